"""Rules by operator family. Importing this package fills the registry."""

from l0prune.infer.rules import (  # noqa: F401
    contraction,
    factories,
    modes,
    movement,
    normalisation,
    pointwise,
    pooling,
    recurrent,
    reduction,
    slicing,
    spectra,
)
