"""Torch-Pruning on the same models: does it prune, run, cut what it says, and export to ONNX?

    python -m benchmarks.torch_pruning --zoo torchvision|timm|transformers|today|small [--models …]

One process per model, with a limit of CPU time; results are lines of
``runs/torch-pruning-ZOO.jsonl``, which ``python -m benchmarks.coverage --page`` puts beside ours.
The tool is used as its README and examples say: magnitude importance, ratio 0.5, the last layers
ignored, heads as its examples have them. Weights and BatchNorm statistics are as for ours
(``benchmarks.scramble``), without gates.

Nothing of what it says about its groups is believed: each cut of a parameter is recorded as it is
made, and ``benchmarks.masked`` compares.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import operator
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.isolation import ROOT, Row
from benchmarks.masked import Kept, errors, onnx_error, shapes_of, zeroed
from benchmarks.runner import ALONE, One, alone, options
from benchmarks.scramble import Example, randomise, settle_statistics


def steps(which: str, name: str, limit: int) -> Iterator[Row]:
    """One model, step by step."""
    import torch_pruning as tp

    model, example = zoo.build(which, name)
    randomise(model)
    settle_statistics(model, example)
    yield {"step": "prune", "version": importlib.metadata.version("torch-pruning"), "limit": limit}
    original, before = copy.deepcopy(model), sum(p.numel() for p in model.parameters())
    shapes = shapes_of(original, example)
    start = time.process_time()
    kept = _prune(tp, name, model, example, shapes)
    yield {
        "pruned": True,
        "seconds": round(time.process_time() - start, 1),
        "params_removed": round(1 - sum(p.numel() for p in model.parameters()) / before, 4),
        "step": "run",
    }
    found = shapes_of(model, example)
    if found != shapes:
        yield {"shapes": str(found)[:300]}
        raise ValueError(f"outputs of other shapes: {str(found)[:300]}, were {str(shapes)[:300]}")
    yield {"runs": True, "step": "compare"}
    yield from errors(zeroed(original, kept), model, kept, example)
    yield {"step": "onnx"}
    yield {"onnx": onnx_error(model.float(), example)}


def _prune(tp: Any, name: str, model: nn.Module, example: Example, shapes: list) -> Kept:
    """As its README does it; returns what it left of each parameter."""
    cutter, cut = tp.BasePruningFunc, tp.BasePruningFunc._prune_parameter_and_grad

    def recorded(self: Any, weight: Tensor, keep: Any, dim: int) -> Tensor:
        kept = list(getattr(weight, "kept", [torch.arange(size) for size in weight.shape]))
        kept[dim] = kept[dim][torch.as_tensor(keep)]
        weight = cut(self, weight, keep, dim)
        weight.kept = kept
        return weight

    cutter._prune_parameter_and_grad = recorded
    model.requires_grad_(True)  # it does not see what is frozen
    heads = _attention(model)
    width = {shape[-1] if len(shape) == 3 else shape[1] for shape in shapes if len(shape) > 1}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    ends = [m for m in layers if m.weight.shape[0] in width and m not in heads]
    if name.startswith(_WITH_HEAD):
        ends = []
    args, kwargs = example
    blocks = getattr(getattr(model, "encoder", None), "layers", None)
    is_vit = hasattr(model, "conv_proj") and blocks is not None
    pruner = tp.pruner.MagnitudePruner(
        model,
        kwargs or args,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[*ends, *_parts(name, model)],
        num_heads=dict(heads),
        round_to=blocks[0].num_heads if is_vit else None,
    )
    pruner.step()
    if is_vit:
        model.hidden_dim = model.conv_proj.out_channels
    _mend(model)
    cutter._prune_parameter_and_grad = cut
    named = model.named_parameters(remove_duplicate=False)
    return {path: p.kept for path, p in named if hasattr(p, "kept")}


_PROJECTIONS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"))
_HEADS = ("num_attention_heads", "num_heads")


def _attention(model: nn.Module) -> dict[nn.Module, int]:
    """Its examples' ``num_heads``: of each projection of an attention of transformers."""
    heads = {}
    for module, projections in _attentions(model):
        own = [module, getattr(module, "config", None)]
        counts = [getattr(o, n, None) for o in own for n in _HEADS]  # of a backbone: of each stage
        by_width = projections[0].out_features // getattr(module, "head_dim", 1)
        count = next((found for found in counts if isinstance(found, int)), by_width)
        shared = getattr(own[1], "num_key_value_heads", None) or count
        heads |= dict(zip(projections, (count, shared, shared), strict=True))
    return heads


def _attentions(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    for module in model.modules():
        for names in _PROJECTIONS:
            found = [getattr(module, name, None) for name in names]
            if all(isinstance(layer, nn.Linear) for layer in found):
                yield module, found


def _mend(model: nn.Module) -> None:
    """Its examples' changes of what attention remembers about its own widths."""
    heads = _attention(model)
    for module, (query, *_) in _attentions(model):
        width = query.out_features
        sizes = {"attention_head_size": width // heads[query], "head_dim": width // heads[query]}
        for name, size in (sizes | {"all_head_size": width, "embed_dim": width}).items():
            if hasattr(module, name):
                setattr(module, name, size)


# The parts of detectors and of RAFT that its examples leave alone, by what is in a model's name.
_RPN = ("rpn.head.cls_logits", "rpn.head.bbox_pred")
_DENSE = ("head.classification_head.cls_logits", "head.regression_head.bbox_reg")
_KEYPOINTS = ("roi_heads.box_head", "roi_heads.box_predictor", "roi_heads.keypoint_predictor")
_LEFT_ALONE = {
    "ssd": ("head",),
    "raft": ("corr_block", "update_block", "mask_predictor"),
    "fasterrcnn": (*_RPN, "backbone.fpn", "roi_heads"),
    "maskrcnn": (*_RPN, "roi_heads.box_predictor", "roi_heads.mask_predictor"),
    "keypointrcnn": (*_RPN, "backbone.fpn.layer_blocks", *_KEYPOINTS),
    "retinanet": _DENSE,
    "yolo11n": ("model.23",),
    "yolo12n": ("model.21",),
    "rtdetr-l": ("model.28",),
    "fcos": (*_DENSE, "head.regression_head.bbox_ctrness"),
}
# Of these the whole head is left alone, and layers that happen to be as wide as an output are not.
_WITH_HEAD = ("yolo11n", "yolo12n", "rtdetr-l")


def _parts(name: str, model: nn.Module) -> list[nn.Module]:
    paths = next((paths for key, paths in _LEFT_ALONE.items() if key in name), ())
    found = [operator.attrgetter(path)(model) for path in paths]
    return [part for part in found if part is not None]


def summary(row: Row) -> str:
    """One line for the terminal."""
    what = " ".join(f"{k} {row[k]}" for k in ("params_removed", "seconds", "peak_mib") if k in row)
    errors = " ".join(f"{k} {row[k]:.0e}" for k in ("exact", "norms", "onnx") if k in row)
    crash = f"CRASH at {row['step']}: {row['crash'][:160]!r}" if "crash" in row else ""
    return f"{row['model']:36} {what} {errors} {crash}"


def main() -> None:
    limit = (120, "CPU seconds for one model")
    given = options(__doc__, **ALONE | {"limit": limit, "zoo": One(zoo.ZOOS)})
    if importlib.util.find_spec("torch_pruning") is None:
        raise SystemExit("torch-pruning is missing: pip install 'l0prune[benchmarks]'")
    path = ROOT / "runs" / f"torch-pruning-{given.zoo}.jsonl"
    alone(given, "torch_pruning", path, partial(steps, limit=given.limit), summary)


if __name__ == "__main__":
    main()
