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
        for part in filter(None, map(str.strip, text.split("/"))):
            sizes = _SIZES.fullmatch(part)
            if sizes is not None:
                context = int(sizes["context"]) if sizes["context"] else found.context
                found = cls(context, int(sizes["batch"] or found.batch), found.dtype)
            elif part in DTYPES:
                found = cls(found.context, found.batch, part)
            elif part.isalnum():
                raise unknown(f"there is no dtype {part!r} to serve in", part, DTYPES)
            else:
                raise UsageError(f"cannot read '@{text}' in a budget in memory; write {EXAMPLES}")
        if found.batch < 1 or found.context == 0:
            raise UsageError(f"'@{text}' in a budget in memory has a size of 0; write {EXAMPLES}")
        return found
