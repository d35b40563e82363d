"""An objective as what a study searches: what is checked before the start, and the header of the study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ephemeron.config.code_bundle import Selection
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.executor.environment import python_of, seen_by_client
from ephemeron.executor.item_trial import RUN
from ephemeron.executor.map_prediction import Workers, predict_calls
from ephemeron.executor.places import PlaceOptions, address_of, admitted
from ephemeron.executor.shipping import Shipment, Shipper, name_of
from ephemeron.functions.deployed_packages import check_modules
from ephemeron.functions.registry import CLOUDS
from ephemeron.functions.shipped_tasks import code_keys
from ephemeron.prices import Prices, load_prices
from ephemeron.runs import detached
from ephemeron.runs.folders import RunFolder, last_t
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.origin import command_line
from ephemeron.runs.predictions import Prediction
from ephemeron.runs.status import session_end
from ephemeron.tuning import prediction
from ephemeron.tuning.folder import StudyFolder, StudyStatus, TrialRecord
from ephemeron.tuning.objective import Objective, ObjectiveSpec, find_function, objective_of
from ephemeron.tuning.objective_call import CallForm, TrialCall, try_trial
from ephemeron.tuning.objective_trials import ObjectiveTrials
from ephemeron.tuning.study_file import StudyFile
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings
    from ephemeron.functions.base import Limits


class ObjectiveSubject:
    """The objective of a study.

    Args:
        file: what the study is.
        folder: of the study, which is not sent with the code beside it.
    """

    def __init__(self, file: StudyFile, folder: StudyFolder) -> None:
        self._file, self._folder = file, folder
        self._admitted: tuple[PlaceOptions, dict[str, str], Limits] | None = None
        self._is_checked = False

    @property
    def spec(self) -> ObjectiveSpec:
        """The function, and where it runs."""
        assert self._file.spec.objective is not None
        return self._file.spec.objective

    @property
    def name(self) -> str:
        """Of the function."""
        return self.spec.function or name_of(self._file.function)

    @property
    def platform(self) -> str:
        """Of its trials."""
        return self.spec.platform

    @property
    def is_simulated(self) -> bool:
        """Whether its trials take place in virtual time."""
        return self.platform == "simulated"

    def objective(self) -> Objective:
        """The function.

        Raises:
            JobError: there is none, or it cannot be called with the parameters of the space, or reports nothing to the pruner.
        """
        if not self.spec.function and self._file.function is None:
            raise JobError(
                "the objective of this study is a function of a program, which is not here", remedy="go on with it there: resume=True"
            )
        folder = None if self._file.path is None else self._file.path.parent
        seen_by_client(self.spec.requirements, self.platform)
        found = objective_of(self._file.function or find_function(self.spec, folder), [p.key for p in self._file.space])
        if self._file.spec.pruner.name != "none" and not found.form.trial:
            raise JobError(
                f"pruner {self._file.spec.pruner.name} needs values before the end, and objective {found.name} has no argument trial",
                remedy='add it, and call trial.report(step, value), or leave the pruner out ("none")',
            )
        return found

    def shipped(self, run: str) -> tuple[Shipment, CallForm]:
        """The function as it is sent.

        Args:
            run: name of the study among runs.

        Raises:
            JobError: see `objective`, or it cannot be sent.
        """
        if self._file.kept is not None:
            return self._file.kept.shipment, self._file.kept.form
        found = self.objective()
        selection = Selection(include=self.spec.code_include, exclude=self.spec.code_exclude, closed=(self._folder.path.absolute(),))
        _, _, limits = self._admitted or self.admit(None)
        check = partial(check_modules, limits=limits, platform=self.platform)
        shipper = Shipper(code_keys(run), list(self.spec.code), selection=selection, check=check)
        return shipper.ship(found.function), found.form

    def admit(self, location: Settings | None, run: RunHeader | None = None) -> tuple[PlaceOptions, dict[str, str], Limits]:
        """Options of its functions with everything filled in and checked, secrets of the channel, and limits of the platform.

        Args:
            location: of functions on a cloud; None: its default.
            run: that has begun, with the settings and sizes that it has.

        Raises:
            JobError, PlanInfeasible: an option is refused.
        """
        asked = PlaceOptions(
            platform=self.platform,
            memory_mb=self.spec.memory_mb or 0,
            max_workers=self._file.spec.concurrency or 0,
            channel=self.spec.channel,
            lifetime_s=self.spec.function_timeout_s or 0.0,
            settings=location,
        )
        options, secrets, limits = admitted(asked, run)
        python = python_of(self.spec.requirements, self.platform, limits, is_taken_over=run is not None)
        self._admitted = replace(options, python=python), secrets, limits
        return self._admitted

    def check(self, location: Settings | None) -> None:
        """Refuses what cannot work before anything starts. How many values a trial reports is not known.

        Raises:
            UserError: see above.
        """
        if self._is_checked:
            return
        if self._file.kept is None:
            self.objective()
        self.admit(location)
        self.shipped("check")
        self._is_checked = True

    def predict(self, on_progress: Callable[[str], None], *, measures: bool = True) -> tuple[None, str]:
        """Nothing: what a trial takes is known when one was tried (`dry_run`). Says what begins."""
        options, _, _ = self._admitted or self.admit(None)
        functions = human_count(min(options.max_workers, self._file.trials), "function")
        memory = f" of {options.memory_mb:,} MB" if options.memory_mb else ""
        on_progress(
            f"{self._file.spec.name}: {human_count(self._file.trials, 'trial')} of {self.name}, on {functions}{memory} ({self.platform})"
        )
        return None, ""

    def dry_run(self, location: Settings | None, on_progress: Callable[[str], None], *, measures: bool) -> Prediction:
        """What the study will take: some of its trials are run in a process of this machine, with the memory of a function.

        Args:
            location: of functions on a cloud; None: its default.
            on_progress: told that they are.
            measures: nothing more is measured.

        Raises:
            UserError: the study is refused, or a trial fails.
        """
        self.check(location)
        options, _, limits = self._admitted or self.admit(location)
        shipment, form = self.shipped(RUN)
        spec, trials = self._file.spec, self._file.trials
        points = prediction.drawn_points(self._file, trials)
        calls = [
            (TrialCall(number=n, params=values, form=form, metric=spec.metric, timeout_s=self.spec.timeout_s),)
            for n, values in enumerate(points)
        ]
        on_progress(f"trying {shipment.name} here, in a process with {options.memory_mb:,} MB")
        found = predict_calls(
            Workers(
                platform=self.platform,
                memory_mb=options.memory_mb,
                vcpus=options.memory_mb / limits.mb_per_vcpu,
                max_workers=options.max_workers,
                function_timeout_s=options.lifetime_s,
                prices=self._prices(),
                limits=limits,
                python=options.python,
            ),
            shipment,
            calls,
            within=f"{try_trial.__module__}:{try_trial.__qualname__}",
            word="trial",
            timeout_s=self.spec.timeout_s,
        )
        counted = f"{trials}, {spec.sampler}, pruner {spec.pruner.name}; time and cost are those of all, without pruning"
        return replace(
            found, kind="study", name=spec.name, rows=(("objective", shipment.name), ("trials", counted), *found.rows[1:])
        ).within(budget_usd=spec.budget_usd, deadline_s=spec.deadline_s)

    def places(self) -> int:
        """Functions of all trials at once."""
        options, _, _ = self._admitted or self.admit(None)
        return options.max_workers

    def check_detached(self, settings: Settings | None) -> tuple[Settings | None, Mapping[str, str]]:
        """Refuses what functions cannot drive.

        Args:
            settings: location of functions on a cloud; None: its default.

        Returns:
            The location as it is recorded, and variables of the channel.

        Raises:
            JobError: see above.
        """
        detached.check_place("study", self.platform, self.spec.channel)
        if not self.spec.function:
            raise JobError(
                "functions drive the study by the name of its objective, which is a function of a program",
                remedy="put it into a module, or leave detach out",
            )
        options, secrets, _ = self.admit(settings)
        return options.settings, secrets if self.platform in CLOUDS else {}

    def header(self, status: StudyStatus, run_id: str, labels: Mapping[str, str], settings: Settings | None) -> RunHeader:
        """The header of the study.

        Args:
            status: of the study.
            run_id: its name among runs.
            labels: see `runs.labels`.
            settings: location of the functions on a cloud; None: its default.
        """
        options, _, _ = self._admitted or self.admit(settings)
        return RunHeader(
            run_id=run_id,
            kind="study",
            name=status.name,
            platform=self.platform,
            channel=address_of(options, self._folder.path),
            functions=status.concurrency,
            memory_mb=options.memory_mb,
            lifetime_s=options.lifetime_s,
            settings={} if options.settings is None else plain(options.settings),
            prices=self._prices(),
            budget_usd=status.budget_usd,
            deadline_s=status.deadline_s,
            started_at=time.time(),
            command=command_line(),
            labels=labels,
            payload={"file": self._home()},
        )

    def _home(self) -> str:
        """The file by which another client goes on with the study; empty: there is none."""
        if self._file.path is not None:
            return str(self._file.path)
        return str(self._folder.study_file.absolute()) if self.spec.function else ""

    def _prices(self) -> Prices:
        return load_prices("cache" if self.spec.channel.startswith("redis") else "objects", self.spec.prices)

    def started(self, run: RunFolder, header: RunHeader) -> RunHeader:
        """The header of a study that begins, or is gone on with: the time of its events is that since `started_at`.

        Args:
            run, header: of the study.
        """
        before_s = last_t(run) if run.events.exists() else 0.0
        if self.is_simulated or (before_s and session_end(run.events) is None):  # its functions may still run
            return header
        header = replace(header, started_at=time.time() - before_s)
        write_header(run, header)
        return header

    def trials(
        self, folder: StudyFolder, header: RunHeader, ended: Iterable[TrialRecord], location: Settings | None, *, spent_usd: float
    ) -> ObjectiveTrials:
        """Its trials while one client drives the study.

        Args:
            folder, header: of the study.
            ended: trials that have ended.
            location: of functions on a cloud; None: elsewhere.
            spent_usd: by earlier clients.
        """
        options, secrets, _ = self.admit(location, header)
        shipment, form = self.shipped(header.run_id)
        return ObjectiveTrials(
            self._file,
            folder,
            header,
            shipment=shipment,
            form=form,
            options=replace(options, is_taken_over=folder.run.events.exists()),
            secrets=secrets,
            prices=header.prices,
            spent_usd=spent_usd,
        )
