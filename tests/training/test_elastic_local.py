"""Functions of this machine that change during a run: real processes that are killed, requests of another process, a stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_job

import ephemeron
from ephemeron.errors import UserError
from ephemeron.events import Ended, Event, FaultFired, GenerationStarted, Progress, RunStarted
from ephemeron.training.driver import Result, configure, resume, train
from ephemeron.training.job import DataSpec, Target, parse_fault

JOB = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=4)
HOW: dict[str, Any] = {
    "platform": "local",
    "workers": 2,
    "aggregators": 1,
    "batch_size": 36,
    "memory_mb": 704,
    "checkpoint_every": 4,
}
SCHEDULE = [{"from_epoch": 1, "workers": 3}, {"from_epoch": 2, "workers": 2, "memory_mb": 640}]
BEGINS = (20, 34)
"""First iterations of the generations of this schedule."""
PROGRAM = str(Path(sys.executable).with_name("ephemeron"))


def go(faults: tuple[str, ...] = (), on_event: Any = None, **how: Any) -> tuple[Result, list[Event]]:
    events: list[Event] = []

    def seen(event: Event) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    values = {**HOW, "schedule": SCHEDULE, **how}
    result = train(JOB, configure(JOB, **values), faults=[parse_fault(f) for f in faults], on_event=seen, check=False)
    return result, events


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[Event]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(tmp_path_factory.mktemp("home")))
        return go()


def left_in(result: Result) -> list[str]:
    return sorted(p.name for p in (result.folder.path / "objects").rglob("*") if p.is_file())


@pytest.mark.slow
def test_functions_change(undisturbed: tuple[Result, list[Event]]) -> None:
    result, events = undisturbed
    assert result.summary.status == "finished", result.causes
    assert [(g.from_iteration, g.workers, g.memory_mb) for g in result.summary.generations] == [
        (0, 2, 704), (BEGINS[0], 3, 704), (BEGINS[1], 2, 640),
    ]  # fmt: skip
    assert left_in(result) == ["result", "spec"]
    assert {e.memory_mb for e in events if isinstance(e, Ended)} == {704, 640}
    assert sum(e.iteration >= 0 for e in events if isinstance(e, Progress)) == 2 * 20 + 3 * 14 + 2 * 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        ("kill:rank=1,iteration=19,phase=upload", "kill:rank=0,iteration=20,phase=compute"),
        (
            "kill:rank=0,iteration=19,phase=download",
            "kill:rank=2,iteration=21,phase=upload",
            "kill:rank=1,iteration=33",
        ),
        ("kill:rank=0,iteration=34,phase=load", "duplicate:rank=1", "drop-put:rank=1,iteration=20"),
    ],
    ids=str,
)
def test_whatever_dies_around_a_change_the_weights_are_the_same(faults, undisturbed, home: Path) -> None:
    result, events = go(faults)
    assert result.summary.status == "finished", result.causes
    assert result.summary.weights_sha256 == undisturbed[0].summary.weights_sha256
    assert sum(isinstance(e, FaultFired) for e in events) >= 2
    assert left_in(result) == ["result", "spec"]


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

    result = train(job, configure(job, **HOW), on_event=seen, check=False)
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
