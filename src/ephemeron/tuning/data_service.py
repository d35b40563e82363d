"""One data service for all trials of a study: its loaders and its cache read each sample once for all (DPFlow, chapter 4).

Functions find it by two environment variables, which a function that outlives the client keeps. So port and token are stored in
the study's folder, and a service that is started again has both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from ephemeron.communication.channels import credentials
from ephemeron.config.paths import replace_file
from ephemeron.data.flow_spec import SERVICE_VARIABLE
from ephemeron.data.service import ServiceSettings
from ephemeron.data.service.client import own_token
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.settings import TOKEN_VARIABLE
from ephemeron.errors import JobError, ServiceUnreachable
from ephemeron.training.job import Configuration, Job
from ephemeron.tuning.study_file import StudySpec

LOOK_EVERY_S = 2.0
"""Interval at which a service that has died is started again."""
_END_S = 30.0
_PORT = "port"
_log = logging.getLogger(__name__)


def check(spec: StudySpec, job: Job, c: Configuration) -> None:
    """Refuses a service that no trial would read through.

    Raises:
        JobError: functions do not run on this machine, or the job's data is no flow.
    """
    if not spec.data_service:
        return
    asked = f"{spec.name}: data_service = {spec.data_service}"
    if c.platform != "local":
        raise JobError(
            f"{asked} is on this machine, which functions of platform {c.platform} do not reach",
            remedy='leave it out, or set run.platform = "local" in the job',
        )
    if job.task is None and job.script is None and job.data.flow is None:
        raise JobError(
            f"{asked} loads flows, and the job has data.source {job.data.source}",
            remedy="leave it out, or describe the data as a flow: data.flow",
        )


@contextlib.asynccontextmanager
async def shared_service(folder: Path, loaders: int) -> AsyncIterator[None]:
    """Runs a service, and names it to the functions that are started inside. It ends with the block, or when it is idle.

    Args:
        folder: of its state.
        loaders: loader functions at most; 0: no service.

    Raises:
        ServiceUnreachable: it does not start.
    """
    if not loaders:
        yield
        return
    token, stored = own_token(folder), folder / _PORT
    port = int(stored.read_text()) if stored.exists() else 0
    settings = ServiceSettings(loaders=loaders, ends_when_idle=True, port=port)
    process = ManagedProcess("coordinator", folder, token)
    address = await asyncio.to_thread(process.ensure, settings)
    replace_file(stored, str(address.port))
    watching = asyncio.create_task(_watched(process, dataclasses.replace(settings, port=address.port)))
    try:
        with credentials.environment({SERVICE_VARIABLE: f"{address.host}:{address.port}", TOKEN_VARIABLE: token}):
            yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(process.kill, gently=True, wait_s=_END_S)


async def _watched(process: ManagedProcess, settings: ServiceSettings) -> None:
    """Starts the service again where it has died or, without readers for a while, has ended. When this is cancelled, no start goes on."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        starting = asyncio.ensure_future(asyncio.to_thread(process.ensure, settings))
        try:
            await asyncio.shield(starting)
        except ServiceUnreachable as e:
            _log.warning("%s", e)
        finally:
            await asyncio.wait([starting])
