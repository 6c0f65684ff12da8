"""Batches in mappings of any kind, as tokenizers give them."""

from collections import UserDict, namedtuple
from types import MappingProxyType

import pytest
import torch

from l0prune.data import Data, Loaded
from l0prune.data.dataset import as_arguments, map_tensors, to_device

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
