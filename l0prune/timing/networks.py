"""The ONNX files of a gated model at several widths, to be compared and timed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.errors import UsageError
from l0prune.exporting.export import export
from l0prune.exporting.pieces import Piece
from l0prune.gating.attaching import gates_of, holder
from l0prune.timing.parts import check_whole
from l0prune.timing.sampling import Widths, slots_of

_NOISE = 1e-3  # beside the weights: exporters make one of tensors that are equal


@dataclass(frozen=True)
class Network:
    """One network of a model's, as an export writes it.

    Attributes:
        kept: the slots that stay, bool, flat.
        model: its ONNX file, with its weights.
        inputs: what the file reads, by name.
    """

    kept: Tensor
    model: onnx.ModelProto
    inputs: dict[str, Tensor]


class Exporter:
    """Exports a gated model at any widths, one after the other; the model stays as it is.

    Weights are made a little different from each other, since equal ones are put together in
    files.

    Args:
        model: the gated model.
        batch: examples in what its files are given.

    Raises:
        NotGated: the model carries no gates.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        gated, _ = holder(model)
        self._model = _disturbed(copied(gated).cpu().eval())
        self._gates, self._batch = gates_of(self._model), batch

    def network(self, widths: Widths) -> Network:
        """The network in which so many slots of each axis are open.

        Raises:
            UsageError: it was captured in parts, or does not take that batch.
        """
        return self.network_of(slots_of(self._gates.plan, widths))

    def network_of(self, open_: Tensor) -> Network:
        """The network with these open gates, bool and flat.

        Raises:
            UsageError: as ``network``.
        """
        self._gates.put(open_)
        dense = export(self._model)
        check_whole([piece.path for piece in dense.pieces])
        with tempfile.TemporaryDirectory() as folder:
            dense.save_onnx(Path(folder) / "model.onnx")
            model = onnx.load(str(Path(folder) / "model.onnx"))
        inputs = dict(_inputs(model, dense.pieces[0], self._batch))
        return Network(self._gates.plan.kept(open_), model, inputs)


def _disturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    gates = gates_of(model).log_alpha
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter is not gates:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((_NOISE * noise).to(parameter.dtype))
    return model


def _inputs(model: onnx.ModelProto, piece: Piece, batch: int) -> Iterator[tuple[str, Tensor]]:
    """Examples for each input of the file, as many as ``batch`` where their number is free."""
    leaves: Sequence[Any] = piece.read(piece.answers[0].inputs)
    for given, leaf, sizes in zip(model.graph.input, leaves, piece.sizes, strict=True):
        value = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
        if sizes.get(0) == "batch":
            value = value[torch.arange(batch) % len(value)]
        elif value.ndim and len(value) != batch and not piece.dynamic:
            raise UsageError(
                f"this model takes a batch of {piece.takes}, not {batch}: gate it with an example "
                f"of that batch size, or measure with batch={len(value)}"
            )
        yield given.name, value.float() if value.is_floating_point() else value
