"""ONNX files in, smaller ONNX files out: exports of torchvision, and files that lie in wheels.

    python -m benchmarks.onnx_in
    python -m benchmarks.onnx_in --exporter torchscript --only resnet18 vit_b_16

Ten networks of torchvision with random weights, as one of torch's exporters writes them: the
present one with a free batch, the former one (``torchscript``) as it does by default, for a batch
of one. Then files of other exporters, from packages that pip fetches into the folder that
L0PRUNE_CACHE names.

Each is read with ``l0prune.load_model``, gated, cut by the size of its weights to a share of its
MACs, and written again. The errors are relative to the outputs' scale: of the network beside the
file that came in (``in``), of the smaller network beside the gated one in float64 (``cut``), of the
file that goes out beside the gated network (``out``). Where the file leaves sizes free and no file
can be written that does, they are fixed. A file that is refused says why.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from torch import nn

import l0prune
from benchmarks import zoo
from benchmarks.wheels import wheel
from l0prune.capture.threads import muted
from l0prune.errors import L0pruneError

TORCHVISION = (
    *("resnet18", "mobilenet_v2", "densenet121", "efficientnet_b0", "shufflenet_v2_x1_0"),
    *("squeezenet1_1", "regnet_y_400mf", "convnext_tiny", "swin_t", "vit_b_16"),
)
WHEELS = {
    ("rapidocr-onnxruntime", "1.4.4"): (
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    ),
    ("silero-vad", "6.2.3"): (
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        "silero_vad/data/silero_vad.onnx",
    ),
    ("basic-pitch", "0.4.0"): ("basic_pitch/saved_models/icassp_2022/nmp.onnx",),
    ("magika", "1.0.3"): ("magika/models/standard_v3_3/model.onnx",),
    ("nudenet", "3.4.2"): ("nudenet/320n.onnx",),
}
SHARE = 0.7


def files(folder: Path, exporter: str, only: list[str]) -> Iterator[Path]:
    """Yield the files, those of torchvision as they are written."""
    for name in TORCHVISION:
        if not only or name in only:
            yield exported(name, folder / f"{name}.onnx", exporter)
    for package, paths in WHEELS.items():
        for path in paths:
            if not only or Path(path).stem in only:
                yield wheel(*package) / path


def exported(name: str, path: Path, exporter: str) -> Path:
    """Write a network of torchvision; what it has of zeros becomes noise."""
    model, ((x,), _) = zoo.build("torchvision", name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    with muted():
        if exporter == "dynamo":
            free = ({0: torch.export.Dim("batch")},)
            torch.onnx.export(
                model, (x,), path, dynamo=True, dynamic_shapes=free, external_data=False
            )
        else:
            torch.onnx.export(model, (x[:1],), str(path), dynamo=False)
    return path


def cut(model: nn.Module, folder: Path, free: dict[str, dict[int, str]] | None) -> l0prune.Export:
    """Gate, cut and write the network."""
    l0prune.gate(model, model.example_input_array, dynamic_shapes=free)
    l0prune.fit(model, f"macs={SHARE}", l0prune.score(model, "magnitude"))
    small = l0prune.export(model)
    small.save_onnx(folder / "out.onnx", time=False)
    return small


def row(path: Path, folder: Path) -> str:
    """Take one file in and out; return a row of the table."""
    start = time.perf_counter()
    content = onnx.load(path, load_external_data=False)
    maker = f"{content.producer_name or 'unknown'} {content.producer_version[:8]}".strip()
    about = f"| {path.stem} | {maker} | {len(content.graph.node)} |"
    try:
        model = l0prune.load_model(str(path))
        sizes = "free" if model.free else "as in the file"
        try:
            dense = cut(model, folder, model.free or None)
        except L0pruneError:
            if not model.free:
                raise
            sizes = "fixed"
            dense = cut(l0prune.load_model(str(path)), folder, None)
    except L0pruneError as error:
        return f"{about} refused: {' '.join(str(error).split())[:240]} |"
    batch = "free" if not model.fixed_batch else str(model.fixed_batch)
    kinds = (("graph", "class"), "float64"), ("onnx", "float32")
    smaller, out = (dense.certificate.worst(*kind) for kind in kinds)
    seconds = time.perf_counter() - start
    return (
        f"{about} {batch} | {sizes} | {dense.macs / dense.macs_before:.1%} | "
        f"{dense.params / dense.params_before:.1%} | {model.origin.error:.0e} | {smaller:.0e} | "
        f"{out:.0e} | {seconds:.0f} s |"
    )


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exporter", choices=("dynamo", "torchscript"), default="dynamo")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    columns = "file", "written by", "nodes", "batch", "other sizes", "MACs", "params", "in", "cut"
    print(f"| {' | '.join((*columns, 'out', 'time'))} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    counts: Counter[bool] = Counter()
    with tempfile.TemporaryDirectory() as name:
        for path in files(Path(name), options.exporter, options.only):
            found = row(path, Path(name))
            counts["refused:" in found] += 1
            print(found, flush=True)
    print(f"\n{counts[False]} of {counts.total()} cut and certified")


if __name__ == "__main__":
    main()
