"""One trial of an objective, where it runs: the user's function is called with its parameters, and what it does becomes a plain value.

This module is all that functions import of `ephemeron.tuning`: it needs neither Optuna nor PyTorch. Whatever the function raises, and a
result that is no number, is a `TrialOutcome`: only a function that dies leaves none, and its trial is tried again.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any

from ephemeron.errors import JobError
from ephemeron.functions.shipped_code import with_own_paths
from ephemeron.functions.tasks.running_task import RunningTask
from ephemeron.user_code import Interruption, failure, guarded, line_of, raised_by

MOST_TEXT = 200
"""Characters of a text beside the metric that is kept."""


class TrialPruned(Interruption):
    """Ends a trial early: raised by `Trial.report` where the study has ended it, or by the function itself. No `Exception`, so that
    `except Exception` in the function does not hold it up."""


class Trial:
    """A trial, from the view of the function that is searched.

    Args:
        number: of the trial in its study.
        params: values of its parameters.
        task: as which it runs; None: it is tried out, and what it reports is not sent.
    """

    def __init__(self, number: int, params: Mapping[str, Any], task: RunningTask | None = None) -> None:
        self.number = number
        """In its study, from 0."""
        self.params: Mapping[str, Any] = MappingProxyType(dict(params))
        """Values of its parameters."""
        self._task = task
        self._reports: dict[int, float] = {}

    @property
    def reports(self) -> tuple[tuple[int, float], ...]:
        """What it has reported: step and value."""
        return tuple(self._reports.items())

    def report(self, step: int, value: float) -> None:
        """Reports a value of the metric before the end, on which the pruner decides. Does not wait for the decision: that is met by
        a later report. Of a function that reports many times a second, some values are sent at once, and all of them with its result.

        Args:
            step: such as an epoch; of a step that was reported before, the first value counts.
            value: a number; one that is not finite is none.

        Raises:
            TrialPruned: the study has ended this trial.
            TypeError: step or value is no number.
        """
        number, whole = as_number(value), as_number(step)
        if number is None:
            raise TypeError(f"trial.report(step, value): value is {_shown(value)}, not a number")
        if whole is None or not whole.is_integer():
            raise TypeError(f"trial.report(step, value): step is {_shown(step)}, not a whole number")
        self._reports.setdefault(int(whole), number)
        if self._task is not None:
            self._task.report(int(whole), number)
        if self.should_prune():
            raise TrialPruned(f"trial {self.number} was ended by its study")

    def should_prune(self) -> bool:
        """Whether the study has ended this trial: the function can store what it wants to keep, and return anything."""
        return self._task is not None and self._task.is_cancelled()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a function is called: with values by name, all of them as one mapping, or through the trial alone."""

    by_name: bool = False
    mapping: str = ""
    """Argument that takes all values."""
    trial: bool = False
    """Whether it has an argument `trial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCall:
    """A trial that is to run."""

    number: int
    params: Mapping[str, Any]
    form: CallForm
    metric: str
    """Key of a result that is a dict."""
    timeout_s: float | None = None
    """Time limit of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """How it has ended."""

    value: float | None = None
    """Of the metric; None: it has failed, or was pruned."""
    metrics: Mapping[str, int | float | str] = field(default_factory=dict)
    """What its result has beside the metric: finite numbers, and texts."""
    reports: tuple[tuple[int, float], ...] = ()
    error: str = ""
    """One line; empty: it has not failed."""
    traceback: str = ""
    """Of the user's code."""
    is_pruned: bool = False


def run_trial(task: RunningTask | None, function: Callable[..., Any], call: TrialCall) -> TrialOutcome:
    """Calls the function of a study.

    Args:
        task: as which it runs; None: it is tried out.
        function: the user's.
        call: the trial.

    Raises:
        Interruption: its executor ends, and another one begins the trial anew.
    """
    trial, began = Trial(call.number, call.params, task), time.perf_counter()
    try:
        with guarded():
            result = function(**_arguments(call, trial))
    except TrialPruned:
        return TrialOutcome(reports=trial.reports, is_pruned=True)
    except Interruption as e:
        if call.timeout_s is None or time.perf_counter() - began < call.timeout_s:
            raise
        _, trace = _failure(e)
        return TrialOutcome(reports=trial.reports, error=f"TimeoutError: not done after timeout_s = {call.timeout_s:g}", traceback=trace)
    except Exception as e:  # noqa: BLE001 - the user's
        error, trace = _failure(e)
        return TrialOutcome(reports=trial.reports, error=error, traceback=trace)
    return judged(result, call.metric, trial.reports)


def try_trial(function: Callable[..., Any], call: TrialCall) -> TrialOutcome:
    """Calls the function of a study before it begins: what it reports is not sent, and what it raises is raised.

    Raises:
        JobError: its result is no value of the metric.
    """
    trial = Trial(call.number, call.params)
    try:
        outcome = judged(function(**_arguments(call, trial)), call.metric)
    except TrialPruned:
        return TrialOutcome(is_pruned=True)
    if outcome.error:
        raise JobError(outcome.error)
    return outcome


def _arguments(call: TrialCall, trial: Trial) -> dict[str, Any]:
    """Arguments of the user's function."""
    named: dict[str, Any] = dict(call.params) if call.form.by_name else {}
    if call.form.mapping:
        named[call.form.mapping] = dict(call.params)
    if call.form.trial:
        named["trial"] = trial
    return named


def judged(result: object, metric: str, reports: tuple[tuple[int, float], ...] = ()) -> TrialOutcome:
    """A result as a value of the metric, or as the reason why it is none."""
    others: dict[str, int | float | str] = {}
    found = result
    if isinstance(result, Mapping):
        if metric not in result:
            has = ", ".join(str(key) for key in result) or "nothing"
            error = f"its result has no {metric!r}, which is the metric of the study; it has {has}: name one of them as metric"
            return TrialOutcome(reports=reports, error=error)
        found = result[metric]
        others = {str(key): kept for key, value in result.items() if key != metric and (kept := _kept(value)) is not None}
    value = as_number(found)
    what = f"its {metric}" if isinstance(result, Mapping) else "its result"
    if value is None:
        form = f"neither a number nor a dict with {metric!r}" if found is result else "not a number"
        return TrialOutcome(reports=reports, metrics=others, error=f"{what} is {_shown(found)}: {form}")
    if not math.isfinite(value):
        return TrialOutcome(reports=reports, metrics=others, error=f"{what} is {value}, which is not finite")
    return TrialOutcome(value=value, metrics=others, reports=reports)


def as_number(value: object) -> float | None:
    """A number, or an array or tensor with one element, as a float; None: it is none, and neither is a truth value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return math.inf
    item: Any = getattr(value, "item", None)
    if not callable(item):
        return None
    try:
        with guarded():
            inner = item()
    except Exception:  # noqa: BLE001 - of several elements, or of a class that has something else of this name
        return None
    return as_number(inner) if type(inner) in (int, float) else None


def _kept(value: object) -> int | float | str | None:
    """A value beside the metric as it is stored; None: it is not."""
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def _shown(value: object) -> str:
    """A value in a message. Never raises."""
    if value is None:
        return "None"
    kind = type(value).__name__
    try:
        with guarded():
            text = " ".join(repr(value).split())
    except Exception as e:  # noqa: BLE001 - the user's class
        text = f"({line_of(e)})"
    return f"{text if len(text) <= 80 else text[:77] + '…'}, {'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _failure(e: BaseException) -> tuple[str, str]:
    """An exception as one line, and its traceback: without the frames of this module at its beginning, and with the user's files as the
    user knows them. Never raises."""
    e = raised_by(e)
    trace: TracebackType | None = e.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    line, text = failure(e.with_traceback(trace))
    return line, with_own_paths(text)
