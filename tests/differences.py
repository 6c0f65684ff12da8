"""How far what was exported is from the gated model: measured by a few lines of the tests' own.

A certificate exists only where it passed, so that no assertion about its numbers can fail. Here the
two models run on inputs that no certificate has seen, with other numbers of examples.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from unittest import mock

import onnxruntime
import torch
from torch.utils import _pytree as pytree

import l0prune
from l0prune.exporting.certify.dtypes import InOneDtype
from l0prune.exporting.network import NotThisWay
from l0prune.exporting.own_class.comparison import Comparison

# What is left of a cut in float32: the weights that were folded are rounded once.
ROUNDED = 1e-5


def in_float64(module, args):
    """The model and its example inputs in float64: what is cut from there on is exact to 1e-10."""
    return module.double(), in_float64_too(args)


def in_float64_too(tree):
    return pytree.tree_map(lambda leaf: leaf.double() if is_floating(leaf) else leaf, tree)


@torch.no_grad()
def difference(gated, dense, args, kwargs=None, *, may_vanish=False):
    """Of any output, as a part of its scale, in float64; nan where one is no number.

    That all of an output is zero would say little, and is a failure unless it ``may_vanish``.

    ``gated`` is the model in eval mode, ``dense`` what ``l0prune.export`` made of it, and the
    example inputs say what others may look like.
    """
    found = []
    models = [copy.deepcopy(each).double().eval() for each in (gated, dense.module)]
    for inputs, named in others(dense, *in_float64_too((args, kwargs))):
        with InOneDtype(torch.float64):
            pair = [model(*inputs, **named) for model in models]
        outputs = zip(*map(tensors, pair), strict=True)
        found += [of_scale(*each, may_vanish=may_vanish) for each in outputs]
    return float(torch.stack(found).max())


@torch.no_grad()
def learned_on(dense):
    """The export, after its module has been trained a little."""
    for parameter in dense.module.parameters():
        parameter.mul_(1.2).add_(0.01)
    return dense


@contextmanager
def as_graph():
    """Within the context an export finds no class to be right, and hands out captured graphs."""
    wrong = Comparison("a test")
    # not by an import statement: the package has a function of this name
    exporting = import_module("l0prune.exporting.export")
    with (
        mock.patch("l0prune.exporting.own_class.choice.compare_class", return_value=wrong),
        mock.patch.object(exporting, "BY_PLAN", (_not_this_way,)),
    ):
        yield


def _not_this_way(network):
    raise NotThisWay


def graph_difference(gated, dense, args, kwargs=None, *, may_vanish=False):
    """The same of the captured graph, which is made only where the class cannot stand for it."""
    if any(check.what == "graph" for check in dense.certificate.checks):
        return 0.0  # it was made, and its certificate is one of what it computes
    with as_graph():
        other = l0prune.export(gated)
    assert not other.rebuilt
    assert (other.params, other.macs, other.widths) == (dense.params, dense.macs, dense.widths)
    return difference(gated, other, args, kwargs, may_vanish=may_vanish)


@torch.no_grad()
def onnx_difference(gated, dense, path, args, kwargs=None):
    """The same of the ONNX file at ``path``, through ONNX Runtime in float32."""
    found = []
    for inputs, named in others(dense, args, kwargs, kinds=("onnx",)):
        expected = tensors(gated(*inputs, **named))
        written = run_onnx(path, *tensors((inputs, named)))
        found += [of_scale(*each) for each in zip(expected, written, strict=True)]
    return float(torch.stack(found).max())


def run_onnx(path, *inputs):
    """What the file computes in ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = [(each.float() if is_floating(each) else each).numpy() for each in inputs]
    feed = dict(zip([given.name for given in session.get_inputs()], values, strict=True))
    return [torch.from_numpy(each) for each in session.run(None, feed)]


def others(dense, args, kwargs, kinds=("graph", "class")):
    """Inputs with other floats than the example, in 1, 3 and 7 examples where that is free."""
    tried = {check.batch for check in dense.certificate.checks if check.what in kinds}
    sizes = [size for size in (1, 3, 7) if size > 1 or 1 in tried] if len(tried) > 1 else [None]
    example = (args if isinstance(args, tuple) else (args,), kwargs or {})
    for size in sizes:
        yield changed(example, size)


def changed(example, size):
    generator = torch.Generator().manual_seed(17)
    count = tensors(example)[0].shape[0]
    rows = torch.randint(count, (size or count,), generator=generator)

    def change(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.ndim and leaf.shape[0] == count:
            leaf = leaf[rows]
        if not is_floating(leaf):
            return leaf
        return leaf * (torch.rand(leaf.shape, generator=generator) + 0.5).to(leaf.dtype)

    return pytree.tree_map(change, example)


def of_scale(expected, found, *, may_vanish=False):
    assert expected.shape == found.shape
    expected, found = expected.double(), found.double()
    apart = torch.where(expected == found, 0.0, (expected - found).abs())  # infinities are equal
    scale = expected[expected.isfinite()].abs().max()
    assert scale > 0 or may_vanish
    return apart.max() / (scale if scale > 0 else 1)


def tensors(tree):
    leaves = pytree.tree_leaves(tree)
    if len(leaves) == 1 and is_dataclass(leaves[0]):
        leaves = [getattr(leaves[0], field.name) for field in fields(leaves[0])]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def is_floating(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
