"""Jobs as TOML files: parsed once, strictly; every mistake is one line that names its place.

name = "digits"
epochs = 30
model = { target = "model:build", options = { width = 32 } }
optimizer = { target = "SGD", options = { lr = 0.1, momentum = 0.9 } }

[data]
source = "digits"          # or flow = "module:function"

[limits]
budget_usd = 0.50

[run]
workers = 4
sync = "hap"
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import build, suggest
from ephemeron.data.spec import check_data
from ephemeron.errors import JobError
from ephemeron.functions.world import Simulation
from ephemeron.training.job.spec import Configuration, Job, sync_name


def load_job(path: str | Path) -> Job:
    """Reads a job file. Relative paths in it are relative to the file.

    Raises:
        JobError: the file is absent, is no TOML, or has an unknown key, a wrong type or a bad value.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise JobError(f"job file {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"job file {path} cannot be read: {e}") from None
    raw = parse_toml(text, where=str(path))
    raw.setdefault("name", path.stem)
    raw.setdefault("code", ["."])
    return parse_job(raw, folder=path.resolve().parent, where=str(path))


def parse_job(raw: Mapping[str, Any], *, folder: Path, where: str = "job") -> Job:
    """A job from a mapping such as TOML or JSON yields. See `load_job`."""
    job: Job = build(Job, raw, where=where)
    code = tuple(_existing(folder / os.path.expanduser(p), f"{where}: code", want_folder=True) for p in job.code)
    data = job.data
    if data.path is not None:
        data = dataclasses.replace(data, path=_existing(folder / os.path.expanduser(data.path), f"{where}: data.path"))
    for key in job.run:
        if key not in {f.name for f in dataclasses.fields(Configuration)}:
            raise JobError(f"{where}: unknown key run.{key}", remedy=suggest(key, Configuration))
    build(Configuration, job.run, where=f"{where}: run")
    if "sync" in job.run:
        try:
            sync_name(job.run["sync"])
        except JobError as e:
            raise JobError(f"{where}: run: {e.problem}", remedy=e.remedy) from None
    _positive(where, "epochs", job.epochs)
    for name in ("deadline_s", "budget_usd", "max_global_batch"):
        value = getattr(job.limits, name)
        if value is not None:
            _positive(where, f"limits.{name}", value)
    try:
        check_data(data)
    except JobError as e:
        raise JobError(f"{where}: {e.problem}", remedy=e.remedy) from None
    if data.flow is not None and "source" in raw["data"]:
        raise JobError(f"{where}: data.source and data.flow exclude each other", remedy="leave one out")
    _check_simulation(where, job.simulation)
    run = dict(job.run)
    if run.get("placement"):
        run["placement"] = str(_existing(folder / os.path.expanduser(run["placement"]), f"{where}: run.placement"))
    return dataclasses.replace(job, code=code, data=data, run=run)


def _check_simulation(where: str, world: Simulation) -> None:
    _positive(where, "simulation.bandwidth_mb_s", world.bandwidth_mb_s)
    if world.compute is not None and set(world.compute) != {"a", "b", "m"}:
        raise JobError(f"{where}: simulation.compute needs exactly the keys a, b and m", remedy="FasDL, equation 3-12")
    numbers = {n: getattr(world, n) for n in ("latency_s", "cold_start_s", "warm_start_s", "straggler_sigma")}
    numbers |= {f"compute.{n}": value for n, value in (world.compute or {}).items()}
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise JobError(f"{where}: simulation.{name} = {value} should be a number from 0")


def _existing(path: Path, where: str, *, want_folder: bool = False) -> Path:
    path = path.resolve()
    if want_folder and not path.is_dir():
        raise JobError(f"{where}: {path} is not a folder")
    if not path.exists():
        raise JobError(f"{where}: {path} does not exist")
    return path


def _positive(where: str, name: str, value: float) -> None:
    if not value > 0:  # not `<=`: NaN is no limit either
        raise JobError(f"{where}: {name} = {value} should be positive")
