"""How an objective is called with the values of a trial, and what becomes of what it gives back, reports and raises."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from ephemeron.errors import JobError
from ephemeron.functions.tasks.compute_slice import TaskInterrupted
from ephemeron.tuning.objective import objective_of
from ephemeron.tuning.objective_call import CallForm, Trial, TrialCall, TrialOutcome, TrialPruned, as_number, run_trial, try_trial


class Told:
    """A task that keeps what is reported, and is cancelled after some reports."""

    def __init__(self, cancelled_after: int = 1_000) -> None:
        self.reports: list[tuple[int, float]] = []
        self._cancelled_after = cancelled_after

    def report(self, step: int, value: float) -> None:
        self.reports.append((step, value))

    def is_cancelled(self) -> bool:
        return len(self.reports) >= self._cancelled_after


def by_names(lr, depth=3, *, width=1): ...
def by_any_names(**values): ...
def with_names_and_trial(lr, trial): ...
def as_params(params, trial): ...
def as_config(config, extra=1): ...
def as_annotated(values: dict, trial): ...
def as_mapping(values: Mapping[str, float]): ...
def trial_alone(trial): ...
def with_trial_of_the_space(trial): ...


class Callable_:
    def __call__(self, lr): ...


@pytest.mark.parametrize(
    ("function", "keys", "form"),
    [
        (by_names, ["lr"], CallForm(by_name=True)),
        (by_names, ["lr", "width", "depth"], CallForm(by_name=True)),
        (by_any_names, ["lr", "a.b"], CallForm(by_name=True)),
        (with_names_and_trial, ["lr"], CallForm(by_name=True, trial=True)),
        (as_params, ["lr", "a.b"], CallForm(mapping="params", trial=True)),
        (as_config, ["lr"], CallForm(mapping="config")),
        (as_annotated, ["lr"], CallForm(mapping="values", trial=True)),
        (as_mapping, ["lr"], CallForm(mapping="values")),
        (trial_alone, ["lr"], CallForm(trial=True)),
        (with_trial_of_the_space, ["trial"], CallForm(by_name=True)),
        (functools.partial(by_names, depth=2), ["lr"], CallForm(by_name=True)),
        (Callable_(), ["lr"], CallForm(by_name=True)),
        (lambda lr: lr, ["lr"], CallForm(by_name=True)),
    ],
)
def test_the_signature_says_how_it_is_called(function: Callable[..., Any], keys: list[str], form: CallForm) -> None:
    assert objective_of(function, keys).form == form


async def coroutine(lr): ...
def positional(lr, /): ...


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        (by_names, ["lr", "rate"], r"the space has rate, and objective .*by_names\(lr, depth, width\) takes no argument of that name"),
        (by_names, ["depth"], r"objective .*by_names\(lr, depth, width\) needs lr, which the space does not have"),
        (lambda lrate: 1, ["lr"], r"\(lrate\) takes none of the parameters of the space \(lr\); name them in its signature"),
        (lambda: 1, ["lr"], r"\(\) takes none of the parameters of the space \(lr\)"),
        (lambda params, lr: 1, ["lr"], r"needs params, which the space does not have"),
        (coroutine, ["lr"], "is a coroutine function"),
        (positional, ["lr"], "argument lr of objective .* has no name to call it by"),
        (3, ["lr"], "the objective is 3, which cannot be called"),
    ],
)
def test_one_that_cannot_be_called_is_refused(function: Any, keys: list[str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        objective_of(function, keys)


def called(function: Callable[..., Any], *, metric: str = "value", task: Any = None, **values: Any) -> TrialOutcome:
    values = values or {"lr": 0.5}
    form = objective_of(function, list(values)).form
    return run_trial(task, function, TrialCall(number=4, params=values, form=form, metric=metric))


def test_values_come_by_name_as_a_mapping_or_with_the_trial() -> None:
    assert called(lambda lr, depth: lr * depth, lr=0.5, depth=4).value == 2.0
    assert called(lambda params: params["a.b"], **{"a.b": 7}).value == 7
    assert called(lambda trial: trial.params["lr"] + trial.number).value == 4.5
    with pytest.raises(TypeError):
        Trial(0, {"lr": 1}).params["lr"] = 2  # type: ignore[index]


class Tensor:
    """As a tensor with one element."""

    def __init__(self, value: object) -> None:
        self._value = value

    def item(self) -> object:
        if isinstance(self._value, list):
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self._value


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.array(0.25), 0.25),
        (np.array([0.25]), 0.25),
        (Tensor(1.5), 1.5),
    ],
)
def test_numbers_of_all_kinds_are_numbers(result: object, value: float) -> None:
    outcome = called(lambda lr: result)
    assert (outcome.value, outcome.error) == (value, "")
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "its result is None: neither a number nor a dict with 'value'"),
        ("0.3", "its result is '0.3', a str: neither a number nor a dict with 'value'"),
        (True, "its result is True, a bool: neither a number nor a dict with 'value'"),
        (Tensor([1, 2]), r"a Tensor: neither a number"),
        (np.bool_(True), "neither a number"),
        ([1.0], "its result is [1.0], a list: neither"),
        (math.nan, "its result is nan, which is not finite"),
        (-math.inf, "its result is -inf, which is not finite"),
        (10**400, "its result is inf, which is not finite"),
        (
            {"loss": 1, "acc": 2},
            "its result has no 'value', which is the metric of the study; it has loss, acc: name one of them as metric",
        ),
        ({}, "it has nothing"),
        ({"value": "high"}, "its value is 'high', a str: not a number"),
        ({"value": math.inf}, "its value is inf, which is not finite"),
    ],
)
def test_a_result_without_a_value_is_a_failure_that_names_it(result: object, error: str) -> None:
    outcome = called(lambda lr: result)
    assert outcome.value is None
    assert error in outcome.error
    with pytest.raises(JobError, match="its "):
        try_trial(lambda lr: result, TrialCall(number=0, params={"lr": 1}, form=CallForm(by_name=True), metric="value"))


def test_a_dict_has_the_metric_and_others_that_are_kept() -> None:
    others = {"loss": 0.5, "acc": np.float64(0.75), "epochs": 3, "note": "x" * 500, "nan": math.nan, "model": object(), "ok": True}
    outcome = called(lambda lr: others, metric="loss")
    assert outcome.value == 0.5
    assert outcome.metrics == {"acc": 0.75, "epochs": 3, "note": "x" * 200, "ok": 1}
    assert outcome == TrialOutcome(value=0.5, metrics=outcome.metrics)


def fails(lr: float) -> float:
    raise ValueError(f"lr = {lr} is too large")


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("raised", "error"),
    [(SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt"), (Odd(), "Odd: (its text cannot be made: RuntimeError)")],
)
def test_whatever_it_raises_is_a_failure(raised: BaseException, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ephemeron.user_code._interruptible", False)  # as in a function

    def objective(lr: float) -> float:
        raise raised

    outcome = called(objective)
    assert outcome.error == error
    assert "in objective" in outcome.traceback


def test_a_failure_has_the_users_own_traceback() -> None:
    outcome = called(fails)
    assert outcome.error == "ValueError: lr = 0.5 is too large"
    assert "in run_trial" not in outcome.traceback
    assert "in fails" in outcome.traceback


def test_what_is_reported_is_told_and_in_the_outcome() -> None:
    def objective(lr: float, trial: Trial) -> float:
        for step in range(3):
            trial.report(step, lr / (step + 1))
        trial.report(np.int64(2), 9.0)  # the first one counts
        trial.report(3, math.nan)
        return lr

    told = Told()
    outcome = called(objective, task=told)
    assert told.reports[:4] == [(0, 0.5), (1, 0.25), (2, 0.5 / 3), (2, 9.0)]
    assert outcome.reports[:3] == ((0, 0.5), (1, 0.25), (2, 0.5 / 3))
    assert math.isnan(outcome.reports[3][1])
    assert (outcome.value, outcome.is_pruned) == (0.5, False)


@pytest.mark.parametrize(
    ("step", "value", "message"), [(0, "high", "value is 'high', a str"), (0.5, 1.0, "step is 0.5, a float"), (0, None, "None")]
)
def test_a_report_of_something_else_fails_the_trial(step: Any, value: Any, message: str) -> None:
    def objective(lr: float, trial: Trial) -> float:
        trial.report(step, value)
        return lr

    assert message in called(objective, task=Told()).error


def test_a_cancelled_trial_ends_at_its_next_report_though_exceptions_are_caught() -> None:
    steps = []

    def objective(lr: float, trial: Trial) -> float:
        for step in range(10):
            steps.append(step)
            try:
                trial.report(step, lr)
            except Exception:  # noqa: BLE001 - what users do
                pass
        return lr

    outcome = called(objective, task=Told(cancelled_after=3))
    assert steps == [0, 1, 2]
    assert (outcome.is_pruned, outcome.value, len(outcome.reports)) == (True, None, 3)


def test_a_trial_can_look_whether_it_was_ended_and_can_end_itself() -> None:
    def looks(lr: float, trial: Trial) -> float:
        assert not trial.should_prune()
        with pytest.raises(TrialPruned):
            trial.report(0, lr)
        assert trial.should_prune()
        return 7.0

    def ends(lr: float) -> float:
        raise TrialPruned

    assert called(looks, task=Told(cancelled_after=1)).value == 7.0, "its client does not want it any more"
    assert called(ends).is_pruned


def test_the_end_of_its_executor_is_no_failure_but_its_own_time_limit_is() -> None:
    def objective(lr: float) -> float:
        time.sleep(0.02)
        raise TaskInterrupted

    call = TrialCall(number=0, params={"lr": 1}, form=CallForm(by_name=True), metric="value")
    with pytest.raises(TaskInterrupted):
        run_trial(None, objective, call)
    late = TrialCall(number=0, params={"lr": 1}, form=CallForm(by_name=True), metric="value", timeout_s=0.01)
    outcome = run_trial(None, objective, late)
    assert outcome.error == "TimeoutError: not done after timeout_s = 0.01"


def test_numbers() -> None:
    assert as_number(True) is None
    assert as_number(np.array([1.0, 2.0])) is None


@pytest.mark.parametrize("module", ["ephemeron.tuning.objective_call", "ephemeron.tuning.api", "ephemeron.cli.training.tune"])
def test_neither_functions_nor_clients_import_pytorch(module: str) -> None:
    """And functions no Optuna."""
    heavy = ("torch", "sklearn") if module != "ephemeron.tuning.objective_call" else ("torch", "sklearn", "optuna", "sqlalchemy")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
