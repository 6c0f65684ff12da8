import pytest
import torch
from small_task import clouds
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from l0prune.data.dataset import WHOLE
from l0prune.errors import DataError
from l0prune.finetune.feed import Feed, call, test_batches
from l0prune.finetune.task import Task

test_batches.__test__ = False  # its name says what it gives, not that it is a test
CPU = torch.device("cpu")
SPLIT = clouds(100)


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


def test_inputs_are_arguments():
    class Sum(nn.Module):
        def forward(self, a, b=0):
            return a + b

    one = torch.ones(1)
    assert call(Sum(), one) == 1
    assert call(Sum(), (one, one)) == 2
    assert call(Sum(), {"a": one, "b": 2 * one}) == 3
