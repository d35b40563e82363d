"""The platforms on which functions live on their own, as `train`, `attach`, `resume` and `stop` take hold of them.

What a run was started on is in its record (`run.json`): `platform`, and for clouds which function, where. No secrets.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ephemeron.errors import JobError
from ephemeron.events import RunEnded, RunStarted, from_json
from ephemeron.job import Configuration
from ephemeron.platforms.clouds import CLOUDS, cloud
from ephemeron.training.home import RunFolder

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

    return await LocalPlatform.start(folder.path, env=secrets)


async def attach(folder: RunFolder, run: dict[str, Any]) -> LocalPlatform | RecordedPlatform:
    """The platform that the run is on.

    Raises:
        NotRunning: it is over.
    """
    if run["platform"] in CLOUDS:
        if _is_over(folder):
            raise NotRunning
        return await _open(folder, run, starting=False)
    from ephemeron.platforms.local import HostGone, LocalPlatform

    try:
        return await LocalPlatform.attach(folder.path)
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


def _is_over(folder: RunFolder) -> bool:
    """Whether the latest launch or resume has ended for a client that watched."""
    over = False
    with contextlib.suppress(FileNotFoundError), folder.events.open() as lines:
        for line in lines:
            if '"kind":"run_' in line:
                with contextlib.suppress(ValueError, TypeError):
                    event = from_json(line)
                    over = isinstance(event, RunEnded) if isinstance(event, (RunEnded, RunStarted)) else over
    return over
