import pytest

from l0prune.progress import stages
from l0prune.progress.stages import Work, advanced, counting, stage, steps, works


@pytest.fixture
def clock(monkeypatch):
    """The clock of stages, to be set by hand."""
    now = [100.0]
    monkeypatch.setattr(stages, "now", lambda: now[0])
    return now


@pytest.fixture
def seen():
    """Name and share of the works that go on, after each step."""
    found = []
    with advanced.watched(lambda work: found.append((work.name, work.share))):
        yield found


def test_a_loop_counts_its_steps(seen):
    with stage("outer"):
        assert list(steps("abcd")) == [*"abcd"]
    assert seen == [("outer", share) for share in (0.25, 0.5, 0.75, 1)]


def test_steps_without_a_stage_or_a_number_are_only_iterated_over(seen):
    assert list(steps(iter("ab"))) == ["a", "b"]
    with stage("outer"):
        assert list(steps(iter("ab"))) == ["a", "b"]
        assert seen == []
        assert list(steps(iter("ab"), 2)) == ["a", "b"]
    assert seen == [("outer", 0.5), ("outer", 1)]
    assert list(steps([])) == []


def test_loops_and_stages_within_a_step_are_parts_of_it():
    found = []
    with stage("outer"), works.watched(lambda work: None):
        outer = stages._chain.get()[-1]
        for _ in steps(range(2)):
            with stage("inner"):
                for _ in steps(range(5)):
                    found.append(outer.share)
    assert found == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])


def test_a_step_may_be_longer_than_others():
    with stage("outer"):
        outer = stages._chain.get()[-1]
        with counting(10) as counter:
            with counter.takes(8):
                for number in steps(range(4)):
                    assert outer.share == pytest.approx(0.2 * number)
            assert outer.share == pytest.approx(0.8)
            counter.step()
            assert outer.share == pytest.approx(0.9)
        assert outer.share is None


def test_a_share_does_not_fall_within_a_loop_and_a_second_loop_begins_anew():
    with stage("outer"):
        outer = stages._chain.get()[-1]
        for _ in steps(range(2)):
            for _ in range(2):
                list(steps("ab"))
                assert outer.share >= 0
            before = outer.share
            assert all(outer.share >= before for _ in steps("ab"))
        assert outer.share is None
        for _ in steps("ab"):
            assert outer.share == 0
            break


def test_the_time_left_follows_from_the_steps_that_are_done(clock):
    with stage("outer"):
        outer = stages._chain.get()[-1]
        clock[0] += 50  # before the loop
        for number in steps(range(4)):
            assert outer.left == pytest.approx({0: None, 1: 30, 2: 20, 3: 10}[number])
            clock[0] += 10
        assert outer.elapsed == 90


def test_a_loop_that_goes_on_counts_the_time_of_its_own_steps(clock):
    work = Work("training")
    with work.counting(100, done=80) as counter:
        clock[0] += 10
        counter.at(90, 100)
        assert (work.share, work.left) == (0.9, 10)


def test_an_error_within_leaves_nothing_behind():
    with stage("outer"):
        outer = stages._chain.get()[-1]
        with pytest.raises(ZeroDivisionError), stage("inner"):
            [1 / 0 for _ in steps("ab")]
        assert (outer.inner, outer.share) == (None, None)
    assert stages._chain.get() == ()
