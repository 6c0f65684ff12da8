import os
import signal
import threading

import pytest

from l0prune.finetune.interrupt import Interrupt, Interrupted


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
