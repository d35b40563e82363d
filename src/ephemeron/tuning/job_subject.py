"""A job as what a study searches: what is checked before the start, what trials will take, and the header of the study."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ephemeron.communication.channels import public_address
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.prices import load_prices
from ephemeron.runs import detached
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.origin import command_line
from ephemeron.runs.predictions import Prediction
from ephemeron.training.driver.launching import admission
from ephemeron.training.driver.launching.launch import LaunchRequest, platform_limits, prepared_run, service_of
from ephemeron.training.job import Configuration, Job
from ephemeron.training.job.spec import KeepBest
from ephemeron.tuning import data_service, kept, prediction
from ephemeron.tuning.folder import StudyFolder, StudyStatus, TrialRecord
from ephemeron.tuning.job_trials import JobTrials
from ephemeron.tuning.prediction import SpacePrediction, TrialPredictor
from ephemeron.tuning.study_file import StudyFile

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings


class JobSubject:
    """The job of a study.

    Args:
        file: what the study is.
    """

    def __init__(self, file: StudyFile) -> None:
        self._file = file
        self._predictor = TrialPredictor()

    @property
    def name(self) -> str:
        """Of its file."""
        return self._file.job.path.name

    @property
    def platform(self) -> str:
        """Of its trials."""
        return prediction.any_of(self._file)[1].platform

    @property
    def is_simulated(self) -> bool:
        """Whether its trials take place in virtual time."""
        return self.platform == "simulated"

    def check(self, location: Settings | None) -> int:
        """Refuses what cannot work before anything starts: builds the job with one combination and does a step.

        Args:
            location: of functions on a cloud; None: its default.

        Returns:
            Evaluations of a trial that runs to its end.

        Raises:
            UserError: see above.
        """
        spec = self._file.spec
        job, c = prediction.any_of(self._file)
        if c.regions.region:
            raise JobError("runs in several regions cannot be tuned", remedy="leave run.regions out of the job")
        data_service.check(spec, job, c)
        if job.sparse is not None:
            return self._check_sparse(job, c, location)
        wanted = dataclasses.replace(job, keep_best=KeepBest(monitor=spec.metric, mode=spec.mode))
        try:
            ready = prepared_run(LaunchRequest(job=wanted, configuration=dataclasses.replace(c, sync="bsp"), cloud=location))
        except JobError as e:
            if e.problem.startswith("keep_best monitors"):
                raise JobError(
                    f"{spec.name}: metric = {spec.metric!r} is not reported by the job's evaluations",
                    remedy=str(e.remedy).replace("monitor", "use"),
                ) from None
            if "need evaluation data" in e.problem:
                raise JobError(f"{spec.name}: the job has no evaluation data, of which trials are judged", remedy=e.remedy) from None
            raise
        every, unit = job.evaluate_every.split()
        of_run = job.epochs if unit.startswith("epoch") else ready.prepared.spec.planned_iterations
        return self._checked_pruner(job, -(-of_run // int(every)))

    def _check_sparse(self, job: Job, c: Configuration, location: Settings | None) -> int:
        """The same for a sparse job, which is evaluated after each epoch."""
        program = prepared_run(LaunchRequest(job=job, configuration=c, cloud=location)).prepared.spec.sparse
        assert program is not None
        if self._file.spec.metric not in program.metrics:
            raise JobError(
                f"{self._file.spec.name}: metric = {self._file.spec.metric!r} is not reported by the job's evaluations",
                remedy=f"use {' or '.join(program.metrics)}",
            )
        return self._checked_pruner(job, job.epochs)

    def _checked_pruner(self, job: Job, evaluations: int) -> int:
        """The evaluations of a trial, if the pruner has one to decide on."""
        spec = self._file.spec
        first = spec.pruner.first_decision(evaluations)
        if spec.pruner.name != "none" and job.script is None and evaluations <= first:
            raise JobError(
                f"{spec.name}: pruner {spec.pruner.name} decides after {first} evaluations, and a trial has "
                f"{evaluations}, the last one at its end",
                remedy='set evaluate_every or epochs in the job, or pruner = "none"',
            )
        return evaluations

    def predict(self, on_progress: Callable[[str], None], *, measures: bool = True) -> tuple[SpacePrediction, str]:
        """Time and cost of all trials without pruning, and why there are none.

        Args:
            on_progress: told what is measured.
            measures: run some steps of the job on this machine, if it has no profile; else nothing is predicted without one.

        Raises:
            UserError: the study is refused.
        """
        self._predictor = TrialPredictor.of(self._file, on_progress, measures=measures)
        return prediction.predict_space(self._file, self._predictor, self.places()), self._predictor.note

    def dry_run(self, location: Settings | None, on_progress: Callable[[str], None], *, measures: bool) -> Prediction:
        """What the study will take. See `check` and `predict`."""
        self.check(location)
        expected, note = self.predict(on_progress, measures=measures)
        found = prediction.described(self._file, expected, self._predictor, self.places())
        if note and not measures and self._file.spec.predict:
            remedy = f"measure the job first: ephemeron tune {self._file.path or 'STUDY'} --dry-run --profile"
            found = dataclasses.replace(found, notes=(*found.notes, remedy))
        return found

    def places(self) -> int:
        """Functions of all trials at once."""
        if self._file.spec.concurrency is not None:
            return self._file.spec.concurrency
        job, c = prediction.any_of(self._file)
        if c.platform == "local":
            return max(os.cpu_count() or 1, prediction.most_workers(self._file))
        return platform_limits(c.platform, job.simulation).concurrency

    def check_detached(self, settings: Settings | None) -> tuple[Settings | None, Mapping[str, str]]:
        """Refuses what functions cannot drive.

        Args:
            settings: location of functions on a cloud; None: its default.

        Returns:
            The location as it is recorded, and variables of the channel.

        Raises:
            JobError: see above.
        """
        _, c = prediction.any_of(self._file)
        detached.check_place("study", c.platform, c.channel)
        if c.platform not in CLOUDS:
            return settings, {}
        kept.check(self._file)
        where = cloud(c.platform)
        located = (settings or where.settings()).located()
        variables = public_address(c.store)[1]
        return where.recorded(located, admission.admit(where, c, located, variables)[1]), variables

    def header(self, status: StudyStatus, run_id: str, labels: Mapping[str, str], settings: Settings | None) -> RunHeader:
        """The header of the study.

        Args:
            status: of the study.
            run_id: its name among runs.
            labels: see `runs.labels`.
            settings: location of the functions on a cloud; None: its default.
        """
        job, c = prediction.any_of(self._file)
        is_cloud = c.platform in CLOUDS
        return RunHeader(
            run_id=run_id,
            kind="study",
            name=status.name,
            platform=c.platform,
            channel=public_address(c.store)[0] if is_cloud else "",
            memory_mb=c.memory_mb if is_cloud else 0,
            settings=plain((settings or cloud(c.platform).settings()).located()) if is_cloud else {},
            functions=status.concurrency,
            prices=load_prices(service_of(c.store), platform=c.platform, servers=job.sparse is not None),
            budget_usd=status.budget_usd,
            deadline_s=status.deadline_s,
            started_at=time.time(),
            command=command_line(),
            labels=labels,
            payload={"file": "" if self._file.path is None else str(self._file.path)},
        )

    def started(self, run: RunFolder, header: RunHeader) -> RunHeader:
        """The header of a study that begins, or is gone on with."""
        return header

    def trials(
        self, folder: StudyFolder, header: RunHeader, ended: Iterable[TrialRecord], location: Settings | None, *, spent_usd: float
    ) -> JobTrials:
        """Its trials while one client drives the study. What those that have ended took corrects the predictions of others.

        Args:
            folder, header: of the study.
            ended: trials that have ended.
            location: of functions on a cloud; None: elsewhere.
            spent_usd: by earlier clients, of which each trial has its own part.
        """
        for each in ended:
            if each.state == "finished" and each.predicted_s is not None and each.predicted_usd is not None:
                p = prediction.TrialPrediction(each.predicted_s, each.predicted_usd)
                self._predictor.learn(each.parameters, p, each.seconds, each.cost_usd)  # type: ignore[arg-type]
        return JobTrials(
            self._file, folder, self._predictor, parent=header.run_id, labels=header.labels, simulated=self.is_simulated, cloud=location
        )
