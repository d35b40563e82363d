"""`tune`: a study of a Python function, without a study file. Its folder has one, by which other clients go on with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.toml import parse_toml, toml_text
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.executor.environment import seen_by_client
from ephemeron.tuning.engine import OnTrial
from ephemeron.tuning.folder import StudyFolder, folder_of
from ephemeron.tuning.objective import named
from ephemeron.tuning.study import Study, StudyResult
from ephemeron.tuning.study_file import PrunerSpec, parse_study

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings

_OF_FUNCTIONS = (
    *("platform", "channel", "memory_mb", "function_timeout_s", "timeout_s", "retries", "code_include", "code_exclude", "requirements"),
    "prices",
)
"""Options that are keys of the table `[objective]`."""


def tune(
    objective: Callable[..., Any] | str,
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    metric: str | None = None,
    mode: str = "min",
    sampler: str = "tpe",
    pruner: str | Mapping[str, Any] | PrunerSpec = "none",
    seed: int = 0,
    name: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    max_workers: int | None = None,
    budget_usd: float | None = None,
    deadline_s: float | None = None,
    max_failures: int | None = None,
    code: Sequence[str | Path] = (),
    settings: Settings | None = None,
    labels: Mapping[str, str] | None = None,
    on_trial: OnTrial = lambda trial: None,
    **functions: Any,
) -> StudyResult:
    """Searches for the parameters with which a Python function gives the best value. Needs Optuna here, and neither it nor PyTorch in functions.

    Args:
        objective: `f(lr, depth)`, with parameters by their names, or `f(params)`, with all of them as a dict; an argument `trial` is the
            `Trial`, which reports values before the end. It returns a number, or a dict with the metric. A function of a module is sent
            as its folder; a closure, a lambda or one of a notebook by value; or `module:function`.
        space: by parameter: a list of values, or `{"low": …, "high": …}`, optionally with `log` or `step`.
        trials: number of trials; None: all of a grid.
        metric: key of results that are dicts, and name of those that are numbers; None: `value`.
        mode: `min` or `max`.
        sampler: `tpe`, `random` or `grid`.
        pruner: `none`, `asha`, `hyperband`, or a table; see `PrunerSpec`.
        seed: of the suggestions.
        name: of the study among runs; None: that of the function.
        out: folder of the study; None: one in the home folder, by its name.
        resume: go on with a study that was interrupted, or whose client has ended.
        max_workers: functions at once, each with a trial. None: the cores of this machine; elsewhere 100, or as many as may run.
        budget_usd: cost of all trials together at which the study ends.
        deadline_s: seconds for which it may run, over all of its clients.
        max_failures: trials that may fail in a row before it is stopped; None: 5.
        code: folders to send along, beside those of the modules that define the function.
        settings: location of the function on a cloud, such as `AwsSettings`.
        labels: names and values by which the study is found; see `runs.labels`.
        on_trial: called with every trial that has begun or ended.
        functions: `platform` (`local`), `channel`, `memory_mb`, `function_timeout_s`, `timeout_s` (of a trial), `retries` (2: times that a
            trial begins again whose function died), `code_include`, `code_exclude`, `requirements`, `prices`.

    Returns:
        The study, of which `best` is the best trial, with its `value` and `parameters`.

    Raises:
        UserError: the study is refused; nothing was started. Or it has begun, and `resume` is not set, or the other way round.
        PlatformError, ChannelError: functions cannot run. It can be resumed.
        KeyboardInterrupt: it was stopped by an interrupt, and can be resumed.
        MissingExtra: Optuna is not installed.
    """
    study = study_of(
        objective,
        space,
        out=out,
        code=code,
        trials=trials,
        metric=metric,
        mode=mode,
        sampler=sampler,
        pruner=plain(pruner) if isinstance(pruner, PrunerSpec) else pruner,
        seed=seed,
        name=name,
        max_workers=max_workers,
        budget_usd=budget_usd,
        deadline_s=deadline_s,
        max_failures=max_failures,
        **functions,
    )
    study.cloud = settings
    return study.run(resume=resume, labels=labels, on_trial=on_trial)


def study_of(
    objective: Callable[..., Any] | str,
    space: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    code: Sequence[str | Path] = (),
    name: str | None = None,
    max_workers: int | None = None,
    **options: Any,
) -> Study:
    """The study of a function, which may have begun.

    Args:
        objective, space, out, code, name, max_workers: see `tune`.
        options: the others of `tune` that are keys of a study file or of its table `[objective]`; None: its default.

    Raises:
        JobError: one of them is refused, or has changed since the study began.
        MissingExtra: Optuna is not installed.
    """
    seen_by_client(options.get("requirements"), options.get("platform") or "local")
    target, folders = named(objective, [Path(folder) for folder in code])
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    table = {"function": target, "code": folders, **{key: given.pop(key) for key in _OF_FUNCTIONS if key in given}}
    for key in {"prices", "requirements"} & table.keys():
        table[key] = str(Path(table[key]).absolute())
    raw = {"name": name or _name_of(objective), "concurrency": max_workers, **given, "objective": table, "space": space}
    try:
        text = toml_text(_plain(raw))
    except TypeError as e:
        raise JobError(f"the study cannot be written to a file: {e}", remedy="give numbers, texts, lists and tables") from None
    file = parse_study(parse_toml(text, where="study"), folder=Path.cwd(), text=text)
    folder = folder_of(file.spec.name) if out is None else StudyFolder(Path(out))
    return Study.of(file if target or isinstance(objective, str) else file.with_function(objective), folder)


def _name_of(objective: Callable[..., Any] | str) -> str:
    """A name for the study of a function."""
    if isinstance(objective, str):
        last = objective.rpartition(":")[2]
    else:
        inner = inspect.unwrap(getattr(objective, "func", objective))
        last = str(getattr(inner, "__name__", type(inner).__name__))
    return re.sub(r"[^A-Za-z0-9_-]", "", last).lstrip("_-")[:64] or "objective"


def _plain(value: Any) -> Any:
    """A value with numbers of NumPy as those of Python."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(each) for each in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value
