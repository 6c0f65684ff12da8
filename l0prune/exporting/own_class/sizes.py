"""Tensors and attributes of the user's own class at the new sizes.

Attributes of torch's layers follow their tensors. Those of the user's modules (``num_heads``,
``hidden_size``) are known where their code passes the number to an operator, and else guessed from
name and value. A wrong guess does no harm: the resized class counts only if it is shown to compute
the same. Numbers that no forward reads follow the tensors nearest below their module, or stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain, islice, permutations, product
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from l0prune.capture.compat import ConvolutionBase
from l0prune.capture.copying import copied
from l0prune.capture.provenance import is_within, within
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import stored_in
from l0prune.files.cut_layers import become
from l0prune.files.given_sizes import GIVEN, GivenSizes
from l0prune.infer.own_code import SCALED
from l0prune.plan.code import PARTS, ReusedSize, SizedCall
from l0prune.plan.layout import Layout, axes_of, outer
from l0prune.plan.plan import Plan

# Attributes of torch's modules that repeat a tensor's size: attribute → (tensor, dim); the first
# tensor that the module has counts.
_FROM_TENSORS: dict[str, tuple[tuple[str, int], ...]] = {
    "num_features": (("running_mean", 0), ("weight", 0)),
    "num_embeddings": (("weight", 0),),
    "embedding_dim": (("weight", 1),),
    "input_size": (("weight_ih_l0", 1), ("weight_ih", 1)),
    "hidden_size": (("weight_hr_l0", 1), ("weight_hh_l0", 1), ("weight_hh", 1)),
    "proj_size": (("weight_hr_l0", 0),),
}

# Kinds of sizes, each with substrings of attribute names for it.
_NAMES = {
    "head": ("head",),
    "head_dim": ("head_dim", "head_size", "kv_dim", "key_dim", "val_dim", "dim_head"),
    "group": ("group",),
    "expert": ("expert",),
    "": ("dim", "size", "channel", "feature", "width", "plane", "hidden", "embed", "units"),
}

Changes = dict[str, dict[str, Any]]  # new values by module path and attribute
Sizes = set[tuple[str, int, int]]  # kind, old size, new size


def joined(*changes: Changes) -> Changes:
    """Join changes; the last one counts where several set an attribute."""
    result: Changes = {}
    for each in changes:
        for path, attributes in each.items():
            result[path] = {**result.get(path, {}), **attributes}
    return result


def resized(model: nn.Module, changes: Changes, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the ungated model with changed attributes and tensors; ties are kept."""
    replaced: dict[int, Any] = {}
    for name, tensor in tensors.items():
        old = stored_in(model, name)
        if old is None or id(old) in replaced:
            continue
        path, _, leaf = name.rpartition(".")
        if isinstance(old, nn.Parameter):
            replaced[id(old)] = nn.Parameter(tensor, requires_grad=old.requires_grad)
        elif leaf in model.get_submodule(path)._buffers:
            replaced[id(old)] = tensor
        else:  # a plain attribute, which .to() of the model skips
            replaced[id(old)] = tensor.to(old.dtype)
    result = copied(model, replaced)
    for path, attributes in changes.items():
        module = result.get_submodule(path)
        for name, value in attributes.items():
            setattr(module, name, value)
        if GIVEN in attributes:
            become(module, GivenSizes.__name__)
    return result


def changed_attributes(
    model: nn.Module, tensors: Mapping[str, Tensor], groups: Mapping[str, int]
) -> Changes:
    """Return the attributes of torch's own layers that follow the tensors.

    ``tensors`` are the cut ones under every name of the model's state_dict, ``groups`` the number
    of groups that each grouped convolution keeps, by path.
    """
    found = {}
    for path, module in model.named_modules():
        sizes = _sizes_by_tensors(module, path, tensors, groups.get(path, 1))
        changed = {name: size for name, size in sizes.items() if getattr(module, name) != size}
        if changed:
            found[path] = changed
    return found


def _sizes_by_tensors(
    module: nn.Module, path: str, tensors: Mapping[str, Tensor], groups: int
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    weight = tensors.get(within(path, "weight"))
    if isinstance(module, nn.Linear) and weight is not None:
        sizes = {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    elif isinstance(module, ConvolutionBase) and weight is not None:
        first, second = int(weight.shape[0]), int(weight.shape[1]) * groups
        if module.transposed:
            first, second = second, first
        sizes = {"out_channels": first, "in_channels": second, "groups": groups}
    elif isinstance(module, nn.GroupNorm) and weight is not None:  # groups go as a whole
        channels = int(weight.shape[0])
        groups = channels * module.num_groups // module.num_channels
        sizes = {"num_channels": channels, "num_groups": groups}
    for attribute, places in _FROM_TENSORS.items():
        for tensor, dim in places if attribute in vars(module) else ():
            found = tensors.get(within(path, tensor))
            if found is not None and found.ndim > dim:
                sizes[attribute] = found.shape[dim]
                break
    return sizes


def groups_left(model: nn.Module, plan: Plan, kept: Tensor) -> dict[str, int]:
    """Return the number of groups that each grouped convolution keeps, by path."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ConvolutionBase) and module.groups > 1:
            name = within(path, "weight")
            dims = plan.tensors.get(plan.aliases.get(name, name))
            whole = module.groups if dims is None else outer(dims[0], module.groups)
            found[path] = whole if isinstance(whole, int) else _left(plan, whole, kept)
    return found


def sizes_in_code(model: nn.Module, plan: Plan, kept: Tensor, *, by_kind: bool) -> Changes:
    """Return the integer attributes that the modules' code seems to pass as sizes, with new values.

    Of several attributes with one value, those named like a size count, if any is: ``head_dim``,
    but not ``reduction_ratio``.

    With ``by_kind``, of those named like a size only the ones named like the size's kind count, if
    any is: of a ``head_dim`` and a ``dim_key`` the latter may be for a scale.
    """
    found = {}
    for path, dims in plan.code.sizes.items():
        sizes: Sizes = set()
        for dim in dims:
            kinds = {plan.axes[number].kind for number in axes_of(dim)}
            kind = kinds.pop() if len(kinds) == 1 else ""
            old_and_new = dim.size, _left(plan, dim, kept)
            sizes |= {(each, *old_and_new) for each in {kind if kind in _NAMES else "", ""}}
        numbers = {n: v for n, v in vars(model.get_submodule(path)).items() if type(v) is int}
        changes = {
            name: new
            for name in _likely(numbers, sizes, by_kind)
            if (new := _size_in_code(name, numbers[name], sizes)) != numbers[name]
        }
        if changes:
            found[path] = changes
    return found


_MOST_WAYS = 24  # in which dims of one old size are told apart


def told_apart(model: nn.Module, plan: Plan, kept: Tensor) -> Iterator[Changes]:
    """Yield attributes of one value, in every way in which dims of that size may be theirs.

    As a state's size that equals the size of a head, where only one of them is cut. Modules of a
    class have the same attributes for the same dims; the other attributes of that value stay.
    """
    names: dict[tuple[type, int], tuple[str, ...]] = {}
    dims: dict[str, dict[int, list[Layout]]] = {}
    for path, of in plan.code.sizes.items():
        module, found = model.get_submodule(path), defaultdict[int, list[Layout]](list)
        for dim in dict.fromkeys(dim for dim in of if axes_of(dim)):
            found[dim.size].append(dim)
        numbers = {name: value for name, value in vars(module).items() if type(value) is int}
        dims[path] = {value: each for value, each in found.items() if len(each) > 1}
        for value in dims[path]:
            likely = _likely(numbers, set(), by_kind=False)
            names[type(module), value] = tuple(n for n in likely if numbers[n] == value)
    most = {key: max(len(each.get(key[1], ())) for each in dims.values()) for key in names}
    ways = [permutations(of, min(len(of), most[key])) for key, of in names.items()]
    for way in islice(product(*ways), _MOST_WAYS) if names else ():
        chosen, changes = dict(zip(names, way, strict=True)), defaultdict[str, dict[str, Any]](dict)
        for path, by_value in dims.items():
            for value, each in by_value.items():
                key = type(model.get_submodule(path)), value
                changes[path] |= dict.fromkeys(names[key], value)
                pairs = zip(chosen[key], each, strict=False)
                changes[path] |= {name: _left(plan, dim, kept) for name, dim in pairs}
        yield dict(changes)


def _likely(numbers: Mapping[str, int], sizes: Sizes, by_kind: bool) -> Iterator[str]:
    """Yield, for each value, the attributes named like a size; all with this value if none is."""
    for value in dict.fromkeys(numbers.values()):
        names = [name for name, other in numbers.items() if other == value]
        kinds = {kind for kind, old, _ in sizes if kind and old == value} if by_kind else set()
        ways = [{part for kind in kinds for part in _NAMES[kind]}, set(chain(*_NAMES.values()))]
        found = ([n for n in names if any(part in n.lower() for part in way)] for way in ways)
        yield from next(filter(None, found), names)


def _size_in_code(name: str, value: int, sizes: Sizes) -> int:
    """Return the new value of an attribute; its name decides if several sizes have its old value.

    If no size has the value, sizes may be equal parts of it: ``x.split(self.width // 2)``.
    """
    for parts in PARTS:
        news = {new * parts for _, old, new in sizes if old * parts == value}
        if len(news) == 1:
            return news.pop()
        if news:
            return _new_size(name, value, sizes, largest=False)
    return value


def guessed_sizes(model: nn.Module, plan: Plan, kept: Tensor, *, largest: bool) -> Changes:
    """Return the integer attributes that seem to repeat a size, by their names and values.

    If a number may mean a size that is unchanged or one that changes (a width that is also
    heads × head_dim), ``largest`` picks the one that changes.
    """
    below = _sizes_below(plan, kept)
    found = {}
    for path, module in model.named_modules():
        if _is_torchs(module):
            continue  # their attributes follow the tensors (``changed_attributes``)
        changes = {
            name: new
            for name, value in vars(module).items()
            if type(value) is int and (new := _new_size(name, value, below[path], largest)) != value
        }
        if changes:
            found[path] = changes
    return found


def _sizes_below(plan: Plan, kept: Tensor) -> dict[str, Sizes]:
    """Return, by module path, the sizes of axes and dims of all tensors in the module and below."""
    below: dict[str, Sizes] = defaultdict(set)
    for tensor, dims in plan.tensors.items():
        sizes: Sizes = set()
        for dim in dims:
            sizes.add(("", dim.size, _left(plan, dim, kept)))
            for number in axes_of(dim):
                axis = plan.axes[number]
                kind = axis.kind if axis.kind in _NAMES else ""
                sizes.add((kind, axis.size, int(kept[axis.slice].sum())))
        path = tensor
        while path:
            path = path.rpartition(".")[0]
            below[path] |= sizes
    return below


def _new_size(name: str, value: int, sizes: Sizes, largest: bool) -> int:
    """Return an attribute's value after the cut by its name; the old value if not unique."""
    for kind in sorted(_NAMES, key=len, reverse=True):  # head_dim before head
        if any(part in name.lower() for part in _NAMES[kind]):
            news = {new for k, old, new in sizes if old == value and k == kind}
            news -= {value} if largest else set()
            return news.pop() if len(news) == 1 else value
    return value


def unread_sizes(model: nn.Module, plan: Plan, kept: Tensor) -> tuple[Changes, list[str]]:
    """Return size attributes that no forward needs to read, such as ``num_features``.

    Since no forward shows their meaning, each is matched with the dims of its value in the tensors
    nearest below the module, if all of these keep equally many positions. An attribute is no size
    if in another module of its class its value matches no dim.

    Returns:
        The attributes with their new sizes; and the names of those whose matching dims are not all
        cut to the same size.
    """
    places: dict[tuple[type, str], list[tuple[str, int]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, value in () if _is_torchs(module) else vars(module).items():
            if type(value) is int and not name.startswith("_"):
                places[type(module), name].append((path, value))
    sizes = {
        tensor: {(dim.size, _left(plan, dim, kept)) for dim in dims}
        for tensor, dims in plan.tensors.items()
    }
    cut = {size for each in sizes.values() for size, left in each if left != size}
    changes: Changes = defaultdict(dict)
    unclear = []
    for (_, name), values in places.items():
        if cut.isdisjoint(value for _, value in values):
            continue
        news = [_nearest(sizes, path, value) for path, value in values]
        for (path, value), found in zip(values, news, strict=True) if all(news) else ():
            if len(found) > 1:
                unclear.append(within(path, name))
            elif found != {value}:
                changes[path][name] = next(iter(found))
    return dict(changes), unclear


def _nearest(sizes: Mapping[str, set[tuple[int, int]]], path: str, size: int) -> set[int]:
    """Return the new sizes of dims with this old size, in the tensors nearest below the path."""
    below: dict[int, set[int]] = defaultdict(set)
    for tensor, found in sizes.items():
        if is_within(tensor, path):
            below[tensor.count(".")] |= {left for old, left in found if old == size}
    return next((news for _, news in sorted(below.items()) if news), set())


def given_sizes(model: nn.Module, plan: Plan, kept: Tensor) -> Changes:
    """Return the ``GIVEN`` attributes: sizes to pass to functions that modules' code calls.

    torch's modules need none: their attributes follow their tensors, and graphs are rewritten.
    """
    found: Changes = {}
    apart = {reused.module for reused in _now_apart(plan, kept)}
    for path, calls in plan.code.calls.items():
        if _is_torchs(model.get_submodule(path)):
            continue
        rows = []
        for call in calls:
            old = [None if dim is None else dim.size for dim in call.sizes]
            new = [None if dim is None else _left(plan, dim, kept) for dim in call.sizes]
            rows.append((call, (call.name, call.count), old, new))
        changed = {
            kind
            for _, kind, old, new in rows
            # Code may derive a head's size from another dim divided by the number of heads.
            if path in apart or old != new or kind[0] == SCALED
        }
        if changed:
            given = [[*k, _given(call, old, new)] for call, k, old, new in rows if k in changed]
            found[path] = {GIVEN: given}
    return found


def _given(call: SizedCall, old: list[Any], new: list[Any]) -> list[Any]:
    """Return the sizes for one call, in the form that ``GivenSizes`` reads."""
    if call.name in ("mean", "layer_norm") and None not in new:
        return [prod(new), prod(old)]
    if call.name in ("scaled_dot_product_attention", SCALED):
        return old
    return [-1 if place == call.follows else size for place, size in enumerate(new)]


def known_cause(chosen: KeptSlots) -> str:
    """Return a known reason why the class may be wrong; empty if there is none.

    It is a weight that the forward standardises, or one size that is used for two dims.
    """
    plan, kept = chosen.plan, chosen.kept
    for name in plan.code.standardised:
        if not all(plan.mask(dim, kept).all() for dim in plan.tensors[name][1:] if axes_of(dim)):
            return f"{name} is standardised over its inputs in each forward, and some are gone"
    return next((reused.text(plan.names) for reused in _now_apart(plan, kept)), "")


def _now_apart(plan: Plan, kept: Tensor) -> Iterator[ReusedSize]:
    """Yield the sizes that code uses for two dims whose sizes differ after the cut."""
    for reused in plan.code.reused:
        read = reused.used.size if reused.read is None else _left(plan, reused.read, kept)
        if _left(plan, reused.used, kept) != read:
            yield reused


def _left(plan: Plan, dim: Layout, kept: Tensor) -> int:
    return int(plan.mask(dim, kept).sum()) if axes_of(dim) else dim.size


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") or isinstance(module, GraphModule)
