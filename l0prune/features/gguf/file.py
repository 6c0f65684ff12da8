"""Files for llama.cpp: checked against the network, then written by the package ``gguf``."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.errors import UsageError, in_a_line, meant, warn
from l0prune.exporting.outcome import Outcome
from l0prune.exporting.own_class.writing import WRITERS
from l0prune.features.gguf.content import Content
from l0prune.features.gguf.network import checked
from l0prune.features.gguf.tokenizer import Tokenizer, tokenizer_in
from l0prune.files.atomic import PathLike, replacement
from l0prune.files.beside_weights import source_folder
from l0prune.progress.stages import stage

TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_OF_DTYPE = {torch.float16: "F16", torch.bfloat16: "BF16"}
_BLOCK = 32  # numbers of a row that share a scale in Q8_0


def save_gguf(
    small: Outcome | nn.Module,
    path: PathLike,
    *,
    type: str | None = None,
    tokenizer: PathLike | None = None,
) -> str:
    """Write a network as one file for llama.cpp, and for what is built on it (Ollama, LM Studio).

    It is a Llama, Mistral, Qwen2 or Qwen3 of transformers. Its layers may differ in the width of
    their MLPs and in their heads, and may lack attention or MLP; not those of a Qwen3. Before
    anything is written, what llama.cpp's graph computes from the file's tensors is compared with
    the network, in float64. Then matrices are rounded to ``type``.

    Args:
        small: what ``export`` or ``shrink`` returned, or a model.
        path: of the file.
        type: ``"F32"``, ``"F16"``, ``"BF16"`` or ``"Q8_0"``. By default the one that the file's
            name ends with (``small.Q8_0.gguf``), else that of the weights. In Q8_0, matrices whose
            rows have no multiple of 32 numbers are in F16.
        tokenizer: folder of the tokenizer, by default the one that the model was loaded from. A
            warning says why there is none in the file, which llama-server then refuses.

    Returns:
        How to run it.

    Raises:
        UsageError: llama.cpp cannot run such a network, the type is unknown or does not hold the
            weights, or the package is not installed.
        CertificateError: llama.cpp would compute something else.
        FileError: it cannot be written.
    """
    if find_spec("gguf") is None:
        raise UsageError("gguf is not installed: pip install 'l0prune[gguf]'")
    module = small.module if isinstance(small, Outcome) else small
    kind = _type(type, Path(path), module)
    with stage(f"writing {Path(path).name}"):
        content = checked(module)
        if kind in ("F16", "Q8_0"):
            _check_range(content, kind)
        known, why = _tokenizer(tokenizer, module, content.number("vocab_size"))
        with replacement(path) as temporary:
            _write(temporary, content, kind, known)
    if known is None:
        warn(
            f"{path} has no tokenizer: programs that call the library with numbers of tokens run "
            f"it, and llama-server and llama-cli, which need texts, do not: {why}"
        )
        return f"A program that calls `llama_decode` with numbers of tokens runs {path}."
    return f"`llama-cli -m {path}` runs it."


def _tokenizer(
    given: PathLike | None, module: nn.Module, size: int
) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of a network; else None and why there is none."""
    source = str(getattr(module, "name_or_path", None) or "")
    folder = source_folder(source) if given is None else Path(given)
    if folder is None:
        at = f"the files of {source} are not here" if source else "nothing says where one is"
        return None, f"{at}; tokenizer=FOLDER names one"
    try:
        return tokenizer_in(folder, size), ""
    except (KeyError, TypeError, ValueError) as error:
        said = str(error) if type(error) is ValueError else in_a_line(error)
        return None, f"that of {folder} was not converted: {said}"


def _type(given: str | None, path: Path, module: nn.Module) -> str:
    """Return the type of the matrices: what was given, what the file's name says, or their own."""
    if given is not None:
        if given.upper() not in TYPES:
            known = ", ".join(TYPES)
            raise UsageError(f"a GGUF file is of type {known}, not {given!r}{meant(given, TYPES)}")
        return given.upper()
    last = re.split(r"[-.]", path.stem)[-1].upper()
    own = next((p.dtype for p in module.parameters()), torch.float32)
    return last if last in TYPES else _OF_DTYPE.get(own, "F32")


def _save(path: Path, module: nn.Module) -> None:
    save_gguf(module, path)


WRITERS[".gguf"] = _save


def _check_range(content: Content, kind: str) -> None:
    most = torch.finfo(torch.float16).max
    for name, tensor in content.tensors.items():
        if tensor.ndim > 1 and tensor.abs().max() > most:
            raise UsageError(f"{name} has values above {most:g}, too large for {kind}: use BF16")


def _write(path: Path, content: Content, kind: str, tokenizer: Tokenizer | None) -> None:
    gguf: Any = importlib.import_module("gguf")
    writer = gguf.GGUFWriter(path, content.architecture)
    writer.add_file_type(gguf.LlamaFileType[TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in content.numbers.items():
        _add_number(writer, f"{content.architecture}.{key}", value)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        tokenizer.write(writer)
    for name, tensor in content.tensors.items():
        of = _type_of(tensor, kind)
        numbers = int(np.prod(tensor.shape))
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[of]]
        writer.add_tensor_info(
            name,
            tensor.shape,
            np.dtype(np.float32),
            numbers // block * size,
            raw_dtype=gguf.GGMLQuantizationType[of],
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in content.tensors.values():
            array = tensor.detach().float().cpu().contiguous().numpy()
            of = gguf.GGMLQuantizationType[_type_of(tensor, kind)]
            writer.write_tensor_data(gguf.quants.quantize(array, of))
    finally:
        writer.close()


def _type_of(tensor: Tensor, kind: str) -> str:
    """Return a tensor's type: F32 of vectors, and F16 for Q8_0 of rows of other lengths."""
    if tensor.ndim == 1:
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % _BLOCK else kind


def _add_number(writer: Any, key: str, value: int | float | list[int]) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
