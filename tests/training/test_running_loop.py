"""The blocking facade where an event loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
import test_one_driver
from training_runs import make_job

from ephemeron import blocking
from ephemeron.errors import UserError
from ephemeron.events import Progress
from ephemeron.functions import passed_on
from ephemeron.runs.verbs import attach, resume
from ephemeron.training.driver import configure, train


def in_a_running_loop(call):
    """What a cell of a notebook does."""

    async def cell():
        return call()

    return asyncio.run(cell())


@pytest.fixture(autouse=True)
def _light(home, monkeypatch):
    monkeypatch.setenv("EPHEMERON_PRELOAD", "")
    monkeypatch.setattr(passed_on, "PASSED_ON", passed_on.PASSED_ON)
    test_one_driver.light()


def test_a_simulated_run():
    job = make_job()
    how = configure(job, platform="simulated", workers=2, aggregators=1, batch_size=24)
    result = in_a_running_loop(lambda: train(job, how))
    assert result.finished
    assert result.summary.weights_sha256 == train(job, how).summary.weights_sha256


@pytest.mark.slow
def test_ctrl_c_stops_a_local_run_at_a_checkpoint_and_it_is_resumed():
    sent = []

    def interrupt(event):
        if isinstance(event, Progress) and event.iteration == 4 and not sent:
            sent.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt_later(event):
        if isinstance(event, Progress) and event.iteration == 8 and not sent:
            sent.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"at a checkpoint by an interrupt; go on with: ephemeron\.resume"):
        in_a_running_loop(lambda: test_one_driver.start(slow=True, on_event=interrupt))
    sent.clear()
    stopped = in_a_running_loop(lambda: resume("last", keep_code=True, on_event=interrupt_later, quiet_interrupt=True))
    assert stopped.summary.status == "stopped"
    assert 8 < stopped.summary.iterations < 48
    with pytest.raises(UserError, match="not running"):
        in_a_running_loop(lambda: attach("last"))
    result = in_a_running_loop(lambda: resume("last", keep_code=True))
    assert result.finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not [t for t in threading.enumerate() if t.name == "ephemeron"]


def test_what_handles_no_interrupt_is_cancelled_by_it():
    ended = []

    async def forever():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.append("tidied up")

    for way in (in_a_running_loop, lambda call: call()):
        with pytest.raises(KeyboardInterrupt):
            way(lambda: blocking.run(lambda _: forever()))
    assert ended == ["tidied up"] * 2


def test_an_interrupt_that_is_handled_is_noted_for_the_caller():
    async def stops(interrupts):
        stopped = asyncio.Event()
        with interrupts.handled(stopped.set):
            os.kill(os.getpid(), signal.SIGINT)
            await stopped.wait()

    for way in (in_a_running_loop, lambda call: call()):
        with blocking.handled_interrupts() as noted:
            way(lambda: blocking.run(stops))
        assert noted.happened


def test_what_is_raised_there_is_raised_here():
    async def fails():
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        in_a_running_loop(lambda: blocking.run(lambda _: fails()))


def test_sigterm_is_an_interrupt_while_a_run_begins():
    with pytest.raises(KeyboardInterrupt), blocking.terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
