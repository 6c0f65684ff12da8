"""Networks around a network in files: they are built again, or the feature that lacks is told."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.files.around import AROUND, Around, innermost

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Scaled(Around):
    """Multiplies what a network returns, by a hook on it."""

    name, words, has_hooks = "scaled", "a scale", True

    def __init__(self, network, factor):
        super().__init__()
        self.network, self.factor = network, factor
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.handle = network.register_forward_hook(lambda *given: given[2] * factor + self.shift)

    @property
    def facts(self):
        return {"factor": self.factor}

    @classmethod
    def of_facts(cls, network, facts):
        return cls(network, facts["factor"])

    def take_off(self):
        self.handle.remove()
        return self.network

    def forward(self, *args):
        return self.network(*args)


@pytest.fixture
def scaled():
    AROUND.register(Scaled)
    yield Scaled
    del AROUND["scaled"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()


@pytest.mark.parametrize("depth", [1, 3])
def test_what_works_by_hooks_is_built_again_at_any_depth(scaled, depth, tmp_path):
    model = network()
    for number in range(depth):
        model = scaled(model, 2.0 + number)
    l0prune.save(model.eval(), tmp_path / "model.pt")
    again = l0prune.load(tmp_path / "model.pt")
    assert torch.equal(again(X), model(X))
    assert type(innermost(again)) is nn.Sequential
    assert sum(isinstance(each, Scaled) for each in again.modules()) == depth


def test_a_file_of_what_no_feature_builds_is_told(scaled, tmp_path):
    l0prune.save(scaled(network(), 2.0), tmp_path / "model.pt", {"of": "mine"})
    AROUND["others"] = AROUND.pop("scaled")
    try:
        with pytest.raises(FileError, match="there is no network around a network 'scaled'"):
            l0prune.load(tmp_path / "model.pt")
    finally:
        AROUND["scaled"] = AROUND.pop("others")
    assert l0prune.read_info(tmp_path / "model.pt") == {"of": "mine"}
