"""What the cards and the line above them say."""

from reported import content, epoch

from l0prune.report.content import Pair, Training
from l0prune.report.page.verdict import cards, verdict


def changed(gain, **parts):
    return gain.model_copy(update=parts)


def test_times_that_differ_less_than_their_turns_say_nothing_of_speed():
    gain = content().gain
    near = gain.time.model_copy(update={"after": gain.time.before * 1.06, "spread": 0.54})
    said = verdict(content(gain=gain.model_copy(update={"time": near})))
    assert "takes about as long (repeated timings differ by 54 %)" in said
    assert "times as" not in said
    (card,) = [c for c in cards(content(gain=changed(gain, time=near))) if "Time" in c.label]
    assert card.change == "about as long: fewer MACs save no time here"
    assert card.note.endswith("the middle half of repeated timings differ by 54 %")
    same = changed(gain, time=near, macs=Pair(before=1000, after=1000))
    assert "about as long" in {c.change for c in cards(content(gain=same))}


def test_the_time_of_training_is_said_by_stage():
    stages = [Training(name=name, epochs=[epoch(1), epoch(2)]) for name in ("dense", "finetune")]
    (card,) = [c for c in cards(content(trainings=stages)) if c.label == "Training"]
    assert card.note == "4 epochs in all: dense 3 s, finetune 3 s"
    (card,) = [c for c in cards(content(trainings=stages[:1])) if c.label == "Training"]
    assert card.note == "2 epochs in all"
