"""The platforms on which functions live on their own, as `train`, `attach`, `resume` and `stop` take hold of them.

What a run was started on is in its record (`run.json`): `platform`, and for clouds which function, where. No secrets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.errors import JobError
from ephemeron.job import Configuration
from ephemeron.platforms.clouds import CLOUDS, cloud
from ephemeron.training.home import RunFolder
from ephemeron.training.standing import session_end

if TYPE_CHECKING:
    from ephemeron.platforms.local import LocalPlatform
    from ephemeron.platforms.recorded.platform import RecordedPlatform


class NotRunning(Exception):
    """Nothing of the run lives any more."""


async def start(folder: RunFolder, run: dict[str, Any], secrets: dict[str, str]) -> LocalPlatform | RecordedPlatform:
    """A platform to launch or resume the run on.

    Raises:
        PlatformError: it cannot be had.
        JobError: the function has become another one since.
    """
    if run["platform"] in CLOUDS:
        return await _open(folder, run, starting=True)
    from ephemeron.platforms.local import LocalPlatform

    return await LocalPlatform.start(folder.path, env=secrets, restart=True)


def sweep(runs: Path) -> None:
    """Removes what clients and daemons that were killed have left below the folder of all runs."""
    from ephemeron.platforms import local
    from ephemeron.training import driver_lock

    local.sweep(runs)
    driver_lock.sweep(runs)


async def at_work(folder: RunFolder, run: dict[str, Any]) -> bool:
    """Whether functions of the run are running on this machine."""
    if run["platform"] in CLOUDS:
        return False
    from ephemeron.platforms.local import HostGone, LocalPlatform

    try:
        async with await LocalPlatform.attach(folder.path) as platform:
            return bool((await platform.status())["running"])
    except HostGone:
        return False


async def attach(folder: RunFolder, run: dict[str, Any], *, restart: bool = True) -> LocalPlatform | RecordedPlatform:
    """The platform that the run is on.

    Args:
        folder, run: of the run.
        restart: replace the process that hosts local functions where it dies; for the client that drives the run.

    Raises:
        NotRunning: it is over.
    """
    if run["platform"] in CLOUDS:
        if session_end(folder.events) is not None:
            raise NotRunning
        return await _open(folder, run, starting=False)
    from ephemeron.platforms.local import HostGone, LocalPlatform

    try:
        return await LocalPlatform.attach(folder.path, restart=restart)
    except HostGone:
        raise NotRunning from None


async def _open(folder: RunFolder, run: dict[str, Any], *, starting: bool) -> RecordedPlatform:
    from ephemeron.platforms.recorded.cloud import Hold

    where = cloud(run["platform"])
    try:
        settings = where.settings(**run[where.name])
        configuration = Configuration(**run["configuration"])
    except (KeyError, TypeError) as e:
        raise JobError(f"run.json of {folder.run_id} does not say where on {where.title} it runs: {e}") from None
    hold = Hold(
        run=run["run_id"], run_dir=folder.path, configuration=configuration, channel=run["address"],
        since=run["wall_time"], starting=starting,
    )  # fmt: skip
    return await where.open(hold, settings.located())
