"""What is kept of a run, and what is handed back of one that has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.errors import RunFailed, RunNotFound, UserError
from ephemeron.events import Event, RunStarted, from_json
from ephemeron.training.driver import run_dir
from ephemeron.training.driver.cost import CostMeter, summary
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.job import Job
from ephemeron.training.planner.prices import Prices
from ephemeron.training.tensors import Arrays
from ephemeron.training.worker.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended."""

    summary: dict[str, Any]
    """What `--json` prints."""
    folder: RunFolder
    causes: tuple[str, ...] = ()
    """Why it failed, if it did."""

    @property
    def finished(self) -> bool:
        return bool(self.summary["status"] == "finished")

    def raise_if_failed(self) -> Result:
        """This result.

        Raises:
            RunFailed: the run failed; has this as its `result`.
        """
        if self.summary["status"] == "failed":
            raise RunFailed(self.folder.run_id, self.causes, result=self)
        return self


def record(spec: RunSpec, folder: RunFolder, job: Job) -> dict[str, Any]:
    """What attaching to a run and resuming it need: `run.json`."""
    c = spec.configuration
    return {
        "run_id": spec.run_id,
        "job": job.name,
        "platform": c.platform,
        "address": folder.objects.resolve().as_uri() if c.channel == "folder" else c.channel,
        "configuration": dataclasses.asdict(c),
        "spec": json.loads(spec.to_bytes()),
        "budget_usd": job.limits.budget_usd,
        "wall_time": time.time(),
    }


def open_run(run_id: str) -> tuple[RunFolder, dict[str, Any], RunSpec]:
    """A run that can be attached to or resumed.

    Raises:
        RunNotFound: no such run.
        UserError: it was simulated.
    """
    folder = run_dir.find(run_id)
    run = folder.read("run.json")
    if run is None:
        raise RunNotFound(f"run {run_id!r} has no readable run.json")
    if run["platform"] == "simulated":
        raise UserError(f"run {folder.run_id} was simulated: its functions lived and ended inside one command")
    return folder, run, RunSpec.from_bytes(json.dumps(run["spec"]).encode())


def events_of(folder: RunFolder) -> Iterator[Event]:
    """Everything that is written down of a run; what is cut off or unknown is passed over."""
    with folder.events.open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                yield from_json(line)


def session_of(folder: RunFolder) -> float:
    """`wall_time` of the latest launch or resume."""
    return max((e.wall_time for e in events_of(folder) if isinstance(e, RunStarted)), default=0.0)


def last_t(folder: RunFolder) -> float:
    """Time of a run's latest event."""
    return max((e.t for e in events_of(folder)), default=0.0)


def conclude(folder: RunFolder, run: dict[str, Any], ledger: CostMeter, ending: RunOutcome, out: Path | None) -> Result:
    """Writes result, weights and report, and copies them to `out`. A run that has finished is never marked otherwise."""
    known = folder.read("result.json")
    if known is not None and known["status"] == "finished" and ending.status != "finished":
        return Result(known, folder)
    value = summary(ledger, run, status=ending.status, final=ending.final)
    folder.write("result.json", value)
    if ending.arrays is not None:
        write_weights(folder.weights, ending.arrays, (ending.final or {}).get("bf16", ()))
    write_report(folder, ledger.prices)
    copy(folder, out)
    return Result(value, folder, tuple(ending.causes))


def copy(folder: RunFolder, out: Path | None) -> None:
    """Copies result, weights and report, as far as they are there."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", folder.weights.name, "report.html", "report.png"):
        if (folder.path / name).exists():
            shutil.copy2(folder.path / name, out / name)


def write_report(folder: RunFolder, prices: Prices, out: Path | None = None) -> list[Path]:
    """`report.html` and, if matplotlib is there, `report.png`."""
    from ephemeron.training import report

    return report.write_report(folder.path, out, prices=prices)


def write_weights(path: Path, arrays: Arrays, bf16: Sequence[str]) -> None:
    """A safetensors file with the names of the module's `state_dict`, loadable by any tool."""
    if bf16:
        import torch
        from safetensors.torch import save_file

        tensors = {n: torch.from_numpy(a) for n, a in arrays.items()}
        save_file({n: t.view(torch.bfloat16) if n in bf16 else t for n, t in tensors.items()}, str(path))
    else:
        from safetensors.numpy import save_file as save_numpy

        save_numpy(arrays, str(path))


def prices_of(run: dict[str, Any]) -> Prices:
    """The prices that a run was billed at."""
    return Prices(**run["spec"]["prices"])
