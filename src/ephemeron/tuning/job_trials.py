"""Trials of a job: each is a run, a gang of functions on the warm ones of one session. Its evaluations are the values that it reports."""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ephemeron.events import Event, RunEnded, RunStarted, to_json
from ephemeron.runs import folders, run_platform
from ephemeron.runs.folder_copies import save_now
from ephemeron.runs.header import read_header
from ephemeron.training.driver import Session
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.step_metrics import StepMerger
from ephemeron.training.job import Configuration, Job
from ephemeron.tuning.folder import StudyFolder
from ephemeron.tuning.prediction import TrialPrediction, TrialPredictor
from ephemeron.tuning.space import Values
from ephemeron.tuning.study_file import StudyFile
from ephemeron.tuning.trial import RUN, TrialRun
from ephemeron.tuning.trials import PreparedTrial, TrialEnd, Trials, Work

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings


class JobTrials(Trials):
    """Runs of the job of a study.

    Args:
        file: what the study is.
        folder: of the study.
        predictor: of trials.
        parent: the study's own name among runs.
        labels: of the study, which its trials have, too.
        simulated: whether they take place in virtual time.
        cloud: location of their functions on a cloud; None: elsewhere, or its default.
        sessions: opens the session that they take place in.
    """

    def __init__(
        self,
        file: StudyFile,
        folder: StudyFolder,
        predictor: TrialPredictor,
        *,
        parent: str,
        labels: Mapping[str, str],
        simulated: bool,
        cloud: Settings | None = None,
        sessions: Callable[..., Session] = Session,
    ) -> None:
        self.simulated = simulated
        self._file, self._folder, self._predictor = file, folder, predictor
        self._parent, self._labels, self._cloud = parent, labels, cloud
        self._sessions = sessions
        self._session: Session | None = None

    def prepare(self, values: Values) -> PreparedTrial:
        job, c = self._file.job.configured(values)
        return PreparedTrial(functions=c.workers, what=(job, c))

    def predict(self, prepared: PreparedTrial, values: Values) -> TrialPrediction | None:
        job, c = prepared.what
        return self._predictor.predict(job, c, values)

    @asynccontextmanager
    async def opened(self, *, places: int, budget_usd: float | None) -> AsyncIterator[None]:
        async with self._sessions(max_functions=places, budget_usd=budget_usd) as self._session:
            yield

    def begin(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        return lambda: self._train(trial, *prepared.what)

    def go_on(self, trial: TrialRun) -> Work | None:
        if self.simulated or not folders.RunFolder(folders.runs_folder() / trial.run).events.exists():
            return None
        return lambda: self._proceed(trial)

    def begin_again(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        folder = folders.RunFolder(folders.runs_folder() / trial.run)
        if not folder.path.exists():
            return self.begin(trial, prepared)
        if self.simulated:  # it has ended with its client, and nothing of it counts
            shutil.rmtree(folder.path)
            trial.cost_usd = 0.0
            return self.begin(trial, prepared)
        if self._cloud is not None:
            return lambda: self._again(trial, folder, *prepared.what)
        self._rename(trial)
        return self.begin(trial, prepared)

    def _rename(self, trial: TrialRun) -> None:
        """Gives a trial that begins anew another run."""
        trial.run, trial.cost_usd = f"{trial.run}-again", 0.0
        trial.store(RUN, trial.run)

    @property
    def _opened(self) -> Session:
        assert self._session is not None
        return self._session

    async def _proceed(self, trial: TrialRun) -> TrialEnd:
        return await self._ended(
            trial, await self._opened.proceed(trial.run, on_event=self._followed(trial), stop=trial.stop, check=False, report=False)
        )

    async def _again(self, trial: TrialRun, before: folders.RunFolder, job: Job, c: Configuration) -> TrialEnd:
        """Begins a trial anew whose driver was killed before it had saved anything of the trial's functions: those are ended."""
        if (header := read_header(before)) is not None:
            await run_platform.cancel(before, header)
            with before.events.open("a") as log:
                log.write(to_json(RunEnded(t=0.0, status="stopped")) + "\n")
            self._folder.link(f"{trial.number}-before", before.path)
        self._rename(trial)
        return await self._train(trial, job, c)

    async def _train(self, trial: TrialRun, job: Job, c: Configuration) -> TrialEnd:
        self._folder.link(trial.number, folders.runs_folder() / trial.run)  # so that its folder is copied with that of the study
        result = await self._opened.train(
            job,
            c,
            on_event=self._followed(trial),
            stop=trial.stop,
            run_id=trial.run,
            check=False,
            report=False,
            parent=self._parent,
            labels=self._labels,
            cloud=self._cloud,
        )
        return await self._ended(trial, result)

    def _followed(self, trial: TrialRun) -> Callable[[Event], None]:
        evaluations = _Evaluations(trial, self._file.spec.metric)

        def on_event(event: Event) -> None:
            trial.cost_usd = self._opened.cost_of(trial.run)
            if isinstance(event, RunStarted):
                self._folder.link(trial.number, folders.runs_folder() / trial.run)
            evaluations.feed(event)

        return on_event

    async def _ended(self, trial: TrialRun, result: Result) -> TrialEnd:
        await save_now()  # before the study takes the trial over
        seconds, cost_usd = result.summary.seconds, result.summary.cost_usd
        if not result.finished:
            if result.summary.status == "failed":
                return TrialEnd(status="failed", seconds=seconds, cost_usd=cost_usd, reason="; ".join(result.causes) or "its run failed")
            reason = "its run was stopped, by a limit of the job or by a user"
            return TrialEnd(status="stopped", seconds=seconds, cost_usd=cost_usd, reason=reason)
        if trial.value is None:
            reason = f"its last evaluation reports no finite {self._file.spec.metric}"
            return TrialEnd(status="failed", seconds=seconds, cost_usd=cost_usd, reason=reason)
        self._predictor.learn(trial.values, trial.predicted, seconds, cost_usd)
        return TrialEnd(status="finished", seconds=seconds, cost_usd=cost_usd)


class _Evaluations:
    """Events of a run as what its trial reports. Events that are read again change nothing."""

    def __init__(self, trial: TrialRun, metric: str) -> None:
        self._trial, self._metric = trial, metric
        self._merger: StepMerger | None = None
        self._iterations = 0

    def feed(self, event: Event) -> None:
        """Takes an event of the run in."""
        if isinstance(event, RunStarted):
            self._iterations = event.iterations
            self._merger = self._merger or StepMerger(merged=event.merges_evaluations)
            self._trial.begin()
        self._trial.seconds = max(self._trial.seconds, event.t)
        row = None if self._merger is None else self._merger.feed(event)
        if row is not None and row.split == "evaluation":
            self._trial.report(row.step, row.metrics.get(self._metric, math.nan), decides=row.step < self._iterations)
