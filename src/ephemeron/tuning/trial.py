"""One trial: what it reports becomes values of Optuna, and the pruner decides on each whether it goes on.

What is known of a trial is in Optuna's storage, written before anything follows from it: its values and the name of its run
before the run starts, each report before the decision on it, cost and reason before the state it ends with. So a client that
goes on after another was killed reads the events again, and finds what has been stored.

A transaction takes about 10 ms, in which the client does nothing else. Functions may report many times a second, so their reports are
stored later, and not all of them: what is not stored is in the events.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ephemeron.runs.stop_requests import RunStop
from ephemeron.tuning.folder import TrialRecord, TrialStatus
from ephemeron.tuning.prediction import TrialPrediction

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

_log = logging.getLogger(__name__)

RUN, ENDING, REASON, COST, SECONDS, PREDICTED_USD, PREDICTED_S, STARTED, WORKERS, METRICS, TRACEBACK, EVALUATIONS = (
    "run",
    "ending",
    "reason",
    "cost_usd",
    "seconds",
    "predicted_usd",
    "predicted_s",
    "started",
    "workers",
    "metrics",
    "traceback",
    "evaluations",
)
"""Names of a trial's user attributes in Optuna's storage."""


class TrialRun:
    """A trial that waits or runs.

    Args:
        study: of Optuna.
        trial: as it is stored.
        workers: number of its functions; 0: not known.
        predicted: its time and cost; None: not predicted.
        on_change: called after its reports and its beginning.
        reports_often: whether reports are stored later, and not all of them.
        compares_at: whether the pruner compares trials after a report of this number.
    """

    def __init__(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        *,
        workers: int,
        predicted: TrialPrediction | None,
        on_change: Callable[[TrialRun], None],
        reports_often: bool = False,
        compares_at: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._study, self._id = study, trial._trial_id
        self.number, self.values = trial.number, dict(trial.params)
        self.run: str = trial.user_attrs[RUN]
        self.workers, self.predicted, self.stop = workers, predicted, RunStop()
        self.ending: str = trial.user_attrs.get(ENDING, "")
        """Why it ends early; empty: it does not."""
        self.started = bool(trial.user_attrs.get(STARTED))
        self.value: float | None = None
        self.metrics: Mapping[str, int | float | str] = {}
        self.traceback = ""
        self.cost_usd: float = trial.user_attrs.get(COST, 0.0)
        self.seconds: float = trial.user_attrs.get(SECONDS, 0.0)
        self._on_change = on_change
        self._known = set(trial.intermediate_values)
        self._steps: dict[int, int] = {}
        """By step, the number of the report, from 1."""
        self._reported: int = trial.user_attrs.get(EVALUATIONS, len(trial.intermediate_values))
        self._reports_often, self._compares_at = reports_often, compares_at
        self._values: dict[int, float] = {}
        """By number, of reports that are not all stored."""
        self._to_store: dict[int, float] = {}
        """Those of them that are to be stored."""

    @property
    def evaluations(self) -> int:
        """Reports so far."""
        return self._reported

    def begin(self) -> None:
        """Takes in that it has functions."""
        if not self.started:
            self.started = True
            self.store(STARTED, True)
        if self.ending:  # a client was killed while it ended the trial
            self.stop.kill(self.ending)
        self._on_change(self)

    def report(self, step: int, value: float, *, number: int = 0, decides: bool = True) -> None:
        """Takes in a value. One of a step that was reported before is not decided on again.

        Args:
            step: of the trial, such as an iteration.
            value: of the metric; not finite: there is none.
            number: of the report, from 1; 0: one more than before.
            decides: whether the trial goes on afterwards, unless the pruner ends it.
        """
        number = self._steps.setdefault(step, number or len(self._steps) + 1)
        self._reported = max(self._reported, number)
        self.value = None if math.isnan(value) else value
        if self._reports_often:
            self._values.setdefault(number, value)
        if number not in self._known:
            self._known.add(number)
            self._to_store[number] = value
            if not self._reports_often:
                self.store_reports()
            if decides and not self.ending and self._is_worse(number):
                self.end(f"pruned at evaluation {number}")
            elif not decides and self._compares_at(number):
                self._is_worse(number)  # which notes its value, with which others are compared
        self._on_change(self)

    def store_reports(self, most: int | None = None) -> None:
        """Stores reports that are not stored yet.

        Args:
            most: of them; None: all.
        """
        last = max(self._to_store, default=0) if most is None else 0
        for number in list(self._to_store)[:most]:
            value = self._to_store.pop(number)
            if not self._reports_often or _is_stored(number) or number == last:
                self._study._storage.set_trial_intermediate_value(self._id, number, value)

    def _is_worse(self, number: int) -> bool:
        """Whether the pruner ends it after a report."""
        from optuna.pruners import NopPruner

        pruner = self._study.pruner
        if isinstance(pruner, NopPruner):
            return False
        trial = self._study._storage.get_trial(self._id)
        if self._reports_often:
            trial = copy.copy(trial)
            trial.intermediate_values = {n: v for n, v in {**trial.intermediate_values, **self._values}.items() if n <= number}
        return bool(pruner.prune(self._study, trial))

    def end(self, reason: str) -> None:
        """Ends the trial's functions at once."""
        if not self.ending:
            self.ending = reason
            self.store_bill()
            self.store(ENDING, reason)
            _log.info("ending trial %d: %s", self.number, reason)
            self.stop.kill(reason)

    def store(self, name: str, value: object) -> None:
        """Stores an attribute of the trial."""
        self._study._storage.set_trial_user_attr(self._id, name, value)

    def store_bill(self) -> None:
        """Stores cost and time of the trial so far, and what it has reported."""
        self.store_reports()
        if self._reports_often:
            self.store(EVALUATIONS, self.evaluations)
        self.store(COST, self.cost_usd)
        self.store(SECONDS, self.seconds)

    def record(self, state: TrialStatus, reason: str = "") -> TrialRecord:
        """The trial in `study.json`."""
        p = self.predicted
        return TrialRecord(
            number=self.number,
            state=state,
            parameters=self.values,
            run=self.run,
            value=self.value,
            metrics=self.metrics,
            evaluations=self.evaluations,
            workers=self.workers,
            cost_usd=round(self.cost_usd, 9),
            seconds=round(self.seconds, 3),
            predicted_usd=None if p is None else p.cost_usd,
            predicted_s=None if p is None else p.seconds,
            started=self.started,
            reason=reason or self.ending,
            traceback=self.traceback,
        )


def _is_stored(number: int) -> bool:
    """Whether a report is stored, of one of those who report often: the first 64, every second of the next 64, every fourth of the next 128."""
    return number % (1 << max(0, (number - 1).bit_length() - 6)) == 0


def recorded(trial: FrozenTrial) -> TrialRecord:
    """A trial that has ended, as Optuna's storage has it."""
    from optuna.trial import TrialState

    names: Mapping[TrialState, TrialStatus] = {
        TrialState.COMPLETE: "finished",
        TrialState.PRUNED: "pruned",
        TrialState.FAIL: "failed",
        TrialState.WAITING: "waiting",
        TrialState.RUNNING: "running",
    }
    attributes: Mapping[str, Any] = trial.user_attrs
    steps = sorted(trial.intermediate_values)
    value = trial.value if trial.value is not None else trial.intermediate_values[steps[-1]] if steps else None
    return TrialRecord(
        number=trial.number,
        state=names[trial.state],
        parameters=dict(trial.params),
        run=attributes.get(RUN, ""),
        value=None if value is None or math.isnan(value) else value,
        metrics=attributes.get(METRICS, {}),
        evaluations=attributes.get(EVALUATIONS, len(steps)),
        workers=attributes.get(WORKERS, 0),
        cost_usd=attributes.get(COST, 0.0),
        seconds=attributes.get(SECONDS, 0.0),
        predicted_usd=attributes.get(PREDICTED_USD),
        predicted_s=attributes.get(PREDICTED_S),
        started=bool(attributes.get(STARTED)),
        reason=attributes.get(REASON, ""),
        traceback=attributes.get(TRACEBACK, ""),
    )
