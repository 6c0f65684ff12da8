"""Random damage to every kind of file: one sentence says so, or nothing has changed."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest
import torch
from torch import nn

import l0prune
from l0prune.cli.project import find_recipe
from l0prune.errors import FileError, L0pruneError
from l0prune.features.recipes import files as recipe_files
from l0prune.files.checked_json import sealed
from l0prune.files.smaller_model import MANIFEST, WEIGHTS
from l0prune.report.collect import training_in
from l0prune.report.report import Report
from l0prune.training import checkpoint

TIMES = 30


class Net(nn.Module):
    """Two widths and a tied weight."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.again = nn.Linear(6, 4)
        self.again.weight = self.last.weight

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.last(x) + self.again(x)


def fresh():
    torch.manual_seed(0)
    return Net()


def tensors(model):
    """What tells two models apart, as bytes."""
    state = sorted(model.state_dict().items())
    kinds = [(name, type(module).__name__) for name, module in model.named_modules()]
    return kinds, [(n, t.dtype, t.shape, t.contiguous().numpy().tobytes()) for n, t in state]


def resources(model):
    """The same with the numbers that modules have of their own."""
    own = [(n, k, v) for n, m in model.named_modules() for k, v in sorted(vars(m).items())
           if isinstance(v, int | float | tuple | str)]  # fmt: skip
    return tensors(model), own


def resized(path):
    return tensors(l0prune.resize(fresh(), path))


def of_checkpoint(path):
    found = checkpoint.read(path.parent)
    return checkpoint.digest(found.model), str(found.records), str(found.optimizers)


def table(model):
    from l0prune.features.latency.facts import Group
    from l0prune.features.latency.latency_model import LatencyModel, Step, Term
    from l0prune.features.latency.table import LatencyTable, Quality, Setting, plan_id

    plan = l0prune.gates(model).plan
    layouts = (next(d for dims in plan.tensors.values() for d in dims),)
    stairs = LatencyModel(layouts, (Term(0, 0.5, (Step(0, 8),)), Term(1, 0.25, ())))
    return LatencyTable(
        Setting("onnxruntime", "1.0", "CPU", 1, 1, "a processor", "a system"), plan_id(plan), 2.5,
        (Group("first", "Gemm", ("00001",), ((), layouts)),), stairs, stairs,
        Quality(0.01, 0.05, 12, 0.02), (((6,), 2.5),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with one of each, and how each is read."""
    folder = tmp_path_factory.mktemp("written")
    model = l0prune.gate(fresh(), torch.randn(2, 4), open_probability=0.5, jitter=1.0)
    l0prune.save(model, folder / "net.gated.pt", {"note": "ä"})
    table(model).save(folder / "net.latency.json")
    small = l0prune.export(model)
    small.save(folder / "net.state.pt")
    small.save(folder / "net.safetensors")
    small.save_pretrained(folder / "net")
    data = [(torch.randn(4, 4), torch.arange(4))] * 2
    l0prune.finetune(model, data, epochs=1, out=folder / "run", progress=False)
    (folder / "recipe.toml").write_bytes(find_recipe("digits-lenet").read_bytes())
    return folder


def report(path):
    return Report.load(path).to_dict()


def changes(data, dice):
    """The data with one number or text in it replaced."""
    if isinstance(data, dict) and data:
        key = dice.choice(sorted(data))
        return {**data, key: changes(data[key], dice)}
    if isinstance(data, list) and data:
        at = dice.randrange(len(data))
        return [*data[:at], changes(data[at], dice), *data[at + 1 :]]
    return dice.choice((-1, 10**18, math.nan, math.inf, "x", None, [], {}, 10**400, True))


def test_numbers_that_no_measurement_gives_are_refused_before_a_model_is_touched(written, tmp_path):
    model, dice = l0prune.load(written / "net.gated.pt", fresh()), random.Random(0)
    plan, path = l0prune.gates(model).plan, tmp_path / "net.latency.json"
    data = json.loads((written / "net.latency.json").read_text(encoding="utf-8"))
    refused = 0
    for _ in range(10 * TIMES):
        path.write_text(json.dumps(sealed(changes(data, dice))), encoding="utf-8")
        try:
            latency = l0prune.LatencyTable.load(path).of(plan)
        except L0pruneError:
            refused += 1
        else:
            assert 0 <= latency.actual(torch.ones(plan.size, dtype=torch.bool)) < math.inf
            assert 0 < latency.dense() < math.inf
    assert refused > 8 * TIMES


def test_a_manifest_whose_numbers_make_no_sense_leaves_the_model_as_it_is(written, tmp_path):
    shutil.copytree(written / "net", tmp_path, dirs_exist_ok=True)
    path, dice = tmp_path / MANIFEST, random.Random(0)
    data = json.loads(path.read_text(encoding="utf-8"))
    before, whole, refused = resources(fresh()), resources(l0prune.resize(fresh(), tmp_path)), 0
    for _ in range(5 * TIMES):
        some = {name: data[name] for name in ("shapes", "attributes", "layers", "rebuild", "tied")}
        changed = {**data, **changes(some, dice)}
        path.write_text(json.dumps(sealed(changed)), encoding="utf-8")
        model = fresh()
        try:
            l0prune.resize(model, tmp_path)
        except L0pruneError:
            refused += 1
            assert resources(model) == before
        else:
            assert resources(model) == whole
    assert refused > 4 * TIMES


# How each is read, and whether a digest tells any change.
READ = {
    "net.gated.pt": (lambda p: (tensors(l0prune.load(p, fresh())), l0prune.read_info(p)), True),
    "net.state.pt": (resized, True),
    "net.safetensors": (resized, True),
    f"net/{MANIFEST}": (lambda p: resized(p.parent), True),
    f"net/{WEIGHTS}": (lambda p: resized(p.parent), True),
    "run/checkpoint.pt": (of_checkpoint, True),
    "net.latency.json": (lambda p: l0prune.LatencyTable.load(p), True),
    "run/report.json": (report, False),
    "run/metrics.jsonl": (lambda p: training_in(p.parent, "x"), False),
    "run/run.json": (lambda p: training_in(p.parent, "x"), False),
    "recipe.toml": (lambda p: recipe_files.load(str(p), []), False),
}


def damaged(content, dice):
    """Some bytes are others, or gone, or more."""
    data = bytearray(content)
    match dice.randrange(5):
        case 0:
            return data[: dice.randrange(len(data))]
        case 1:
            at = dice.randrange(len(data))
            data[at:at] = dice.randbytes(dice.randint(1, 9))
        case 2:
            at = dice.randrange(len(data))
            del data[at : at + dice.randint(1, 9)]
        case _:
            for _ in range(dice.randint(1, 4)):
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return data


@pytest.mark.parametrize("name", READ)
def test_random_damage_is_said_or_changes_nothing(name, written, tmp_path):
    read, is_sealed = READ[name]
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    path, dice = tmp_path / name, random.Random(name)
    whole, content = read(path), path.read_bytes()
    said = []
    for _ in range(TIMES):
        path.write_bytes(damaged(content, dice))
        try:
            found = read(path)
        except L0pruneError as error:
            said.append(error)
        else:
            assert found == whole or not is_sealed
    assert len(said) >= TIMES / 5
    assert not is_sealed or all(type(error) is FileError for error in said)
    for text in map(str, said):
        assert path.name in text or path.parent.name in text
        assert len(text.splitlines()) == 1 or "is no recipe" in text
