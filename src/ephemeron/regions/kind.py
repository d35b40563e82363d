"""The kind `regions`: training in several places, each with functions of its own, which exchange what they learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following, RunKind

if TYPE_CHECKING:
    from ephemeron.runs.predictions import Prediction
    from ephemeron.training.driver.launching.launch import LaunchRequest
    from ephemeron.training.driver.lifecycle import OnEvent
    from ephemeron.training.driver.result import Result
    from ephemeron.training.job import RegionPlanMethod


class RegionRuns(RunKind):
    """Runs of several regions, each of them a run of kind `training`. A function loads this, too, for `exchange` alone."""

    def launch(self, request: LaunchRequest, *, on_event: OnEvent | None, out: Path | None) -> Result:
        """Trains a job in its regions, and waits for the end of the run."""
        from ephemeron.regions.driver.driving import train_groups

        return train_groups(request, on_event=on_event, out=out)

    def predict(self, request: LaunchRequest, on_progress: Callable[[str], None]) -> Prediction:
        """What a run will take; see `driver.launch`."""
        from ephemeron.regions.driver.launch import predict_groups, prepared_groups

        return predict_groups(prepared_groups(request), on_progress)

    def launch_detached(self, request: LaunchRequest) -> str:
        """Starts a run in its regions, which functions drive, or stores it if it is simulated; returns its name."""
        from ephemeron.regions.driver.driving import launch_groups

        return launch_groups(request)

    def read_options(self, path: str, plan: RegionPlanMethod | None) -> dict[str, object]:
        """The table `[run.regions]` from a file of regions: its regions with the functions that the plan gives them, and how they exchange.

        Args:
            path: of the file.
            plan: method; None: that of the file.

        Raises:
            JobError: the file is refused, or nothing can be planned.
            PlanInfeasible: as `plan_regions`.
        """
        from ephemeron.regions.planning import planned
        from ephemeron.regions.region_files import groups_of, load_regions

        found, method = planned(load_regions(path), plan)
        return {
            "region": groups_of(found),
            "plan": method,
            "store": found.store,
            "least_regions": found.least_regions,
            "replan_every_s": found.replan_every_s,
            "communicator": found.communicator,
            "relay": found.relay,
            "authority": found.authority,
        }

    @property
    def exchange(self) -> ModuleType:
        """What functions of a region call; see `training.worker.group_exchange`."""
        from ephemeron.regions import exchange

        return exchange

    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> Result:
        from ephemeron.regions.driver.driving import follow_groups

        return follow_groups(folder, header, following, attach=True)

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> Result:
        from ephemeron.regions.driver.driving import follow_groups

        return follow_groups(folder, header, following, attach=False)

    def result(self, folder: RunFolder) -> Result | None:
        from ephemeron.training.driver.kind import TrainingRuns

        return TrainingRuns().result(folder)

    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        from ephemeron.regions.driver.driving import stop_groups

        stop_groups(folder, now=now)
