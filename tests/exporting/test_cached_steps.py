"""Decoders without some layers go on from a cache as the gated model does."""

import inspect

import pytest
import torch
from deadness import close_some
from decoders import TOKENS, gated, generated, gpt2, llama
from torch import nn

import l0prune
from l0prune.exporting.own_class import skipped_modules
from l0prune.exporting.own_class.comparison import OTHER_STEPS as SOMETHING_ELSE
from l0prune.exporting.own_class.comparison import CachedStep
from l0prune.exporting.own_class.skipped_modules import renumbered


def name_of_cache(model):
    named = inspect.signature(model.forward).parameters
    return "cache" if "cache" in named else "past_key_values"  # by the version of transformers


def by_hand(model):
    """The scores of a last token, given by itself with what was remembered of the others."""
    name = name_of_cache(model)
    with torch.no_grad():
        before = model(input_ids=TOKENS[:, :-1], use_cache=True)[name]
        return model(input_ids=TOKENS[:, -1:], use_cache=True, **{name: before}).logits


@pytest.mark.parametrize(
    ("make", "closed"),
    [
        (llama, ["model.layers.0.self_attn"]),
        (llama, ["model.layers.0.self_attn", "model.layers.0.mlp"]),
        (gpt2, ["transformer.h.0.attn", "transformer.h.1.mlp"]),
    ],
)
@pytest.mark.slow
def test_what_is_left_is_counted_from_the_first_place_on(make, closed, tmp_path):
    model = gated(make, *closed)
    dense = l0prune.export(model)
    assert (dense.rebuilt, set(dense.gone)) == (True, set(closed))
    dense.save_pretrained(tmp_path / "small")
    for small in (dense.module, l0prune.from_pretrained(tmp_path / "small").eval()):
        for use_cache in (True, False):
            expected = generated(model, use_cache=use_cache)
            torch.testing.assert_close(generated(small, use_cache=use_cache), expected)
        torch.testing.assert_close(by_hand(small), by_hand(model))


@pytest.mark.slow
def test_a_class_that_would_go_on_otherwise_is_not_handed_out(monkeypatch):
    model = gated(llama, "model.layers.0.self_attn")
    right = CachedStep.of(model, ((), {"input_ids": TOKENS}))
    small = l0prune.export(model)
    assert right.fault_of(small.module) == ""
    for number, layer in enumerate(small.module.model.layers):
        layer.self_attn.layer_idx = number
    assert right.fault_of(small.module) == SOMETHING_ELSE
    monkeypatch.setattr(skipped_modules, "renumbered", lambda plain, passed: {})
    small = l0prune.export(model)
    assert not small.rebuilt
    assert f"its code computes that; without that, {SOMETHING_ELSE}" in small.note


def test_what_keeps_no_cache_has_no_such_step():
    assert CachedStep.of(nn.Linear(7, 3), ((torch.ones(2, 7),), {})) is None


class Attention(nn.Module):
    def __init__(self, layer_idx, window):
        super().__init__()
        self.layer_idx, self.window, self.depth = layer_idx, window, 7


class Block(nn.Module):
    def __init__(self, number, window):
        super().__init__()
        self.attention, self.number = Attention(number, window), number


def test_numbers_change_places_among_modules_of_one_kind():
    model = nn.Module()
    windows = [4, None, 4, None, None]
    model.layers = nn.ModuleList(Block(i, window) for i, window in enumerate(windows))
    assert renumbered(model, ["layers.0.attention", "layers.1.attention"]) == {
        "layers.2.attention": {"layer_idx": 0},
        "layers.3.attention": {"layer_idx": 1},
        "layers.4.attention": {"layer_idx": 3},
    }
    assert renumbered(model, ["layers.3"]) == {
        "layers.4": {"number": 3},
        "layers.4.attention": {"layer_idx": 3},
    }
    assert renumbered(model, ["layers.4"]) == {}


def test_what_is_no_number_stays():
    model = nn.Module()
    model.layers = nn.ModuleList(Block(i, None) for i in (0, 2, 1))
    assert renumbered(model, ["layers.0"]) == {}


def test_a_layer_without_such_a_module_has_no_number_of_it():
    """As where some layers of a decoder have no attention of their own."""
    model = nn.Module()
    model.layers = nn.ModuleList(Block(i, None) for i in range(5))
    for number in (1, 3):
        del model.layers[number].attention, model.layers[number].number
        model.layers[number].layer_idx = number
    assert renumbered(model, ["layers.0.attention"]) == {
        "layers.2.attention": {"layer_idx": 0},
        "layers.4.attention": {"layer_idx": 2},
    }
    assert renumbered(model, ["layers.1"]) == {"layers.3": {"layer_idx": 1}}


@pytest.mark.slow
def test_a_step_with_a_cache_as_the_example_is_cut_as_one_without(tmp_path):
    """Heads and their dims, too: the small model's own cache has those that stayed."""
    model = llama().eval()
    name = name_of_cache(model)
    with torch.no_grad():
        before = model(input_ids=TOKENS[:, :-1], use_cache=True)[name]
    example = {"input_ids": TOKENS[:, -1:], name: before}
    length = before.get_seq_length()
    found = l0prune.survey(model, (), example, own_class=False)
    without = l0prune.survey(model, (), {"input_ids": TOKENS}, own_class=False)
    names = {axis.name: axis.size for axis in found.axes}
    assert names == {axis.name: axis.size for axis in without.axes}
    assert any(each.endswith(".heads") for each in names)
    l0prune.gate(model, (), example, survey=found, branches=False)
    small = l0prune.export(close_some(model))
    assert small.rebuilt, small.note
    torch.testing.assert_close(by_hand(small.module), by_hand(model))
    small.save_onnx(tmp_path / "model.onnx")
    assert before.get_seq_length() == length
