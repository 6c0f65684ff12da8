"""The public names, and the rules of the house: a room for each step, imports that go down."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

import l0prune
from l0prune.cli.more import added_options
from l0prune.doors import BUILT_IN, features

ROOT = Path(l0prune.__file__).parent
BENCHMARKS = ROOT.parent / "benchmarks"
# From the ground up: a room imports itself and those before it.
ROOMS = (
    "progress", "plan", "capture", "infer", "gating", "files", "data", "running", "selection",
    "exporting", "training", "integrations", "report", "cli", "features",
)  # fmt: skip
NAMES = {
    "BinaryConcrete", "Budget", "Certificate", "Compensation", "ContinuousSparsification",
    "Data", "EarlyExits", "Export", "FewerExperts", "Gate", "Gates", "HardConcrete", "History",
    "InputMacs",
    "LatencyTable", "Measure", "Pruner", "Report", "Settings", "SmallerVocabulary",
    "Survey", "Task", "__version__",
    "add_exits", "add_input_gates", "choose_exits", "compensate",
    "distributions", "evaluate", "export", "finetune", "fit", "from_pretrained", "gate",
    "gates", "input_macs", "input_penalty", "load", "load_data", "load_model", "measure",
    "measures", "param_groups", "penalty", "read_info", "resize", "save",
    "save_skipping", "score", "scores",
    "shrink", "shrink_experts", "shrink_vocabulary", "survey",
    "train_dense", "ungate", "with_pseudo_labels",
}  # fmt: skip
ASKED_FOR = (
    "names",
    "commands",
    "functions",
    "sources",
    "runtimes",
    "formats",
    "writers",
    "around",
    "measures",
)  # by a user
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """The modules of l0prune that a file imports, as parts of their names."""
    for node in ast.walk(tree(ROOT / path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("l0prune."):
            yield tuple(node.module.split(".")[1:])


def test_public_names_are_these():
    assert set(l0prune.__all__) == NAMES
    assert set(dir(l0prune)) >= NAMES


def test_every_public_name_can_be_reached():
    assert [name for name in NAMES if getattr(l0prune, name, None) is None] == []


def test_what_is_not_there_is_said_as_python_says_it():
    with pytest.raises(AttributeError, match="has no attribute 'prune'"):
        _ = l0prune.prune


def test_documented_modules_have_an_import_path():
    assert l0prune.scores is importlib.import_module("l0prune.selection.scores")
    assert l0prune.measures is importlib.import_module("l0prune.plan.measures")
    assert l0prune.distributions is importlib.import_module("l0prune.gating.kinds.distributions")
    for name in ("errors", "infer.registry", "gating.kinds.base", "selection.scores"):
        importlib.import_module(f"l0prune.{name}")


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("l0prune"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(
                    f"{node.module}.{alias.name}"
                )


def opened_as_text(path):
    """The lines of a file that read or write text in the encoding of whoever runs it."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call) or "encoding" in {each.arg for each in node.keywords}:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [each.value for each in node.args if isinstance(each, ast.Constant)]
        is_text = any(re.fullmatch("[rwax]t?[+]?", str(mode)) for mode in modes[-1:])
        is_open = isinstance(node.func, ast.Name) and name == "open"
        if (is_open and len(node.args) == 1) or (name == "open" and is_text):
            yield node.lineno
        if name == "write_text" or (name == "read_text" and not node.args):
            yield node.lineno


def test_text_is_utf_8_wherever_it_is_read():
    paths = [*ROOT.rglob("*.py"), *BENCHMARKS.rglob("*.py")]
    assert {str(path): found for path in paths if (found := [*opened_as_text(path)])} == {}


def test_all_errors_are_in_errors():
    errors = importlib.import_module("l0prune.errors")
    for path in FILES:
        for node in ast.walk(tree(ROOT / path)):
            bases = [b.id for b in getattr(node, "bases", ()) if isinstance(b, ast.Name)]
            is_error = any(base in vars(errors) or base.endswith("Error") for base in bases)
            assert not is_error or path == Path("errors.py") or node.name.startswith("_"), node.name


def test_every_room_is_known_and_none_is_named_like_a_function():
    rooms = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert rooms == set(ROOMS)
    assert not rooms & NAMES
    assert len(rooms) + sum(len(path.parts) == 1 for path in FILES) <= 20


def test_imports_go_down():
    places = {room: number for number, room in enumerate(ROOMS)} | {"errors": -1, "doors": -1}
    assert {
        (str(path), parts)
        for path in FILES
        if len(path.parts) > 1
        for parts in imported(path)
        if places[parts[0]] > places[path.parts[0]]
    } == set()


def test_features_import_one_another_only_where_they_say_so():
    for path in FILES:
        if path.parts[0] == "features" and len(path.parts) > 2:
            own = path.parts[1]
            others = {parts[1] for parts in imported(path) if parts[0] == "features"} - {own}
            assert others <= {*features()[own].needs}, path


def test_built_in_features_are_those_that_there_are_and_what_a_user_may_ask_of_them():
    there = {path.parts[1] for path in FILES if path.parts[0] == "features"} - {"__init__.py"}
    assert {*BUILT_IN} == there
    for name, words in BUILT_IN.items():
        each = features()[name]
        more = [each.load("more", command) for command in each.more]
        asked = {option.name for function in more for option in added_options(function)}
        asked |= {word for door in ASKED_FOR for word in getattr(each, door)}
        assert {*words} == asked, name
    assert sum(map(len, BUILT_IN.values())) == len({*chain(*BUILT_IN.values())})
    rings = (ROOT.parent / "docs/architecture.md").read_text(encoding="utf-8")
    rings = rings.partition("## Two rings")[2].partition("\n## ")[0]
    assert [*BUILT_IN] == re.findall(r"^\| `(\w+)` \|", rings, re.MULTILINE) == sorted(there)


def test_no_file_imports_itself_in_a_circle_outside_the_registry_of_rules():
    arrows = {}
    for path in FILES:
        name = path.with_suffix("").parts
        arrows[name] = {to for to in imported(path) if to != name}
    reached = {}

    def below(name, seen):
        for to in arrows.get(name, ()):
            if to not in seen:
                seen.add(to)
                below(to, seen)
        return seen

    for name in arrows:
        reached[name] = below(name, set())
    circles = {name for name in arrows if name in reached[name]}
    assert all(
        name[:2] in {("infer", "inference"), ("infer", "registry"), ("infer", "rules")}
        for name in circles
    )


@pytest.mark.parametrize("more", ["", "; from l0prune.doors import features; features()"])
def test_importing_the_package_and_finding_its_features_loads_no_torch(more):
    code = f"import sys, l0prune{more}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_file_of_tests_has_a_name_of_its_own():
    """pytest imports them by that name alone."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}
