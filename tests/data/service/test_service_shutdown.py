"""A process hears of its end, whoever tells it; and others see whether it lives."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ephemeron.data.service.daemon import ManagedProcess, ProcessLock
from ephemeron.data.service.process import ShutdownSignal


@pytest.fixture
def over() -> Iterator[ShutdownSignal]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield ShutdownSignal()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_before_anybody_waits(over: ShutdownSignal, number: signal.Signals) -> None:
    assert not over.wait(0)
    os.kill(os.getpid(), number)
    assert over.wait()
    assert over.wait(0), "it stays so"


def test_a_signal_wakes_who_waits(over: ShutdownSignal) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGTERM)).start()
    assert over.wait(60)


def test_a_thread_can_tell(over: ShutdownSignal) -> None:
    threading.Thread(target=over.set).start()
    assert over.wait(60)


def test_it_may_be_told_any_number_of_times(over: ShutdownSignal) -> None:
    for _ in range(100_000):
        over.set()
    assert over.wait(0)


def test_who_looks_whether_a_part_lives_is_not_taken_for_it(tmp_path: Path) -> None:
    part = ManagedProcess("coordinator", tmp_path, "token")
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("ab") as another:
        fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as one does who looks
        assert not part.alive
    presence = ProcessLock(tmp_path)
    assert part.alive
    del presence
    assert not part.alive
