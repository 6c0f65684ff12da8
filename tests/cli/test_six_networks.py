"""Half the MACs with no other option, on networks of six kinds and real data, by commands."""

import json
import os

import pytest
from commands import run

from benchmarks.budgets import NETWORKS

FILE = """
import l0prune
from benchmarks.budgets import NETWORKS, part

def network():
    return NETWORKS["{name}"][1]()

def data():
    return part(l0prune.load_data("{source}"), 2000)
"""


@pytest.mark.slow
@pytest.mark.skipif("L0PRUNE_DATA" not in os.environ, reason="L0PRUNE_DATA names no data")
@pytest.mark.parametrize("name", NETWORKS)
def test_half_the_macs(name, tmp_path):
    (tmp_path / "own.py").write_text(FILE.format(name=name, source=NETWORKS[name][0]))
    code, out, err = run("gate", "own.py:network", "--data", "own.py:data", "--json", cwd=tmp_path)
    assert code == 0, err
    gated = json.loads(out)
    tune = ("finetune", gated["file"], "--data", "own.py:data", "--budget", "macs=0.5", "--json")
    code, out, err = run(*tune, cwd=tmp_path)
    assert code == 0, err
    assert "doctor" in json.loads(out)
    code, out, err = run("export", "--onnx", "--json", cwd=tmp_path)
    assert code == 0, err
    exported = json.loads(out)
    print(name, exported["macs"] / gated["macs"])
    assert 0.95 * 0.5 <= exported["macs"] / gated["macs"] <= 0.5
