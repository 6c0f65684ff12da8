"""Torch-Pruning on the same models: does it prune, run, cut what it says, and export to ONNX?

    python -m benchmarks.torch_pruning --zoo torchvision|timm|transformers|today|small [--models …]

One process per model, with a limit of CPU time; results are lines of
``runs/torch-pruning-ZOO.jsonl``, which ``python -m benchmarks.coverage --page`` puts beside ours.
The tool is used as its README and examples say: magnitude importance, ratio 0.5, the last layers
ignored, heads as its examples have them. Weights and BatchNorm statistics are as for ours
(``benchmarks.scramble``), without gates.

Nothing of what it says about its groups is believed: each cut of a parameter is recorded as it is
made. In a copy of the original every element that was cut is zero, and the two must compute the
same. They differ if positions that belong together were cut apart, and also where a channel that is
zero is not the same as none (LayerNorm, a mean, a scale by the head's width): then there is no mask
that the cut stands for.
"""

from __future__ import annotations

import copy
import dataclasses
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
from benchmarks.runner import ALONE, One, alone, options
from benchmarks.scramble import Example, randomise, settle_statistics
from l0prune.capture.example_inputs import tensors_in
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import InOneDtype, cast
from l0prune.exporting.certify.inputs import fresh_inputs
from l0prune.exporting.onnx.file import Session

Kept = dict[str, list[Tensor]]  # by parameter: the positions that are left, in each dimension


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


def output_of(model: nn.Module, example: Example) -> list[Tensor]:
    """All tensors that a model returns."""
    args, kwargs = example
    with torch.no_grad():
        result = model(*args, **kwargs)
    result = vars(result) if dataclasses.is_dataclass(result) else result
    return tensors_in(result)


def shapes_of(model: nn.Module, example: Example) -> list[tuple[int, ...]]:
    """Of all outputs; of a detector's, which are as many as it found, without that number."""
    counted = any(isinstance(given, list) for given in example[0])
    return [tuple(out.shape[1:] if counted else out.shape) for out in output_of(model, example)]


def zeroed(original: nn.Module, kept: Kept) -> nn.Module:
    """Every element that was cut is zero; tied weights come apart where they were cut apart."""
    for name, left in kept.items():
        path, _, leaf = name.rpartition(".")
        module = original.get_submodule(path)
        weight = getattr(module, leaf).detach().clone()
        for dim, index in enumerate(left):
            dead = torch.ones(weight.shape[dim], dtype=torch.bool).index_fill(0, index, False)
            weight.index_fill_(dim, dead.nonzero().flatten(), 0)
        setattr(module, leaf, nn.Parameter(weight))
    return original


def errors(masked: nn.Module, pruned: nn.Module, kept: Kept, example: Example) -> Iterator[Row]:
    """In float64, relative to how far another input moves the output."""
    masked.double()
    pruned.double()
    batch = tensors_in(example)[0].shape[0]
    given, other = (cast(e, torch.float64) for e in (example, fresh_inputs(example, batch, 1)))
    with InOneDtype(torch.float64):
        expected, found = output_of(masked, given), output_of(pruned, given)
        signal = difference(expected, output_of(masked, other))
        yield {"signal": signal}
        if signal < 1e-12:
            return  # equal or not, it would prove nothing
        exact = difference(expected, found) / min(signal, 1)
        yield {"exact": exact, "norms": exact}
        norms = [
            (name, norm)
            for name, norm in masked.named_modules()
            if isinstance(norm, nn.LayerNorm | nn.GroupNorm) and f"{name}.weight" in kept
        ]
        for name, norm in norms:
            hook = _of_kept(pruned.get_submodule(name), kept[f"{name}.weight"][-1])
            norm.register_forward_hook(hook)
        if norms:
            yield {"norms": difference(output_of(masked, given), found) / min(signal, 1)}


def _of_kept(norm: nn.Module, kept: Tensor) -> Any:
    """A hook: the norm of the channels that were kept, zero elsewhere."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        is_first = getattr(module, "data_format", None) == "channels_first"
        is_image = isinstance(module, nn.GroupNorm) or type(module).__name__ == "LayerNorm2d"
        dim = 1 if is_first or is_image else -1
        part = norm(args[0].index_select(dim, kept))
        return torch.zeros_like(output).index_copy_(dim, kept, part)

    return hook


def onnx_error(model: nn.Module, example: Example) -> float:
    """The difference between PyTorch and ONNX Runtime in float32."""
    args, kwargs = example
    made = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
    assert made is not None
    run = Session(made.model_proto.SerializeToString())
    return difference(output_of(model, example), run(tensors_in(example)))


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
