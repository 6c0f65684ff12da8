import sys

from l0prune.running.environment import command, environment


def test_a_command_is_as_one_would_type_it():
    assert command(["/usr/bin/l0prune", "run", "a b.toml"]) == "l0prune run 'a b.toml'"
    assert command(["/x/l0prune/__main__.py", "export"]) == "l0prune export"
    assert command(["/home/me/train.py", "--lr", "1"]) == "python train.py --lr 1"
    assert command(["-c"]) == command([]) == ""


def test_versions_are_those_that_run():
    found = environment()
    assert found["versions"]["torch"] == sys.modules["torch"].__version__.partition("+")[0]
    assert found["versions"]["python"] == sys.version.split()[0]
