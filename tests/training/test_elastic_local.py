"""Functions of this machine that change during a run: real processes that are killed, requests of another process, a stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_job, real

import ephemeron
from ephemeron.errors import UserError
from ephemeron.events import Ended, Event, FaultFired, GenerationStarted, Progress, RunStarted
from ephemeron.runs.verbs import resume
from ephemeron.training.driver import configure, train
from ephemeron.training.job import DataSpec, Target, parse_fault
from ephemeron.training.job.generation import ScheduledResize

JOB = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=4)
SHAPE: dict[str, Any] = {"workers": 2, "aggregators": 1, "batch_size": 36, "memory_mb": 704, "checkpoint_every": 4}
SCHEDULE = (ScheduledResize(from_epoch=1, workers=3), ScheduledResize(from_epoch=2, workers=2, memory_mb=640))
BEGINS = (20, 34)
"""First iterations of the generations of this schedule."""
PROGRAM = str(Path(sys.executable).with_name("ephemeron"))


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_whatever_dies_around_a_change_the_weights_are_those_of_the_simulated_run() -> None:
    """The functions that grow, and all of them where their memory changes."""
    deaths = ["kill:rank=1,iteration=19,phase=upload", "kill:rank=0,iteration=20", "kill:rank=2,iteration=21,phase=upload"]
    events: list[Event] = []
    c = configure(JOB, platform="local", resize={"schedule": SCHEDULE}, **SHAPE)
    faults = [parse_fault(f) for f in (*deaths, "duplicate:rank=1")]
    result = train(JOB, c, faults=faults, on_event=events.append, check=False)
    assert result.summary.status == "finished", result.causes
    assert result.summary.weights_sha256 == real(JOB, resize={"schedule": SCHEDULE}, **SHAPE).sha
    assert sum(isinstance(e, FaultFired) for e in events) == len(deaths)
    assert [(g.from_iteration, g.workers, g.memory_mb) for g in result.summary.generations] == [
        (0, 2, 704),
        (BEGINS[0], 3, 704),
        (BEGINS[1], 2, 640),
    ]
    assert {e.memory_mb for e in events if isinstance(e, Ended)} == {704, 640}
    three = {e.rank for e in events if isinstance(e, Progress) and BEGINS[0] <= e.iteration < BEGINS[1]}
    assert three == {0, 1, 2}
    assert sorted(p.name for p in (result.folder.path / "objects").rglob("*") if p.is_file()) == ["result", "spec"]


@pytest.mark.slow
def test_another_process_changes_the_functions_of_a_run(home: Path) -> None:
    asked: list[subprocess.Popen[str]] = []

    def ask(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 5 and not asked:
            command = [PROGRAM, "resize", "last", "--workers", "3", "--json"]
            asked.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    job = make_job(model=Target(target="tiny:mlp"), data=DataSpec(), epochs=400)
    events: list[Event] = []

    def seen(event: Event) -> None:
        events.append(event)
        ask(event)
        begun = [e for e in events if isinstance(e, GenerationStarted)]
        if begun and isinstance(event, Progress) and event.iteration > begun[0].from_iteration + 5 and len(asked) == 1:
            asked.append(subprocess.Popen([PROGRAM, "stop", "last"], text=True))

    result = train(job, configure(job, platform="local", **SHAPE), on_event=seen, check=False)
    told = asked[0].communicate(timeout=240)[0]
    asked[1].wait(timeout=240)
    assert '"workers": 3' in told
    assert result.summary.status == "stopped", result.causes
    assert [g.workers for g in result.summary.generations] == [2, 3]
    first = next(e for e in events if isinstance(e, GenerationStarted))
    assert f'"from_iteration": {first.from_iteration}' in told
    with pytest.raises(UserError, match="not running"):
        ephemeron.resize("last", workers=2)
    # It goes on with three functions, from a checkpoint of its generation.
    more: list[Event] = []

    def until_it_moves(event: Event) -> None:
        more.append(event)
        if isinstance(event, Progress) and event.rank == 2 and len(asked) == 2:
            asked.append(subprocess.Popen([PROGRAM, "stop", "last"], text=True))

    again = resume("last", on_event=until_it_moves, check=False)
    asked[2].wait(timeout=240)
    assert again.summary.status == "stopped", again.causes
    resumed = max(i for i, e in enumerate(more) if isinstance(e, RunStarted))
    progress = [e for e in more[resumed:] if isinstance(e, Progress)]
    assert {e.rank for e in progress} == {0, 1, 2}
    assert min(e.iteration for e in progress) >= first.from_iteration
