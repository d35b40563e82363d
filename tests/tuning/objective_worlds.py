"""Studies of functions: trials that are values in virtual time, and functions of tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import optuna

from ephemeron.functions import simulation
from ephemeron.tuning import sampling
from ephemeron.tuning.api import study_of
from ephemeron.tuning.engine import Engine
from ephemeron.tuning.folder import StudyState, TrialRecord
from ephemeron.tuning.space import Values
from ephemeron.tuning.trial import TrialRun, recorded
from ephemeron.tuning.trials import PreparedTrial, TrialEnd, Trials, Work

STEPS = 9
USD = 0.01
"""Of a second."""
Callback = Callable[..., None]


def lr(values: Values) -> float:
    """The rate of a trial, which is also its value."""
    return float(values["lr"])


class ValueTrials(Trials):
    """Trials that are values: a step takes a second of virtual time, after which it is reported. Nothing of them outlives their client.

    Args:
        fails: whether a trial fails, of its number and values.
    """

    simulated = True
    reports_often = True
    stopped = "stopped: it begins anew"

    def __init__(self, fails: Callable[[int, Values], bool] = lambda number, values: False) -> None:
        self._fails = fails
        self.begun: list[int] = []

    def prepare(self, values: Values) -> PreparedTrial:
        return PreparedTrial(functions=1, what=values)

    @asynccontextmanager
    async def opened(self, *, places: int, budget_usd: float | None) -> AsyncIterator[None]:
        yield

    def begin(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        return lambda: self._run(trial, lr(prepared.what))

    def go_on(self, trial: TrialRun) -> Work | None:
        return None

    def begin_again(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        return self.begin(trial, prepared)

    async def _run(self, trial: TrialRun, rate: float) -> TrialEnd:
        self.begun.append(trial.number)
        trial.begin()
        ended = asyncio.Event()
        with trial.stop.handled(lambda reason="": ended.set()):
            for step in range(STEPS):
                try:
                    await asyncio.wait_for(ended.wait(), 1.0)
                    return TrialEnd(status="stopped", seconds=step, cost_usd=USD * step)
                except TimeoutError:
                    trial.seconds, trial.cost_usd = step + 1.0, USD * (step + 1)
                    trial.report(step, rate + 1 / (step + 1), decides=step < STEPS - 1)
        if self._fails(trial.number, trial.values):
            return TrialEnd(status="failed", seconds=STEPS, cost_usd=USD * STEPS, reason="ValueError: it had to")
        trial.value = rate
        return TrialEnd(status="finished", seconds=STEPS, cost_usd=USD * STEPS)


class ValueObjective:
    """A study of such trials, of which several engines may drive parts."""

    def __init__(self, folder: Path, *, fails: Any = lambda number, values: False, **options: Any) -> None:
        folder.mkdir()
        space = options.pop("space", {"lr": [0.1, 0.2, 0.4, 0.8]})
        study = study_of(print_nothing, space, out=folder / "out", **options)
        self.file, self.folder = study.file, study.folder
        self.folder.trials.mkdir(parents=True)
        self.trials_taken = ValueTrials(fails)
        self.seconds = 0.0
        self.engine: Engine | None = None
        with sampling.quiet():
            self.optuna = optuna.create_study(
                study_name=self.file.spec.name, direction="minimize", pruner=sampling.pruner_of(self.file.spec, None)
            )

    def run(self, on_trial: Callback = lambda trial: None, on_change: Callback = lambda: None) -> StudyState:
        """Drives the study to its end, or until a callback raises an error, as if the client had been killed."""
        self.engine = engine = Engine(
            self.file,
            self.folder,
            self.optuna,
            self.trials_taken,
            places=self.file.spec.concurrency or 1,
            token="t",
            seconds=self.seconds,
            on_trial=on_trial,
            on_change=on_change,
        )
        try:
            return simulation.run(engine.run())
        finally:
            self.seconds = engine.seconds

    @property
    def trials(self) -> list[TrialRecord]:
        return [recorded(t) for t in self.optuna.get_trials(deepcopy=False)]

    @property
    def ended(self) -> list[tuple[Any, ...]]:
        return [(t.number, t.state, tuple(t.parameters.values()), t.value, t.evaluations, t.cost_usd) for t in self.trials]


def print_nothing(lr: float, trial: Any) -> float:
    """An objective that is never called."""
    raise AssertionError
