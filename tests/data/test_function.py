"""Data from a function of the user's own."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from l0prune.data import Loaded, Tensors
from l0prune.errors import DataError, UsageError
from l0prune.running.sources import load_data


@pytest.fixture
def data_of(tmp_path, monkeypatch):
    """What load_data makes of a function with this body."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(body):
        header = (
            "import torch\n"
            "from torch.utils.data import *\n"
            "import l0prune\n"
            "from l0prune.data import Tensors\n"
            "x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])\n"
        )
        (tmp_path / "d.py").write_text(
            f"{header}def load():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        )
        return load_data(f"{tmp_path}/d.py:load")

    return load


def test_pairs_of_tensors(data_of):
    data = data_of("return (x, y.to(torch.int32)), (x[:3], y[:3])")
    assert isinstance(data.train, Tensors)
    assert (data.n_train, len(data.test), data.classes) == (6, 3, 3)
    assert data.train.targets.dtype == torch.int64
    assert data.name.endswith("d.py:load")


@pytest.mark.parametrize(
    "body",
    [
        "return TensorDataset(x, y), TensorDataset(x, y)",
        "return [TensorDataset(x, y), list(zip(x, y.tolist()))]",
        "return DataLoader(TensorDataset(x, y), 2), DataLoader(TensorDataset(x, y), 2)",
        "d = TensorDataset(x, y); return random_split(d, [3, 3])[0], d",
    ],
)
def test_datasets_and_loaders(data_of, body):
    data = data_of(body)
    assert isinstance(data.train, Loaded)
    assert data.classes == 3
    assert data.train.example(2).shape == (2, 4)
    inputs, targets = next(data.test.batches(6))
    assert inputs.shape == (6, 4)
    assert targets.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_loaders_own_way_to_make_batches_is_kept(data_of):
    data = data_of(
        """
        def collate(examples):
            return torch.stack([x for x, _ in examples]) * 0, torch.tensor([y for _, y in examples])
        loader = DataLoader(TensorDataset(x, y), 2, collate_fn=collate)
        return loader, loader
        """
    )
    assert data.train.example(2).abs().sum() == 0


def test_a_data_object_keeps_its_classes_and_gets_the_name_it_was_asked_by(data_of):
    data = data_of("return l0prune.Data('mine', Tensors(x, y), Tensors(x, y), 7)")
    assert data.classes == 7
    assert data.name.endswith("d.py:load")


@pytest.mark.parametrize(
    "body",
    [
        "return (x, x.sum(1)), (x, x.sum(1))",
        "none = torch.full((6,), torch.nan); return (x, none), (x, none)",
        "return TensorDataset(x, x), TensorDataset(x, x[:, 0])",
        "d = [{'a': v, 'b': v} for v in x]; return d, d",  # no labels
    ],
)
def test_targets_that_are_no_classes(data_of, body):
    assert data_of(body).classes == 0


def test_labels_in_the_rows_and_labels_that_do_not_count(data_of):
    data = data_of("d = [{'a': v, 'labels': t} for v, t in zip(x, y)]; return d, d")
    assert data.classes == 3
    inputs, targets = next(data.test.batches(6))
    assert list(inputs) == ["a", "labels"]
    assert targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert list(data.train.example(2)) == ["a"]
    assert data_of("return (x, y.masked_fill(y == 2, -100)), (x, y)").classes == 3


def test_a_task_is_given_as_it_is_under_the_name_it_was_asked_by(data_of):
    task = data_of("return l0prune.Task([(x, x)], loss='mse', metric='mae')")
    assert (task.loss, task.metric_name) == ("mse", "mae")
    assert task.name.endswith("d.py:load")


@pytest.mark.parametrize(
    "labels", ["classes = list('abcde')", "targets = [0, 4]", "targets = torch.tensor([0, 4])"]
)
def test_no_image_is_read_to_count_classes(data_of, labels):
    data = data_of(
        f"""
        class Images(Dataset):
            {labels}
            def __len__(self):
                return 2
            def __getitem__(self, index):
                raise AssertionError("read")
        return Subset(Images(), [1]) if {"targets" in labels} else Images(), Images()
        """
    )
    assert data.classes == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", r"must return \(train, test\).*not a int"),
        ("return (x, y)", "returned a Tensor where a dataset"),
        ("return x, y, x", r"must return \(train, test\)"),
        ("return None", "not a NoneType"),
        ("return (x, y), 5", "returned a int where a dataset"),
        ("return (x, y), (x[:0], y[:0])", "no test examples"),
        ("return (x[:0], y[:0]), (x, y)", "no training examples"),
        ("return TensorDataset(x[:0], y[:0]), (x, y)", "no training examples"),
        ("return (x, y - 1), (x, y)", "labels must be class numbers"),
        ("return (x, y), (x, y + 0.5)", "labels of one part are class numbers"),
        ("return (x, y[:2]), (x, y)", "2 targets for inputs"),
        ("return l0prune.Data('d', Tensors(x, y), Tensors(x, y), 3), 1", "a Data where a dataset"),
        ("return l0prune.Data('d', Tensors(x, y), Tensors(x, y), 2)", "training label is 2"),
        (
            "class S(IterableDataset):\n    def __iter__(self): return iter([])\nreturn S(), S()",
            "where a dataset with a length should be",
        ),
    ],
)
def test_what_is_no_data(data_of, body, message):
    with pytest.raises(DataError, match=message):
        data_of(body)


def test_a_function_that_fails(data_of):
    with pytest.raises(UsageError, match=r"ZeroDivisionError.*d\.py, line 7"):
        data_of("1 / 0")
