"""Result of an export: the smaller model, its proof, its files, and the notes on these."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.export import ExportedProgram

import l0prune
from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import holds_objects
from l0prune.capture.sizes import ANY
from l0prune.capture.threads import one_at_a_time
from l0prune.capture.weights import Weight
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import CertificateError, UsageError, warn
from l0prune.exporting.certify.certificate import Certificate, Check, Compared, compare_file
from l0prune.exporting.certify.dtypes import CPU, placed
from l0prune.exporting.handed_out import HandedOut, parameters_of
from l0prune.exporting.onnx import file as onnx_file
from l0prune.exporting.onnx.older import check_opset, data_beside
from l0prune.exporting.onnx.other_runtimes import tried_elsewhere
from l0prune.exporting.onnx.times import Times, times_of
from l0prune.exporting.own_class.origin import apart_from_state, described
from l0prune.exporting.own_class.writing import shortened, write_folder
from l0prune.exporting.pieces import ExportedPart, InParts, Whole
from l0prune.exporting.programs import FORMATS, Format, write_program
from l0prune.exporting.slicing.graph import DenseGraph
from l0prune.files.atomic import atomic_write, replacement
from l0prune.files.cut_layers import LAYERS
from l0prune.files.onnx_network import Origin
from l0prune.files.smaller_model import as_text
from l0prune.files.tensor_file import MANIFEST, each_once, write_tensors
from l0prune.infer.nodes import called, draws
from l0prune.plan.globs import listed
from l0prune.plan.int8 import Ranges
from l0prune.plan.numbers import THREADS, check_whole
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone
from l0prune.running.environment import as_html
from l0prune.running.stages import stage
from l0prune.selection.compensate import Fidelity

if TYPE_CHECKING:
    from l0prune.exporting.onnx.half import Half
    from l0prune.exporting.onnx.int8 import Int8

_FIXED = "with a free batch size torch.export finds no graph that is right for it"
_GROUPED = "the model's forward takes so many rows together"
_FROM_TWO = "the model's forward treats a single example in another way"


def note_on_batches(pieces: Sequence[ExportedPart]) -> str:
    """Note on the batches that programs and files take."""
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
    kinds: tuple[type[nn.Module], ...] = (DenseGraph, *LAYERS.values())
    of_ours = [kind for each in module.modules() for kind in kinds if isinstance(each, kind)]
    if not of_ours:
        return ""
    names = ", ".join(dict.fromkeys(kind.__name__ for kind in of_ours))
    folder = "" if DenseGraph in of_ours else "save_pretrained(folder, code=True) or "
    return (
        f"torch.save(module) makes a file that only loads where l0prune is installed, for {names}: "
        f'{folder}save("model.pt2") makes one that torch alone loads.'
    )


def note_on_objects(made: Whole | InParts) -> str:
    """Return what programs make of inputs that are objects; empty where there are none."""
    if isinstance(made, InParts) or not holds_objects(made.example):
        return ""
    return (
        "Program and ONNX file take a list of its tensors for each input that is an object, and do "
        "not give back what the forward writes into it. A memory that it extends, such as a cache, "
        "has the slots that stayed."
    )


def note_on_sizes(made: Whole | InParts) -> str:
    """Note on sizes that were to be free and are not, or only from some size on."""
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


PRECISIONS = ("float64", "float32")
CHANGED = (
    "The weights were changed after the export, whose comparisons with the gated model were of "
    "others. Programs and files are of the module as it was when they were made, and were compared "
    "with that."
)


@dataclass(frozen=True, slots=True)
class Step:
    """A network that ``shrink`` tried for a tolerance.

    Attributes:
        share: of the MACs, that was asked for.
        fidelity: how near it came.
    """

    share: float
    fidelity: Fidelity


@dataclass
class Export:
    """A smaller model that computes what the gated one does in eval mode.

    Attributes:
        module: the small network, on the device and in the dtypes of the model. It is of the
            model's own class at the new sizes, and may be trained on, where the class allows them;
            else it is the captured graph, for evaluation. Programs and files are made on the CPU.
        rebuilt: the module, or for a model captured in parts every part of it, is of its own class.
        certificate: the measured errors.
        macs: of the small network, for one example.
        params_before, macs_before: of the network before the cut.
        widths: for each axis (kept slots, all slots).
        fidelity: how near the module's outputs are to the network's that ``shrink`` was given, on
            inputs that weights were not fitted to; None where something else made it.
        curve: the sizes that ``shrink`` tried for a tolerance, ascending.
        times: milliseconds of the ONNX file and of the dense network's, once they were taken.
        int8: what eight bits change, once ``save_onnx`` wrote an int8 file.
        half: what 16 bits change, once ``save_onnx`` wrote a file in float16 or bfloat16.
        files: what ``save_onnx`` wrote last: the ONNX files, and those with their weights.
        changed: the module was found to compute something else than when it was exported, since it
            has learned on: programs and files are of what it is now.
        plan: of the network before the cut: where its gates acted, and what stayed whole and why.
        kept: which slots of its axes stayed; bool, flat, shape ``(plan.size,)``.
        weights: the layers of the network before the cut.
        source: the ONNX file that the network was made from, if it was; the files that are written
            have its names of inputs and outputs.
        ranges: in eight bits, which ``finetune(quantize="int8")`` trained with; None without it. An
            int8 file has them.
        preprocessing: of the images that the network takes, as ``load_data`` says it of a data
            source: of those that ``finetune`` learned from; None where unknown. It is written into
            the files, and can be set before.
    """

    module: nn.Module
    rebuilt: bool
    certificate: Certificate
    macs: int
    params_before: int
    macs_before: int
    widths: dict[str, tuple[int, int]]
    plan: Plan = field(repr=False)
    kept: Tensor = field(repr=False)
    weights: tuple[Weight, ...] = field(repr=False)
    _made: Whole | InParts = field(repr=False)
    _note: str = field(repr=False)
    _state: Mapping[str, Tensor] = field(repr=False)
    _manifest: dict[str, Any] = field(repr=False)
    _handed_out: HandedOut = field(repr=False)
    _unused: frozenset[str] = field(repr=False)
    times: Times | None = None
    int8: Int8 | None = None
    half: Half | None = None
    files: tuple[Path, ...] = ()
    preprocessing: Preprocessing | None = None
    source: Origin | None = None
    ranges: Ranges | None = field(default=None, repr=False)
    fidelity: Fidelity | None = None
    curve: tuple[Step, ...] = ()
    changed: bool = False

    @property
    def params(self) -> int:
        """The parameters that ``module`` holds, but for those that eval mode does not use.

        The ``note`` says how many these are.
        """
        return parameters_of(self.module, self._unused)

    @property
    def note(self) -> str:
        """Note for the user: why the module is not of its own class; what else to know; the
        batches that program and files are for, where these are not all; what they take for inputs
        that are objects; what is random; and what loads the module where it is pickled.
        """
        pieces = self._made.pieces
        sizes, objects = note_on_sizes(self._made), note_on_objects(self._made)
        batches, pickles = note_on_batches(pieces), note_on_pickles(self.module)
        changed = CHANGED if self.changed else ""
        notes = (self._note, batches, sizes, objects, _note_on_draws(pieces), pickles, changed)
        return "\n".join(filter(None, notes))

    @property
    @one_at_a_time()
    def pieces(self) -> tuple[ExportedPart, ...]:
        """The captured parts of ``module`` as it is, each with its program, compared with it.

        They are made when first asked for, and anew once the module has learned on. The
        certificate gains the comparison.

        Raises:
            CaptureError: torch.export can no longer follow the model.
            CertificateError: a program does not compute what the module does.
            UsageError: the module has other tensors than were exported.
        """
        self._look()
        shown: tuple[Compared, ...] = ("program",) if self.changed else ("graph", "program")
        if self.certificate.worst(shown, "float64") is None:
            self.certificate = self.certificate.with_checks(self._made.checks())
        return self._made.pieces

    def _look(self) -> None:
        """Let programs and files be made anew if the module is not what it was."""
        self._handed_out.check_sizes(self.module)
        if not self._handed_out.has_changed(self.module):
            return
        module = placed(copied(self.module), CPU).eval()
        self._made, self.times, self.files, self.changed = self._made.of(module), None, (), True
        self.int8 = self.half = self.ranges = None
        self.certificate = self.certificate.without(
            "program", "onnx", "openvino", "executorch", "litert"
        )
        self._handed_out = HandedOut.of(module, self._handed_out.example, module.state_dict())

    @property
    def program(self) -> ExportedProgram:
        """The small network as a ``torch.export`` program.

        Raises:
            UsageError: the model was captured in parts; ``pieces`` have a program each.
        """
        if self.in_parts:
            raise UsageError(
                "This model was captured in parts, so there is no one program of it: see .pieces."
            )
        return self.pieces[0].program

    @property
    def in_parts(self) -> bool:
        """True if the model could only be captured in parts."""
        return isinstance(self._made, InParts)

    @property
    def dynamic(self) -> bool:
        """True if the batch size is free."""
        return all(piece.dynamic for piece in self._made.pieces)

    @one_at_a_time()
    def save_onnx(
        self,
        path: str | os.PathLike[str],
        *,
        beside: nn.Module | None = None,
        threads: int = 1,
        opset: int | None = None,
        int8: Any = None,
        compensate: bool = True,
        dtype: str | None = None,
        half_io: bool = False,
        external_data: bool = False,
    ) -> tuple[Path, ...]:
        """Write the module as it is in ONNX, after ONNX Runtime has shown that it is the same.

        The certificate gains the comparison, and the file's metadata carries it: with the gated
        model, or with ``module`` where that has learned on. A model that
        was captured in parts becomes a file for each: ``model.backbone.onnx`` for ``model.onnx``.
        It is in float32 whatever dtype the model has, which is what can be compared exactly.
        Weights of more than 2 GB go into a file beside it, ``model.onnx.….data``, which has to stay
        there: its name is a new one each time, so that a kill leaves the old model or the new one.

        Args:
            path: of the file.
            beside: the gated model, to time the file beside that of the dense network (``times``,
                which the metadata carries, too); a warning says where nothing was gained. A model
                of several files is not timed.
            threads: that a call may use when it is timed.
            opset: of the file, from 7 on; None for that which torch's exporter takes by itself.
                Before 18 it is torch's former exporter that writes the file.
            int8: write ``model.int8.onnx`` beside ``model.onnx``, too: weights and activations in
                eight bits, which ONNX Runtime's quantizer makes of the file. What it is calibrated
                with: data as ``finetune`` takes them, whose training examples are taken and whose
                test examples are tested; or a batch of inputs, as ``gate`` takes them, or an
                iterable of such. The certificate is about the file in float32; what eight bits
                change is measured (``int8`` of the export, which the metadata of the second file
                carries), and warned of where it is much or where nothing is gained.
            compensate: with ``int8``, whether weights that make up for the rounding are tried, by
                the least squares of ``l0prune.compensate``; they are in the file where the error on
                held-out inputs is less with them (``int8.compensated``).
            dtype: write ``model.float16.onnx`` (or ``bfloat16``) beside ``model.onnx``, too: its
                weights and operators in 16 bits. The certificate is about the file in float32; what
                16 bits change is computed on the certificate's inputs, operator by operator
                (``half`` of the export, which the metadata of the second file carries).
            half_io: with ``dtype``, whether its inputs and outputs are in 16 bits, too.
            external_data: write the weights into the file beside it in any case.

        Returns:
            The files written, those with weights after the others.

        Raises:
            CertificateError: it does not, or nobody can know, since it draws random numbers in
                eval mode; nothing is written.
            L0pruneError: an operator cannot be written in this opset; the message names the lowest
                one that can.
            FileError: a file cannot be written.
            UsageError: an int8 file is asked for with inputs that do not fit, that are too few or
                not finite, or of a model in parts; a dtype that is none of these, or that the
                opset has not.
        """
        check_whole("threads", threads, most=THREADS)
        check_opset(opset)
        _check_apart(path, self.source)
        self._look()
        self.int8 = self.half = None
        if dtype is not None:
            from l0prune.exporting.onnx import half as half_precision  # loads onnx

            opset = half_precision.opset_for(dtype, opset, self._made.pieces)
        if int8 is not None:
            from l0prune.exporting.onnx import int8 as eight_bits  # loads onnx

            eight_bits.check_possible(self._made.pieces, opset)
        with ExitStack() as stack:
            written, data_files, checks = {}, [], []
            for piece in self._made.pieces:
                _check_drawless(piece)
                file = self._file_of(piece, path)
                data = stack.enter_context(data_beside(file))
                written[file] = stack.enter_context(replacement(file))
                session = onnx_file.write_runnable(
                    piece.single,
                    written[file],
                    data,
                    piece.sizes,
                    opset,
                    self.source,
                    apart=external_data,
                )
                data_files += [file.with_name(data.name)] if data.exists() else []
                onnx_file.describe(written[file], {"batch": piece.takes})
                with stage("comparing the ONNX file with the gated model"):
                    checks += compare_file("onnx", piece.answers, session, piece.path, piece.read)
            certificate = self.certificate.without("onnx", "openvino").with_checks(checks)
            for piece, unfinished in zip(self._made.pieces, written.values(), strict=True):
                certificate = certificate.with_checks(tried_elsewhere(unfinished, piece))
            facts = self._metadata(certificate)
            if beside is not None and len(written) == 1:
                (piece,), (unfinished,) = self._made.pieces, written.values()
                read = piece.read(piece.answers[0].inputs)
                self.times = times_of(beside, unfinished, read, piece.sizes, threads, opset)
                facts["times"] = self.times.to_dict()
            facts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}
            for unfinished in written.values():
                onnx_file.describe(unfinished, facts)
            if int8 is not None:
                (file, unfinished), (piece,) = *written.items(), self._made.pieces
                small = eight_bits.path_of(file)
                written[small] = stack.enter_context(replacement(small))
                self.int8 = eight_bits.write_int8(
                    unfinished,
                    written[small],
                    int8,
                    piece,
                    facts,
                    threads,
                    self.ranges,
                    compensates=compensate,
                )
            if dtype is not None:
                (file, unfinished), piece = next(iter(written.items())), self._made.pieces[0]
                small = half_precision.path_of(file, dtype)
                data = stack.enter_context(data_beside(small))
                written[small] = stack.enter_context(replacement(small))
                self.half = half_precision.write_half(
                    unfinished, written[small], data, dtype, piece, facts, threads, half_io=half_io
                )
                data_files += [small.with_name(data.name)] if data.exists() else []
        self.certificate = certificate
        self.files = (*written, *data_files)
        warnings = [self.times.warning] if self.times is not None else []
        for each in (self.int8, self.half):
            warnings += each.warnings if each is not None else []
        for text in filter(None, warnings):
            warn(text)
        return self.files

    def _metadata(self, certificate: Certificate) -> dict[str, Any]:
        """Return what the metadata of an ONNX file says but for its times."""
        sizes = {"params": self.params, "macs": self.macs, "widths": self.widths}
        facts = self._proof(certificate) | sizes
        if self.source is not None:
            facts["source"] = asdict(self.source)
        if self.preprocessing is not None:
            facts["preprocessing"] = self.preprocessing.model_dump_json()
        return facts

    @one_at_a_time()
    def save(self, path: str | os.PathLike[str], *, model: str = "") -> tuple[Path, ...]:
        """Write for torch: ``.pt2`` an exported program, else a state_dict with its manifest.

        ``.pte`` is a program for ExecuTorch and ``.tflite`` one for LiteRT, for one example where
        the batch is free; its runtime runs it first, and the certificate gains the comparison.

        The state_dict's file is a dict of ``state_dict``, and ``manifest`` as JSON text: shapes of
        each tensor, attributes of each module that have changed, what builds its class, and under
        ``rebuild`` whether that, resized, was found to compute the same, or why not; and why it
        fails in ``training`` mode, where it does. ``.safetensors`` holds the same without a
        pickle, the manifest among its metadata: each tensor once, and under ``tied`` of the
        manifest the further names of tied ones. ``l0prune.load`` reads both.

        Args:
            path: of the file.
            model: what built the model, as ``load_model`` takes it: ``timm:NAME``,
                ``file.py:factory``. Models of transformers are known without.

        Returns:
            The files written; more than one program where the model was captured in parts.

        Raises:
            CertificateError: such a program computes something else; nothing is written.
            FileError: a file cannot be written.
            L0pruneError: ExecuTorch or LiteRT cannot translate the model, or run what came of it.
            UsageError: one of these is asked for and not installed.
        """
        if (kind := FORMATS.get(Path(path).suffix)) is not None:
            return self._save_program(kind, path)
        if Path(path).suffix == ".pt2":
            for piece in self.pieces:
                save = partial(torch.export.save, piece.program)
                atomic_write(self._file_of(piece, path), save)
            return tuple(self._file_of(piece, path) for piece in self.pieces)
        self._look()
        known = described(self.module, self._facts, self._made.trials, model)
        state, apart = self._state_now(), apart_from_state(known, self.module)
        if Path(path).suffix == ".safetensors":
            tensors, tied = each_once({**state, **apart})
            manifest = as_text(known.model_copy(update={"tied": tied}))
            write_tensors(path, tensors, {"format": "pt", MANIFEST: manifest})
            return (Path(path),)
        content = {MANIFEST: as_text(known), "state_dict": state, "constants": apart}
        atomic_write(path, lambda file: torch.save(content, file))
        return (Path(path),)

    def _save_program(self, kind: Format, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        self._look()
        checks: list[Check] = []
        with ExitStack() as stack:
            files = [self._file_of(piece, path) for piece in self._made.pieces]
            for piece, file in zip(self._made.pieces, files, strict=True):
                checks += write_program(kind, piece, stack.enter_context(replacement(file)))
            self.certificate = self.certificate.without(kind.name).with_checks(checks)
        return tuple(files)

    @one_at_a_time()
    def save_pretrained(
        self, folder: str | os.PathLike[str], *, model: str = "", code: bool = False
    ) -> str:
        """Write ``module`` to a folder: safetensors and a manifest in JSON, without a pickle.

        ``l0prune.from_pretrained(folder)`` loads it; where only the user's own code can build the
        class, ``l0prune.resize`` makes such a model smaller. For a model of transformers the
        folder also holds its configuration: with the new sizes where one can say them, and then
        transformers loads it by itself. Both are tried before they are said. What is written are
        the parameters of ``module`` as they are now. If they have changed since the export, the
        manifest says so and has no comparison with the gated model, which was of others.

        Args:
            folder: is made where there is none. Other files in it stay.
            model: what built the model, as ``load_model`` takes it: ``timm:NAME``,
                ``file.py:factory``. Models of transformers are known without, and those of timm
                and torchvision as they come.
            code: put ``l0prune_model.py`` beside it: one file of plain torch, whose ``resize``
                loads the folder where l0prune is not installed.

        Returns:
            What loads it, and whether transformers does, or why not.

        Raises:
            FileError: it cannot be written; what was there is unchanged.
            UsageError: the module is a captured graph, not of its own class.
        """
        if not self.rebuilt:
            raise UsageError(
                f"{folder} was not written: it is for models of their own class, and {self._note} "
                'Save it as a program (save("model.pt2")) or as ONNX (save_onnx).'
            )
        self._look()
        trials = self._made.trials
        manifest = described(self.module, self._facts, trials, model)
        return write_folder(folder, *shortened(self.module, manifest, trials), code=code)

    @one_at_a_time()
    def save_vllm(self, folder: str | os.PathLike[str]) -> str:
        """Write ``module`` as the folder that vLLM serves as a ``DeciLMForCausalLM``.

        That is a Llama whose MLPs have a width of their own in each layer, and whose attentions
        and MLPs may be absent: what ``gate(…, loadable_by="vllm")`` cuts. The folder has
        ``config.json`` with ``block_configs``, the code of this configuration, for
        ``--trust-remote-code``, and ``model.safetensors``. What vLLM's code makes of them is
        compared with ``module``, in float32 and in transformers' own layers; vLLM itself is not
        run.

        Args:
            folder: is made where there is none. Other files in it stay.

        Returns:
            How to serve it.

        Raises:
            UsageError: the model is no Llama, or its sizes cannot be said there.
            CertificateError: the network there would compute something else.
            FileError: it cannot be written; what was there is unchanged.
        """
        from l0prune.exporting.own_class.vllm import write_for_vllm  # loads transformers

        self._look()
        return write_for_vllm(folder, self.module, self._made.trials)

    @property
    def _facts(self) -> dict[str, Any]:
        """Return what the manifest says beside the model's origin."""
        known = None if self.preprocessing is None else self.preprocessing.model_dump()
        return {**self._manifest, **self._proof(self.certificate), "preprocessing": known}

    def _proof(self, certificate: Certificate) -> dict[str, Any]:
        """Return what of a certificate is about the module as it is, for a file of that."""
        if not self.changed:
            return {"certificate": certificate.to_dict()}
        return {"certificate": certificate.of_module().to_dict(), "changed": CHANGED}

    def _state_now(self) -> dict[str, Tensor]:
        """Return the model's own state_dict with the values that the module has.

        A graph has not all of its names: those of unused parameters, of counters of batches.
        """
        now, aliases = self.module.state_dict(), self.plan.aliases
        found = {}
        for name, exported in self._state.items():
            tensor = now.get(name, now.get(aliases.get(name, name), exported))
            found[name] = tensor.detach().cpu()
        return found

    @staticmethod
    def _file_of(piece: ExportedPart, path: str | os.PathLike[str]) -> Path:
        """The file of a part: its name before the ending, and after the first form its number."""
        whole = Path(path)
        form = f"-{piece.form}" if piece.form > 1 else ""
        part = re.sub(r"[/\\\0]", "_", piece.path)  # a name in a ModuleDict may hold anything
        return whole.with_stem(f"{whole.stem}.{part}{form}") if part else whole

    def report(self, history: Any = None) -> l0prune.Report:
        """One page that shows what came of it: ``dense.report(history).save("report.html")``.

        A notebook shows it by itself.

        Args:
            history: what ``finetune`` returned; several in a list.
        """
        return l0prune.Report.of(self, history)

    @property
    def gone(self) -> tuple[str, ...]:
        """The branches that are left out, by name: see ``gate``."""
        return tuple(gone(self.plan, self.kept))

    def to_dict(self) -> dict[str, Any]:
        """Sizes and certificate as plain data."""
        return {
            "params": self.params,
            "params_before": self.params_before,
            "macs": self.macs,
            "macs_before": self.macs_before,
            "dynamic_batch": self.dynamic,
            "batches": list(dict.fromkeys(piece.takes for piece in self._made.pieces)),
            "own_class": self.rebuilt,
            "note": self.note,
            "parts": list(dict.fromkeys(piece.path for piece in self._made.pieces)),
            "widths": {name: list(width) for name, width in self.widths.items()},
            "gone": list(self.gone),
            "certificate": self.certificate.to_dict(),
            "times": None if self.times is None else self.times.to_dict(),
            "int8": None if self.int8 is None else self.int8.to_dict(),
            "half": None if self.half is None else self.half.to_dict(),
            "fidelity": None if self.fidelity is None else asdict(self.fidelity),
            "curve": [asdict(step) for step in self.curve],
            "changed": self.changed,
        }

    def __repr__(self) -> str:
        errors = [
            f"{error:.0e} in {dtype}"
            for dtype in PRECISIONS
            if (error := self.certificate.worst(("class", "graph", "program"), dtype)) is not None
        ]
        params = _share(self.params, self.params_before, "params")
        macs = _share(self.macs, self.macs_before, "MACs")
        name = type(self.module).__name__
        return f"Export({name}: {params}, {macs}; largest error {', '.join(errors)})"

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Sizes before and after, and the certificate, for people."""
        sizes = Table("", "before", "after", "kept", title="Cut")
        for name, before, after in (
            ("params", self.params_before, self.params),
            ("MACs", self.macs_before, self.macs),
        ):
            sizes.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.1%}")
        yield sizes
        if self.gone:
            yield Text(f"Branches that are gone: {listed(self.gone)}.")
        proof = Table("compared", "precision", "batch", "error", "allowed", title="Certificate")
        for c, batches in self.certificate.summary():
            what = f"{c.against} and {c.what}" + (f" of {c.part}" if c.part else "")
            sizes_of_batches = ", ".join(map(str, batches))
            proof.add_row(
                Text(what), c.dtype, sizes_of_batches, f"{c.error:.1e}", f"{c.tolerance:.1e}"
            )
        yield proof
        if self.curve:
            curve = Table("MACs", "the same", "error", title="Tried, on held-out inputs")
            for share, near in ((step.share, step.fidelity) for step in self.curve):
                same = "" if near.agreement is None else f"{near.agreement:.1%}"
                curve.add_row(f"{share:.1%}", same, f"{near.error:.2%}")
            yield curve
        if self.fidelity is not None:
            yield Text(f"Beside the original, on held-out inputs: {self.fidelity}.")
        if self.times is not None:
            yield Text(f"Time: {self.times}")
        if self.int8 is not None:
            yield Text(f"In int8: {self.int8}")
        if self.half is not None:
            yield Text(f"In {self.half.dtype}: {self.half}")
        if self.note:
            yield Text(self.note)


def _check_apart(path: str | os.PathLike[str], source: Origin | None) -> None:
    """Raise UsageError for the path of the file that the network was made from."""
    if source is not None and os.path.realpath(path) == os.path.realpath(source.file):
        raise UsageError(
            f"{path} is the file that this network was made from, and its gated models are built "
            "by it: give the smaller file another name"
        )


def _share(after: int, before: int, unit: str) -> str:
    return f"{after:,} of {before:,} {unit}" + (f" ({after / before:.1%})" if before else "")


def _note_on_draws(pieces: Sequence[ExportedPart]) -> str:
    """Return the note on a model that draws random numbers; empty where it does not."""
    nodes = (node for piece in pieces for node in piece.program.graph.nodes)
    found = dict.fromkeys(called(node) for node in nodes if draws(node))
    if not found:
        return ""
    return (
        f"In eval mode the model draws random numbers ({', '.join(found)}): it was compared with "
        "the same draws, and save_onnx will refuse, since ONNX Runtime draws others."
    )


def _check_drawless(piece: ExportedPart) -> None:
    """Raise CertificateError where the piece draws random numbers."""
    found = [node for node in piece.single.graph.nodes if draws(node)]
    if found:
        raise CertificateError(
            f"No ONNX file was written: in eval mode the model draws random numbers "
            f"({called(found[0])}), and ONNX Runtime draws others than torch, so "
            "that the file cannot be compared with the model. Give the model its noise as an "
            "input, or write it in torch's own formats: --pt2 or --state (Export.save)."
        )
