"""Several threads: each gets what it would get alone, and only its own words are dropped."""

from __future__ import annotations

import logging
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import l0prune
from l0prune.capture.compat import TRACE_LOG
from l0prune.capture.threads import muted, one_at_a_time, printing_to
from l0prune.errors import CaptureError


def run(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def test_threads_gate_and_export_networks_of_their_own():
    own, x = (sys.stdout, sys.stderr, list(warnings.filters)), torch.randn(3, 4)
    models, found = [network(seed) for seed in range(3)], {}

    def work(number):
        model = models[number]
        l0prune.gate(model, x)
        l0prune.gates(model).log_alpha.data[number::3] = -20
        found[number] = l0prune.export(model).module(x)

    run(*(lambda number=number: work(number) for number in range(3)))
    for number, model in enumerate(models):
        assert torch.allclose(found[number], model.eval()(x), atol=1e-6)
    assert (sys.stdout, sys.stderr) == own[:2]


def test_a_thread_is_muted_alone(capfd, caplog):
    entered, said = threading.Event(), threading.Event()
    log = logging.getLogger("a.user")

    def speak(who):
        print(f"printed by {who}")
        print(f"printed by {who}", file=sys.stderr)
        log.warning("logged by %s", who)
        warnings.warn(f"warned by {who}", UserWarning, stacklevel=1)

    def one():
        with muted():
            entered.set()
            said.wait(20)
            speak("one")

    def loud():
        entered.wait(20)
        speak("another")
        said.set()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(one, loud)
    assert capfd.readouterr().out == "printed by another\n"
    assert [record.getMessage() for record in caplog.records] == ["logged by another"]
    assert [str(each.message) for each in seen] == ["warned by another"]


def test_torch_finds_out_that_nobody_asked_for_its_trace_files(monkeypatch):
    """Its handler says so at the first record; before that, records are gathered for it."""
    handler, found = logging.Handler(), []
    monkeypatch.setattr(handler, "emit", found.append)
    monkeypatch.setattr(logging.getLogger(TRACE_LOG), "handlers", [handler])
    l0prune.survey(network(0), torch.randn(3, 4))
    assert found


def test_in_whatever_order_threads_are_done_the_streams_are_the_programs_own():
    own, first_in, second_in, first_out = (
        (sys.stdout, sys.stderr),
        *(threading.Event() for _ in "abc"),
    )

    def first():
        with muted():
            first_in.set()
            second_in.wait(20)
        first_out.set()

    def second():
        first_in.wait(20)
        with muted():
            second_in.set()
            first_out.wait(20)

    run(first, second)
    assert (sys.stdout, sys.stderr) == own


def test_after_an_error_everything_speaks_again(capfd):
    own = sys.stdout, sys.stderr, logging.root.manager.disable

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError):
        l0prune.gate(nn.Sequential(nn.Linear(4, 4), Branches()), torch.randn(2, 4))
    assert (sys.stdout, sys.stderr, logging.root.manager.disable) == own
    capfd.readouterr()
    print("here")
    with pytest.warns(UserWarning, match="again"):
        warnings.warn("again", UserWarning, stacklevel=1)
    assert capfd.readouterr().out == "here\n"


def test_one_stream_for_another(capfd):
    with muted(), printing_to(sys.stderr):
        print("to stderr")
    assert capfd.readouterr() == ("", "to stderr\n")


def test_one_thread_may_enter_twice_and_another_one_waits():
    order, inside = [], threading.Event()

    def first():
        with one_at_a_time(), one_at_a_time():
            inside.set()
            for _ in range(3):
                order.append("first")

    def second():
        inside.wait(20)
        with one_at_a_time():
            order.append("second")

    run(first, second)
    assert order == ["first"] * 3 + ["second"]
