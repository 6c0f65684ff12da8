"""What the cards and the line above them say."""

from reported import content, epoch

from l0prune.features.page.verdict import cards, verdict
from l0prune.report.content import Pair, Training


def changed(gain, **parts):
    return gain.model_copy(update=parts)


def timed(after, spread):
    """What is said of a time in the line above the cards, and on its card."""
    gain = content().gain
    time = gain.time.model_copy(update={"after": gain.time.before * after, "spread": spread})
    made = content(gain=changed(gain, time=time))
    (card,) = [each for each in cards(made) if "Time" in each.label]
    return verdict(made), card


def test_times_that_differ_less_than_repeated_timings_say_nothing_of_speed():
    said, card = timed(after=1.06, spread=0.08)
    assert "takes about as long (repeated timings differ by 8 %)" in said
    assert "times as" not in said
    assert card.change == "about as long: fewer MACs save no time here"
    assert card.note.endswith("the middle half of repeated timings differ by 8 %")
    gain = content().gain
    near = gain.time.model_copy(update={"after": gain.time.before * 1.06, "spread": 0.08})
    same = changed(gain, time=near, macs=Pair(before=1000, after=1000))
    assert "about as long" in {c.change for c in cards(content(gain=same))}


def test_a_speedup_is_the_first_sentence_with_what_was_asked_and_the_ideal():
    gain = content().gain
    facts = {"asked": ["macs=0.4"], "ideal": 4.5, "losses": ["deep (Conv): 2 ms instead of 1"]}
    time = gain.time.model_copy(update=facts | {"advice": ["a budget in time"]})
    made = content(gain=changed(gain, time=time))
    first = f"3.2 times as fast (8 ms → 2.5 ms on {time.runtime}, {time.threads} thread"
    assert verdict(made).startswith(first)
    assert ", asked macs=0.4, ideal by MACs 4.5 times. The network keeps" in verdict(made)
    (card,) = [each for each in cards(made) if "Time" in each.label]
    lost = ". Most is lost in deep (Conv): 2 ms instead of 1. What can help: a budget in time"
    assert card.note.endswith(lost)
    assert ", asked macs=0.5. The network" in verdict(content())  # of the run's own budgets


def test_on_a_noisy_machine_nothing_is_said_of_what_macs_save():
    said, card = timed(after=0.65, spread=0.48)
    differ = "repeated timings differ by 48 %"
    assert f"cannot be told from the dense one by its time ({differ})" in said
    assert card.change == "too noisy to tell"


def test_the_time_of_training_is_said_by_stage():
    stages = [Training(name=name, epochs=[epoch(1), epoch(2)]) for name in ("dense", "finetune")]
    (card,) = [c for c in cards(content(trainings=stages)) if c.label == "Training"]
    assert card.note == "4 epochs in all: dense 3 s, finetune 3 s"
    (card,) = [c for c in cards(content(trainings=stages[:1])) if c.label == "Training"]
    assert card.note == "2 epochs in all"
