"""How an export is shown."""

import pickle
import pickletools
import re
from contextlib import nullcontext

import pytest
import torch
from deadness import close_some, randomise
from torch import nn

import l0prune


def exported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2))
    l0prune.gate(model, (torch.randn(2, 6),), exclude="*.in")
    l0prune.fit(model, "macs=0.5", l0prune.score(model, "magnitude"))
    return l0prune.export(model)


def test_it_is_shown_in_a_line_and_in_a_notebook():
    dense = exported()
    number = r"\de[-+]\d\d"
    params = rf"{dense.params} of 362 params \({dense.params / 362:.1%}\)"
    macs = rf"{dense.macs} of 320 MACs \({dense.macs / 320:.1%}\)"
    errors = rf"largest error {number} in float64, {number} in float32"
    assert re.fullmatch(rf"Export\(Sequential: {params}, {macs}; {errors}\)", repr(dense))
    html = dense._repr_html_()
    assert html.startswith("<pre")
    for text in ("Cut", "Certificate", "float64", f"{dense.params}", "362"):
        assert text in html


class Computed(nn.Module):
    """Divides by a size: it cannot be of its own class."""

    def forward(self, x):
        return x / x.shape[-1]


LAYERS_BETWEEN = {"": nn.ReLU, "CutLayerNorm": lambda: nn.LayerNorm(8), "DenseGraph": Computed}


@pytest.mark.parametrize("kind", LAYERS_BETWEEN)
def test_the_note_says_what_a_pickle_of_the_module_needs(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), LAYERS_BETWEEN[kind](), nn.Linear(8, 2))
    model = l0prune.gate(randomise(model).eval(), torch.randn(2, 6), exclude="*.in")
    small = l0prune.export(close_some(model, seed=1))
    assert small.widths["0"][0] < 8
    with pytest.warns(match="this pickle holds") if kind else nullcontext():
        pickled = pickle.dumps(small.module, protocol=2)
    names = [argument for _, argument, _ in pickletools.genops(pickled)]
    needs = any(str(name).startswith("l0prune.") for name in names)
    assert needs is bool(kind)
    assert (f"only loads where l0prune is installed, for {kind}:" in small.note) is needs
