"""The kind `training`: one program on the ranks of one group of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ephemeron import blocking
from ephemeron.events import Event, RunEnded
from ephemeron.runs import run_platform
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following, RunKind
from ephemeron.runs.status import session_end
from ephemeron.runs.stop_requests import request_stop, withdraw_stop
from ephemeron.training.driver import lifecycle, records, run_logging, simulations
from ephemeron.training.driver.progress import shown_progress
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.result import Result, conclude

if TYPE_CHECKING:
    from ephemeron.runs.predictions import Prediction
    from ephemeron.training.driver.launching.launch import LaunchRequest


class TrainingRuns(RunKind):
    """Runs of jobs."""

    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> Result:
        if header.platform == "simulated":
            return self._attach_simulated(folder, header, following)
        return self._follow(folder, header, following, attach=True)

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> Result:
        if header.platform == "simulated":
            withdraw_stop(folder)
            return simulations.simulate_again(folder, header, following)
        return self._follow(folder, header, following, attach=False)

    def _attach_simulated(self, folder: RunFolder, header: RunHeader, following: Following) -> Result:
        known = self.result(folder)
        if known is None or known.summary.status != session_end(folder.events):
            return simulations.simulate_again(folder, header, following)
        for event in events_of(folder):
            following.on_event(event)
        return known

    def _follow(self, folder: RunFolder, header: RunHeader, following: Following, *, attach: bool) -> Result:
        spec, chosen = run_spec(header), run_logging.continued(folder, following.loggers)
        with run_logging.logged(folder, spec, chosen, following.on_event) as log:
            ending, ledger = blocking.run(
                lambda interrupts: lifecycle.drive(
                    folder, header, spec, log.on_event, {}, interrupts, attach=attach, keep_code=following.keep_code
                )
            )
            return log.conclude(conclude(folder, spec, ledger, ending, None))

    def shown(self, header: RunHeader) -> Callable[[Event], None]:
        return shown_progress(header.prices)

    def predict(self, request: LaunchRequest, on_progress: Callable[[str], None]) -> Prediction:
        """What a run will take; see `api.dry_run`."""
        from ephemeron.training.driver.launching import dry_runs
        from ephemeron.training.driver.launching.launch import prepared_run

        return dry_runs.predict_run(prepared_run(request, run_id=dry_runs.RUN))

    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        if header.platform == "simulated":
            return request_stop(folder, now=now)
        blocking.run(lambda _: lifecycle.stop(folder, header, now=now))

    def result(self, folder: RunFolder) -> Result | None:
        summary = records.read_result(folder)
        if summary is None:
            return None
        causes = [event.causes for event in events_of(folder) if isinstance(event, RunEnded)]
        return Result(summary, folder, tuple(causes[-1]) if causes else ())

    def suspend(self, folder: RunFolder, header: RunHeader) -> int:
        return blocking.run(lambda _: run_platform.suspend(folder, header))

    def wake(self, folder: RunFolder, header: RunHeader) -> int:
        return blocking.run(lambda _: run_platform.wake(folder, header))
