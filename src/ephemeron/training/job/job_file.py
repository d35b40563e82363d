"""Job files in TOML or JSON, read strictly: every mistake is one line that names the file, the value and a remedy.

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
import json
import os
import re
from collections.abc import Mapping
from glob import glob
from pathlib import Path

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import build
from ephemeron.data.spec import check_data
from ephemeron.errors import JobError
from ephemeron.training.job.former_names import refuse_former_names
from ephemeron.training.job.spec import PROGRAMS, Job, RunRegion, check_program

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
"""Beginning of an address as a part of a path."""


def load_job(path: str | Path) -> Job:
    """Reads a job file, in JSON if its name ends in `.json` and in TOML otherwise. Relative paths in it are relative to it.

    Raises:
        JobError: the file is absent or malformed, or has an unknown key, a wrong type or a value out of bounds.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise JobError(f"job file {path} does not exist", remedy="give the path of a TOML or JSON file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"job file {path} cannot be read: {e}") from None
    raw = _parse_json(text, str(path)) if path.suffix == ".json" else parse_toml(text, where=str(path))
    if isinstance(raw, dict):
        raw = {"name": path.stem, "code": ["."], **raw}
        raw.pop("$schema", None)  # editors find the schema of a JSON file by it
    return parse_job(raw, folder=path.resolve().parent, where=str(path))


def parse_job(raw: object, *, folder: Path, where: str = "job") -> Job:
    """A job from a mapping such as TOML or JSON yields.

    Args:
        raw: the mapping.
        folder: that relative paths are relative to.
        where: prefix of messages.

    Raises:
        JobError: see `load_job`.
    """
    given = [name for name in PROGRAMS if isinstance(raw, Mapping) and name in raw]
    if isinstance(raw, Mapping) and len(given) != 1:
        others = {"name": "", **{name: value for name, value in raw.items() if name not in PROGRAMS}}
        for name in given or ["model"]:  # other mistakes come first
            build(Job, {**others, name: raw.get(name, "m:f")}, where=where)
        check_program(given, where=where)
    if isinstance(raw, Mapping) and isinstance(raw.get("run"), Mapping):
        refuse_former_names(raw["run"], where=f"{where}: run.")
    job = build(Job, raw, where=where)
    code = tuple(_existing(folder / os.path.expanduser(p), f"{where}: code", want_folder=True) for p in job.code)
    data = job.data
    if data.path is not None:
        data = dataclasses.replace(data, path=_existing(folder / os.path.expanduser(data.path), f"{where}: data.path", may_be_glob=True))
    try:
        check_data(data)
    except JobError as e:
        raise JobError(f"{where}: {e.problem}", remedy=e.remedy) from None
    if data.flow is not None and isinstance(raw, Mapping) and "source" in raw["data"]:
        raise JobError(f"{where}: data.source and data.flow exclude each other", remedy="leave one out")
    if job.init is not None:
        job = dataclasses.replace(job, init=_existing(folder / os.path.expanduser(job.init), f"{where}: init"))
    run = dict(job.run)
    for name, key in (("stages", "placement"), ("regions", "file")):
        if isinstance(table := run.get(name), Mapping) and table.get(key):
            run[name] = {**table, key: str(_existing(folder / os.path.expanduser(str(table[key])), f"{where}: run.{name}.{key}"))}
    if isinstance(regions := run.get("regions"), Mapping):
        run["regions"] = regions = dict(regions)
        if tables := regions.get("region"):
            regions["region"] = tuple(_located(region, folder) for region in tables)
        if authority := regions.get("authority"):
            regions["authority"] = folder / authority.expanduser()
    loggers = tuple(
        logger if logger.folder is None else dataclasses.replace(logger, folder=(folder / os.path.expanduser(logger.folder)).resolve())
        for logger in job.loggers
    )
    return dataclasses.replace(job, code=code, data=data, run=run, loggers=loggers)


def _located(region: RunRegion, folder: Path) -> RunRegion:
    """A region with paths relative to a folder."""

    def at(path: Path | None) -> Path | None:
        return None if path is None else folder / path.expanduser()

    return dataclasses.replace(
        region,
        data=None if region.data is None else dataclasses.replace(region.data, path=at(region.data.path)),
        prices=at(region.prices),
        certificate=at(region.certificate),
        certificate_key=at(region.certificate_key),
    )


def _parse_json(text: str, where: str) -> object:
    try:
        raw: object = json.loads(text)
    except RecursionError:
        raise JobError(f"{where} is not valid JSON: brackets are nested too deep") from None
    except ValueError as e:  # of json, and Python's of integers that are too long
        raise JobError(f"{where} is not valid JSON: {str(e).partition(';')[0]}") from None
    return raw


def _existing(path: Path, where: str, *, want_folder: bool = False, may_be_glob: bool = False) -> Path:
    scheme = next((part for part in path.parts if _SCHEME.fullmatch(part)), "")
    if scheme:  # a path has lost one of its slashes
        rest = "/".join(path.parts[path.parts.index(scheme) + 1 :])
        raise JobError(
            f"{where} = {scheme}//{rest} is an address, and data are read from this machine", remedy="copy them to a folder, and name that"
        )
    path = path.resolve()
    if want_folder and not path.is_dir():
        raise JobError(f"{where}: {path} is not a folder")
    if not path.exists() and not (may_be_glob and glob(str(path), recursive=True)):
        raise JobError(f"{where}: {path} does not exist")
    return path
