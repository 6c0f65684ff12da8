"""Notes on the programs and files of an export: inputs that they take, and requirements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from l0prune.capture.example_inputs import holds_objects
from l0prune.capture.sizes import ANY
from l0prune.exporting.pieces import ExportedPart, InParts, Whole
from l0prune.exporting.slicing.graph import DenseGraph
from l0prune.exporting.state import lost
from l0prune.files.cut_layers import OWN
from l0prune.infer.nodes import called, draws

CHANGED = (
    "The weights were changed after the export, whose comparisons with the gated model were of "
    "others. Programs and files are of the module as it was when they were made, and were compared "
    "with that."
)
_FIXED = "with a free batch size torch.export finds no graph that is right for it"
_GROUPED = "the model's forward takes so many rows together"
_FROM_TWO = "the model's forward treats a single example in another way"


def notes_on_files(made: Whole | InParts, module: nn.Module) -> list[str]:
    """Return the notes on programs and files made from ``module``, some of them empty."""
    on_model = (_note_on_sizes(made), _note_on_objects(made), _note_on_draws(made.pieces))
    on_pieces = (note(piece) for piece in made.pieces for note in (_note_on_zeros, _note_on_state))
    return [_note_on_batches(made.pieces), *on_model, *on_pieces, note_on_pickles(module)]


def _note_on_batches(pieces: Sequence[ExportedPart]) -> str:
    """Note on batch sizes that programs and files are limited to."""
    lines = []
    for piece in pieces:
        is_limited = piece.batches != ANY if piece.path else piece.takes != str(ANY)
        if is_limited:
            of = f" of {piece.path}" if piece.path else ""
            together = _FROM_TWO if piece.batches.multiple == 1 else _GROUPED
            why = together if piece.dynamic else piece.why_fixed or _FIXED
            lines.append(f"Program and ONNX file{of} are for batches of {piece.takes}: {why}.")
    return "\n".join(lines)


def note_on_pickles(module: nn.Module) -> str:
    """Name the layers for which ``torch.load`` of the pickled module needs l0prune, if any."""
    kinds: tuple[type[nn.Module], ...] = (DenseGraph, *OWN)
    of_ours = [kind for each in module.modules() for kind in kinds if isinstance(each, kind)]
    if not of_ours:
        return ""
    names = ", ".join(dict.fromkeys(kind.__name__ for kind in of_ours))
    folder = "" if DenseGraph in of_ours else "save_pretrained(folder, code=True) or "
    return (
        f"torch.save(module) makes a file that only loads where l0prune is installed, for {names}: "
        f'{folder}save("model.pt2") makes one that torch alone loads.'
    )


def _note_on_objects(made: Whole | InParts) -> str:
    """Return a note on how programs flatten object inputs; empty without such inputs."""
    if isinstance(made, InParts) or not holds_objects(made.example):
        return ""
    return (
        "Program and ONNX file take a list of its tensors for each input that is an object, and do "
        "not give back what the forward writes into it. A memory that it extends, such as a cache, "
        "has the slots that stayed."
    )


def _note_on_sizes(made: Whole | InParts) -> str:
    """Note on sizes requested as free that are fixed, or free only from 2 on."""
    if isinstance(made, InParts) or not made.free:
        return ""
    (piece,), lines = made.pieces, []
    tried, taken = (
        [made.free.sizes(answer.inputs) for answer in answers]
        for answers in (piece.answers, made.answers)
    )
    for name in made.free.names:
        if name not in piece.free.names:
            lines.append(
                f"Program and ONNX file are for {name} = {tried[0][name]} only: torch.export "
                "finds no graph that is right for other sizes."
            )
        elif 1 in {sizes[name] for sizes in taken} - {sizes[name] for sizes in tried}:
            lines.append(f"Program and ONNX file are for {name} of 2 or more.")
    return "\n".join(lines)


def _note_on_zeros(piece: ExportedPart) -> str:
    """Return a note on a comparison of zeros alone, which shows nothing; empty for others."""
    scales = [scale for answer in piece.answers for scale in answer.scales]
    if not scales or any(scales):
        return ""
    return (
        f"All outputs{f' of {piece.path}' if piece.path else ''} are 0 for the inputs that were "
        "compared, so that the comparison shows nothing. Usual causes: a last layer that starts "
        "with zeros and was not trained or loaded, or inputs that are all alike."
    )


def _note_on_state(piece: ExportedPart) -> str:
    """Return a note on what a piece keeps from one call to the next; empty if nothing."""
    if piece.lost:
        return f"No program or file will be written: {lost(piece.lost)}"
    if not piece.state:
        return ""
    names = ", ".join(piece.state)
    return (
        f"The model keeps {names} from one call to the next. An ONNX file has that as its last "
        "inputs and outputs: give the first call the module's own values, and each other one what "
        "the call before returned. .pt2 keeps it by itself; .pte and .tflite are refused."
    )


def _note_on_draws(pieces: Sequence[ExportedPart]) -> str:
    """Return a note on random numbers drawn in eval mode; empty if there are none."""
    nodes = (node for piece in pieces for node in piece.program.graph.nodes)
    found = dict.fromkeys(called(node) for node in nodes if draws(node))
    if not found:
        return ""
    return (
        f"In eval mode the model draws random numbers ({', '.join(found)}): it was compared with "
        "the same draws, and save_onnx will refuse, since ONNX Runtime draws others."
    )
