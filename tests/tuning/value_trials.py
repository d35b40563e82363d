"""Trials that are values: an epoch takes a second of virtual time and costs a cent a function, and better rates are better at once."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from tuning_worlds import write_study

from ephemeron.events import Evaluated, RunStarted
from ephemeron.functions import simulation
from ephemeron.runs.folders import RunFolder, runs_folder
from ephemeron.runs.stop_requests import RunStop
from ephemeron.training.driver import Session
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Configuration, Job
from ephemeron.tuning import sampling
from ephemeron.tuning.engine import Engine
from ephemeron.tuning.folder import StudyFolder, StudyState, TrialRecord
from ephemeron.tuning.job_trials import JobTrials
from ephemeron.tuning.prediction import TrialPrediction, TrialPredictor
from ephemeron.tuning.study_file import load_study
from ephemeron.tuning.trial import recorded

USD = 0.01
"""Of a function and second."""


def value_of(rate: float, epoch: int) -> float:
    """Metric of an evaluation."""
    return rate * (1 - 0.5**epoch)


class ValueSession(Session):
    """Runs are values, which a later session goes on with. They end where their session's budget is spent.

    The option `fails_after` of a model is the number of epochs after which its run fails.
    """

    def __init__(self, *, max_functions: int | None = None, budget_usd: float | None = None) -> None:
        super().__init__(max_functions=max_functions, budget_usd=budget_usd)
        self._left_usd, self._cost, self._places = budget_usd, dict[str, float](), max_functions or 0
        self._busy = 0

    def cost_of(self, run_id: str) -> float:
        return self._cost.get(run_id, 0.0)

    async def train(  # type: ignore[override]
        self, job: Job, configuration: Configuration, *, on_event: Any, stop: RunStop, run_id: str, **how: Any
    ) -> Result:
        folder = RunFolder(runs_folder() / run_id)
        folder.path.mkdir(parents=True)
        (folder.path / "job").write_bytes(pickle.dumps((job, configuration)))
        return await self.proceed(run_id, on_event=on_event, stop=stop)

    async def proceed(self, run_id: str, *, on_event: Any, stop: RunStop, **how: bool) -> Result:  # type: ignore[override]
        folder = RunFolder(runs_folder() / run_id)
        job, c = pickle.loads((folder.path / "job").read_bytes())
        known = json.loads(folder.events.read_text()) if folder.events.exists() else 0
        folder.events.write_text(json.dumps(known))
        self._busy += c.workers
        assert self._busy <= self._places, "a trial begins when all its functions have places"
        ended = asyncio.Event()
        fails_after, status, epoch = job.model.options.get("fails_after", job.epochs), "finished", 0
        with stop.handled(lambda reason="": ended.set()):
            on_event(
                RunStarted(
                    t=0.0,
                    run_id=run_id,
                    job=job.name,
                    workers=c.workers,
                    aggregators=1,
                    memory_mb=c.memory_mb,
                    iterations=job.epochs,
                    epochs=job.epochs,
                    samples=1,
                )
            )
            while epoch < min(job.epochs, fails_after) and not ended.is_set():
                if epoch >= known:
                    try:
                        await asyncio.wait_for(ended.wait(), 1.0)
                        break
                    except TimeoutError:
                        folder.events.write_text(json.dumps(epoch + 1))
                epoch += 1
                self._cost[run_id] = USD * c.workers * epoch
                for rank in range(c.workers):
                    sums = {"accuracy": (value_of(job.optimizer.options["lr"], epoch), 1.0)}
                    on_event(Evaluated(t=epoch, rank=rank, attempt=0, epoch=epoch, iteration=epoch, samples=1, sums=sums))
                if self._left_usd is not None and sum(self._cost.values()) >= self._left_usd - 1e-9:
                    break
        self._busy -= c.workers
        if epoch < job.epochs:
            status = "failed" if epoch == fails_after else "stopped"
        summary: Any = SimpleNamespace(status=status, seconds=float(epoch), cost_usd=self.cost_of(run_id))
        return Result(summary, folder, ("rank 0: it had to",) if status == "failed" else ())


class ValuePredictor(TrialPredictor):
    """Predicts trials of values, right."""

    def predict(self, job: Job, c: Configuration, values: Any) -> TrialPrediction:
        return TrialPrediction(float(job.epochs), USD * c.workers * job.epochs)


class ValueStudy:
    """A study whose trials are values, of which several engines may drive parts."""

    def __init__(self, folder: Path, *, predicts: bool = False, simulated: bool = True, **values: Any) -> None:
        self.file, self.folder = load_study(write_study(folder, **values)), StudyFolder(folder / "out")
        self.folder.trials.mkdir(parents=True)
        self.places = self.file.spec.concurrency or 4
        self._predictor, self._simulated = ValuePredictor() if predicts else TrialPredictor(), simulated
        self.seconds = self.spent_usd = 0.0
        with sampling.quiet():
            self.optuna = optuna.create_study(
                study_name=self.file.spec.name, direction="maximize", pruner=sampling.pruner_of(self.file.spec, 4)
            )

    def run(
        self, on_trial: Callable[[TrialRecord], None] = lambda trial: None, on_change: Callable[[Engine], None] = lambda engine: None
    ) -> StudyState:
        """Drives the study to its end, or until a callback raises an error, as if the client had been killed."""
        trials = JobTrials(self.file, self.folder, self._predictor, parent="", labels={}, simulated=self._simulated, sessions=ValueSession)
        engine = Engine(
            self.file,
            self.folder,
            self.optuna,
            trials,
            places=self.places,
            token=self.folder.path.parent.name,
            seconds=self.seconds,
            on_trial=on_trial,
            on_change=lambda: on_change(engine),
        )
        try:
            return simulation.run(engine.run())
        finally:
            self.seconds, self.spent_usd = engine.seconds, engine.spent_usd

    @property
    def trials(self) -> list[TrialRecord]:
        return [recorded(t) for t in self.optuna.get_trials(deepcopy=False)]

    @property
    def ended(self) -> list[tuple[Any, ...]]:
        return [(t.number, t.state, tuple(t.parameters.values()), t.value, t.cost_usd) for t in self.trials]
