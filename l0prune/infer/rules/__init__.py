"""Rules by operator family. Importing this package fills the registry."""

from l0prune.infer.rules import (  # noqa: F401
    contraction,
    control_flow,
    movement,
    normalisation,
    pointwise,
    positions,
    recurrent,
    reduction,
    slicing,
)
