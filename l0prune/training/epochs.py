"""The epochs of a run, told to whoever watches.

with watched(print):
    l0prune.finetune(model, data, out="run")

The watcher gets the history after each epoch, once its checkpoint is written. Where several
processes train together the first one tells, and the others wait.
"""

from l0prune.running.watching import Happenings
from l0prune.training.history import History

_epochs: Happenings[History] = Happenings("epochs")
watched, done = _epochs.watched, _epochs.tell
