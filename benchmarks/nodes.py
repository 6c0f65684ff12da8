"""Does a file of ours have nodes that the dense network's own file does not have?

    python -m benchmarks.nodes [torchvision:resnet50 transformers:bert …] [--round-to 16]

Each network has a process of its own; weights are random, of every axis half of the gates are
closed at random. Its file from ``Export.save_onnx`` is held against what ``torch.onnx.export``
makes of the dense original: first as they are written, then as ONNX Runtime has optimised them for
this machine. Printed are the operators of which ours has more or fewer nodes, and why it has more.
Where there are none, the file has node by node what a network has that was built at these sizes.

With ``--round-to`` all widths are multiples of a number. Of 16, ONNX Runtime's blocks on
AVX-512 (8 on AVX2), it leaves nothing to reorder that it would not reorder in the dense network.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import l0prune
from benchmarks import isolation, zoo
from benchmarks.isolation import ROOT, Row, parser_of
from benchmarks.scramble import scramble

MODELS = (
    *(f"torchvision:{name}" for name in ("resnet18", "resnet50", "mobilenet_v2", "densenet121")),
    *(f"torchvision:{name}" for name in ("efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t")),
    "torchvision:shufflenet_v2_x1_0",
    *(f"transformers:{name}" for name in ("bert", "gpt2", "llama-lm", "vit")),
)
# Why a file has more of these than its dense network's.
_NORM = "a norm over slots some of which are gone has zeros in their place, or is arithmetic"
_APART = "queries, keys and values of torch's own attention are computed apart"
_BLOCKS = "widths that ONNX Runtime's blocks do not fit"
_WHY = {
    **dict.fromkeys(("Pad", "Slice", "LayerNormalization"), _NORM),
    **dict.fromkeys(("Mul", "Reciprocal", "ReduceMean", "Sqrt", "Sub"), _NORM),
    **dict.fromkeys(("MatMul", "Split"), _APART),
    **dict.fromkeys(("Conv", "FusedConv", "ReorderInput", "ReorderOutput"), _BLOCKS),
    "Add": f"{_NORM}; {_APART}",
}


def steps(which: str, name: str, round_to: int) -> Iterator[Row]:
    """One network: its dense file, and ours."""
    model, (args, kwargs) = zoo.build(which, name)
    with tempfile.TemporaryDirectory() as folder:
        dense, ours = Path(folder) / "dense.onnx", Path(folder) / "ours.onnx"
        _plainly(model, args, kwargs, dense)
        yield {"step": "gate"}
        scramble(model, (args, kwargs), evenly=round_to == 1, round_to=round_to)
        yield {"step": "export"}
        result = l0prune.export(model)
        result.save_onnx(ours, time=False)
        yield {
            "own_class": result.rebuilt,
            "written": _apart(onnx.load(ours), onnx.load(dense)),
            "step": "optimise",
        }
        pair = (onnx.load(_optimised(each)) for each in (ours, dense))
        yield {"optimised": _apart(*pair)}


def _plainly(model: nn.Module, args: Any, kwargs: Any, path: Path) -> None:
    """What ``torch.onnx.export`` makes of it, with a free batch where the model allows one."""
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    free = {name: pytree.tree_map(lambda _: {0: Dim.AUTO}, value) for name, value in given.items()}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        made = torch.onnx.export(model, args, kwargs=kwargs, dynamic_shapes=free, verbose=False)
    assert made is not None
    made.save(path)


def _optimised(path: Path) -> Path:
    """What ONNX Runtime makes of the file on this machine, as a file beside it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(path.with_suffix(".optimised.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return path.with_suffix(".optimised.onnx")


def _apart(ours: onnx.ModelProto, dense: onnx.ModelProto) -> Row:
    """Counts of nodes, and the operators of which ours has more or fewer."""
    mine, theirs = _counts(ours), _counts(dense)
    return {
        "nodes": [mine.total(), theirs.total()],
        "more": dict(mine - theirs),
        "fewer": dict(theirs - mine),
    }


def _counts(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def summary(row: Row) -> str:
    """Some lines for the terminal."""
    if "optimised" not in row:
        return f"{row['model']:32} {row.get('refused') or row.get('crash')}"
    lines = [row["model"] + ("" if row["own_class"] else " (graph)")]
    for which in ("written", "optimised"):
        found: Mapping[str, Any] = row[which]
        ours, dense = found["nodes"]
        more = ", ".join(f"+{count} {kind}" for kind, count in sorted(found["more"].items()))
        fewer = ", ".join(f"-{count} {kind}" for kind, count in sorted(found["fewer"].items()))
        change = "; ".join(filter(None, (more, fewer))) or "the same"
        lines.append(f"    {which:9} {ours:4} nodes, dense {dense:4}: {change}")
    kinds = sorted({*row["written"]["more"], *row["optimised"]["more"]})
    reasons = dict.fromkeys(_WHY.get(kind, f"{kind}: not known") for kind in kinds)
    return "\n".join([*lines, *(f"    {reason}" for reason in reasons)])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--round-to", type=int, default=1)
    parser.add_argument("--limit", type=int, default=900, help="CPU seconds for one network")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "nodes.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.one:
        round_to, which, name = options.one.split(":")
        isolation.measure(f"{which}:{name}", steps(which, name, int(round_to)))
        return
    print(f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}")
    isolation.run(
        "benchmarks.nodes",
        options.out,
        str(options.round_to),
        options.models,
        options.limit,
        summary,
    )


if __name__ == "__main__":
    main()
