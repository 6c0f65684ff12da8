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
from l0prune.exporting.own_class.writing import WRITERS
from l0prune.features.penalties.shrinkage import PENALTIES
from l0prune.selection.scores import SCORES

FILES = {
    "halves/__init__.py": """
        from l0prune.doors import Feature

        FEATURE = Feature(
            __name__,
            names={"half_of": "halving"},
            commands={"halve": "command", "fails": "nowhere", "gate": "command", "run": "command"},
            options={"Budget": ("share",), "Output": ("noted",), "Halves": ("twice",)},
            more={"export": "command"},
            scores={"first-half": "halving"},
            penalties={"halved": "halving"},
            writers={".widths": "halving"},
            report_sections={"quarter": "halving", "faulty": "halving"},
        )
    """,
    "halves/halving.py": """
        from dataclasses import dataclass
        from typing import ClassVar

        import torch
        from l0prune import scores
        from l0prune.exporting.own_class.writing import WRITERS
        from l0prune.features.penalties.shrinkage import register

        @register
        @dataclass(frozen=True)
        class Halved:
            name: ClassVar[str] = "halved"

            def shrunk(self, t, tau, scale):
                return t / 2

        def write(path, network):
            path.write_text(str([tuple(p.shape) for p in network.parameters()]))

        WRITERS[".widths"] = write

        def quarter(content):
            return "A quarter <of it>", f"of {len(content.layers)} layers"

        def faulty(content):
            raise ValueError("no axes")

        def half_of(number):
            return number / 2

        @scores.register("first-half")
        def first_half(of):
            return torch.arange(of.plan.size, 0, -1).double()
    """,
    "halves/command.py": '''
        from typing import Annotated

        import typer

        def halve(
            number: float,
            share: Annotated[float, typer.Option(help="Of it.")] = 0.5,
            twice: Annotated[bool, typer.Option(help="Once more.")] = False,
        ):
            """Print a share of a number."""
            print(number * share * (share if twice else 1))

        def gate():
            """Replace a command of l0prune."""

        run = gate

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
    for registry in (SCORES, PENALTIES, WRITERS):
        for name in ("first-half", "halved", ".widths"):
            registry._known.pop(name, None)
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


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:the feature 'broken'", "ignore:l0prune. the feature 'broken'")
def test_its_penalty_trains_its_format_is_written_and_its_section_is_on_the_page(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    l0prune.gate(model, torch.randn(2, 3))
    before = float(model[0].weight.detach().norm())
    data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    settings = {"epochs": 1, "lr": 1e-3, "progress": False}
    l0prune.finetune(model, data, penalty="halved", lam=1.0, **settings)
    assert float(model[0].weight.detach().norm()) < 0.6 * before
    small = l0prune.export(model)
    small.save(tmp_path / "net.widths")
    shapes = [tuple(p.shape) for p in small.module.parameters()]
    assert (tmp_path / "net.widths").read_text() == str(shapes)
    with pytest.warns(UserWarning, match="section 'faulty' of halves is left out: .*no axes"):
        page = l0prune.Report.of(small).html()
    assert "A quarter &lt;of it&gt;</h2>" in page
    assert "of 2 layers" in page


@pytest.mark.slow
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

    whole = said("--help")
    assert "halve " in whole.stdout
    assert "the command 'fails' of halves is left out: ModuleNotFoundError" in whole.stderr
    for name, owner in (("gate", "l0prune"), ("run", "l0prune.features.recipes")):
        assert f"{name!r} of halves is left out: {owner} has a command of that name" in whole.stderr
    assert "Replace a command" not in said("gate", "--help").stdout
    assert "Halves:\n  --twice" in said("halve", "--help").stdout
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
