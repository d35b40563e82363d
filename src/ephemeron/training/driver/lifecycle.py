"""The asynchronous part of `train`, `attach`, `resume` and `stop`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Protocol

from ephemeron import logs
from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.channels.retrying import BRIEF
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import Keys
from ephemeron.errors import UserError
from ephemeron.events import Event, RunEnded, to_json
from ephemeron.runs import run_platform
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folder_copies import save_now
from ephemeron.runs.folders import RunFolder, events_of, last_t, session_of
from ephemeron.runs.header import RunHeader, read_header, write_header
from ephemeron.runs.kinds import load_kind
from ephemeron.runs.status import session_end
from ephemeron.training.driver import parameter_server, records
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.records import code_source
from ephemeron.training.driver.renewal import Renewal, renewed
from ephemeron.training.driver.resizing import check_request
from ephemeron.training.driver.run_driver import RunDriver, RunOutcome, read_result
from ephemeron.training.driver.trained import store_program
from ephemeron.training.job import Simulation
from ephemeron.training.job.generation import Generation, Resize
from ephemeron.training.worker.control import ResizeRequest, encode_control
from ephemeron.training.worker.recovery.generations import current_generation, members_of
from ephemeron.training.worker.spec import RunSpec

if TYPE_CHECKING:
    from ephemeron.functions.simulated import SimulatedPool

_log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]
OnDriver = Callable[[RunDriver | None], None]

_ANSWER_S, _ANSWER_EVERY_S = 30.0, 0.25
"""Seconds to wait until functions have agreed on a change, and interval at which it is looked for."""
_END_S = 120.0
"""Seconds from the end of a run to its result, at most."""


class StopRequests(Protocol):
    """Tells the driver of a run to stop it: signals of the process, or a session of runs."""

    def handled(self, callback: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Inside, each request calls `callback` on the loop."""


@contextlib.contextmanager
def told(on_driver: OnDriver, driver: RunDriver) -> Iterator[None]:
    """Inside, `driver` drives a run."""
    on_driver(driver)
    try:
        yield
    finally:
        on_driver(None)


async def simulate(
    prepared: Prepared,
    folder: RunFolder,
    world: Simulation,
    on_event: OnEvent,
    *,
    stop: StopRequests | None = None,
    pool: SimulatedPool | None = None,
    shared: Channel | None = None,
    on_driver: OnDriver = lambda driver: None,
) -> tuple[RunOutcome, CostMeter]:
    """Runs everything in virtual time.

    Args:
        prepared, folder, world: the run, its folder and its simulation.
        on_event: called with every event.
        stop: stops the run.
        pool: functions of a session; None: of this run alone.
        shared: store that the groups of a run share.
        on_driver: called with the driver, and with None at the end.
    """
    from ephemeron.functions.simulated import SimulatedPlatform

    platform = SimulatedPlatform(world, seed=prepared.spec.seed, log=folder.events, pool=pool, shared=shared)
    _log.info("simulating run %s in virtual time", prepared.spec.run_id)
    clock = asyncio.get_running_loop().time
    header = read_header(folder)
    driver = RunDriver(
        platform,
        platform.store,
        prepared.spec,
        channel_address="memory",
        clock=clock,
        on_event=on_event,
        signing=folder.signing_key(),
        labels=None if header is None else header.labels,
    )
    with contextlib.nullcontext() if stop is None else stop.handled(driver.interrupt), told(on_driver, driver):
        await driver.launch(prepared)
        ending = await driver.watch()
    await platform.close()
    return ending, driver.ledger


async def drive(
    folder: RunFolder,
    run: RunHeader,
    spec: RunSpec,
    on_event: OnEvent,
    secrets: dict[str, str],
    interrupts: StopRequests,
    *,
    prepared: Prepared | None = None,
    attach: bool = False,
    keep_code: bool = False,
    session: Path | None = None,
    origin: float | None = None,
    anew: bool = False,
    on_driver: OnDriver = lambda driver: None,
) -> tuple[RunOutcome, CostMeter]:
    """Launches (with `prepared`), attaches to, or resumes a run, and supervises it to its end. The caller holds its lock.

    A run that is resumed while its functions are running is attached to instead. Functions on this machine are hosted by the
    daemon of `session`, where that is given. `origin` is the Unix time at the t = 0 of a new run; None: now.
    `anew`: an earlier launch of it has failed, whose objects are deleted. `on_driver` is called with the driver, and with None at the end.
    """
    if spec.sparse is not None:
        ended: tuple[RunOutcome, CostMeter] = await load_kind("sparse").drive(
            folder, run, spec, on_event, secrets, interrupts, new=prepared is not None, attach=attach, session=session
        )
        return ended
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(logs.context(run=folder.run_id))
        signing = folder.signing_key()
        attach = attach or (prepared is None and await run_platform.at_work(folder, run))
        server = parameter_server.known(folder.path)
        if spec.configuration.store == "parameter_server" and not attach:
            server = await asyncio.to_thread(parameter_server.start, folder.path)
            run = dataclasses.replace(run, channel=server.address)
            write_header(folder, run)
        if server is not None:
            stack.push_async_callback(asyncio.to_thread, server.stop)
            secrets = {**secrets, "EPHEMERON_CHANNEL_TOKEN": server.token}
        stack.enter_context(environment(secrets))
        channel = await stack.enter_async_context(open_channel(run.channel))
        renewal: Renewal | None = None
        if attach:
            try:
                platform = await run_platform.attach(folder, run)
            except run_platform.NotRunning:
                _log.info("its functions have ended")
                return await _already_over(folder, spec, channel, on_event)
            _log.info("attached to running functions on %s", platform.name)
        else:
            await _probe(channel, spec.run_id)
            if anew:
                before = RunChannel(channel, owner="anew", retry=BRIEF)
                await before.delete(await before.list(f"{spec.run_id}/"))
            if prepared is None and not keep_code and (source := code_source(run)) is not None:
                renewal = await renewed(RunChannel(channel, owner="resume", signing=signing), source, spec)
            platform = await run_platform.start(folder, run, secrets, session=session)
        stack.push_async_callback(platform.shutdown)
        driver = RunDriver(
            platform,
            channel,
            spec,
            channel_address=run.channel,
            clock=time.time,
            on_event=on_event,
            origin=run.started_at if attach else origin,
            session=session_of(folder) if attach else 0.0,
            signing=signing,
            labels=run.labels,
        )
        with interrupts.handled(driver.interrupt), told(on_driver, driver):
            if prepared is not None:
                await save_now()
                await driver.launch(prepared)
            elif not attach:
                await driver.resume(last_t(folder), renewal)
                if renewal is not None:
                    store_program(folder, None, renewal.bundle)
                write_header(folder, dataclasses.replace(run, started_at=driver.origin))
            return await driver.watch(), driver.ledger


async def launch(
    folder: RunFolder,
    run: RunHeader,
    spec: RunSpec,
    secrets: dict[str, str],
    prepared: Prepared,
    *,
    session: Path,
    origin: float | None = None,
) -> None:
    """Launches a run that functions are to drive, and lets go of it.

    Args:
        folder, run, spec, secrets, prepared: as for `drive`.
        session: folder of the daemon that hosts the functions of this machine.
        origin: see `drive`.
    """
    with logs.context(run=folder.run_id), environment(secrets):
        async with open_channel(run.channel) as channel:
            await _probe(channel, spec.run_id)
            platform = await run_platform.start(folder, run, secrets, session=session)
            driver = RunDriver(
                platform, channel, spec, channel_address=run.channel, clock=time.time, origin=origin, signing=folder.signing_key()
            )
            try:
                await driver.launch(prepared)
            except BaseException:
                await platform.shutdown()
                raise
            write_header(folder, dataclasses.replace(run, started_at=driver.origin))
            await platform.close()


async def stop(folder: RunFolder, run: RunHeader, *, now: bool) -> None:
    """Asks the functions of a run to stop, or cancels them.

    Raises:
        UserError: it is not running.
    """
    try:
        platform = await run_platform.attach(folder, run, restart=False)
    except run_platform.NotRunning:
        raise UserError(f"run {folder.run_id} is not running") from None
    async with platform:
        if now:
            await platform.cancel_all(folder.run_id)
            return
        with environment(_server_secrets(folder)):
            async with RunChannel(open_channel(run.channel), owner="stop", retry=BRIEF) as channel:
                await channel.put(Keys(folder.run_id).control, [b"stop"])


async def resize(folder: RunFolder, run: RunHeader, spec: RunSpec, wanted: Resize) -> Generation | None:
    """Asks the functions of a run to change, and waits until they have agreed on when.

    Returns:
        The generation that begins; None: there was no answer yet.

    Raises:
        UserError: it is not running, or it cannot change so.
    """
    try:
        platform = await run_platform.attach(folder, run, restart=False)
    except run_platform.NotRunning:
        raise UserError(f"run {folder.run_id} is not running") from None
    async with platform:
        with environment(_server_secrets(folder)):
            signing = folder.signing_key()
            async with RunChannel(open_channel(run.channel), owner="resize", retry=BRIEF, signing=signing) as channel:
                keys = Keys(folder.run_id)
                now = await current_generation(channel, keys, spec)
                check_request(now, wanted, platform.limits)
                request = ResizeRequest(name=token_hex(4), resize=wanted)
                await channel.put(keys.control, [encode_control(request)])
                return await _answered(channel, keys, request, now.current_generation.number)


async def _answered(channel: Channel, keys: Keys, request: ResizeRequest, number: int) -> Generation | None:
    """The generation that a request has led to; None: no answer yet."""
    loop = asyncio.get_running_loop()
    latest = loop.time() + _ANSWER_S
    while loop.time() < latest:
        members = await members_of(channel, keys, number + 1)
        if members is not None and members.request == request.name:
            return members
        number += members is not None  # a change of the job's schedule came first
        await asyncio.sleep(_ANSWER_EVERY_S)
    return None


async def _probe(channel: Channel, run_id: str) -> None:
    """Writes and deletes a small object, so that a wrong address is noticed before a function is paid for."""
    key = f"{run_id}/probe"
    channel = RunChannel(channel, owner="probe", retry=BRIEF)
    await channel.put(key, [b"ephemeron"])
    await channel.delete([key])


async def _already_over(folder: RunFolder, spec: RunSpec, channel: Channel, on_event: OnEvent) -> tuple[RunOutcome, CostMeter]:
    """Outcome of a run whose functions have ended, from the result that they have written.

    Raises:
        UserError: there is no result.
    """
    ledger = CostMeter(spec.prices, servers=spec.servers)
    for event in events_of(folder):
        ledger.feed(event)
        on_event(event)
    channel = RunChannel(channel, owner="attach", retry=BRIEF, signing=folder.signing_key())
    data = await channel.fetch(Keys(spec.run_id).result)
    if data is None:
        result = records.read_result(folder)
        status = "interrupted" if result is None else result.status
        raise UserError(f"run {folder.run_id} is not running ({status}); continue it with: ephemeron resume {folder.run_id}")
    if session_end(folder.events) != "finished":
        ended = RunEnded(t=ledger.ended_at, status="finished")
        with folder.events.open("a") as log:
            log.write(to_json(ended) + "\n")
        on_event(ended)
    ending = RunOutcome("finished", [])
    await read_result(ending, channel, Keys(spec.run_id), data)
    return ending, ledger


def _server_secrets(folder: RunFolder) -> dict[str, str]:
    server = parameter_server.known(folder.path)
    return {} if server is None else {"EPHEMERON_CHANNEL_TOKEN": server.token}
