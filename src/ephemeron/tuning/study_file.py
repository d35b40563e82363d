"""Study files in TOML, read strictly: every mistake is one line that names the file, the value and a remedy.

job = "job.toml"                     # relative to this file
metric = "accuracy"                  # of the job's evaluations
mode = "max"
sampler = "tpe"                      # grid, random or tpe
pruner = "asha"                      # none, asha or hyperband
trials = 40
budget_usd = 0.50                    # of all trials together

[space]
optimizer.options.lr = { low = 1e-3, high = 1.0, log = true }
run.workers = [1, 2, 4]

Or of a Python function: `objective = "module:function"` in place of `job`, and a space of its arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import AtLeast, Count, Form, Positive, Typed, build, plain
from ephemeron.errors import JobError
from ephemeron.executor.shipping import Shipment
from ephemeron.training.job.spec import Mode
from ephemeron.tuning.objective import ObjectiveSpec
from ephemeron.tuning.objective_call import CallForm
from ephemeron.tuning.space import FIXED, JobTemplate, Parameter, grid_size, parameters_of

MOST_FAILURES = 5
"""Trials of an objective that may fail in a row."""
VALUE = "value"
"""Metric of an objective whose study names none."""
_LATER = ("objective", "max_failures")
"""Keys that earlier releases do not have: a study without them has the digest that it had there."""
_OF_JOBS = ("data_service", "profile")
"""Keys that are for jobs alone."""

SamplerName = Literal["grid", "random", "tpe"]
PrunerName = Literal["none", "asha", "hyperband"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunerSpec(Typed):
    """When trials that do badly are ended early."""

    SHORTHAND: ClassVar[str] = "name"

    name: PrunerName = "none"
    """`asha`: successive halving, decided as soon as a trial has reported; `hyperband`: several of them, with other first
    decisions."""
    reduction_factor: Annotated[int, AtLeast(2)] = 3
    """One in so many trials goes on after a decision; the next one comes after so many times the evaluations."""
    min_evaluations: Count | None = None
    """Evaluations of a trial before the first decision; None: of `asha` the square root of all evaluations of a trial, rounded; of
    `hyperband`, which varies it by itself, 1."""

    def first_decision(self, evaluations: int) -> int:
        """Number of the evaluation at which trials are first compared, of so many evaluations in a whole trial."""
        if self.min_evaluations is not None:
            return self.min_evaluations
        return max(1, round(math.sqrt(evaluations))) if self.name == "asha" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySpec(Typed):
    """What is tuned, how, and within which limits."""

    name: Annotated[str, Form(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits, dots, hyphens and underscores")]
    """Name of the study; in a file, the file's name by default. Its folder and its runs begin with it."""
    job: Path | None = None
    """The job file; relative to the study's. None: an objective is searched."""
    objective: ObjectiveSpec | None = None
    """A Python function: `module:function`, or a table with `function`. None: a job is searched."""
    metric: str = "loss"
    """Metric of the job's evaluations. The value of a trial is that of its last evaluation. Of an objective: key of results that are
    dicts, and name of those that are numbers; by default `value`."""
    mode: Mode = "min"
    """`min`: lower is better; `max`: higher is better."""
    sampler: SamplerName = "tpe"
    """`grid`: all combinations; `random`; `tpe`: tree-structured Parzen estimators."""
    pruner: PrunerSpec = field(default_factory=PrunerSpec)
    """When trials are ended early: a name, or a table with `name`."""
    trials: Count | None = None
    """Number of trials; None: all of a grid."""
    seed: int = 0
    """Seed of the suggestions."""
    concurrency: Count | None = None
    """Functions of all trials at once; None: as many as the platform has; on this machine, one for each core, or the largest
    trial."""
    budget_usd: Positive | None = None
    """Cost of all trials together, US dollars."""
    deadline_s: Positive | None = None
    """Seconds for which the study may run, over all of its clients."""
    max_failures: Count | None = None
    """Trials that may fail in a row before the study is stopped; None: 5 of an objective, any number of a job."""
    data_service: Annotated[int, AtLeast(0)] = 0
    """Loader functions of a data service through which all trials read their flow; 0: each trial loads for itself. Only on
    platform `local`."""
    predict: bool = True
    """Predict time and cost of every trial from a profile of the job, which is measured once if it is not known."""
    profile: Path | None = None
    """A profile.json, instead of measuring; relative to the study's file."""
    space: Mapping[str, object]
    """By dotted key of the job file, or argument of the objective: a list of values, or a table with `low`, `high`, and optionally
    `log` or `step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptObjective:
    """An objective as it was sent, which functions can run though its module is not here."""

    shipment: Shipment
    form: CallForm


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFile:
    """A study as it was read."""

    spec: StudySpec
    template: JobTemplate | None = None
    """The job, of which trials are variants; None: an objective is searched."""
    space: tuple[Parameter, ...]
    text: str
    """The file."""
    path: Path | None = None
    """Where it is; None: it was no file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that were given in place of values of the files."""
    function: Callable[..., Any] | None = None
    """The objective, where a program has given it; None: it is found by its name."""
    kept: KeptObjective | None = None
    """The objective as it was sent first, where functions drive the study that have none of its files."""

    def with_options(self, options: Mapping[str, Any]) -> StudyFile:
        """The study with `platform`, `channel`, `max_workers` and `budget_usd` in place of those of its files."""
        if not options:
            return self
        names = {"max_workers": "concurrency", "budget_usd": "budget_usd"}
        of_job = {name: value for name, value in options.items() if name not in names}
        if self.spec.objective is not None:
            changes: dict[str, Any] = {names[name]: value for name, value in options.items() if name in names}
            changes["objective"] = dataclasses.replace(self.spec.objective, **of_job)
            return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes), options=options)
        document = {**self.job.document, "run": {**self.job.document.get("run", {}), **of_job}}
        spec = dataclasses.replace(self.spec, **{names[name]: value for name, value in options.items() if name in names})
        return dataclasses.replace(self, spec=spec, template=dataclasses.replace(self.job, document=document), options=options)

    def with_function(self, function: Callable[..., Any]) -> StudyFile:
        """The study with an objective that a program has given."""
        return dataclasses.replace(self, function=function)

    @property
    def job(self) -> JobTemplate:
        """The job of a study of one."""
        assert self.template is not None
        return self.template

    @property
    def digest(self) -> str:
        """Digest of all values of the study file and the job file."""
        if self.spec.objective is None:
            known = plain(dataclasses.replace(self.spec, job=Path(self.job.path.name)))
            value = {"study": {k: v for k, v in known.items() if v is not None or k not in _LATER}, "job": self.job.document}
        else:
            code = tuple(Path(folder.name) for folder in self.spec.objective.code)
            known = plain(dataclasses.replace(self.spec, objective=dataclasses.replace(self.spec.objective, code=code)))
            if known["objective"]["requirements"] is None:
                del known["objective"]["requirements"]
            value = {"study": known}
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def max_failures(self) -> int | None:
        """Trials that may fail in a row; None: any number."""
        return self.spec.max_failures or (None if self.spec.objective is None else MOST_FAILURES)

    @property
    def trials(self) -> int:
        """Number of trials."""
        if self.spec.sampler == "grid":
            return min(self.spec.trials or grid_size(self.space), grid_size(self.space))
        assert self.spec.trials is not None
        return self.spec.trials


def load_study(path: str | Path) -> StudyFile:
    """Reads a study file and its job.

    Raises:
        JobError: a file is absent or malformed, has an unknown key, a wrong type or a value out of bounds; the space is empty, or
            names a key that the job does not have.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise JobError(f"study file {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"study file {path} cannot be read: {e}") from None
    raw = {"name": path.stem, **parse_toml(text, where=str(path))}
    return dataclasses.replace(parse_study(raw, folder=path.resolve().parent, where=str(path), text=text), path=path.resolve())


def parse_study(raw: Mapping[str, Any], *, folder: Path, where: str = "study", text: str = "") -> StudyFile:
    """A study from a mapping such as TOML yields.

    Args:
        raw: the mapping.
        folder: that relative paths are relative to.
        where: prefix of messages.
        text: the file, which is copied into the study's folder.

    Raises:
        JobError: see `load_study`.
    """
    spec = build(StudySpec, raw, where=where)
    if (spec.job is None) == (spec.objective is None):
        raise JobError(
            f"{where}: missing key job" if spec.job is None else f"{where}: job and objective exclude each other",
            remedy="name the job file whose keys are searched, or a Python function: objective = 'module:function'",
        )
    template = None
    if spec.objective is not None:
        spec = _objective_of(spec, raw, folder=folder, where=where)
    else:
        assert spec.job is not None
        profile = None if spec.profile is None else folder / spec.profile.expanduser()
        spec = dataclasses.replace(spec, job=folder / spec.job.expanduser(), profile=profile)
    space = parameters_of(spec.space, where=f"{where}: space", fixed=FIXED if spec.objective is None else ())
    if spec.objective is None:
        assert spec.job is not None
        template = JobTemplate.load(spec.job)
        template.check(space, where=f"{where}: space")
    if spec.sampler == "grid":
        for parameter in space:
            parameter.grid_values(where=f"{where}: space")
    elif spec.trials is None:
        raise JobError(f"{where}: missing key trials", remedy="say how many trials there may be, such as trials = 20")
    return StudyFile(spec=spec, template=template, space=space, text=text)


def _objective_of(spec: StudySpec, raw: Mapping[str, Any], *, folder: Path, where: str) -> StudySpec:
    """A study of an objective, with paths that do not depend on the working folder.

    Raises:
        JobError: it has keys that are for jobs.
    """
    for key in _OF_JOBS:
        if raw.get(key):
            raise JobError(f"{where}: {key} is for studies of a job", remedy="leave it out")
    o = spec.objective
    assert o is not None
    found = dataclasses.replace(
        o,
        code=tuple(folder / path.expanduser() for path in o.code),
        prices=None if o.prices is None else folder / o.prices.expanduser(),
        requirements=None if o.requirements is None else folder / o.requirements.expanduser(),
    )
    return dataclasses.replace(spec, objective=found, metric=spec.metric if "metric" in raw else VALUE)
