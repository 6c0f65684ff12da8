"""A package of someone else brings in a feature by an entry point, by the doors of the built-in."""

import subprocess
import sys

import pytest
import torch
from processes import LONGEST
from torch import nn

import l0prune
from l0prune.doors import Registry, features, provided
from l0prune.errors import UsageError

FILES = {
    "halves/__init__.py": """
        from l0prune.doors import Feature

        FEATURE = Feature(
            __name__,
            names={"half_of": "halving"},
            commands={"halve": "command"},
            options={"Budget": ("share",), "Output": ("noted",)},
            more={"export": "command"},
            scores={"first-half": "halving"},
        )
    """,
    "halves/halving.py": """
        import torch
        from l0prune import scores

        def half_of(number):
            return number / 2

        @scores.register("first-half")
        def first_half(of):
            return torch.arange(of.plan.size, 0, -1).double()
    """,
    "halves/command.py": '''
        from typing import Annotated

        import typer

        def halve(number: float, share: Annotated[float, typer.Option(help="Of it.")] = 0.5):
            """Print a share of a number."""
            print(number * share)

        def export(examples, *, noted: Annotated[str, typer.Option(help="A note.")] = "none"):
            """Print a note before anything is cut."""
            print(noted)
    ''',
    "halves-1.0.dist-info/METADATA": """
        Metadata-Version: 2.1
        Name: halves
        Version: 1.0
    """,
    "halves-1.0.dist-info/entry_points.txt": """
        [l0prune.features]
        halves = halves:FEATURE
        broken = halves:THERE_IS_NONE
    """,
}


def dedented(text):
    return "\n".join(line.removeprefix(" " * 8) for line in text.strip("\n").splitlines()) + "\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder on the path of imports, as pip leaves it when it has installed the package."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(dedented(text), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    features.cache_clear()
    yield tmp_path
    features.cache_clear()
    vars(l0prune).pop("half_of", None)
    l0prune.scores.SCORES._known.pop("first-half", None)
    for name in [each for each in sys.modules if each.partition(".")[0] == "halves"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_a_feature_of_another_package_is_found_and_one_that_is_broken_is_told():
    with pytest.warns(UserWarning, match=r"'broken' \(halves:THERE_IS_NONE\) is left out: Attrib"):
        assert features()["halves"].package == "halves"
    assert "halves.halving" not in sys.modules  # before it is asked for
    assert l0prune.half_of(3) == 1.5
    assert "first-half" in l0prune.scores.names()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    l0prune.gate(model, torch.randn(2, 3))
    data = [(torch.randn(2, 3), torch.tensor([0, 1]))]
    assert l0prune.score(model, "first-half", data, normalise="none").tolist() == [
        7,
        6,
        5,
        4,
        3,
        2,
        1,
    ]


def test_its_command_is_one_of_l0prune(installed):
    def said(*words):
        code = f"import sys; sys.path.insert(0, {str(installed)!r}); "
        code += "from l0prune.cli.app import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )

    assert "halve " in said("--help").stdout
    assert "Budget:\n  --share" in said("halve", "--help").stdout
    assert "A note. [none]" in said("export", "--help-all").stdout.partition("Output:\n")[2]
    done = said("halve", "6", "--share", "0.25")
    assert (done.returncode, done.stdout) == (0, "1.5\n")


def test_what_no_feature_has_is_told():
    with pytest.raises(UsageError, match="no feature has the function 'nothing'"):
        provided("nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = l0prune.nothing


def test_a_registry_tells_the_nearest_name():
    registry = Registry("fruit")

    @registry.register
    class Apple:
        name = "apple"

    assert registry.named("apple") is Apple
    with pytest.raises(
        UsageError, match=r"no fruit 'appel'; did you mean 'apple'. There are apple"
    ):
        registry.named("appel")
    with pytest.raises(UsageError, match="no fruit 'xyz'; there are apple"):
        registry.named("xyz")
