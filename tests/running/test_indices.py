"""Indices beyond the end are found before the operator that would read there runs."""

import pytest
import torch
import torch.nn.functional as F
from small_task import FEATURES, clouds, gated
from torch import nn

import l0prune
from l0prune.capture.compat import TorchDispatchMode
from l0prune.errors import DataError
from l0prune.running.indices import checked_indices

VALUES, BEYOND = torch.arange(12.0).reshape(3, 4), torch.tensor([0, 4])
ROWS, CLASSES, INDICES = "indices of an embedding", "class numbers", "indices"
CASES = {
    "row": (lambda: F.embedding(torch.tensor([1, 3]), VALUES), 3, ROWS, 2),
    "negative row": (lambda: F.embedding(torch.tensor([-1]), VALUES), -1, ROWS, 2),
    "bag": (lambda: F.embedding_bag(torch.tensor([[3]]), VALUES), 3, ROWS, 2),
    "class": (lambda: F.cross_entropy(VALUES[:2], BEYOND), 4, CLASSES, 3),
    "of one": (lambda: F.cross_entropy(VALUES[0], BEYOND[1]), 4, CLASSES, 3),
    "of places": (
        lambda: F.cross_entropy(VALUES[None], torch.tensor([[0, 3, -100, 1]])),
        3, CLASSES, 2,
    ),
    "gather": (lambda: VALUES.gather(1, BEYOND[None]), 4, INDICES, 3),
    "select": (lambda: VALUES.index_select(1, BEYOND), 4, INDICES, 3),
    "index": (lambda: VALUES[:, BEYOND], 4, INDICES, 3),
    "from the end": (lambda: VALUES[torch.tensor([-4])], -4, INDICES, 2),
    "put": (lambda: VALUES.clone().index_put_((BEYOND,), VALUES[0, 0]), 4, INDICES, 2),
    "scatter": (lambda: VALUES.scatter(1, BEYOND[None], 1.0), 4, INDICES, 3),
}  # fmt: skip


class Ran(TorchDispatchMode):
    """Which operators run."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("call", "value", "what", "last"), CASES.values(), ids=CASES)
def test_the_index_is_named_before_the_operator_runs(call, value, what, last):
    with Ran() as before, pytest.raises((IndexError, RuntimeError)):
        call()  # whose last operator fails, on a CPU
    said = f"^{value} is out of bounds: {what} go from 0 to {last} here$"
    with Ran() as ran, checked_indices(), pytest.raises(IndexError, match=said):
        call()
    assert before.operators[-1] not in ran.operators


def test_what_lies_within_is_computed():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(values):
        return values[[0, -1]]

    def results():
        yield F.cross_entropy(VALUES, torch.tensor([3, -100, 0]), label_smoothing=0.1)
        yield VALUES[torch.tensor([-3, 2])]
        yield VALUES[VALUES[:, 0] > 0, torch.tensor([0, 3])]
        yield F.one_hot(torch.tensor([0, 3]), 4)
        yield VALUES[torch.empty(0, dtype=torch.int64)]
        yield compiled(VALUES)

    with checked_indices():
        found = list(results())
    assert all(map(torch.equal, found, results()))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.head(self.table(words).mean(1).relu())


def test_a_word_or_a_class_too_many_is_said_before_training():
    words, classes = torch.tensor([[0, 4], [1, 5]]), torch.tensor([0, 2])
    model = l0prune.gate(Words(), words.clamp(max=4))
    with pytest.raises(DataError, match="IndexError: 5 is out of bounds: indices of an embedding"):
        l0prune.finetune(model, [(words, classes)], progress=False)
    with pytest.raises(DataError, match="5 is out of bounds: indices of an embedding"):
        l0prune.score(model, "fisher", [(words, classes)])
    model, split = gated(), clouds(30)
    own = {"loss": lambda scores, targets: F.nll_loss(scores.log_softmax(1), targets)}
    test = [(torch.zeros(2, FEATURES), torch.tensor([7, 1]))]
    with pytest.raises(DataError, match=r"test data.*7 is out of bounds: class numbers go from 0"):
        l0prune.finetune(model, (split, test), progress=False, **own)
