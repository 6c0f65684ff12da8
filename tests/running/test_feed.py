from collections import UserDict

import pytest
import torch
from shared_runs import OneByOne, doubled
from small_task import clouds
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from l0prune.data import Loaded
from l0prune.data.dataset import WHOLE
from l0prune.errors import DataError
from l0prune.running.batches import Feed, example_inputs, test_batches
from l0prune.running.task import Task, batch_length

test_batches.__test__ = False  # its name says what it gives, not that it is a test
CPU = torch.device("cpu")
SPLIT = clouds(100)
TARGETS = torch.tensor([0, 1, 1, 2])


def feed(source, batch_size=30, **kwargs):
    return Feed(Task(source, **kwargs), batch_size, seed=1, augment=False)


def loader(**kwargs):
    return DataLoader(TensorDataset(SPLIT.inputs, SPLIT.targets), batch_size=30, **kwargs)


def targets(batches):
    return torch.cat([target for _, target, *_ in batches]).tolist()


def test_a_split_is_shuffled_by_seed_and_epoch():
    one = feed(SPLIT)
    assert (one.size, one.steps) == (100, 3)
    first = targets(one.train(0, CPU))
    assert len(first) == 90
    assert first == targets(feed(SPLIT).train(0, CPU))
    assert first != targets(one.train(1, CPU))
    other = Feed(Task(SPLIT), 30, seed=2, augment=False)
    assert first != targets(other.train(0, CPU))


def test_a_split_smaller_than_a_batch_is_one_batch():
    small = feed(clouds(9))
    assert small.steps == 1
    assert len(targets(small.train(0, CPU))) == 9


def test_a_loader_keeps_its_own_batches():
    one = feed(loader())
    assert (one.size, one.steps) == (100, 4)
    assert targets(one.train(5, CPU)) == SPLIT.targets.tolist()


def test_a_list_of_batches_is_counted():
    one = feed(list(SPLIT.batches(40)))
    assert (one.size, one.steps) == (100, 3)


@pytest.mark.parametrize(
    ("source", "length"),
    [(SPLIT, 16), (loader(), 30), ([(torch.zeros(25, 2), torch.zeros(25))] * 3, 25)],
)
def test_how_long_batches_are_is_for_the_source_to_say(source, length):
    assert feed(source, batch_size=16).length == length


def test_a_stream_must_say_what_it_holds():
    class Stream:
        def __iter__(self):
            while True:
                yield SPLIT.inputs, SPLIT.targets

    with pytest.raises(DataError, match="size=N"):
        feed(Stream())
    with pytest.raises(DataError, match="steps="):
        feed(Stream(), size=100)
    one = feed(Stream(), size=100, steps=2)
    assert len(list(one.train(0, CPU))) == 2


class OfUnknownLength(IterableDataset):
    """Examples one by one, and nobody knows how many."""

    def __iter__(self):
        yield from zip(SPLIT.inputs, SPLIT.targets, strict=True)


@pytest.mark.parametrize(("drops", "steps"), [(False, 4), (True, 3)])
def test_the_batches_of_a_stream_follow_from_the_number_of_its_examples(drops, steps):
    source = DataLoader(OfUnknownLength(), batch_size=30, drop_last=drops)
    with pytest.raises(DataError, match="size=N"):
        feed(source)
    one = feed(source, size=100)
    assert (one.steps, one.length) == (steps, 30)
    for epoch in range(2):
        assert targets(one.train(epoch, CPU)) == SPLIT.targets.tolist()[: 30 * steps]
    assert len(list(feed(source, size=100, steps=2).train(0, CPU))) == 2


@pytest.mark.parametrize("batched", [False, True])
def test_the_number_of_batches_of_a_stream_is_enough(batched):
    class Generated:
        def __iter__(self):
            return SPLIT.batches(20)

    source = DataLoader(OfUnknownLength(), batch_size=20) if batched else Generated()
    one = feed(source, steps=3)
    assert (one.size, one.steps, one.length) == (None, 3, 20)
    assert len(list(one.train(0, CPU))) == 3


def test_a_stream_whose_loader_makes_no_batches_must_say_how_many_there_are():
    with pytest.raises(DataError, match="steps="):
        feed(DataLoader(OfUnknownLength(), batch_size=None), size=100)


@pytest.mark.parametrize("source", [[], clouds(0)])
def test_empty_data_is_refused(source):
    with pytest.raises(DataError, match="empty"):
        feed(source)


def test_batches_that_are_no_pairs_are_refused():
    with pytest.raises(DataError, match="list of 3"):
        list(feed([[1, 2, 3]], size=1).train(0, CPU))
    with pytest.raises(DataError, match="gave a Tensor"):
        list(feed([torch.ones(2)], size=1).train(0, CPU))


def test_every_tensor_of_a_batch_goes_to_the_device():
    batch = ({"a": torch.ones(2), "b": (torch.ones(2), "text")}, [torch.ones(2)])
    inputs, target, _ = next(feed([batch], size=1).train(0, torch.device("meta")))
    assert [inputs["a"].device.type, inputs["b"][0].device.type] == ["meta", "meta"]
    assert inputs["b"][1] == "text"
    assert target[0].device.type == "meta"


class Encoding(UserDict):
    """A mapping that is no dict, as tokenizers return it."""

    def __getattr__(self, name):
        raise AttributeError


def test_a_mapping_that_is_no_dict_does_as_a_dict_does():
    batches = [(Encoding(a=torch.ones(4, 2), b=torch.ones(4)), torch.zeros(4))] * 3
    one = feed(batches)
    assert one.size == 12
    batch = next(one.train(0, CPU))
    assert type(batch.inputs) is dict
    first, _ = batch.parts(2)
    assert (first.inputs["a"].shape, first.examples) == ((2, 2), 2)
    assert batch_length(Encoding(a=torch.ones(4, 2)), None) == 4


WORDS = torch.arange(8).view(4, 2)


@pytest.mark.parametrize("kind", [Encoding, dict])
def test_a_batch_may_hold_its_targets(kind):
    batch = kind(input_ids=WORDS, labels=TARGETS)
    one = feed([batch, batch])
    assert one.size == 8
    inputs, found, _ = next(one.train(0, CPU))
    assert list(inputs) == ["input_ids", "labels"]  # the model may compute its loss
    assert torch.equal(found, TARGETS)
    inputs, found, _ = next(test_batches(Task([], [batch], loss="mse"), 4, CPU, WHOLE))
    assert list(inputs) == ["input_ids"]  # the loss is another
    assert torch.equal(found, TARGETS)
    half = next(feed([batch]).train(0, CPU)).part((1, 2))
    assert half.examples == len(half.inputs["labels"]) == 2


def test_a_detectors_lists_are_arguments_and_count_as_they_are_long():
    images = [torch.zeros(3, size, 8) for size in (8, 9, 7)]
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (5, 0, 1)]
    one = feed([(images, boxes)])
    assert one.size == 3
    batch = next(one.train(0, CPU))
    assert [len(each) for each in batch.inputs] == [3, 3]
    assert batch.inputs[1][0].keys() == {"boxes"}
    assert batch.examples == 3
    own = feed([(images, boxes)], loss=lambda found, targets: 0)
    assert [len(each) for each in next(own.train(0, CPU)).inputs] == [3]
    (found,) = example_inputs(one.task, 2)
    assert [image.shape[1] for image in found] == [8, 9]


def test_without_labels_the_targets_are_all_of_the_batch():
    batch = {"input_ids": WORDS, "start_positions": TARGETS}
    inputs, targets, _ = next(feed([batch]).train(0, CPU))
    assert inputs.keys() == targets.keys() == batch.keys()


class Rows(Dataset):
    """As a table of ``datasets`` gives them."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": WORDS[index], "label": int(TARGETS[index])}


def test_rows_that_hold_their_targets_come_in_batches():
    one = feed(Rows(), batch_size=2)
    assert (one.size, one.steps) == (4, 2)
    inputs, targets, _ = next(test_batches(Task(Rows(), Rows()), 3, CPU, WHOLE))
    assert torch.equal(inputs["input_ids"], WORDS[:3])
    assert torch.equal(targets, TARGETS[:3])
    assert list(example_inputs(one.task, 2)) == ["input_ids"]


def test_an_example_is_the_first_inputs():
    for source in (SPLIT, list(SPLIT.batches(40)), loader()):
        assert torch.equal(example_inputs(Task(source), 2), SPLIT.inputs[:2])
    batch = {"input_ids": WORDS, "scale": torch.ones(()), "labels": TARGETS}
    found = example_inputs(Task([batch]), 2)
    assert found.keys() == {"input_ids", "scale"}
    assert torch.equal(found["input_ids"], WORDS[:2])
    with pytest.raises(DataError, match="empty"):
        example_inputs(Task([]), 2)


def test_generators_of_a_loader_are_found_once():
    generator = torch.Generator()
    assert feed(loader(shuffle=True, generator=generator)).generators() == [generator]
    assert feed(loader(shuffle=True)).generators() == []
    assert feed(SPLIT).generators() == []


def test_a_distributed_sampler_hears_of_the_epoch():
    dataset = TensorDataset(SPLIT.inputs, torch.arange(100))
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    one = feed(DataLoader(dataset, batch_size=30, sampler=sampler))
    first = targets(one.train(0, CPU))
    assert first != targets(one.train(1, CPU))
    assert first == targets(one.train(0, CPU))


def test_tests_come_whole_and_in_order():
    task = Task(SPLIT, SPLIT)
    assert targets(test_batches(task, 30, CPU, WHOLE)) == SPLIT.targets.tolist()
    assert targets(test_batches(Task(SPLIT, loader()), 7, CPU, WHOLE)) == SPLIT.targets.tolist()
    assert list(test_batches(Task(SPLIT), 30, CPU, WHOLE)) == []


def test_each_process_reads_its_own_examples_only():
    read = []
    for rank in range(2):
        data = OneByOne()
        feed = Feed(Task(Loaded(data)), 30, seed=1, augment=False, part=(rank, 2))
        weights = {batch.weight for batch in feed.train(0, CPU)}
        assert weights == {1}
        read.append(data.read)
    alone = OneByOne()
    for _ in Feed(Task(Loaded(alone)), 30, seed=1, augment=False).train(0, CPU):
        pass
    assert [len(found) for found in read] == [120, 120]
    halves = [[found[k : k + 15] for k in range(0, 120, 15)] for found in read]
    assert [n for pair in zip(*halves, strict=True) for half in pair for n in half] == alone.read


def test_a_shuffled_loader_has_one_order_in_all_processes():
    def order(rank, size):
        data = OneByOne()
        feed = Feed(
            Task(DataLoader(data, 30, shuffle=True)), 30, seed=1, augment=False, part=(rank, size)
        )
        torch.manual_seed(rank)  # as processes are
        return [batch.targets.tolist() for batch in feed.train(0, CPU)], data.read

    (first, seen), (second, same) = (order(rank, 2) for rank in range(2))
    assert seen == same
    whole = [seen[k : k + 30] for k in range(0, 240, 30)]
    targets = doubled().targets
    for one, other, indices in zip(first, second, whole, strict=True):
        assert one + other == targets[indices].tolist()


def test_a_loader_that_is_shared_out_is_left_alone():
    data = OneByOne()
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    feed = Feed(Task(loader), 30, seed=1, augment=False, part=(1, 2))
    assert (feed.size, feed.steps) == (240, 8)
    batches = list(feed.train(0, CPU))
    assert [(len(batch.targets), batch.weight) for batch in batches] == [(15, 1)] * 8
