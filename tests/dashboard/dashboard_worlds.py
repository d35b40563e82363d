"""Folders of runs and studies as their writers leave them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ephemeron.events import Ended, Event, FaultFired, GenerationStarted, Invoked, Progress, RunEnded, RunStarted, Started, to_json

PRICES = {"name": "test", "as_of": "2026-01-01", "gb_second_usd": 1e-5, "invocation_usd": 2e-7}
TOKEN = "a token of this test alone"


def write_run(folder: Path, events: Iterable[Event], **record: Any) -> Path:
    """A run's folder with a log."""
    folder.mkdir(parents=True)
    values = {"run_id": folder.name, "platform": "local", "spec": {"prices": PRICES}, **record}
    (folder / "run.json").write_text(json.dumps(values))
    (folder / "events.jsonl").write_text("".join(to_json(e) + "\n" for e in events))
    return folder


def write_executor(folder: Path, status: str) -> Path:
    """The folder of an executor of one function that has ended with this status."""
    header = {"run_id": folder.name, "kind": "tasks", "name": "linalg", "platform": "local", "prices": PRICES, "budget_usd": 0.5}
    ended = Ended(t=2.0, rank=0, attempt=0, invocation="x", status="ok", gb_seconds=2.0, memory_mb=1024)
    write_run(folder, [Invoked(t=0.0, rank=0, attempt=0, invocation="x"), ended])
    (folder / "run.json").write_text(json.dumps(header))
    result = {"run_id": folder.name, "status": status, "seconds": 2.0, "cost_usd": 0.00123, "platform": "local", "invocations": 1}
    result |= {"billed": {"gb_seconds": 2.0, "requests": 1, "storage_usd": 0.0}, "budget_usd": 0.5, "prices": "test"}
    result |= {"tasks": 7, "failed": 2, "cancelled": 1, "causes": ["ValueError: three"]}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def started(workers: int = 2, iterations: int = 4, **more: Any) -> RunStarted:
    """The first event of a run."""
    return RunStarted(
        t=0.0, run_id="r", job="job", workers=workers, aggregators=1, memory_mb=1024, iterations=iterations, epochs=1, samples=100, **more
    )


def progress(rank: int, iteration: int, loss: float, *, attempt: int = 0, samples: int = 10, **more: Any) -> Progress:
    """A rank's report."""
    values = {"t": 1.0 + iteration, "epoch": 0, "version": iteration} | more
    return Progress(rank=rank, attempt=attempt, iteration=iteration, samples=samples, loss=loss, **values)


def troubled_run() -> list[Event]:
    """A run of two functions with a fault, a replacement, another generation, and names that would be markup."""
    out: list[Event] = [started(configuration={"budget_usd": 0.01, "sync": "bsp"}, wall_time=1.7e9, notes=["<b>note</b>"])]
    for rank in range(2):
        out.append(Invoked(t=0.1, rank=rank, attempt=0, invocation=f"i{rank}"))
        out.append(Started(t=0.5, rank=rank, attempt=0, invocation=f"i{rank}", cold=True))
    for i in range(4):
        for rank in range(2):
            spans: Any = [("compute", 1.0 + i, 1.5 + i), ("upload", 1.5 + i, 1.7 + i), ("wait", 1.7 + i, 2.0 + i)]
            out.append(progress(rank, i, 2.0 - 0.3 * i, t=2.0 + i, spans=spans, metrics={"<img src=x onerror=alert(1)>": 0.5}))
        if i == 1:
            out.append(FaultFired(t=3.1, rank=1, attempt=0, fault="kill", iteration=1))
            error = "<script>document.title = 'taken'</script>"
            out.append(Ended(t=3.2, rank=1, attempt=0, invocation="i1", status="lost", error=error, gb_seconds=2.7, memory_mb=1024))
            out.append(Invoked(t=3.3, rank=1, attempt=1, invocation="i2", reason="replacement"))
            out.append(Started(t=3.5, rank=1, attempt=1, invocation="i2", cold=False))
            out.append(progress(1, 1, 1.7, attempt=1, t=3.9))
    generation = GenerationStarted(
        t=4.2,
        generation=1,
        from_iteration=3,
        from_epoch=0,
        workers=2,
        memory_mb=2048,
        aggregators=1,
        batch_size=10,
        nonaggregator_batch_size=10,
        iterations=4,
        request="wide",
    )
    return [*out, generation, RunEnded(t=6.5, status="finished")]


def write_study(folder: Path, runs: dict[int, Path]) -> Path:
    """A study's folder, whose trials are links to runs."""
    (folder / "trials").mkdir(parents=True)
    trials = [
        {
            "number": 0,
            "state": "finished",
            "parameters": {"lr": 0.1, "sync": "bsp"},
            "run": "a",
            "value": 0.9,
            "evaluations": 3,
            "cost_usd": 0.01,
            "seconds": 5.0,
        },
        {
            "number": 1,
            "state": "pruned",
            "parameters": {"lr": 0.001, "sync": "<i>asp</i>"},
            "run": "b",
            "value": 0.4,
            "evaluations": 1,
            "reason": "asha",
        },
        {"number": 2, "state": "running", "parameters": {"lr": 0.5, "sync": "bsp"}, "run": "c", "value": 0.7, "evaluations": 2},
    ]
    status = {
        "name": folder.name,
        "state": "running",
        "metric": "accuracy",
        "mode": "max",
        "sampler": "tpe",
        "pruner": "asha",
        "job": "digits",
        "parameters": ["lr", "sync"],
        "trials_planned": 8,
        "concurrency": 4,
        "budget_usd": 0.5,
        "spent_usd": 0.02,
        "best": 0,
        "predicted_usd": 0.3,
        "trials": trials,
    }
    for number, run in runs.items():
        (folder / "trials" / str(number)).symlink_to(run, target_is_directory=True)
    (folder / "study.json").write_text(json.dumps(status))
    return folder
