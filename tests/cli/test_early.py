"""Wrong names, settings, budgets and files are told before torch is loaded."""

import pytest
from test_start_up import python

from l0prune.cli.early import check
from l0prune.errors import L0pruneError
from l0prune.features.penalties.shrinkage import PENALTIES
from l0prune.files.consent import SOURCES
from l0prune.gating.kinds import base
from l0prune.plan import names
from l0prune.plan.budget_text import check_texts, known_units
from l0prune.plan.measures import kind_of
from l0prune.running import criteria, sources
from l0prune.selection import scores
from l0prune.training.settings import Settings

WRONG = [
    ("gate none.pt", "none.pt does not exist."),
    ("gate nothing", "'nothing' is neither a file nor any other model source"),
    ("gate none.py:build", "none.py does not exist."),
    ("survey m.pt --data imagefolder:none", "none is no folder"),
    ("gate m.pt --data minst", "'minst' is no data source"),
    ("gate m.pt --gate hard", "there is no gate 'hard'"),
    ("export none.tuned.pt", "none.tuned.pt does not exist."),
    ("measure none.gated.pt", "none.gated.pt does not exist."),
    ("finetune m.pt --budget mac=0.5", "not 'mac'; did you mean 'macs'?"),
    ("finetune m.pt --budget macs=half", "cannot read 'half' in the budget"),
    ("finetune m.pt --budget latency=12parsecs", "'parsecs' is none of its units"),
    ("finetune m.pt --set epochz=3", "there is no setting 'epochz'; did you mean 'epochs'?"),
    ("finetune m.pt --set lr=-1", "lr must be a number from 0 to"),
    ("finetune m.pt --loss mes", "there is no loss 'mes'; did you mean 'mse'?"),
    ("finetune m.pt --start fischer", "there is no score 'fischer'"),
    ("finetune m.pt --penalty mpc", "there is no penalty 'mpc'; did you mean 'mcp'?"),
    ("finetune m.pt --set penalty=group-laso", "did you mean 'group-lasso'?"),
    ("run r.toml", "there is no penalty 'group-laso'; did you mean 'group-lasso'?"),
    ("run r.toml finetune.penalty=scad", "there is no gate 'hard'"),
    ("finetune m.pt --data none.py:load", "none.py does not exist."),
    ("fit m.pt --budget macs=0.5 --score best", "there is no score 'best'"),
    ("fit m.pt --budget macs=0.5 --score none.py:worth", "none.py does not exist."),
    ("finetune m.pt --start none.py:worth", "none.py does not exist."),
    ("finetune m.pt --loss none.py:far", "none.py does not exist."),
    ("run f.toml", "none.py does not exist."),
    ("run f.toml fit.score=fisher", "there is no score 'fischer'; did you mean 'fisher'?"),
    ("run f.toml rounds=[] fit.score=gate", "there is no score 'gate'"),
    ("run f.toml model.source=none", "'none' is neither a file nor any other model source"),
    ("run f.toml data.source=minst", "'minst' is no data source"),
    ("fit m.pt --budget macs=0.5 --target tensorrt", "target is one of onnxruntime"),
    ("fit m.pt --latency none.json --budget latency=0.5", "none.json does not exist."),
    ("shrink m.pt --budget flops=0.5", "not 'flops'; did you mean 'macs'?"),
    ("run digits-wide-open", "there is no recipe 'digits-wide-open'"),
]
COMMANDS = """
import pathlib, shlex, sys
from l0prune.cli.app import main
pathlib.Path("m.pt").touch()
recipe = 'gate.kind = "hard"\\nfinetune.penalty = "group-laso"\\n[data]\\nsource = "digits"\\n'
pathlib.Path("r.toml").write_text(recipe)
fit = '[fit]\\nscore = "none.py:worth"\\n[[rounds]]\\n[rounds.fit]\\nscore = "fischer"\\n'
pathlib.Path("f.toml").write_text(fit)
for arguments in {arguments}:
    sys.argv = ["l0prune", *shlex.split(arguments)]
    try:
        main()
    except SystemExit as stop:
        assert stop.code in (1, 2), arguments
    else:
        raise AssertionError(arguments)
    assert "torch" not in sys.modules, arguments
"""


def test_wrong_names_are_told_before_torch_is_loaded(tmp_path):
    lines = python(COMMANDS.format(arguments=[each for each, _ in WRONG]), tmp_path).splitlines()
    assert len(lines) == len(WRONG)
    for line, (arguments, message) in zip(lines, WRONG, strict=True):
        assert line.startswith("error: "), line
        assert message in line, arguments


def test_right_names_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "m.py", "m.gated.pt"):
        (tmp_path / name).touch()
    (tmp_path / "images").mkdir()
    given = {"budget": ["macs=50%, params=10k", "a.*: width=0.5", "speed=2x"], "lam": "0.1/N"}
    given |= {"loss": "m.py:loss", "start": "ablation", "file": "m.gated.pt", "setting": ["clip=1"]}
    for data in ("digits", "a.txt", "a.txt:64", "a.txt,b.txt", "imagefolder:images:1x28", "m.py:f"):
        check("finetune", {**given, "data": data})
    for model in ("m.py:build", "timm:any", "images", "m.gated.pt"):
        check("gate", {"model": model, "kind": "hard_concrete"})
    check("fit", {"score": "m.py:worth", "start": "m.py:worth"})
    check("fit", {"score": "gates", "measures": ["m.py:M"], "budget": ["memory=0.5"]})


def test_these_are_the_names_that_are_registered():
    assert {*names.SCORES} == {*scores.names()}
    assert [*names.METRICS] == [*criteria._METRICS]
    assert [*names.LOSSES] == [criteria.AUTO, *criteria._LOSSES]
    assert {*names.DATA} == {*sources._NAMED}
    assert {*names.PACKAGES} == {each for each in SOURCES if each.isidentifier()}
    assert {*names.PENALTIES} == {*PENALTIES}
    for name in (*names.PENALTIES, "group-scad"):
        names.check_penalty(name)
    assert {name.replace("-", "_") for name in names.GATES} <= {*base.KINDS}
    for name, units in known_units().items():
        assert kind_of(name).suffixes == units


@pytest.mark.parametrize("text", ["macs", ": macs=0.5", "macs=.5.5", "macs=0.5,"])
def test_texts_that_are_no_budget(text):
    with pytest.raises(L0pruneError, match="cannot read"):
        check_texts([text], known_units())


def test_defaults_of_settings_are_among_those_allowed():
    from l0prune.training.fields import check_fields

    check_fields(Settings, {n: f.default for n, f in Settings.model_fields.items()})
