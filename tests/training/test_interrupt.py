import os
import signal
import threading

import pytest

from l0prune.errors import Interrupted
from l0prune.running.processes import World
from l0prune.training import loop as interrupt_module
from l0prune.training.loop import Interrupt


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Python leaves Ctrl-C ignored where it was started so, as in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_somebody_asks(number):
    before = signal.getsignal(number)
    interrupt = Interrupt()
    with interrupt.caught():
        interrupt.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as caught:
            interrupt.check()
    assert caught.value.signal == number
    assert isinstance(caught.value, KeyboardInterrupt)
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_acts_at_once():
    interrupt = Interrupt()
    with interrupt.caught():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(caught.value, Interrupted)


class Pair(World):
    """Two processes, of which the other one has heard nothing."""

    def __init__(self):
        super().__init__(0, 2)

    def highest(self, value):
        return value


def test_in_several_processes_an_echo_of_ctrl_c_is_no_second_one(monkeypatch):
    before, now = signal.getsignal(signal.SIGINT), [100.0]
    monkeypatch.setattr(interrupt_module.time, "monotonic", lambda: now[0])
    interrupt = Interrupt(Pair())
    with interrupt.caught():
        for _ in range(3):  # from the terminal, and from torchrun
            os.kill(os.getpid(), signal.SIGINT)
            now[0] += 1
        with pytest.raises(Interrupted):
            interrupt.check()
        now[0] += 20
        with pytest.raises(KeyboardInterrupt) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(caught.value, Interrupted)
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interrupt().caught():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone():
    seen = []

    def work():
        with Interrupt().caught():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
