"""Batches: their order, their augmentation, and what a data source promises."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from l0prune.data import Data, Loaded, Tensors
from l0prune.data.dataset import (
    as_arguments,
    inputs_and_targets,
    map_tensors,
    sampled,
    to_device,
    without_labels,
)
from l0prune.data.preprocessing import shifted, shifted_and_mirrored
from l0prune.errors import DataError, UsageError


def numbered(count, **options):
    return Tensors(torch.arange(float(count))[:, None], torch.arange(count), **options)


def loaded(count, **options):
    return Loaded(
        TensorDataset(torch.arange(float(count))[:, None], torch.arange(count)), **options
    )


def generator(seed=4):
    return torch.Generator().manual_seed(seed)


def order(split, size, **options):
    return torch.cat([targets for _, targets in split.batches(size, **options)]).tolist()


@pytest.mark.parametrize("make", [numbered, loaded])
class TestAnySplit:
    def test_a_generator_decides_the_order(self, make):
        split = make(10)
        first = order(split, 3, generator=generator())
        assert first == order(split, 3, generator=generator())
        assert first != order(split, 3, generator=generator(5))
        assert len(set(first)) == 9  # the last, smaller batch is left out
        assert first != sorted(first)

    def test_one_generator_gives_another_order_each_time(self, make):
        split, same = make(10), generator()
        assert order(split, 5, generator=same) != order(split, 5, generator=same)

    def test_the_inputs_go_with_their_targets(self, make):
        for inputs, targets in make(10).batches(3, generator=generator()):
            assert torch.equal(inputs[:, 0].long(), targets)

    def test_without_a_generator_every_example_comes_once_in_order(self, make):
        batches = list(make(10).batches(4))
        assert [len(targets) for _, targets in batches] == [4, 4, 2]
        assert order(make(10), 4) == list(range(10))

    def test_fewer_examples_than_a_batch(self, make):
        assert sorted(order(make(3), 8, generator=generator())) == [0, 1, 2]

    def test_the_global_generator_is_left_alone(self, make):
        before = torch.random.get_rng_state()
        order(make(10), 4)
        order(make(10), 4, generator=generator())
        assert torch.equal(before, torch.random.get_rng_state())

    def test_the_first_examples(self, make):
        assert make(10).example(2).tolist() == [[0.0], [1.0]]
        assert make(1).example(2).tolist() == [[0.0]]

    def test_augmentation_that_is_not_there(self, make):
        with pytest.raises(UsageError, match="no augmentation of its own"):
            order(make(10), 4, generator=generator(), augment=True)


def test_tensors_are_augmented_in_training_only():
    split = numbered(10, augmentation=lambda batch, g: batch + 100)
    plain, varied, test = (
        torch.cat([x for x, _ in split.batches(5, generator=g, augment=augment)])
        for g, augment in ((generator(), False), (generator(), True), (None, True))
    )
    assert torch.equal(varied, plain + 100)
    assert test.max() < 100
    assert split.example(9).max() < 100


def test_loaded_examples_are_augmented_by_their_twin():
    twin = TensorDataset(torch.arange(10.0)[:, None] + 100, torch.arange(10))
    split = loaded(10, augmented=twin)
    inputs, targets = next(split.batches(5, generator=generator(), augment=True))
    assert torch.equal(inputs[:, 0], targets + 100.0)
    assert split.example(9).max() < 100


def test_tensors_seen_first_without_gradients_can_be_learned_from():
    split = Tensors(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    weight = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        list(split.batches(2, device="cpu"))
    inputs, _ = next(split.batches(2))
    (inputs * weight).sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0]


def test_a_sample_is_of_different_examples_and_always_the_same():
    inputs, targets = torch.randn(20, 3), torch.arange(20)
    for whole in (Tensors(inputs, targets), Loaded(TensorDataset(inputs, targets))):
        part = sampled(whole, 8)
        ((drawn, of),) = part.batches(20)
        assert len({*of.tolist()}) == len(part) == 8
        assert torch.equal(drawn, inputs[of])
        ((_, again),) = sampled(whole, 8).batches(20)
        assert torch.equal(of, again)
        assert sampled(whole, 20) is whole


def test_as_many_targets_as_inputs():
    with pytest.raises(DataError, match=r"3 targets for inputs of shape \(2, 4\)"):
        Tensors(torch.zeros(2, 4), torch.zeros(3))


class Pairs(Dataset):
    """Two inputs, the second a dict; the last example is unreadable."""

    def __init__(self, broken=False):
        self.broken = broken

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.broken and index == 3:
            raise OSError("image file is truncated")
        return (torch.full((2,), index), {"mask": torch.ones(1)}), index


def test_inputs_of_several_parts():
    inputs, targets = next(Loaded(Pairs()).batches(2))
    assert isinstance(inputs, tuple)
    assert inputs[0].tolist() == [[0, 0], [1, 1]]
    assert inputs[1]["mask"].shape == (2, 1)
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_example_that_cannot_be_read(workers):
    with pytest.raises(DataError, match=r"^an example cannot be read: .*image file is truncated$"):
        list(Loaded(Pairs(broken=True), workers).batches(2))


def test_what_a_data_source_promises():
    data = Data("mine", numbered(10), numbered(4), 10)
    assert data.n_train == 10
    data.check_fits(10)
    data.check_fits(1000)
    with pytest.raises(DataError, match="10 classes, but the model has 9 outputs"):
        data.check_fits(9)
    with pytest.raises(DataError, match="said to have 9 classes, but a training label is 9"):
        Data("mine", numbered(10), numbered(4), 9)
    for parts, which in (((0, 4), "training"), ((4, 0), "test")):
        with pytest.raises(DataError, match=f"no {which} examples"):
            Data("mine", *map(numbered, parts), 10)


def windows(image, border, **padding):
    """Every part of the padded image that is as large as the image."""
    height, width = image.shape[-2:]
    padded = torch.nn.functional.pad(image[None], (border,) * 4, **padding)[0]
    return [
        padded[:, i : i + height, j : j + width]
        for i in range(2 * border + 1)
        for j in range(2 * border + 1)
    ]


def test_every_augmented_image_is_a_shift_of_the_original_or_of_its_mirror():
    image = torch.randn(2, 6, 7)
    batch = shifted_and_mirrored(image.expand(400, -1, -1, -1), generator())
    possible = torch.stack([w for found in windows(image, 4) for w in (found, found.flip(2))])
    equal = (batch[:, None] == possible).flatten(2).all(2)
    assert equal.any(1).all()
    assert equal.any(0).float().mean() > 0.8  # of 162, 400 draws see 91 % on average


def test_every_shifted_image_is_a_shift_over_a_border_like_its_edge():
    image = torch.randn(1, 6, 7)
    batch = shifted(image.expand(200, -1, -1, -1), generator())
    possible = torch.stack(windows(image, 2, mode="replicate"))
    equal = (batch[:, None] == possible).flatten(2).all(2)
    assert equal.any(1).all()
    assert equal.any(0).all()  # of 25, 200 draws miss one in 25·e⁻⁸


@pytest.mark.parametrize("vary", [shifted, shifted_and_mirrored])
def test_augmentation_is_reproducible(vary):
    images = torch.randn(5, 3, 8, 8)
    first, second = (vary(images, generator()) for _ in range(2))
    assert torch.equal(first, second)
    assert first.is_contiguous()
    assert not torch.equal(first, images)


A, B = torch.ones(2, 3), torch.zeros(2)


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
def test_any_mapping_becomes_a_dict(kind):
    found = map_tensors((kind({"a": A, "rest": kind({"b": B, "text": "x"})}), [B]))
    assert type(found[0]) is type(found[0]["rest"]) is dict
    assert found[0]["a"] is A
    assert found[0]["rest"]["text"] == "x"
    assert found[0]["rest"]["b"] is found[1][0] is B


def test_every_tensor_is_moved_wherever_it_is():
    pair = namedtuple("pair", "one other")(A, UserDict(b=[B, "text"]))
    one, other = to_device(pair, "meta")
    assert (one.device.type, other["b"][0].device.type, other["b"][1]) == ("meta", "meta", "text")


def test_inputs_are_arguments():
    assert as_arguments("a") == (("a",), {})
    assert as_arguments(("a", "b")) == as_arguments(["a", "b"]) == (("a", "b"), {})
    assert as_arguments(UserDict(a=1)) == as_arguments({"a": 1}) == ((), {"a": 1})


def test_a_tokenizers_batch_is_moved_and_shown_as_an_example():
    encoding = pytest.importorskip("transformers").BatchEncoding
    examples = [({"ids": torch.tensor([n])}, n % 2) for n in range(6)]

    def collate(chosen):
        ids = torch.stack([inputs["ids"] for inputs, _ in chosen])
        return encoding({"ids": ids}), torch.tensor([target for _, target in chosen])

    split = Loaded(examples, collate=collate)
    assert type(split.example(2)) is dict
    assert split.example(2)["ids"].tolist() == [[0], [1]]
    batches = list(split.batches(3))
    assert [type(inputs) for inputs, _ in batches] == [dict, dict]
    assert Data("tokens", split, split, 2).n_train == 6


def test_what_a_tokenizer_gives_for_each_text_becomes_tensors():
    """Lists of numbers; torch alone would make a list of a tensor for each place."""
    examples = [{"input_ids": [n, n + 1, 2], "labels": n % 2, "text": "a"} for n in range(4)]
    inputs, targets = next(Loaded(examples).batches(3))
    assert inputs["input_ids"].tolist() == [[0, 1, 2], [1, 2, 2], [2, 3, 2]]
    assert targets.tolist() == [0, 1, 0]
    examples[1]["input_ids"] = [1, 2]
    with pytest.raises(DataError, match=r"input_ids of \(2,\) and \(3,\)\. Pad all to one length"):
        next(Loaded(examples).batches(3))


ONE, TWO = torch.ones(1), torch.ones(2)


def test_a_pair_is_one_as_it_is():
    for batch in ((ONE, TWO), [ONE, TWO]):
        assert inputs_and_targets(batch) == (ONE, TWO)


@pytest.mark.parametrize("name", ["labels", "label"])
def test_the_labels_of_a_mapping_are_its_targets(name):
    batch = {"x": ONE, name: TWO}
    inputs, targets = inputs_and_targets(batch)
    assert inputs is batch
    assert targets is TWO
    assert without_labels(inputs) == {"x": ONE}


def test_without_labels_all_of_it_is():
    batch = {"x": ONE, "start_positions": TWO}
    assert inputs_and_targets(batch) == (batch, batch)
    assert without_labels((ONE, TWO)) == (ONE, TWO)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (ONE, r"gave a Tensor\. Without labels.*with_pseudo_labels"),
        ([ONE] * 3, r"a list of 3\. .*Several inputs go into a tuple"),
        ("ab", "gave a str"),
    ],
)
def test_what_is_neither_is_refused(batch, says):
    with pytest.raises(DataError, match=says):
        inputs_and_targets(batch)
