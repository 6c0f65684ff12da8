"""Conditions of a budget in bytes, as written behind ``@``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from l0prune.errors import UsageError, unknown

# Bytes of one number, by the dtype that serves.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SIZES = re.compile(r"(?:(?P<batch>\d+)x)?(?P<context>\d+)?", re.ASCII)
EXAMPLES = "memory=6GB@4096, @8x4096 (eight sequences), @8x (eight examples) or @4096/bfloat16"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Circumstances in which a network's memory is counted.

    Attributes:
        context: tokens of each sequence in the cache; None where none are named.
        batch: sequences, or examples of one call.
        dtype: of the weights and the cache; empty for the network's own.
    """

    context: int | None = None
    batch: int = 1
    dtype: str = ""

    @classmethod
    def of(cls, text: str) -> Conditions:
        """Return the conditions in a text such as ``8x4096/bfloat16``, each part of it optional.

        Raises:
            UsageError: it cannot be read.
        """
        found = cls()
        for part in filter(None, text.split("/")):
            sizes = _SIZES.fullmatch(part.strip())
            if sizes is None and not part.strip().isalnum():
                raise UsageError(f"cannot read '@{text}' in a budget in memory; write {EXAMPLES}")
            if sizes is None and part.strip() not in DTYPES:
                raise unknown(f"there is no dtype {part.strip()!r} to serve in", part.strip(), DTYPES)
            if sizes is None:
                found = cls(found.context, found.batch, part.strip())
            else:
                context = int(sizes["context"]) if sizes["context"] else found.context
                found = cls(context, int(sizes["batch"] or found.batch), found.dtype)
        if found.batch < 1 or found.context == 0:
            raise UsageError(f"'@{text}' in a budget in memory has a size of 0; write {EXAMPLES}")
        return found
