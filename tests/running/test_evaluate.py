import math

import pytest
import torch
from small_task import data, differing, gated, tensors
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import l0prune
from l0prune.data.dataset import WHOLE, Tensors
from l0prune.errors import DataError, UsageError
from l0prune.running.batches import test_batches
from l0prune.running.evaluate import evaluate, evaluate_batches
from l0prune.running.task import Task

test_batches.__test__ = False  # its name says what it gives, not that it is a test
CPU = torch.device("cpu")


def random_gates(model):
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.log_alpha.normal_(0, 3, generator=torch.Generator().manual_seed(0))
    return model


def test_it_is_the_mean_over_the_test_examples():
    model, source = random_gates(gated(dropout=0.5)), data()
    scores = model.eval()(source.test.inputs)
    wrong = (scores.argmax(1) != source.test.targets).double().mean().item()
    loss = cross_entropy(scores, source.test.targets).item()
    for size in (120, 50, 7):  # the last batch is smaller, and counts less
        found = evaluate(model.train(), source, batch_size=size)
        assert found["error"] == pytest.approx(wrong, abs=1e-12)
        assert found["test_loss"] == pytest.approx(loss, rel=1e-5)


class Bigrams(nn.Module):
    """Scores of the next token from the token alone."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens):
        return self.table(tokens)


@pytest.mark.parametrize("size", [1, 3, 10])
def test_perplexity_is_over_all_tokens_however_they_are_batched(size):
    model, texts = Bigrams(), torch.randint(0, 11, (10, 6))
    known = texts.masked_fill(torch.rand(10, 6) < 0.4, -100)  # some do not count
    known[4:7] = -100  # and of some texts none
    task = Task([], Tensors(texts, known), loss=lambda *_: torch.zeros(()), metric="perplexity")
    losses = []
    for text, tokens in zip(texts.tolist(), known.tolist(), strict=True):
        for token, following in zip(text, tokens[1:], strict=False):
            if following != -100:
                scores = model.table.weight[token].detach().double()
                losses.append(float(scores.logsumexp(0) - scores[following]))
    found = evaluate(model, task, batch_size=size)["perplexity"]
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)


def test_the_loss_of_the_next_token_is_what_transformers_compute():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model, texts = GPT2LMHeadModel(config).eval(), torch.randint(0, 20, (6, 8))
    found = evaluate(model, ([], [(texts, texts)]), loss="next-token", metric="perplexity")
    loss = model(texts, labels=texts).loss.item()
    assert found == pytest.approx({"test_loss": loss, "perplexity": math.exp(loss)}, rel=1e-6)


def test_what_is_no_language_model_has_no_perplexity():
    texts = torch.randint(0, 11, (4, 6))
    with pytest.raises(UsageError, match="a head for the next token"):
        evaluate(nn.Embedding(11, 11), ([], [(texts, texts[:, 0])]), loss="next-token")


def test_the_model_is_left_as_it_was():
    model = gated(dropout=0.5).train()
    before, state = tensors(model), torch.get_rng_state()
    evaluate(model, data())
    assert differing(before, tensors(model)) == []
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_loss_and_metric_may_be_the_users():
    def first(outputs, targets):
        return outputs[:, 0].mean()

    source = data()
    task = Task(source.train, source.test, loss=first, metric=first, metric_name="first")
    model = gated().eval()
    found = evaluate(model, task, batch_size=50)
    mean = model(source.test.inputs)[:, 0].mean().item()
    assert found == pytest.approx({"test_loss": mean, "first": mean}, rel=1e-5)


def test_with_a_loss_of_its_own_a_task_is_measured_by_it():
    source, model = data(), gated().eval()
    wanted = torch.nn.functional.one_hot(source.test.targets, 3).float()
    task = Task(source.train, [(source.test.inputs, wanted)], loss=mse_loss)
    loss = mse_loss(model(source.test.inputs), wanted).item()
    assert evaluate(model, task) == pytest.approx({"test_loss": loss}, rel=1e-6)
    batches = ([], [(source.test.inputs, wanted)])
    found = evaluate(model, batches, loss="mse", metric="mae")
    distance = (model(source.test.inputs) - wanted).abs().mean().item()
    assert found == pytest.approx({"test_loss": loss, "mae": distance}, rel=1e-6)


class Labelled(torch.nn.Module):
    """As transformers' models do, it computes its loss from its labels."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels=None):
        logits = self.model(x)
        loss = None if labels is None else cross_entropy(logits, labels)
        return ModelOutput(loss=loss, logits=logits)


class ModelOutput(dict):
    def __getattr__(self, name):
        return self.get(name)


def test_batches_of_dicts_count_by_their_examples():
    source, model = data().test, gated().eval()
    batches = [
        {"x": source.inputs[rows], "labels": source.targets[rows]}
        for rows in (slice(0, 100), slice(100, 101), slice(101, 120))
    ]
    wanted = evaluate(model, (source, source))
    for each in (model, Labelled(model)):
        named = [{"input": b["x"], "labels": b["labels"]} for b in batches]
        found = evaluate(each, ([], named if each is model else batches))
        assert found == pytest.approx(wanted, rel=1e-6)


def test_between_batches_somebody_may_stop_it():
    calls = []
    source = data()
    task = Task.of(source)
    batches = test_batches(task, 40, CPU, WHOLE)
    evaluate_batches(gated(), batches, task, CPU, between=lambda: calls.append(1))
    assert len(calls) == 3


def test_it_needs_test_data():
    with pytest.raises(DataError, match="no test part"):
        evaluate(gated(), data().train)
    with pytest.raises(DataError, match="test data is empty"):
        evaluate(gated(), (data().train, []))


def test_a_list_of_single_examples_is_said_to_be_no_list_of_batches():
    """As a Trainer takes them."""
    model, source = gated(), data()
    pairs = zip(source.test.inputs[:4], source.test.targets[:4], strict=True)
    with pytest.raises(DataError, match=r"a list holds batches. Give examples as DataLoader"):
        evaluate(model, (None, [*pairs]))
