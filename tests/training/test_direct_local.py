"""Direct runs of real processes that are killed and frozen: the weights of the undisturbed run, from live peers."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_job, real

from ephemeron.events import Ended, Event, FaultFired, Loaded
from ephemeron.training.driver import Result, configure, train
from ephemeron.training.job import DataSpec, Job, Target, parse_fault
from gates import Gate

pytestmark = pytest.mark.slow

JOB = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=3)
SHAPE: dict[str, Any] = {"workers": 4, "aggregators": 4, "batch_size": 24, "checkpoint_every": 8}


def go(
    *faults: str, on_event: Callable[[Event], None] = lambda event: None, peer_timeout_s: float = 20.0, job: Job = JOB, **how: Any
) -> tuple[Result, list[Event]]:
    events: list[Event] = []

    def seen(event: Event) -> None:
        events.append(event)
        on_event(event)

    c = configure(job, **{"platform": "local", "channel": "direct", "memory_mb": 640, **SHAPE, **how})
    result = train(job, c, faults=[parse_fault(f) for f in faults], on_event=seen, check=False, peer_timeout_s=peer_timeout_s)
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
    assert [e.error for e in events if isinstance(e, Ended) and e.status == "lost"] == ["killed by SIGKILL"] * len(deaths)
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


def test_hand_offs(weights: str, home: Path, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open(0.4)  # before each of 45 batches
    job = dataclasses.replace(JOB, model=gate.model(0, dropout=0.2))
    result, events = go("kill:rank=3,iteration=0,phase=load,attempt=1", job=job, function_timeout_s=8.0)
    assert result.summary.weights_sha256 == weights, result.causes
    assert {rank for rank, _ in resumed(events)} == set(range(4))


def test_a_frozen_function_that_wakes_changes_nothing(weights: str, home: Path, tmp_path: Path) -> None:
    """It freezes while it computes iteration 4; its replacement computes that when it has been woken."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "freeze").touch()

    def wake(event: Event) -> None:
        if isinstance(event, Loaded) and event.attempt == 1:
            [frozen] = marks.glob("frozen-*")
            os.kill(int(frozen.name.partition("-")[2]), signal.SIGCONT)

    model = Target(target="tiny:freezing", options={"folder": str(marks), "dropout": 0.2})
    job = dataclasses.replace(JOB, model=model)
    result, events = go(job=job, on_event=wake, peer_timeout_s=15.0)  # longer than the others are ever silent
    assert (marks / "woken").exists()
    assert result.summary.weights_sha256 == weights, result.causes
    assert [at for _, at in resumed(events)] == [4]
