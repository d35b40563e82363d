"""Direct runs of real processes that are killed and frozen: the weights of the undisturbed run, from live peers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_runs import make_job, real

from ephemeron.events import Ended, Event, FaultFired, Loaded, Progress
from ephemeron.training.driver import Result, configure, train
from ephemeron.training.job import DataSpec, Target, parse_fault

pytestmark = pytest.mark.slow

JOB = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=3)
SHAPE: dict[str, Any] = {"workers": 4, "aggregators": 4, "batch_size": 24, "checkpoint_every": 8}


def go(
    *faults: str, on_event: Callable[[Event], None] = lambda event: None, peer_timeout_s: float = 20.0, **how: Any
) -> tuple[Result, list[Event]]:  # fmt: skip
    events: list[Event] = []

    def seen(event: Event) -> None:
        events.append(event)
        on_event(event)

    c = configure(JOB, **{"platform": "local", "channel": "direct", "memory_mb": 640, **SHAPE, **how})
    result = train(
        JOB, c, faults=[parse_fault(f) for f in faults], on_event=seen, check=False, peer_timeout_s=peer_timeout_s
    )
    return result, events


@pytest.fixture(scope="module")
def weights() -> str:
    """Of the same schedule over the store in virtual time, where nothing happens."""
    return real(JOB, **SHAPE).sha


def resumed(events: list[Event]) -> list[tuple[int, int]]:
    return [(e.rank, e.iteration) for e in events if isinstance(e, Loaded) and e.attempt]


def test_deaths_in_every_phase_repeat_no_iteration(weights: str, home: Path) -> None:
    deaths = [
        (2, 5, "compute"),
        (0, 10, "upload"),
        (3, 15, "download"),
        (0, 20, "aggregate"),  # small vectors have few owners here
        (0, 25, "compute"),
        (1, 25, "compute"),
    ]
    before: dict[int, int] = {}
    faults = []
    for rank, iteration, phase in deaths:
        faults.append(f"kill:rank={rank},iteration={iteration},phase={phase},attempt={before.get(rank, 0)}")
        before[rank] = before.get(rank, 0) + 1
    result, events = go(*faults)
    assert result.summary.weights_sha256 == weights, result.causes
    assert len([e for e in events if isinstance(e, FaultFired)]) == len(deaths)
    assert [e.error for e in events if isinstance(e, Ended) and e.status == "lost"] == ["killed by SIGKILL"] * len(
        deaths
    )
    begun = resumed(events)
    for rank, iteration, _ in deaths:
        assert (rank, iteration) in begun or (rank, iteration + 1) in begun, begun


def test_all_die_at_once_and_go_on_from_a_common_checkpoint(weights: str, home: Path) -> None:
    result, events = go(*(f"kill:rank={rank},iteration=21,phase=compute" for rank in range(4)))
    assert result.summary.weights_sha256 == weights, result.causes
    assert len([e for e in events if isinstance(e, FaultFired)]) == 4
    begun = resumed(events)
    assert len({at for _, at in begun}) == 1
    assert begun[0][1] in (8, 16)


def test_hand_offs(weights: str, home: Path) -> None:
    slow = "delay:rank=1,factor=40"
    result, events = go(slow, "kill:rank=3,iteration=0,phase=load,attempt=1", function_timeout_s=5.0)
    assert result.summary.weights_sha256 == weights, result.causes
    assert {rank for rank, _ in resumed(events)} == set(range(4))


def functions() -> list[psutil.Process]:
    """Processes of this home that run functions, without the first one, from which they are forked."""
    runs, found = str((Path(os.environ["EPHEMERON_HOME"]) / "runs").resolve()), []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ours = "ephemeron.functions.function_main" in (process.info["cmdline"] or [])
            if ours and process.environ().get("HOME", "").startswith(runs):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)[1:]


def test_a_frozen_function_that_wakes_changes_nothing(weights: str, home: Path) -> None:
    frozen: list[psutil.Process] = []
    woken = threading.Event()

    def freeze(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration == 3 and not frozen:
            frozen.append(max(functions(), key=lambda process: process.cpu_times().user))
            frozen[0].send_signal(signal.SIGSTOP)
        if isinstance(event, Loaded) and event.attempt and not woken.is_set():
            woken.set()
            frozen[0].send_signal(signal.SIGCONT)

    slow = "delay:rank=1,factor=20"
    try:
        result, events = go(slow, on_event=freeze, peer_timeout_s=10.0)  # longer than the others are ever silent
    finally:
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    assert woken.is_set(), "the others have replaced it"
    assert result.summary.weights_sha256 == weights, result.causes
    [(_, at)] = resumed(events)
    assert at > 0
