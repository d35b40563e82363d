"""The data service as a service of this machine (`runs.services`): its coordinator is kept alive, and its loaders' events are collected.

Each shard hosts its loaders, and has their events and output in its folder. The run of the service has them together: events are copied,
and logs are links. A coordinator ends by itself when nobody keeps it alive any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ephemeron.config.typed import Typed, build, plain
from ephemeron.data.service.client import own_token
from ephemeron.data.service.daemon import LOG_FILE, ManagedProcess
from ephemeron.data.service.settings import TOKEN_VARIABLE, ServiceSettings
from ephemeron.errors import JobError, ServiceUnreachable
from ephemeron.runs.client_run import ClientRun
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.lock import is_driven
from ephemeron.runs.logs import PARTS_FOLDER
from ephemeron.runs.services import Said, ServiceRun

LOOK_S = 1.0
"""Interval at which it is looked whether the coordinator lives, and for events."""
_END_S = 30.0
_EVENTS = "flows/*/shard-*/events.jsonl"
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
    for events in place.glob(_EVENTS):  # of earlier runs
        service.run.skip(events)
    loaders = 0
    settings = replace(o.settings, run=str(service.folder.path), labels=service.header.labels)
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
            loaders += _collect(place, service.run)
            if not part.alive:
                _log.warning("the coordinator has ended: starting it again")
                await asyncio.to_thread(part.ensure, settings)
    finally:
        await asyncio.to_thread(part.kill, gently=True, wait_s=_END_S)
        if service.run.begun:
            loaders += _collect(place, service.run)
    return Said(f"the data service has ended; its state is in {place}", {"loaders": loaders})


def _collect(place: Path, run: ClientRun) -> int:
    """Collects events and logs of loaders; returns how many were started."""
    invoked = sum(map(run.collect, place.glob(_EVENTS)))
    run.link(place / LOG_FILE, f"{PARTS_FOLDER}/coordinator.txt")
    for log in (*place.glob(f"flows/*/{LOG_FILE}"), *place.glob(f"flows/*/shard-*/{LOG_FILE}")):
        run.link(log, f"{PARTS_FOLDER}/{'-'.join(log.parent.relative_to(place / 'flows').parts)}.txt")
    return invoked


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
