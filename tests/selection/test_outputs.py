"""Outputs that matter: those that are named, else those that a model is for."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering, BertModel

import l0prune
from l0prune.errors import UsageError
from l0prune.features.unlabelled.fidelity import fidelity
from l0prune.running.criteria import measured


class Two(nn.Module):
    """Scores that are easily cut, and features of noise that are not."""

    def __init__(self, kind=dict):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scores = nn.Linear(8, 32), nn.Linear(32, 3)
        self.other, self.noise = nn.Linear(8, 32), nn.Linear(32, 40)
        self.kind = kind

    def forward(self, x):
        scores = self.scores(self.body(x).tanh())
        noise = 30 * self.noise(self.other(5 * x).relu())
        return {"scores": scores, "noise": noise} if self.kind is dict else (scores, noise)


def by_hand(model, small, inputs, pick):
    """Error of a part of the outputs over its variance, about the mean of each column."""
    with torch.no_grad():
        wanted, found = pick(model(inputs)), pick(small(inputs))
    spread = (wanted - wanted.mean(0)).square().sum()
    return float((found - wanted).square().sum() / spread)


@pytest.mark.parametrize(("kind", "name", "key"), [(dict, "scores", "scores"), (tuple, "*_0", 0)])
@pytest.mark.one_in(2)
def test_outputs_that_are_named_are_measured_alone(kind, name, key):
    model, inputs = Two(kind).eval(), torch.randn(400, 8)
    options = {"budget": "params=0.5", "round_to": 1, "allow_worse_than_mean": True}
    whole = l0prune.shrink(model, inputs, **options)
    small = l0prune.shrink(model, inputs, **options, outputs=name)
    assert small.fidelity.error < 0.5 * whole.fidelity.error
    mine = by_hand(model, small.module.cpu(), inputs, lambda outputs: outputs[key])
    assert small.fidelity.error == pytest.approx(mine, rel=0.5)
    batches = [inputs[:200], inputs[200:]]
    error = fidelity(model, small.module.cpu(), batches, names=[name]).error
    assert error == pytest.approx(mine, rel=1e-4)
    found, wanted = small.module(inputs[:2]), model(inputs[:2])
    assert type(found) is type(wanted)  # all outputs are there
    other = "noise" if kind is dict else 1
    assert found[other].shape == wanted[other].shape


def test_scores_look_at_outputs_that_are_named():
    model, inputs = Two().eval(), torch.randn(60, 8)
    l0prune.gate(model, inputs[:2], outputs=["scores"])
    data = [(inputs, torch.zeros(60))]
    scores = l0prune.score(model, "outputs", data, loss=lambda outputs, _: outputs["scores"].sum())
    of = {axis.name: scores[axis.slice] for axis in l0prune.gates(model).axes}
    assert (of["body"] > 0).all()
    assert not of["other"].any()


def test_names_are_kept_with_the_gates_and_checked_at_once(tmp_path):
    model, inputs = Two().eval(), torch.randn(60, 8)
    with pytest.raises(UsageError, match=r"outputs='logits' is no output.* scores, noise"):
        l0prune.gate(model, inputs[:2], outputs="logits")
    l0prune.gate(model, inputs[:2], outputs="scores")
    l0prune.save(model, tmp_path / "model.pt")
    loaded = l0prune.load(tmp_path / "model.pt", Two())
    assert l0prune.gates(loaded).outputs == ("scores",)


def tiny(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    return kind(BertConfig(vocab_size=50, num_hidden_layers=1, **sizes)).eval()


def test_a_model_of_transformers_has_documented_outputs():
    ids = torch.randint(0, 50, (2, 5))
    outputs = tiny(BertModel)(input_ids=ids)
    assert measured(outputs) is outputs.last_hidden_state
    assert measured(outputs, ["pooler_output"]) is outputs.pooler_output
    outputs = tiny(BertForQuestionAnswering)(input_ids=ids)
    assert measured(outputs) == (outputs.start_logits, outputs.end_logits)
    plain = {"last_hidden_state": ids, "more": ids}  # of a network of one's own
    assert measured(plain) is plain


def test_what_a_pooler_gives_counts_in_no_fidelity():
    model, ids = tiny(BertModel), torch.randint(0, 50, (40, 6))
    with torch.no_grad():
        model.pooler.dense.weight.mul_(200)
    small = l0prune.shrink(
        model, {"input_ids": ids}, "macs=0.5", round_to=1, allow_worse_than_mean=True
    )
    with torch.no_grad():
        wanted, found = (each(input_ids=ids).last_hidden_state for each in (model, small.module))
    spread = (wanted - wanted.mean(0)).square().sum()
    mine = float((found - wanted).square().sum() / spread)
    batches = [{"input_ids": ids}]
    assert fidelity(model, small.module, batches).error == pytest.approx(mine, rel=1e-3)
    pooled = fidelity(model, small.module, batches, names=["pooler_output"]).error
    assert small.fidelity.error < pooled / 2  # a mean of both would be more
    assert small.module(input_ids=ids).pooler_output.shape == (40, 16)


class InUnits(nn.Module):
    """Two sums, one of them in a far smaller unit."""

    def __init__(self, unit):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(5, 6)
        self.one, self.other, self.unit = nn.Linear(6, 2), nn.Linear(6, 3), unit

    def forward(self, x):
        return self.one(self.first(x).relu()), self.unit * self.other(self.second(x).relu())


@pytest.mark.parametrize("score", ["outputs", "ablation"])
def test_scores_of_outputs_are_the_same_in_every_unit(score):
    found, x = [], torch.randn(40, 5)
    for unit in (1.0, 1e-4):
        model = InUnits(unit).eval()
        l0prune.gate(model, x[:2])
        found.append(l0prune.score(model, score, [(x, x)], normalise="none"))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)
    assert found[0].min() > 0
