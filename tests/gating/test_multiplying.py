import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l0prune.gating.multiplying import Spreader
from l0prune.plan.layout import Cat, Const, Gated, Layout, Prod, Slots
from l0prune.plan.plan import Axis, Plan

SIZES = (3, 4, 12)


def plan() -> Plan:
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    axes = [
        Axis(f"a{i}", "channel", n, s, 1)
        for i, (n, s) in enumerate(zip(SIZES, starts, strict=True))
    ]
    return Plan(tuple(axes), (), {}, (), ())


@st.composite
def slots(draw) -> Layout:
    axis = draw(st.integers(0, len(SIZES) - 1))
    start = draw(st.integers(0, SIZES[axis] - 1))
    return Slots(axis, start, draw(st.integers(start + 1, SIZES[axis])))


leaf = st.one_of(st.builds(Const, st.integers(1, 4)), slots())
composed = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.builds(Cat, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Prod, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=4,
)
layouts = st.one_of(
    composed,
    st.sampled_from(
        [
            Gated(Prod((Slots(0, 0, 3), Const(4))), Slots(2, 0, 12)),
            Gated(Prod((Slots(1, 0, 4), Slots(0, 0, 3))), Slots(2, 0, 12)),
            Gated(Const(12), Slots(2, 0, 12)),
        ]
    ),
)


@given(st.lists(layouts, min_size=1, max_size=5), st.integers(0, 1000), st.booleans())
def test_spreads_all_layouts_as_the_plan_spreads_each(wanted, seed, is_cut):
    words = plan()
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(words.size, dtype=torch.float64, generator=generator).requires_grad_()
    draws = [torch.rand(layout.size, generator=generator) for layout in wanted]
    left = [(draw < 0.7).nonzero().flatten() if is_cut else None for draw in draws]
    spreader = Spreader(words, list(zip(wanted, left, strict=True)))
    whole, got = spreader(z)
    whole_spread = [words.spread(layout, z).double() for layout in wanted]
    pairs = zip(whole_spread, left, strict=True)
    expected = [each if at is None else each[at] for each, at in pairs]
    for begin, part in zip(spreader.begins, got, strict=True):
        torch.testing.assert_close(whole[begin : begin + len(part)], part)
    weights = [torch.rand(len(w), dtype=torch.float64, generator=generator) for w in expected]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-14, atol=0)
    if not any(theirs.requires_grad for theirs in expected):
        return  # constants all through
    for _ in range(2):  # a second pass through the same spread, as checkpointing makes them
        z.grad = None
        for ours, weight in zip(got, weights, strict=True):
            (ours @ weight).backward(retain_graph=False)
        ours_grad = z.grad
    total = sum((t @ w for t, w in zip(expected, weights, strict=True)), torch.zeros(()))
    torch.testing.assert_close(ours_grad, torch.autograd.grad(total, z)[0], rtol=1e-12, atol=1e-14)


def test_layouts_in_the_order_of_the_gates_are_views_of_z():
    words = plan()
    z = torch.rand(words.size)
    layouts = [Slots(0, 0, 3), Gated(Const(4), Slots(1, 0, 4)), Slots(2, 0, 12)]
    _, parts = Spreader(words, [(layout, None) for layout in layouts])(z)
    assert [part.data_ptr() - z.data_ptr() for part in parts] == [0, 3 * 4, 7 * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_dtype(dtype):
    layout = Gated(Prod((Slots(0, 0, 3), Const(4))), Slots(2, 0, 12))
    _, (part,) = Spreader(plan(), [(layout, None)])(torch.rand(plan().size, dtype=dtype))
    assert part.dtype == dtype
