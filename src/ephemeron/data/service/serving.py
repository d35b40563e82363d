"""The data service as a service of this machine (`runs.services`): its coordinator is kept alive, and its loaders' events are collected.

Each shard hosts its loaders, and has their events and output in its folder. The run of the service has them together: events are copied,
and logs are links. A coordinator ends by itself when nobody keeps it alive any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ephemeron.config.typed import Typed, build, plain
from ephemeron.data.service.address import TOKEN_VARIABLE
from ephemeron.data.service.client import own_token
from ephemeron.data.service.daemon import LOG_FILE, ManagedProcess
from ephemeron.data.service.settings import ServiceSettings
from ephemeron.errors import JobError, ServiceUnreachable
from ephemeron.events import Ended, Event, Invoked, RunEnded, RunStarted
from ephemeron.functions.jsonl import complete_lines, events_in
from ephemeron.runs.client_run import ClientRun
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.lock import is_driven
from ephemeron.runs.logs import LOGS_FOLDER, PARTS_FOLDER
from ephemeron.runs.services import Said, ServiceRun

LOOK_S = 1.0
"""Interval at which it is looked whether the coordinator lives, and for events."""
_END_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(Typed):
    """Settings of the service as a run."""

    folder: str
    """Folder of its state."""
    settings: ServiceSettings


async def serve(service: ServiceRun) -> Said:
    """See `runs.services.Serve`."""
    o = build(DataSettings, service.header.payload, where=f"settings of {service.header.run_id}")
    place = Path(o.folder)
    part = ManagedProcess("coordinator", place, os.environ.get(TOKEN_VARIABLE) or own_token(place))
    await asyncio.to_thread(_take_over, part)
    loaders = LoaderEvents(place, service.run)
    settings = replace(o.settings, run=str(service.folder.path))
    address = await asyncio.to_thread(part.ensure, settings)
    settings = replace(settings, port=address.port)
    where = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else str(place / "token")
    said = Said(
        f"data service at {address}, token in {where}; Ctrl-C ends it",
        {"address": str(address), "folder": str(place), "token_in": where, "run_id": service.header.run_id},
    )
    try:
        service.ready(said, address=str(address), payload=plain(replace(o, settings=replace(settings, run=""))))
        while not await service.is_over(LOOK_S):
            loaders.collect()
            if not part.alive:
                _log.warning("the coordinator has ended: starting it again")
                await asyncio.to_thread(part.ensure, settings)
    finally:
        await asyncio.to_thread(part.kill, gently=True, wait_s=_END_S)
        if service.run.begun:
            loaders.collect()
    return Said(f"the data service has ended; its state is in {place}", {"loaders": loaders.invocations})


class LoaderEvents:
    """Events and logs of the loader functions of a service, as those of a run.

    Args:
        place: folder of the service's state. What is there already is of earlier runs.
        run: of the service.
    """

    def __init__(self, place: Path, run: ClientRun) -> None:
        self._place, self._run = place, run
        self._offsets = {path: path.stat().st_size for path in self._files()}
        self.invocations = 0
        """Of loader functions."""

    def collect(self) -> None:
        """Copies the events that are new."""
        for path in self._files():
            lines = complete_lines(path, self._offsets.get(path, 0))
            self._offsets[path] = self._offsets.get(path, 0) + len(lines)
            for event in events_in(lines):
                self._add(path.parent, event)
        self._link(self._place / LOG_FILE, f"{PARTS_FOLDER}/coordinator.txt")
        for log in self._place.glob(f"flows/*/{LOG_FILE}"):
            self._link(log, f"{PARTS_FOLDER}/{log.parent.name}.txt")
        for log in self._place.glob(f"flows/*/shard-*/{LOG_FILE}"):
            self._link(log, f"{PARTS_FOLDER}/{log.parents[1].name}-{log.parent.name}.txt")

    def _add(self, shard: Path, event: Event) -> None:
        if isinstance(event, RunStarted | RunEnded):
            return
        if isinstance(event, Invoked):
            self.invocations += 1
            name = f"{LOGS_FOLDER}/{event.invocation}.txt"
            self._link(shard / name, name)
        if isinstance(event, Ended) and not event.memory_mb:  # of a killed host, whose successor does not know it
            memory_mb = self._run.header.memory_mb
            event = replace(event, memory_mb=memory_mb, gb_seconds=memory_mb / 1024 * event.billed_s)
        self._run.emit(event)

    def _link(self, target: Path, name: str) -> None:
        link = self._run.folder.path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(target)

    def _files(self) -> Iterator[Path]:
        return self._place.glob("flows/*/shard-*/events.jsonl")


def _take_over(part: ManagedProcess) -> None:
    """Ends a coordinator whose run was killed.

    Raises:
        JobError: another run, or a reader, keeps it alive.
    """
    try:
        running = part.address()
    except ServiceUnreachable:
        if not part.alive:
            return
        running = None
    settings = part.settings()
    run = settings.get("run") if isinstance(settings, dict) else ""
    if not run or is_driven(RunFolder(Path(run))):
        raise JobError(f"a data service with this folder runs at {running or part.folder}", remedy="use it, or end it, or give --folder")
    part.kill(gently=True, wait_s=_END_S)
