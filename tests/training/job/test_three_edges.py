"""A job is checked in the same way and with the same words whether it comes from TOML, JSON or Python; its schema agrees."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import jsonschema
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import ephemeron
from ephemeron.config.typed import LARGEST, Bound, Form, Partial, plain
from ephemeron.errors import JobError
from ephemeron.training.job import Configuration, ExchangeOptions, Job, RegionOptions, ResizeOptions, StageOptions, load_job
from ephemeron.training.job.schema import job_schema

BASE: dict[str, Any] = {"name": "j", "model": "m:f", "code": []}
FIELDS = {
    (*prefix, f.name): hints[f.name]
    for prefix, cls in (
        ((), Job),
        (("model",), ephemeron.Target),
        (("data",), ephemeron.DataSpec),
        (("limits",), ephemeron.JobLimits),
        (("simulation",), ephemeron.Simulation),
        (("run",), Configuration),
        (("run", "exchange"), ExchangeOptions),
        (("run", "stages"), StageOptions),
        (("run", "resize"), ResizeOptions),
        (("run", "regions"), RegionOptions),
    )
    for hints in [typing.get_type_hints(cls, include_extras=True)]
    for f in dataclasses.fields(cls)
}
"""Type of every value of a job file by its path."""
SCHEMA = jsonschema.Draft202012Validator(json.loads(job_schema()))
BESIDE: dict[str, dict[str, Any]] = {"model": {"target": "m:f"}, "data": {"flow": "m:f"}}
"""What the other keys of a table need."""
TEXTS = st.sampled_from(["", "x", "15 min", "1", "2 GB", "nan", "a:b"])
PLAIN = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-3, 2**60),
    st.floats(),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["a", "b", "target", "workers", "options"]), st.integers(0, 2), max_size=2),
)
"""What TOML and JSON can both hold."""


def fits(hint: Any, value: Any) -> bool:
    """A second opinion, from the annotations alone, on whether a value may be there."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        kind, *bounds = args
        return fits(kind, value) and all(_holds(b, value) for b in bounds)
    if origin in (Union, types.UnionType):
        return any(fits(option, value) for option in args if option is not type(None))
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, list) and all(fits(args[0], v) for v in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict)
    if dataclasses.is_dataclass(hint):
        names = {f.name for f in dataclasses.fields(hint)}
        if isinstance(value, str):
            return "target" in names
        hints = typing.get_type_hints(hint, include_extras=True)
        required = {
            f.name for f in dataclasses.fields(hint) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        return isinstance(value, dict) and required <= set(value) <= names and all(fits(hints[k], v) for k, v in value.items())
    if hint in (int, float):
        number = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        return number and not math.isnan(value) and (isinstance(value, float) or abs(value) <= LARGEST)
    return isinstance(value, (str, Path) if hint is Path else hint)


def _holds(bound: Any, value: Any) -> bool:
    if isinstance(bound, Bound):
        return bound.holds(value)
    if isinstance(bound, Form):
        return bound.pattern.fullmatch(value) is not None
    assert isinstance(bound, Partial)
    hints = typing.get_type_hints(bound.cls, include_extras=True)
    return all(k in hints and fits(hints[k], v) for k, v in value.items())


def in_json_schema(value: Any) -> bool:
    """Whether JSON Schema can distinguish the value: it takes 3.0 for 3, and knows no infinity, NaN or largest number."""
    if isinstance(value, float):
        return math.isfinite(value) and not value.is_integer()
    return not isinstance(value, int) or abs(value) <= LARGEST


def toml(value: Any) -> str:
    """A value in TOML; tables are inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def answers(raw: dict[str, Any], folder: Path) -> list[Job | str]:
    """The job, or the refusal without its prefix, from TOML, JSON and Python."""
    files = {folder / "j.toml": "\n".join(f"{k} = {toml(v)}" for k, v in raw.items()), folder / "j.json": json.dumps(raw)}
    found: list[Job | str] = []
    for path, text in files.items():
        path.write_text(text)
        found.append(answer(f"{path}: ", lambda path=path: load_job(path)))
    return [*found, answer("Job: ", lambda: Job(**raw))]


def answer(prefix: str, make: Callable[[], Job]) -> Job | str:
    """The job, or the refusal without its prefix."""
    try:
        return make()
    except JobError as e:
        text = str(e)
    assert text.startswith(prefix), text
    return text.removeprefix(prefix)


@given(path=st.sampled_from(sorted(FIELDS)), value=PLAIN)
@example(path=("limits", "deadline_s"), value=math.nan)
@example(path=("run", "workers"), value=0)
@example(path=("run", "function_timeout_s"), value=LARGEST + 1)
@example(path=("run", "function_timeout_s"), value="15 min")
@settings(deadline=None, max_examples=150)
def test_the_same_answer_from_toml_json_and_python(tmp_path_factory: pytest.TempPathFactory, path: Any, value: Any) -> None:
    named = (("code",), ("data", "path"), ("run", "stages", "placement"), ("run", "regions", "file"), ("init",))
    assume(path not in named)  # what they name has to exist
    assume(path[0] != "task")  # one of model and task has to be given
    raw: dict[str, Any] = {**BASE}
    if len(path) == 1:
        raw[path[0]] = value
    elif len(path) == 3:
        raw[path[0]] = {path[1]: {path[2]: value}}
    else:
        raw[path[0]] = {**BESIDE.get(path[0], {}), path[1]: value} if path != ("data", "source") else {path[1]: value}
    first, *others = answers(raw, tmp_path_factory.getbasetemp())
    assert [plain(o) for o in others] == [plain(first)] * 2
    assert isinstance(first, Job) == fits(FIELDS[path], value), first
    if in_json_schema(value):
        assert SCHEMA.is_valid(raw) == isinstance(first, Job), first
    if isinstance(first, str):
        assert ".".join(path) in first, "a refusal names the path of the value"
    if path[0] == "run" and len(path) == 2 and isinstance(first, str):
        with pytest.raises(JobError) as caught:
            ephemeron.configure(Job(**BASE), **{path[1]: value})
        assert str(caught.value) == f"configuration: {first.removeprefix('run.')}"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"run": {"worker": 4}}, "run: unknown key worker; did you mean workers?"),
        ({"limits": {"deadline_min": 4}}, "limits: unknown key deadline_min; did you mean deadline_s?"),
        ({"run": {"function_timeout_s": "15 min"}}, "run.function_timeout_s = '15 min' should be a number; give seconds, as a number"),
        ({"run": {"memory_mb": "2 GB"}}, "run.memory_mb = '2 GB' should be a whole number; give MB, as a number"),
        ({"limits": {"budget_usd": "$5"}}, "limits.budget_usd = '$5' should be a number; give US dollars, as a number"),
        (
            {"simulation": {"bandwidth_mb_s": "70 MB/s"}},
            "simulation.bandwidth_mb_s = '70 MB/s' should be a number; give MB per second, as a number",
        ),
        ({"run": {"memory_mb": 2 * 10**9}}, "run.memory_mb = 2000000000 should be from 0 to 10000000"),
    ],
)
def test_unknown_names_and_wrong_units(tmp_path: Path, raw: dict[str, Any], told: str) -> None:
    assert answers({**BASE, **raw}, tmp_path) == [told] * 3


def test_an_unknown_option_in_python() -> None:
    with pytest.raises(JobError) as caught:
        ephemeron.configure(Job(**BASE), worker=4)
    assert str(caught.value) == "unknown option 'worker'; did you mean 'workers'?"
