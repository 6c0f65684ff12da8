import pytest
from plans import plan_of

from l0prune.errors import UsageError
from l0prune.plan.globs import by_rules, listed, matching, named, per_axis


def test_the_first_glob_that_matches_counts():
    plan = plan_of([1, 1, 1], [])
    assert per_axis(plan, 0.3, None, "x") == [0.3, 0.3, 0.3]
    assert per_axis(plan, {"a1": 0.5, "a*": 0.2}, None, "x") == [0.2, 0.5, 0.2]
    assert per_axis(plan, {"a2": 0.5}, None, "x") == [None, None, 0.5]
    assert per_axis(plan, {}, 0.9, "x") == [0.9, 0.9, 0.9]


def test_a_glob_that_matches_nothing_is_a_mistake():
    with pytest.raises(UsageError, match=r"prior is given for 'b\*'.*a0, a1"):
        per_axis(plan_of([1, 1], []), {"b*": 0.5}, None, "prior")


def test_a_long_list_is_cut_short():
    plan = plan_of([1] * 30, [])
    assert listed(plan.names).endswith("a18, a19, … (30 in all)")
    assert listed(plan.names, most=30).endswith("a28, a29")


def test_a_name_means_itself_and_else_is_a_glob():
    names = ["a[0]", "a0", "a1"]
    assert matching(names, "a[0]", "x") == [0]
    assert matching(names[1:], "a[0]", "x") == [0]
    assert matching(names, "a[01]", "x") == [1, 2]
    assert by_rules(names, (("a[0]", 1.0), ("*", 2.0)), None, "x") == [1.0, 2.0, 2.0]


def test_names_that_are_close_are_offered():
    with pytest.raises(UsageError, match=r"'cnov1', which matches no axis. Did you mean 'conv1'"):
        named(["conv1", "fc"], ["fc", "cnov1"], "exclude", "axis")


def test_all_of_nothing_is_no_mistake():
    assert named([], "*", "include", "axis") == []
