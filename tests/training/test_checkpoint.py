import copy
from functools import partial

import pytest
import torch
from small_task import data, differing, gated, network, tensors
from torch import nn

from l0prune.errors import FileError, UsageError
from l0prune.running import rng
from l0prune.running.task import Task
from l0prune.training import checkpoint
from l0prune.training.checkpoint import (
    Checkpoint,
    digest,
    fingerprint,
    put_back,
    read,
    snapshot,
)
from l0prune.training.run import finetune
from l0prune.training.settings import Settings

CPU = torch.device("cpu")
SETTINGS = {"lam": "0.1/N", "lr": "0.001", "N": "240"}


def made(model, **changes):
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    values = {
        "settings": SETTINGS, "models": ["start"], "model": snapshot(model),
        "optimizers": [optimizer.state_dict()], "pruner": {}, "teacher": {},
        "average": {"a": torch.ones(2)}, "updates": 3,
        "scaler": {}, "epoch": 1, "step": 2, "losses": (1.5, 0.25, 2, 0.1), "rng_epoch": None,
        "rng": [rng.capture(CPU)], "records": [{"epoch": 1, "open": {"fc": 3}, "dead": []}],
    }  # fmt: skip
    return Checkpoint(**{**values, **changes})


def test_what_is_written_is_read(tmp_path):
    state = made(gated())
    expected = copy.deepcopy(state)
    state.write(tmp_path)
    found = read(tmp_path)
    assert differing(expected.model, found.model) == []
    for name in ("settings", "models", "updates", "epoch", "step", "losses", "records", "scaler"):
        assert getattr(found, name) == getattr(expected, name)
    other = torch.optim.Adam(gated().parameters(), fused=True)
    other.load_state_dict(found.optimizers[0])
    for number, moments in expected.optimizers[0]["state"].items():
        assert differing(moments, other.state_dict()["state"][number]) == []


def test_where_nothing_is_nothing_is_read(tmp_path):
    assert read(tmp_path) is None


def test_a_failed_write_leaves_the_one_before(tmp_path, monkeypatch):
    made(network()).write(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(FileError, match="disk is full"):
        made(network(), epoch=2).write(tmp_path)
    assert read(tmp_path).epoch == 1
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]


@pytest.mark.parametrize("length", [0, 10, 3000])
def test_a_truncated_file_is_refused(tmp_path, length):
    path = made(network()).write(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FileError):
        read(tmp_path)


def test_another_format_is_refused(tmp_path):
    torch.save({"format": 99}, tmp_path / checkpoint.NAME)
    with pytest.raises(FileError, match="this version can read"):
        read(tmp_path)
    torch.save({"format": 4, "epoch": 3}, tmp_path / checkpoint.NAME)
    with pytest.raises(FileError, match="not a complete checkpoint"):
        read(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"epoch": "1"}, {"losses": [1.5]}, {"model": []}, {"rng_epoch": 3}, {"rng": None}]
)
def test_parts_of_the_wrong_type_are_damage(tmp_path, changes):
    state = made(network())
    vars(state).update(changes)
    state.write(tmp_path)
    with pytest.raises(FileError, match=f"damaged: {next(iter(changes))} of the wrong type"):
        read(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"rng": []}, {"optimizers": [{}]}, {"losses": ()}, {"rng": [{"torch": 1}]}]
)
def test_a_run_does_not_go_on_from_damage(tmp_path, changes):
    settings = {"epochs": 1, "out": tmp_path, "progress": False}
    finetune(gated(), data(), **settings)
    path = tmp_path / checkpoint.NAME
    torch.save({**torch.load(path, weights_only=True), **changes}, path)
    model = gated()
    before = tensors(model)
    with pytest.raises(FileError, match=r"checkpoint\.pt is damaged"):
        finetune(model, data(), **settings, resume=True)
    assert differing(before, tensors(model)) == []


def test_the_same_run_may_go_on():
    assert made(network()).check(SETTINGS, "start", finished=False) == []


def test_how_fast_it_learns_may_change_until_it_is_done():
    slower = {**SETTINGS, "lr": "0.0001"}
    state = made(network())
    assert state.check(slower, "start", finished=False) == ["lr 0.001 → 0.0001"]
    with pytest.raises(UsageError, match=r"lr .* → 0"):
        state.check(slower, "start", finished=True)


@pytest.mark.parametrize(("name", "value"), [("lam", "1/N"), ("N", "100"), ("new", "1")])
def test_another_run_may_not(name, value):
    with pytest.raises(UsageError, match=f"{name} .* → {value}.*resume=False"):
        made(network()).check({**SETTINGS, name: value}, "start", finished=False)


def test_another_model_may_not():
    state = made(network(), models=["start", "end"])
    assert state.check(SETTINGS, "end", finished=False) == []
    with pytest.raises(UsageError, match="other weights"):
        state.check(SETTINGS, "another", finished=False)


def test_a_snapshot_is_put_back_to_the_bit():
    model = gated()
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    before, held = tensors(model), snapshot(model)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    put_back(model, held)
    assert differing(before, tensors(model)) == []
    assert torch.equal(model.scratch, torch.ones(2))
    assert sum(p.requires_grad for p in model.parameters()) == len(list(model.parameters()))


def test_the_tensors_of_another_model_change_nothing():
    model = network()
    before = tensors(model)
    with pytest.raises(FileError, match=r"another model: 1\.bias"):
        put_back(model, snapshot(network(norm=False)))
    assert differing(before, tensors(model)) == []


def test_a_digest_tells_tensors_apart():
    model = network()
    same = digest(snapshot(model))
    assert same == digest(snapshot(network()))
    with torch.no_grad():
        model[0].bias[0] += 1e-6
    assert same != digest(snapshot(model))
    assert digest({"a": torch.ones(1)}) != digest({"b": torch.ones(1)})
    assert digest({"a": torch.zeros(2)}) != digest({"a": torch.zeros(2, 1)})
    half = nn.Linear(2, 2).bfloat16()
    assert digest(snapshot(half)) == digest(snapshot(half))


def print_of(settings, **task):
    return fingerprint(settings, Task([], **task))


def test_the_fingerprint_holds_what_decides_the_numbers():
    one = print_of(Settings(lr=0.1, out="a", progress=False, device="cpu"))
    assert one == print_of(Settings(lr=0.1, out="b", resume=True))
    assert one != print_of(Settings(lr=0.2, out="a"))
    assert one["lr"] == "0.1"


def test_functions_are_told_apart_by_name_and_arguments_not_by_address():
    def halve(done):
        return 0.5

    assert print_of(Settings(schedule=halve))["schedule"].endswith("halve")
    one, other, third = (
        print_of(Settings(optimizer=partial(torch.optim.SGD, lr=lr))) for lr in (0.1, 0.1, 0.2)
    )
    assert one == other != third


def test_teachers_are_told_apart_by_their_weights():
    one, same, other = network(), network(), network()
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    texts = [print_of(Settings(distill=0.5, teacher=each)) for each in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
