"""Rules by operator family. Importing this package fills the registry."""

from l0prune.infer.rules import (  # noqa: F401
    attention,
    contraction,
    einsum,
    factories,
    modes,
    movement,
    normalisation,
    pointwise,
    pooling,
    quantisation,
    recurrent,
    reduction,
    slicing,
    spectra,
    windows,
)
