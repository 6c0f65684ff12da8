"""Result of an export: the small network with its certificate, and methods that write files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import l0prune
from l0prune.capture.copying import copied
from l0prune.capture.threads import one_at_a_time
from l0prune.doors import behind, provided
from l0prune.errors import L0pruneError, UsageError, in_a_line, warn
from l0prune.exporting.certify.certificate import Certificate, Check
from l0prune.exporting.certify.dtypes import CPU, placed
from l0prune.exporting.handed_out import HandedOut
from l0prune.exporting.network import copies_of, original_of
from l0prune.exporting.notes import CHANGED
from l0prune.exporting.onnx.derived import Derived, InFloat32, wanted
from l0prune.exporting.onnx.file import describe
from l0prune.exporting.onnx.speedup import cut_facts, measured
from l0prune.exporting.onnx.times import DenseNetwork
from l0prune.exporting.onnx.writing import Unfinished, check_apart, check_opset
from l0prune.exporting.outcome import Outcome
from l0prune.exporting.own_class.origin import apart_from_state, described
from l0prune.exporting.own_class.writing import WRITERS, shortened, write_folder
from l0prune.exporting.pieces import ExportedPart, Whole
from l0prune.exporting.programs import FORMATS, Format, write_program
from l0prune.exporting.state import check_kept
from l0prune.files.atomic import atomic_write, replacement
from l0prune.files.smaller_model import as_text
from l0prune.files.tensor_file import MANIFEST, each_once, write_tensors
from l0prune.gating.attaching import holder
from l0prune.plan.numbers import THREADS, check_whole
from l0prune.progress.display import displayed
from l0prune.progress.stages import counting, stage, steps

# About how long parts of writing a file take, relative to each other.
_PROGRAM, _WRITTEN, _TIMED = 1, 4, 6


class Export(Outcome):
    """Outcome of an export, with its programs and files."""

    @property
    @one_at_a_time()
    def pieces(self) -> tuple[ExportedPart, ...]:
        """The captured parts of the current ``module``, each with its program, compared with it.

        They are made on first access, and again after the module has been trained further. The
        certificate gains the comparison.

        Raises:
            CaptureError: torch.export can no longer follow the model.
            CertificateError: a program does not compute what the module does, in one call or in
                several in a row.
            UsageError: the module has other tensors than were exported.
        """
        self._look()
        for piece in self._made.pieces:
            check_kept(piece.lost, "program")
        shown: tuple[str, ...] = ("program",) if self.changed else ("graph", "program")
        if self.certificate.worst(shown, "float64") is None:
            self.certificate = self.certificate.with_checks(self._made.checks())
        return self._made.pieces

    def _look(self) -> None:
        """Discard programs, files and their checks if the module has changed since the export."""
        self._handed_out.check_sizes(self.module)
        if not self._handed_out.has_changed(self.module):
            return
        module = placed(copied(self.module), CPU).eval()
        self._made, self.files, self.changed = self._made.of(module), (), True
        self.speedup, self.in_fewer_bits, self.ranges = None, {}, None
        elsewhere = (name for name, _ in behind("runtimes"))
        self.certificate = self.certificate.without("program", "onnx", *elsewhere)
        self._handed_out = HandedOut.of(module, self._handed_out.example, {})

    def measure_rounding_of(self, uncut: nn.Module) -> None:
        """Measure runtimes' rounding on this uncut model, where the gated one will be gone."""
        if isinstance(self._made, Whole):
            self._made = replace(self._made, original=original_of(uncut))

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

    @one_at_a_time()
    @displayed
    def save_onnx(
        self,
        path: str | os.PathLike[str],
        *,
        time: bool = True,
        beside: nn.Module | None = None,
        threads: int = 1,
        opset: int | None = None,
        external_data: bool = False,
        progress: bool = True,
        **fewer_bits: Any,
    ) -> tuple[Path, ...]:
        """Write the current module as ONNX, after ONNX Runtime has shown that the file is the same.

        The certificate gains the comparison, and the file's metadata carries it. The file is in
        float32, which can be compared exactly. A model in parts becomes a file for each. Weights of
        more than 2 GB go into a file beside it, ``model.onnx.….data``, of a new name each time.

        Args:
            path: of the file.
            time: time the file beside that of the dense network, and say what it is worth
                (``speedup``). Where that fails, the ``note`` says why.
            beside: another gated model whose dense network it is timed beside, such as that of the
                first of several rounds.
            threads: that a call may use when it is timed.
            opset: of the file, from 7 on; before 18 torch's former exporter writes it. None for
                what torch's exporter takes by itself.
            external_data: write the weights into the file beside it in any case.
            progress: show progress on stderr.
            fewer_bits: ask for further files beside it, each measured beside the one in float32
                (``in_fewer_bits``). ``int8=data`` writes ``model.int8.onnx``, calibrated with data
                as ``finetune`` takes them, a batch of inputs, or an iterable of such; unless
                ``compensate=False``, weights that make up for the rounding are tried, and unless
                ``fastest=False``, layers that are faster in float32 are computed so. With
                ``tolerance="1%"`` and ``judge=`` (see ``shrink``) as many layers stay in float32 as
                the file needs to be within the tolerance.
                ``dtype="float16"`` (or ``"bfloat16"``) writes ``model.float16.onnx``, with
                ``half_io=True`` its inputs and outputs, too.

        Returns:
            The files written, those with weights after the others.

        Raises:
            CertificateError: it is not the same, or draws random numbers; nothing is written.
            L0pruneError: an operator cannot be written in this opset.
            FileError: a file cannot be written.
            UsageError: an option does not fit the model, the opset or the others.
        """
        check_whole("threads", threads, most=THREADS)
        asked = wanted(fewer_bits)
        check_opset(opset)
        check_apart(path, self.source)
        self._look()
        self.speedup, self.in_fewer_bits = None, {}
        parts = _PROGRAM + _WRITTEN + time * _TIMED + sum(each.kind.effort for each in asked)
        with stage(f"writing {Path(path).name}"), counting(parts) as counter:
            pieces, self._untimed, made = self._made.pieces, "", list[Derived]()
            counter.step(_PROGRAM)
            for each in asked:
                made.append(each.of(opset, pieces))
                opset = made[-1].opset
            with Unfinished() as files:
                with counter.takes(_WRITTEN):
                    certificate = self._write_proven(files, path, opset, external_data)
                file, unfinished = next(iter(files.paths.items()))
                dense: Path | None = None
                if time:
                    with counter.takes(_TIMED):
                        also = [other.name for other in made]
                        dense = self._time(unfinished, beside, threads, opset, also)
                facts = self._describe(files, certificate)
                proven = InFloat32(unfinished, pieces[0], facts, threads, time, dense, self.ranges)
                for other in made:
                    place = files.begin(file.with_name(f"{file.stem}.{other.name}{file.suffix}"))
                    with counter.takes(other.effort):
                        self.in_fewer_bits[other.name] = other.write(proven, *place)
        self.certificate, self.files = certificate, files.written
        self._warn_of_files()
        return self.files

    def _write_proven(
        self, files: Unfinished, path: str | os.PathLike[str], opset: int | None, apart: bool
    ) -> Certificate:
        """Write the files in float32, and return the certificate with their comparisons."""
        checks: list[Check] = []
        for piece in steps(self._made.pieces):
            checks += files.add(piece, piece.file_of(path), opset, self.source, apart)
        others = {name: each.load("file_checks", name) for name, each in behind("file_checks")}
        certificate = self.certificate.without("onnx", *others).with_checks(checks)
        for piece, unfinished in zip(self._made.pieces, files.paths.values(), strict=True):
            for tried in others.values():
                certificate = certificate.with_checks(tried(unfinished, piece))
        return certificate

    def _time(
        self,
        path: Path,
        beside: nn.Module | None,
        threads: int,
        opset: int | None,
        also: Sequence[str],
    ) -> Path | None:
        """Time a file, and return the path of the dense network's; None where that fails."""
        pieces = self._made.pieces
        if len(pieces) != 1:
            self._untimed = "Not timed: the model is in several files, which have no one time."
            return None
        if pieces[0].state:
            self._untimed = "Not timed: the file carries state from one call to the next."
            return None
        try:
            dense, macs = self._dense, (self.macs_before, self.macs)
            if beside is not None:
                dense = DenseNetwork(copies_of(holder(beside)[0]))
                macs = (dense.macs, self.macs)
            else:
                dense.check_size()
            with counting(_TIMED) as counter:
                with counter.takes(_WRITTEN):
                    file = dense.file(pieces[0].sizes, opset)
                known = cut_facts(self.plan, self.kept, self.asked, also)
                with counter.takes(_TIMED - _WRITTEN):
                    self.speedup = measured(path, file, pieces[0], threads, macs, known)
        except Exception as error:  # of torch, ONNX Runtime or the system: the file itself is right
            self._untimed = f"Not timed: {in_a_line(error)}"
            return None
        return file

    def _describe(self, files: Unfinished, certificate: Certificate) -> dict[str, str]:
        """Write metadata into the files, with the times if they were taken, and return it."""
        sizes = {"params": self.params, "macs": self.macs, "widths": self.widths}
        facts = self._proof(certificate) | sizes
        if self.source is not None:
            facts["source"] = asdict(self.source)
        if self.preprocessing is not None:
            facts["preprocessing"] = self.preprocessing.model_dump_json()
        if self.speedup is not None:
            facts["times"] = self.speedup.times.to_dict()
            facts["speedup"] = self.speedup.to_dict()
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}
        for each in files.paths.values():
            describe(each, texts)
        return texts

    def _warn_of_files(self) -> None:
        warnings = [self.speedup.warning] if self.speedup is not None else []
        for each in self.in_fewer_bits.values():
            warnings += each.warnings
        for text in filter(None, warnings):
            warn(text)

    @one_at_a_time()
    def save(self, path: str | os.PathLike[str], *, model: str = "") -> tuple[Path, ...]:
        """Write for torch: ``.pt2`` an exported program, else a state_dict with its manifest.

        ``.pte`` is a program for ExecuTorch and ``.tflite`` one for LiteRT, for one example where
        the batch is free; its runtime runs it first, and the certificate gains the comparison.
        ``.gguf`` is a file for llama.cpp (``save_gguf``).

        A state_dict's file is a dict of ``state_dict`` and ``manifest``, a JSON text: shapes of
        tensors, changed attributes of modules, what builds the class, and under ``rebuild``
        whether that was found to compute the same at the new sizes. ``.safetensors`` holds the
        same without a pickle; ``tied`` of its manifest has the further names of tied tensors.
        ``l0prune.load`` reads both.

        Args:
            path: of the file.
            model: what built the model, as ``load_model`` takes it: ``timm:NAME``,
                ``file.py:factory``. Models of transformers are known without.

        Returns:
            The files written; more than one program where the model was captured in parts.

        Raises:
            CertificateError: such a program computes something else; nothing is written.
            FileError: a file cannot be written.
            L0pruneError: ExecuTorch or LiteRT cannot translate the model, or run what came of it;
                torch cannot serialize the program.
            UsageError: one of these is asked for and not installed.
        """
        if FORMATS.knows(suffix := Path(path).suffix):
            return self._save_program(FORMATS.named(suffix), path)
        if WRITERS.knows(suffix):
            self._look()
            WRITERS.named(suffix)(Path(path), self.module)
            return (Path(path),)
        if suffix == ".pt2":
            return tuple(_write_pt2(piece, path) for piece in self.pieces)
        self._look()
        known = described(self.module, self._facts, self._made.trials, model)
        state, apart = self._state_now(), apart_from_state(known, self.module)
        if suffix == ".safetensors":
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
            files = [piece.file_of(path) for piece in self._made.pieces]
            for piece, file in zip(self._made.pieces, files, strict=True):
                checks += write_program(kind, piece, stack.enter_context(replacement(file)))
            self.certificate = self.certificate.without(kind.name).with_checks(checks)
        return tuple(files)

    @one_at_a_time()
    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        model: str = "",
        code: bool = False,
        onnx: bool = False,
    ) -> str:
        """Write ``module`` to a folder: safetensors and a manifest in JSON, without a pickle.

        ``l0prune.from_pretrained(folder)`` loads it; where only the user's own code can build the
        class, ``l0prune.resize`` makes such a model smaller. For a model of transformers there is
        its configuration, too; where that can say the new sizes, transformers loads the folder by
        itself, which is tried. Parameters are written as they are now; where they have changed
        since the export, the manifest has no comparison with the gated model.

        Args:
            folder: is made where there is none. Other files in it stay.
            model: what built the model, as ``load_model`` takes it: ``timm:NAME``,
                ``file.py:factory``. Models of transformers are known without, and those of timm
                and torchvision as they come.
            code: put ``l0prune_model.py`` beside it: one file of plain torch, whose ``resize``
                loads the folder where l0prune is not installed.
            onnx: put ``model.onnx`` into it, too, as ``save_onnx`` writes it.

        Returns:
            How to load it, and whether transformers can, or why not.

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
        if onnx:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.save_onnx(Path(folder) / "model.onnx")
        trials = self._made.trials
        manifest = described(self.module, self._facts, trials, model)
        return write_folder(folder, *shortened(self.module, manifest, trials), code=code)

    @one_at_a_time()
    def save_vllm(self, folder: str | os.PathLike[str]) -> str:
        """Write ``module`` as the folder that vLLM serves as a ``DeciLMForCausalLM``.

        That is a Llama of which layers differ in the width of their MLPs, and may lack attention
        or MLP: what ``gate(…, loadable_by="vllm")`` cuts. The folder has the code of its
        configuration, for ``--trust-remote-code``. What vLLM's code makes of it is compared with
        ``module``, in float32 and in transformers' own layers; vLLM itself is not run.

        Args:
            folder: is made where there is none. Other files in it stay.

        Returns:
            How to serve it.

        Raises:
            UsageError: the model is no Llama, or its sizes cannot be said there.
            CertificateError: the network there would compute something else.
            FileError: it cannot be written; what was there is unchanged.
        """
        self._look()
        how: str = provided("write_for_vllm")(folder, self.module, self._made.trials)
        return how

    @property
    def _facts(self) -> dict[str, Any]:
        """Return the manifest's content without the model's origin."""
        known = None if self.preprocessing is None else self.preprocessing.model_dump()
        return {**self._manifest, **self._proof(self.certificate), "preprocessing": known}

    def _proof(self, certificate: Certificate) -> dict[str, Any]:
        """Return the checks that hold for the current module, for the facts of a file."""
        if not self.changed:
            return {"certificate": certificate.to_dict()}
        return {"certificate": certificate.of_module().to_dict(), "changed": CHANGED}

    def _state_now(self) -> dict[str, Tensor]:
        """Return the model's state_dict with the current values of the module.

        Names that a graph lacks (unused parameters, ``num_batches_tracked``) keep their values.
        """
        now, aliases = self.module.state_dict(), self.plan.aliases
        found = {}
        for name, exported in self._state.items():
            tensor = now.get(name, now.get(aliases.get(name, name), exported))
            found[name] = tensor.detach().cpu()
        return found

    def report(self, history: Any = None) -> l0prune.Report:
        """Return a one-page report of the export: ``small.report(history).save("report.html")``.

        A notebook displays it.

        Args:
            history: what ``finetune`` returned; several in a list.
        """
        return l0prune.Report.of(self, history)


def _write_pt2(piece: ExportedPart, path: str | os.PathLike[str]) -> Path:
    """Write the program of a part as torch's ``.pt2``.

    Raises:
        FileError: the file cannot be written.
        L0pruneError: torch cannot serialize the program.
    """
    file = piece.file_of(path)
    try:
        atomic_write(file, partial(torch.export.save, piece.program))
    except L0pruneError:
        raise
    except Exception as error:
        raise L0pruneError(
            f"{file} was not written: torch cannot serialize the program ({in_a_line(error)}). The "
            "usual cause is a class of the user's among the inputs or outputs whose registration "
            "gives no serialized_type_name, as torch.export.register_dataclass takes it. ONNX "
            "(save_onnx, --onnx) and the state (--state) need no such name."
        ) from error
    return file


Export.__doc__ = Outcome.__doc__  # which lists the attributes
