"""Where the tasks of an executor run: a platform, opened, and the channel that its functions and the client share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ephemeron.communication.channels import open_channel, public_address
from ephemeron.communication.channels.address import check_address
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.credentials import environment
from ephemeron.config.own_processes import PYTHON_VARIABLE
from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.provider import CapacityRequest, RunHandle
from ephemeron.functions.base import Limits, Platform
from ephemeron.functions.entries import PRELOAD_VARIABLE, PRELOADS
from ephemeron.functions.environments.local_environment import in_use
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.functions.world import Simulation
from ephemeron.runs import run_platform
from ephemeron.runs.header import RunHeader

PLATFORMS = ("local", "simulated", *CLOUDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """Where functions run, and of which size; open values are filled in by `admitted`."""

    platform: str = "local"
    memory_mb: int = 0
    """0: one vCPU's on this machine and in the simulator, the function's own on a cloud."""
    max_workers: int = 0
    """0: the cores of this machine, 100 elsewhere."""
    lifetime_s: float = 0.0
    """Time limit of a function; 0: the platform's."""
    autoscaling_factor: float = 1.0
    """Functions for each task that is ready or running, up to `max_workers`."""
    idle_s: float = 10.0
    """Time after which a function that finds no task ends."""
    channel: str = "folder"
    """Address of the channel, without credentials."""
    settings: Any = None
    """Settings of the cloud."""
    python: str = ""
    """Of the environment of functions of this machine; empty: the client's."""
    preload: tuple[str, ...] = ()
    """Modules that functions import before their first call, beside those of `PRELOADS`."""
    simulation: Simulation = field(default_factory=Simulation)
    is_taken_over: bool = False
    """Whether the run was begun by another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An opened platform."""

    platform: Platform
    store: Channel
    address: str
    """Of the channel, for functions."""
    clock: Callable[[], float]
    """In which `Call.origin` is."""
    lease_s: float = 12.0
    """See `TaskQueue`."""
    poll_s: float = 1.0
    """Longest pause of a function that finds no task."""


USUAL_WORKERS = 100
"""Functions at once on other platforms than this machine, unless told otherwise; fewer where fewer may run."""


def admitted(options: PlaceOptions, run: RunHeader | None = None) -> tuple[PlaceOptions, dict[str, str], Limits]:
    """Options with everything filled in and checked, secrets of the channel, and the platform's limits. Nothing is started.

    Args:
        options: of an executor.
        run: that this process takes over, with the settings and sizes that it has.

    Raises:
        JobError, PlanInfeasible, MissingExtra: one line; names the option.
    """
    if options.platform not in PLATFORMS:
        raise JobError(f"platform {options.platform!r} is not known", remedy=f"use one of {', '.join(PLATFORMS)}")
    for name in ("memory_mb", "max_workers", "lifetime_s"):
        if getattr(options, name) < 0:
            raise JobError(f"{name} = {getattr(options, name)} is negative", remedy="leave it out for the default")
    check_address(options.channel)
    address, secrets = public_address(options.channel)
    options = replace(options, channel=address)
    if options.platform in CLOUDS:
        where = cloud(options.platform)
        if run is not None:
            options = replace(
                options,
                settings=run_platform.settings_of(where, run),
                memory_mb=run.memory_mb,
                max_workers=run.functions,
                lifetime_s=run.lifetime_s,
                is_taken_over=True,
            )
        settings = (where.settings() if options.settings is None else options.settings).located()
        wanted = CapacityRequest(
            workers=options.max_workers or 1, memory_mb=options.memory_mb, lifetime_s=options.lifetime_s, channel=address
        )
        request, limits = where.admit(wanted, settings, secrets)
        workers = request.workers if options.max_workers else max(1, min(USUAL_WORKERS, limits.concurrency))
        return (
            replace(
                options,
                settings=where.recorded(settings, limits),
                memory_mb=request.memory_mb,
                lifetime_s=request.lifetime_s,
                max_workers=workers,
            ),
            secrets,
            limits,
        )
    if options.settings is not None:
        raise JobError(f"{type(options.settings).__name__} is not for platform {options.platform}")
    if options.platform == "simulated":
        from ephemeron.functions.simulated import simulated_limits

        limits = simulated_limits(options.simulation)
        workers = options.max_workers or min(USUAL_WORKERS, limits.concurrency)
    else:
        from ephemeron.functions.local import default_limits

        limits = default_limits()
        workers = options.max_workers or min(os.cpu_count() or 1, limits.concurrency)
    made = replace(
        options,
        memory_mb=options.memory_mb or min(int(limits.mb_per_vcpu), limits.memory_max_mb),
        max_workers=workers,
        lifetime_s=options.lifetime_s or limits.lifetime_s,
    )
    if made.max_workers > limits.concurrency:
        raise JobError(
            f"max_workers = {made.max_workers}, and {options.platform} runs {limits.concurrency} functions at once",
            remedy=limits.more or f"use at most {limits.concurrency}",
        )
    if not limits.memory_min_mb <= made.memory_mb <= limits.memory_max_mb:
        raise JobError(f"memory_mb = {made.memory_mb} is outside {limits.memory_min_mb} to {limits.memory_max_mb} on {options.platform}")
    if made.lifetime_s > limits.lifetime_s:
        raise JobError(f"function_timeout_s = {made.lifetime_s:g} is above {limits.lifetime_s:g} on {options.platform}")
    return made, secrets, limits


def address_of(options: PlaceOptions, folder: Path) -> str:
    """Address of a run's channel, without credentials.

    Args:
        options: admitted.
        folder: of the run.
    """
    if options.platform == "simulated":
        return "memory"
    return (folder / "objects").resolve().as_uri() if options.channel == "folder" else options.channel


@asynccontextmanager
async def opened(options: PlaceOptions, *, run: str, folder: Path, secrets: dict[str, str]) -> AsyncIterator[Place]:
    """Opens a platform for a run; functions that are left at the end are cancelled.

    Args:
        options: admitted.
        run: name of the run.
        folder: of the run.
        secrets: of the channel.

    Raises:
        PlatformError, ChannelError, JobError: it cannot be opened.
    """
    async with contextlib.AsyncExitStack() as stack:
        if options.platform == "simulated":
            from ephemeron.functions.simulated import SimulatedPlatform

            simulated = SimulatedPlatform(options.simulation, log=folder / "events.jsonl")
            stack.push_async_callback(simulated.close)
            clock = asyncio.get_running_loop().time
            yield Place(platform=simulated, store=simulated.store, address=address_of(options, folder), clock=clock)
            return
        stack.enter_context(environment(secrets))
        address = address_of(options, folder)
        store = await stack.enter_async_context(open_channel(address))
        platform: Platform
        if options.platform in CLOUDS:
            capacity = CapacityRequest(
                workers=options.max_workers, memory_mb=options.memory_mb, lifetime_s=options.lifetime_s, channel=address
            )
            handle = RunHandle(
                run=run, run_dir=folder, capacity=capacity, channel=address, since=time.time(), starting=not options.is_taken_over
            )
            recorded = await cloud(options.platform).open(handle, options.settings)
            stack.push_async_callback(recorded.shutdown)
            platform = recorded
        else:
            from ephemeron.functions.local import LocalPlatform

            variables = {**secrets, PRELOAD_VARIABLE: ",".join((*PRELOADS["task-executor"], *options.preload))}
            if options.python:
                stack.enter_context(in_use(options.python))
                variables[PYTHON_VARIABLE] = options.python
            local = await LocalPlatform.start(folder, env=variables, restart=True)
            stack.push_async_callback(local.shutdown)
            platform = local
        stack.push_async_callback(platform.cancel_all, run)
        quick = {"lease_s": 6.0, "poll_s": 0.02} if options.platform == "local" else {}
        yield Place(platform=platform, store=store, address=address, clock=time.time, **quick)
