"""Result of ``shrink_vocabulary``: the smaller model, its tokenizer, and the map of ids."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.exporting.certify.certificate import Check
from l0prune.files.atomic import PathLike, replaced_folder
from l0prune.files.model_sources import write_model

MAP = "vocabulary.json"


@dataclass
class SmallerVocabulary:
    """A model and a tokenizer of fewer tokens.

    Attributes:
        model: of its own class, at the new size; ready for ``gate``, ``shrink`` and ``export``.
        tokenizer: of the given kind, with the tokens that stayed.
        kept: the former id of each token, int64, ascending; shape ``(tokens,)``.
        tokens: by former id, what each token is; empty for rows that no token has.
        params_before: parameters of the whole model.
        coverage: share of the tokens of the text that stayed; None where no text was given.
        checks: the comparisons with the whole model, all of which passed: logits of the tokens
            that stayed, in float64 and float32.
    """

    model: nn.Module = field(repr=False)
    tokenizer: Any = field(repr=False)
    kept: Tensor = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    params_before: int
    coverage: float | None
    checks: tuple[Check, ...] = field(repr=False)

    @property
    def params(self) -> int:
        """Parameters of the smaller model."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def error(self) -> float:
        """The largest difference that was found, relative to the largest logit."""
        return max(check.error for check in self.checks)

    def new_ids(self, ids: Tensor) -> Tensor:
        """Return the new ids of tokens by the former ones; of the same shape and dtype.

        Raises:
            UsageError: a token was cut out; the message names it.
        """
        whole = torch.full((len(self.tokens),), -1, device=ids.device)
        whole[self.kept.to(ids.device)] = torch.arange(len(self.kept), device=ids.device)
        outside = (ids < 0) | (ids >= len(whole))
        found = whole[ids.long().masked_fill(outside, 0)].masked_fill(outside, -1)
        if bool((found < 0).any()):
            first = int(ids[found < 0].flatten()[0])
            token = self.tokens[first] if 0 <= first < len(self.tokens) else ""
            what = f"the token {token!r} (id {first})" if token else f"no token of the id {first}"
            raise UsageError(
                f"{what} is in the cut vocabulary of {len(self.kept):,} tokens"
                if not token
                else f"{what} is not in the cut vocabulary of {len(self.kept):,} tokens: write the "
                "text with its tokenizer, or let this token stay (ids=…)"
            )
        return found.to(ids.dtype)

    def old_ids(self, ids: Tensor) -> Tensor:
        """Return the former ids of tokens by the new ones; of the same shape and dtype.

        Raises:
            UsageError: an id is not in the cut vocabulary.
        """
        outside = (ids < 0) | (ids >= len(self.kept))
        if bool(outside.any()):
            raise UsageError(
                f"{int(ids[outside].flatten()[0])} is no id of the cut vocabulary of "
                f"{len(self.kept):,} tokens"
            )
        return self.kept.to(ids.device)[ids.long()].to(ids.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the cut, as JSON data."""
        return {
            "tokens": len(self.kept),
            "tokens_before": len(self.tokens),
            "params": self.params,
            "params_before": self.params_before,
            "coverage": self.coverage,
            "error": self.error,
        }

    def save(self, folder: PathLike) -> None:
        """Write a folder with the model, its tokenizer, and the map of ids.

        A model of transformers is written by ``save_pretrained``, so that ``from_pretrained`` and
        ``transformers:FOLDER`` load both; another as ``model.pt``, pickled. ``vocabulary.json`` has
        the former ids, in the order of the new ones.

        Raises:
            FileError: it cannot be written.
        """
        with replaced_folder(folder, MAP, ()) as scratch:
            write_model(self.model, scratch)
            if hasattr(self.tokenizer, "save_pretrained"):
                self.tokenizer.save_pretrained(scratch)
            else:
                self.tokenizer.save(str(scratch / "tokenizer.json"))
            content = {"rows": len(self.tokens), "kept": self.kept.tolist()}
            Path(scratch, MAP).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        text = "" if self.coverage is None else f"; {self.coverage:.2%} of the text's tokens stay"
        return (
            f"{len(self.tokens):,} → {len(self.kept):,} tokens, {self.params_before:,} → "
            f"{self.params:,} parameters{text}; logits of kept tokens differ by {self.error:.1e}"
        )
