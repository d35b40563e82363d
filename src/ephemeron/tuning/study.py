"""`Study`: the interface of tuning in Python, and what the command `ephemeron tune` calls.

study = Study.open("study.toml")
result = study.run()
print(result.best, study.table())
study.to_optuna()                    # the study in Optuna's own terms
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron import blocking
from ephemeron.errors import JobError, MissingExtra, UserError
from ephemeron.events import Event
from ephemeron.functions.registry import cloud
from ephemeron.runs import detached, folders, run_platform
from ephemeron.runs.folders import KEY_FILE, RESULT_FILE, RUN_FILE, RunFolder, last_t, runs_folder
from ephemeron.runs.header import RunHeader, open_header, read_header
from ephemeron.runs.labels import check_labels
from ephemeron.runs.predictions import Prediction
from ephemeron.runs.stop_requests import withdraw_stop
from ephemeron.tuning import data_service, kind, results, sampling
from ephemeron.tuning.engine import Engine, OnTrial
from ephemeron.tuning.folder import StudyFolder, StudyState, StudyStatus, TrialRecord, folder_of, storage_of, written
from ephemeron.tuning.job_subject import JobSubject
from ephemeron.tuning.objective_subject import ObjectiveSubject
from ephemeron.tuning.prediction import SpacePrediction
from ephemeron.tuning.study_file import KeptObjective, StudyFile, load_study
from ephemeron.tuning.trial import recorded
from ephemeron.tuning.trials import TrialsBroken
from ephemeron.user_code import line_of

if TYPE_CHECKING:
    import optuna

    from ephemeron.functions.async_invoke.provider import Settings

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.3
"""Interval at which a client that watches reads the status."""


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A study that has ended, or was stopped."""

    status: StudyStatus

    @property
    def best(self) -> TrialRecord | None:
        """The best finished trial; None: none has finished."""
        return next((t for t in self.status.trials if t.number == self.status.best), None)

    def count(self, state: str) -> int:
        """Number of trials in a state."""
        return sum(t.state == state for t in self.status.trials)

    def to_json(self) -> dict[str, Any]:
        """What `ephemeron tune --json` prints."""
        best, s = self.best, self.status
        return {
            "best": None
            if best is None
            else {"value": best.value, "parameters": dict(best.parameters), "trial": best.number, "run": best.run},
            "trials": {state: self.count(state) for state in ("finished", "pruned", "failed")},
            "not_started": sum(not t.started and t.state == "pruned" for t in s.trials),
            "seconds": round(s.seconds, 3),
            "cost_usd": round(s.spent_usd, 9),
            "state": s.state,
            "reason": s.reason,
            "predicted": None if s.predicted_usd is None else {"seconds": s.predicted_s, "cost_usd": s.predicted_usd},
        }


class Study:
    """A search for the best parameters of a job or of an objective.

    Args:
        file: what the study is.
        folder: of its files, which need not exist.
    """

    def __init__(self, file: StudyFile, folder: StudyFolder) -> None:
        self.file, self.folder = file, folder
        self.subject: JobSubject | ObjectiveSubject = JobSubject(file) if file.spec.objective is None else ObjectiveSubject(file, folder)
        self.cloud: Settings | None = None
        """Location of the functions on a cloud, such as `AwsSettings`, for a study that begins; None: its default."""

    @property
    def platform(self) -> str:
        """Of its trials."""
        return self.subject.platform

    @classmethod
    def open(cls, path: str | Path, *, out: str | Path | None = None, options: Mapping[str, Any] | None = None) -> Study:
        """A study of a study file, which may have begun.

        Args:
            path: of the file.
            out: folder of the study; None: one in the home folder, by its name.
            options: `platform`, `channel`, `max_workers` and `budget_usd` in place of those of the files. A study that has begun keeps its own.

        Raises:
            JobError: the file is refused, or it or an option has changed since the study began.
            MissingExtra: Optuna is not installed.
        """
        _require_optuna()
        file = load_study(path)
        return cls.of(file, folder_of(file.spec.name) if out is None else StudyFolder(Path(out)), options=options, what=str(path))

    @classmethod
    def of(cls, file: StudyFile, folder: StudyFolder, *, options: Mapping[str, Any] | None = None, what: str = "the study") -> Study:
        """The same of a study that was read.

        Args:
            file: what the study is.
            folder: of its files.
            options: see `open`.
            what: of which it was read, for messages.

        Raises:
            JobError, MissingExtra: see `open`.
        """
        _require_optuna()
        begun = folder.options() if folder.exists else {}
        for name, value in (options or {}).items():
            if folder.exists and begun.get(name, value) != value:
                raise JobError(f"the study in {folder.path} has begun with {name} = {begun[name]}", remedy="leave the option out")
        study = cls(file.with_options({**begun, **(options or {})}), folder)
        if folder.exists and folder.status().digest != study.file.digest:
            if file.spec.objective is not None:
                raise JobError(
                    f"there is a study in {folder.path} already, and not with these values of {what}",
                    remedy="give those with which it began, or begin another one by another name or in another folder (--name, --out)",
                )
            raise JobError(
                f"{what} or its job has changed since the study in {folder.path} began",
                remedy="restore the files, or begin another study: --out FOLDER",
            )
        return study

    # -- results --------------------------------------------------------------------------------------------

    @property
    def status(self) -> StudyStatus:
        """As of the latest change.

        Raises:
            UserError: the study has not begun.
        """
        return self.folder.status()

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """All trials in the order of their numbers; none before the study begins."""
        return self.status.trials if self.folder.exists else ()

    @property
    def best(self) -> TrialRecord | None:
        """The best finished trial so far."""
        return StudyResult(self.status).best if self.folder.exists else None

    def table(self) -> list[dict[str, Any]]:
        """Trials as rows, best first: number, state, value, parameters by their keys, cost, time, predictions, reason."""
        return results.rows(self.status)

    def to_optuna(self) -> optuna.Study:
        """The study as Optuna has it, with its storage.

        Raises:
            UserError: it has not begun.
        """
        if not self.folder.exists:
            raise UserError(f"the study in {self.folder.path} has not begun")
        return self._stored(1)

    def end_trial(self, number: int) -> None:
        """Asks the client that drives the study to end a running trial.

        Raises:
            UserError: the trial does not run.
        """
        self._refuse_elsewhere()
        if not any(t.number == number and t.state == "running" for t in self.trials):
            raise UserError(f"trial {number} of the study in {self.folder.path} does not run")
        self.folder.request_end(number)

    # -- running --------------------------------------------------------------------------------------------

    def dry_run(self, on_progress: Callable[[str], None] = lambda text: None, *, measures: bool = False) -> Prediction:
        """Checks the study as `run` does, and says what it will take.

        Args:
            on_progress: told what is measured.
            measures: run some steps of the job on this machine, if it has no profile; else nothing is predicted without one.

        Raises:
            UserError: the study is refused.
        """
        return self.subject.dry_run(self._location(), on_progress, measures=measures)

    def run(
        self,
        *,
        resume: bool = False,
        on_trial: OnTrial = lambda trial: None,
        on_progress: Callable[[str], None] = lambda text: None,
        labels: Mapping[str, str] | None = None,
        quiet_interrupt: bool = False,
    ) -> StudyResult:
        """Runs the study to its end, or until it is interrupted.

        Args:
            resume: go on with a study whose client has ended.
            on_trial: called with every trial that has begun or ended.
            on_progress: called with a description of what is measured before the start.
            labels: of the study and its trials, see `runs.labels`; those with which it began stay.
            quiet_interrupt: return the result of a study that an interrupt has stopped.

        Raises:
            UserError: the study is refused, has begun already or has not, or another client drives it.
            KeyboardInterrupt: an interrupt has stopped all trials at a checkpoint; `run(resume=True)` goes on.
        """
        self._refuse_elsewhere()
        self._check_early()
        with written(self.folder.path), self.folder.driving(), blocking.handled_interrupts() as interrupts:
            result = self.drive(resume=resume, on_trial=on_trial, on_progress=on_progress, labels=labels)
        if interrupts.happened and not quiet_interrupt and result.status.state == "stopped":
            raise KeyboardInterrupt(f"study {result.status.name} was stopped by an interrupt; go on with: run(resume=True)")
        return result

    def drive(
        self,
        *,
        resume: bool,
        on_trial: OnTrial = lambda trial: None,
        on_progress: Callable[[str], None] = lambda text: None,
        on_event: Callable[[Event], None] = lambda event: None,
        labels: Mapping[str, str] | None = None,
    ) -> StudyResult:
        """The same for a caller that holds the study's lock.

        Args:
            resume, on_trial, on_progress, labels: see `run`.
            on_event: called with the events of the study as a run.

        Raises:
            UserError: see `run`.
        """
        labels = check_labels(labels)
        known = self.folder.status() if self.folder.exists else None
        if known is not None and known.over and resume:
            return StudyResult(known)
        study, known = self._begun(known, resume=resume, on_progress=on_progress)
        return self._drive(study, known, on_trial, on_event, labels)

    def detach(
        self, *, resume: bool = False, on_progress: Callable[[str], None] = lambda text: None, labels: Mapping[str, str] | None = None
    ) -> str:
        """Has functions drive the study, and returns its name among runs when the first of them does.

        Args:
            resume, on_progress, labels: see `run`.

        Raises:
            UserError: see `run`; or it cannot be detached.
        """
        labels = check_labels(labels)
        self.cloud, variables = self.subject.check_detached(self.cloud)
        self._refuse_elsewhere()
        self._check_early()
        with written(self.folder.path), self.folder.driving():
            known = self.folder.status() if self.folder.exists else None
            _, known = self._begun(known, resume=resume, on_progress=on_progress)
            header = self._header(known, labels)
            run = RunFolder(runs_folder() / self.folder.begin(header).run_id)
            (run.path / RESULT_FILE).unlink(missing_ok=True)
            if not (run.path / KEY_FILE).exists():
                run.create_key()
        blocking.run(lambda _: detached.hand_over(run, open_header(run), variables))
        return header.run_id

    def as_sent(self, run: str) -> StudyFile:
        """The study file; of an objective with its function as it is sent.

        Args:
            run: name of the study among runs.
        """
        if not isinstance(self.subject, ObjectiveSubject):
            return self.file
        self.subject.admit(self._location())
        shipment, form = self.subject.shipped(run)
        return dataclasses.replace(self.file, kept=KeptObjective(shipment=shipment, form=form))

    def _check_early(self) -> None:
        """Refuses a new study of an objective before there is a folder of it."""
        if isinstance(self.subject, ObjectiveSubject) and not self.folder.exists:
            self.subject.check(self._location())

    def _location(self) -> Settings | None:
        """Location of the functions on a cloud: where the study began, if it has."""
        header = read_header(self.folder.run)
        return run_platform.settings_of(cloud(header.platform), header) if header is not None and header.settings else self.cloud

    def _refuse_elsewhere(self) -> None:
        """Refuses to drive a study from here that functions elsewhere drive, or have stopped.

        Raises:
            JobError: they do.
        """
        run = self.folder.run
        header = read_header(run)
        if header is not None and detached.is_remote(header) and not self.status.over:
            raise JobError(
                f"functions on {header.platform} drive study {run.run_id}",
                remedy=f"use ephemeron attach {run.run_id}, or when they have stopped it: ephemeron resume {run.run_id}",
            )

    def _begun(self, known: StudyStatus | None, *, resume: bool, on_progress: Callable[[str], None]) -> tuple[optuna.Study, StudyStatus]:
        """The study as it is stored, checked and predicted; a new one is stored."""
        if known is not None and known.over:
            raise UserError(f"the study in {self.folder.path} has ended ({known.state}); begin another one with --out FOLDER")
        if known is not None and not resume:
            raise UserError(f"the study in {self.folder.path} has begun; go on with it: --resume")
        if known is None and resume:
            raise UserError(f"there is no study in {self.folder.path}; begin it without --resume")
        if known is None and (self.folder.path / RUN_FILE).exists():
            raise JobError(f"{self.folder.path} is a run and no study", remedy="give the study another name, or another folder: --out")
        withdraw_stop(self.folder.run)
        evaluations = self.subject.check(self._location())
        expected, note = self.subject.predict(on_progress)
        if known is None:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.database.unlink(missing_ok=True)
            study = self._stored(evaluations)
            known = self._first_status(expected, note)
            self.folder.create(self.file.text, known, self.file.options)
        else:
            study = self._stored(evaluations)
        return study, known

    def _header(self, known: StudyStatus, labels: Mapping[str, str]) -> RunHeader:
        return self.subject.header(known, self.folder.new_run_id(known.name, known.token), labels, self.cloud)

    def attach(self, *, on_trial: OnTrial = lambda trial: None, quiet_interrupt: bool = False) -> StudyResult:
        """Watches a study that another client drives. When that client ends before the study, this one goes on with it.

        Args:
            on_trial, quiet_interrupt: see `run`.

        Raises:
            UserError: the study has not begun.
            KeyboardInterrupt: see `run`; while another client drives it, the study goes on.
        """
        told: dict[int, str] = {}
        self._refuse_elsewhere()
        while True:
            driven = self.folder.is_driven
            status = self.folder.status()
            for trial in status.trials:
                if told.get(trial.number) != trial.state:
                    told[trial.number] = trial.state
                    on_trial(trial)
            if status.over or (status.state == "stopped" and not driven):
                return StudyResult(status)
            if not driven:
                return self.run(resume=True, on_trial=on_trial, quiet_interrupt=quiet_interrupt)
            time.sleep(LOOK_EVERY_S)

    def _drive(
        self, study: optuna.Study, known: StudyStatus, on_trial: OnTrial, on_event: Callable[[Event], None], labels: Mapping[str, str]
    ) -> StudyResult:
        simulated = self.subject.is_simulated
        header = self.folder.begin(self._header(known, labels))
        run = self.folder.run
        if not (run.path / KEY_FILE).exists():
            run.create_key()  # from which those of its trials are derived
        header = self.subject.started(run, header)
        if simulated and run.events.exists():  # trials that had not ended begin again
            known = dataclasses.replace(known, seconds=last_t(run))
        ended = [recorded(t) for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
        trials = self.subject.trials(self.folder, header, ended, self._location(), spent_usd=known.spent_usd)
        log = kind.StudyLog(run, header, known, on_event, t=trials.t(known.seconds))
        engine = Engine(
            self.file,
            self.folder,
            study,
            trials,
            places=self.subject.places(),
            token=known.token,
            seconds=known.seconds,
            on_trial=lambda trial: told(trial),
            on_change=lambda: write(),
        )

        def told(trial: TrialRecord) -> None:
            log.tell(trial, trials.t(engine.seconds))
            on_trial(trial)

        def write() -> None:
            self.folder.write(self._now(study, known, engine, "running"))

        async def main(interrupts: blocking.Interrupts) -> StudyState:
            if simulated:
                return await engine.run()
            service = data_service.shared_service(self.folder.data_service, self.file.spec.data_service)
            with interrupts.handled(engine.interrupt):
                async with service:
                    return await engine.run()

        from ephemeron.functions import simulation

        broken: TrialsBroken | None = None
        try:
            state = blocking.run(main, runner=simulation.run if simulated else asyncio.run)
        except TrialsBroken as e:
            state, broken = "stopped", e
        status = self._now(study, known, engine, state, reason=engine.reason if broken is None else line_of(broken.error))
        self.folder.write(status)
        results.write(self.folder, self.file, status, study)
        log.conclude(status, trials.t(status.seconds))
        if broken is not None:
            _log.warning("study %s was stopped; go on with it: ephemeron resume %s", known.name, header.run_id)
            raise broken.error
        return StudyResult(status)

    def _now(self, study: optuna.Study, known: StudyStatus, engine: Engine, state: StudyState, *, reason: str = "") -> StudyStatus:
        ended = [recorded(t) for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
        unfinished = engine.unfinished
        if state == "stopped":
            ids = {t.number for t in ended}
            left = [recorded(t) for t in study.get_trials(deepcopy=False) if t.number not in ids]
            unfinished = [dataclasses.replace(t, reason=engine.stopped if t.started else "") for t in left]
        sign = 1 if self.file.spec.mode == "min" else -1
        finished = [t for t in ended if t.state == "finished" and t.value is not None]
        best = min(finished, key=lambda t: (sign * (t.value or 0.0), t.number), default=None)
        return dataclasses.replace(
            known,
            state=state,
            seconds=round(engine.seconds, 3),
            spent_usd=round(engine.spent_usd, 9),
            best=None if best is None else best.number,
            trials=tuple(sorted([*ended, *unfinished], key=lambda t: t.number)),
            reason=reason,
        )

    def _first_status(self, expected: SpacePrediction | None, note: str) -> StudyStatus:
        spec = self.file.spec
        predicted = expected is not None and expected.cheapest is not None
        return StudyStatus(
            name=spec.name,
            digest=self.file.digest,
            token=secrets.token_hex(3),
            state="running",
            metric=spec.metric,
            mode=spec.mode,
            sampler=spec.sampler,
            pruner=spec.pruner.name,
            job=self.subject.name,
            parameters=tuple(p.key for p in self.file.space),
            trials_planned=self.file.trials,
            concurrency=self.subject.places(),
            budget_usd=spec.budget_usd,
            deadline_s=spec.deadline_s,
            predicted_usd=expected.cost_usd if predicted and expected else None,
            predicted_s=expected.seconds if predicted and expected else None,
            notes=(note,) if note else (),
            is_of_objective=spec.objective is not None,
        )

    def _stored(self, evaluations: int | None) -> optuna.Study:
        import optuna

        with sampling.quiet():
            return optuna.create_study(
                study_name=self.file.spec.name,
                storage=storage_of(self.folder.database),
                load_if_exists=True,
                direction="minimize" if self.file.spec.mode == "min" else "maximize",
                sampler=optuna.samplers.RandomSampler(seed=0),
                pruner=sampling.pruner_of(self.file.spec, evaluations),
            )


def _require_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("Optuna", "tuning") from None


def run_folder(trial: TrialRecord) -> Path:
    """Folder of a trial's run."""
    return folders.runs_folder() / trial.run
