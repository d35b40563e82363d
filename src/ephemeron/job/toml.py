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
import difflib
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ephemeron.errors import JobError
from ephemeron.job.spec import Configuration, Job, Simulation, check_data, sync_name


def load_job(path: str | Path) -> Job:
    """Reads a job file. Relative paths in it are relative to the file.

    Raises:
        JobError: the file is absent, is no TOML, or has an unknown key, a wrong type or a bad value.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise JobError(f"job file {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"job file {path} cannot be read: {e}") from None
    except tomllib.TOMLDecodeError as e:
        raise JobError(f"{path} is not valid TOML: {e}") from None
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
            raise JobError(f"{where}: unknown key run.{key}", remedy=_suggest(key, Configuration))
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


def build(cls: type[Any], raw: Any, *, where: str) -> Any:
    """A frozen dataclass from a mapping, strictly.

    Raises:
        JobError: unknown or missing key, or wrong type.
    """
    if not isinstance(raw, Mapping):
        raise JobError(f"{where}: expected a table, got {raw!r}")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise JobError(f"{where}: unknown key {key}", remedy=_suggest(key, cls))
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in raw.items()}
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise JobError(f"{where}: missing key {name}")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        return _convert(next(o for o in options if o is not type(None)), value, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise JobError(
                f"{where} = {value!r} is not known", remedy=f"use one of {', '.join(map(str, get_args(hint)))}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise JobError(f"{where} = {value!r} should be a list")
        return tuple(_convert(get_args(hint)[0], v, where) for v in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise JobError(f"{where} = {value!r} should be a table")
        inner = get_args(hint)[1]
        return {k: v if inner is Any else _convert(inner, v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if isinstance(value, str) and "target" in {f.name for f in dataclasses.fields(hint)}:
            value = {"target": value}  # model = "models:cnn" is short for {target = "models:cnn"}
        return build(typing.cast("type[Any]", hint), value, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise JobError(f"{where} = {value!r} should be {_name(hint)}")
    return value


def _name(hint: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}.get(
        hint, hint.__name__
    )


def _suggest(key: str, cls: type) -> str:
    names = [f.name for f in dataclasses.fields(cls)]
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"


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
