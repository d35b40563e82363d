"""Parameters of a study: keys of the job file, the values that each may have, and the job that follows from chosen values."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.training.driver import configure
from ephemeron.training.job import Configuration, Job, parse_job

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = str | int | float | bool
"""A value of a parameter, as TOML, JSON and Optuna have it."""
Values = Mapping[str, Value]
"""Chosen values by dotted key."""

_RANGE = frozenset(("low", "high", "log", "step"))
FIXED = ("name", "code", "script.file", "simulation", "run.platform", "run.regions")
"""Keys of a job, with all below them, that trials have in common."""
_ARGUMENTS = "script.arguments."
"""Beginning of keys that are options of a script: `script.arguments.lr` is its `--lr`."""
MOST_GRID = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """A range of numbers, both ends included."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: values to choose from, or a range of numbers."""

    key: str
    """Dotted key of the job file, such as `optimizer.options.lr`, or argument of the objective."""
    choices: tuple[Value, ...] = ()
    range: _Range | None = None

    @property
    def integer(self) -> bool:
        """Whether it is a range of whole numbers."""
        r = self.range
        return r is not None and isinstance(r.low, int) and isinstance(r.high, int) and not isinstance(r.step, float)

    @property
    def edges(self) -> tuple[Value, ...]:
        """All choices, or both ends of the range."""
        return self.choices if self.range is None else (self.range.low, self.range.high)

    @property
    def distribution(self) -> BaseDistribution:
        """The parameter as Optuna has it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        r = self.range
        if r is None:
            return CategoricalDistribution(self.choices)
        if self.integer:
            return IntDistribution(int(r.low), int(r.high), log=r.log, step=int(r.step or 1))
        return FloatDistribution(float(r.low), float(r.high), log=r.log, step=None if r.step is None else float(r.step))

    def grid_values(self, where: str = "space") -> tuple[Value, ...]:
        """Its values in a grid.

        Raises:
            JobError: there are infinitely many.
        """
        r = self.range
        if r is None:
            return self.choices
        if r.step is None and not self.integer:
            raise JobError(
                f"{where}.{self.key} is a range of numbers, of which a grid needs to know which", remedy="list values, or give step"
            )
        step = r.step or 1
        count = math.floor((r.high - r.low) / step + 1e-9) + 1
        if count > MOST_GRID:
            raise JobError(f"{where}.{self.key} has {count:,} values", remedy="list those that are to be tried")
        return tuple(r.low + i * step for i in range(count))


def parameters_of(raw: Mapping[str, object], *, where: str, fixed: Sequence[str] = FIXED) -> tuple[Parameter, ...]:
    """Parameters of the table `[space]`, in its order. Keys may be dotted (`a.b = …`) or quoted (`"a.b" = …`).

    Args:
        raw: the table.
        where: prefix of messages.
        fixed: keys that cannot be searched, with all below them.

    Raises:
        JobError: it is empty, or a parameter has no values, or bounds that do not fit.
    """
    found = [_parameter(key, value, where) for key, value in _flat(raw)]
    if not found:
        example = '"optimizer.options.lr"' if fixed else "lr"
        raise JobError(f"{where} is empty", remedy=f"name what to search, such as {example} = [0.01, 0.1]")
    keys = [p.key for p in found]
    for key in keys:
        if keys.count(key) > 1:
            raise JobError(f"{where}.{key} is given twice", remedy="leave one out")
        for each in fixed:
            if key == each or key.startswith(f"{each}."):
                raise JobError(f"{where}.{key} is the same for all trials", remedy="set it in the job")
    return tuple(found)


def _flat(raw: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and not (value and value.keys() <= _RANGE):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parameter(key: str, value: object, where: str) -> Parameter:
    if isinstance(value, (list, tuple)):
        if not value:
            raise JobError(f"{where}.{key} has no values", remedy="list at least one")
        for each in value:
            if not isinstance(each, (str, int, float, bool)):
                raise JobError(f"{where}.{key}: {each!r} is not a number, a text, true or false", remedy="search a key below it")
            if isinstance(each, float) and not math.isfinite(each):
                raise JobError(f"{where}.{key}: {each} is not finite")
        if len({json.dumps(each) for each in value}) < len(value):
            raise JobError(f"{where}.{key} lists a value twice", remedy="leave one out")
        return Parameter(key, choices=tuple(value))
    if not isinstance(value, Mapping):
        raise JobError(f"{where}.{key} = {value!r} is no domain", remedy="give a list of values, or { low = …, high = … }")
    r = build(_Range, value, where=f"{where}.{key}")
    if not (math.isfinite(r.low) and math.isfinite(r.high) and r.low < r.high):
        raise JobError(f"{where}.{key}: low = {r.low} is not below high = {r.high}", remedy="exchange them")
    if r.log and r.low <= 0:
        raise JobError(f"{where}.{key}: low = {r.low} has no logarithm", remedy="give low above 0, or leave log out")
    if r.log and r.step is not None:
        raise JobError(f"{where}.{key}: log and step exclude each other", remedy="leave one out")
    if r.step is not None and not 0 < r.step <= r.high - r.low:
        raise JobError(f"{where}.{key}: step = {r.step} should be above 0 and at most high − low")
    return Parameter(key, range=r)


def grid_size(space: Sequence[Parameter]) -> int:
    """Number of combinations."""
    return math.prod(len(p.grid_values()) for p in space)


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """A job file, of which trials are variants."""

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> JobTemplate:
        """Reads a job file.

        Raises:
            JobError: it is absent, or malformed.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            raise JobError(f"job file {path} cannot be read", remedy="name it relative to the study's file") from None
        try:
            raw = json.loads(text) if path.suffix == ".json" else parse_toml(text, where=str(path))
        except ValueError as e:
            raise JobError(f"{path} is not valid JSON: {e}") from None
        if not isinstance(raw, dict):
            raise JobError(f"{path}: expected a table")
        raw.pop("$schema", None)
        found = cls(path.resolve(), {"name": path.stem, "code": ["."], **raw})
        found.job({})
        return found

    def with_values(self, values: Values) -> dict[str, Any]:
        """The document with values set.

        Raises:
            JobError: a key is below something that is no table.
        """
        document = copy.deepcopy(dict(self.document))
        for key, value in values.items():
            if key.startswith(_ARGUMENTS):
                _set_argument(document, key.removeprefix(_ARGUMENTS), value)
                continue
            *tables, last = key.split(".")
            table = document
            for i, name in enumerate(tables):
                if isinstance(table.get(name), str):  # model = "model:build" is short for a table
                    table[name] = {"target": table[name]}
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    raise JobError(f"{key}: {'.'.join(tables[: i + 1])} of {self.path.name} is no table")
            table[last] = value
        return document

    def job(self, values: Values, *, where: str | None = None) -> Job:
        """The job with chosen values.

        Raises:
            JobError: a key does not exist, or a value is out of bounds.
        """
        return parse_job(self.with_values(values), folder=self.path.parent, where=where or str(self.path))

    def configured(self, values: Values) -> tuple[Job, Configuration]:
        """Job and configuration with chosen values.

        Raises:
            JobError: values contradict each other.
        """
        job = self.job(values)
        return job, configure(job)

    def check(self, space: Sequence[Parameter], *, where: str) -> None:
        """Refuses keys that the job does not have, and values that its types exclude, one parameter at a time.

        Raises:
            JobError: see above.
        """
        for parameter in space:
            for value in parameter.edges:
                self.job({parameter.key: value}, where=where)


def _set_argument(document: dict[str, Any], name: str, value: Value) -> None:
    """Sets an option in the arguments of the document's script."""
    script, flag = document.get("script"), f"--{name}"
    if not isinstance(script, dict):
        raise JobError(f"{_ARGUMENTS}{name} is for jobs of a script", remedy="name a key of this job")
    given = list(script.get("arguments", ()))
    kept = [a for i, a in enumerate(given) if not a.startswith(f"{flag}=") and flag not in (a, given[i - 1] if i else "")]
    script["arguments"] = [*kept, flag, str(value)]
