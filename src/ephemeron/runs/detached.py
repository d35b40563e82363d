"""Runs without a client: functions drive them (`runs.driver_function`), and clients that have the run's folder attach, stop and resume it.

On this machine those functions share the run's folder with all clients, so a client that attaches takes over by its lock when no function
drives. Elsewhere the folder is copied (`runs.folder_copies`): a client reads the copy, and becomes the driver by taking a term.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ephemeron import blocking
from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.credentials import environment
from ephemeron.errors import ChannelEmptied, EphemeronError, JobError, PlatformError, RunAlreadyDriven, UserError
from ephemeron.events import Event
from ephemeron.functions.base import Call, Platform
from ephemeron.functions.function_process import THREADS
from ephemeron.functions.jsonl import complete_lines, events_in, unfinished
from ephemeron.functions.local import SESSION_VARIABLE, LocalPlatform, is_hosted
from ephemeron.functions.registry import CLOUDS
from ephemeron.runs import run_platform
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.driver_function import SLOTS, DriverRecords, DriverRequest, Look, SignsOfLife, driver_call, prefix_of
from ephemeron.runs.folder_copies import Copying, FolderCopy, TermOver
from ephemeron.runs.folders import RESULT_FILE, RunFolder, events_of, runs_folder
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.kinds import find_kind
from ephemeron.runs.lock import is_driven
from ephemeron.units import human_count

_log = logging.getLogger(__name__)

FOLDER = "driver"
"""Of the driver functions, below that of the run: their events and logs, and on this machine their channel."""
_MEMORY_MB, _LARGE_MB = 1024, 3072
"""Of a driver function on this machine; the second where it trains, predicts, simulates or keeps a model itself."""
BEAT_S, CLOUD_BEAT_S = 1.0, 5.0
LIFETIME_S = 86_400.0
"""Time limit of a driver function, at most: the longest of its platform, if that is shorter."""
_SILENT = 6.0
"""Beats without a sign of life after which a driver function is replaced."""
_START_S = 60.0
"""Longest time until the first driver function has the lock."""
_ENDS_S = 20.0
"""Longest wait for the ends of driver functions."""
_LOOK_S, _REMOTE_LOOK_S = 0.1, 1.0


def is_remote(header: RunHeader) -> bool:
    """Whether the driver functions of a run have a copy of its folder, and not the folder itself."""
    return bool(header.detached) and header.platform in CLOUDS


def channel_of(folder: RunFolder, header: RunHeader) -> str:
    """Address of the channel of a run's driver functions."""
    return header.channel if header.platform in CLOUDS else (folder.path / FOLDER / "objects").resolve().as_uri()


def check(header: RunHeader) -> None:
    """Refuses a run that functions cannot drive.

    Raises:
        JobError: says why.
    """
    check_place(header.kind, header.platform, header.channel)


def check_place(kind: str, platform: str, channel: str) -> None:
    """The same for what is no run yet.

    Args:
        kind: of the run.
        platform: on which it is to run.
        channel: its address.
    """
    if kind in ("service", "profile"):
        raise JobError(f"a {kind} is a process of its command, and cannot be detached", remedy="leave --detach out")
    if platform in CLOUDS and kind == "regions":
        why = "each region has a channel, credentials and functions of its own, which the client knows"
        raise JobError(f"{why}: it cannot be driven by functions on {platform}", remedy="leave --detach out")
    if channel.startswith(("ps://", "parameter_server")):
        raise JobError("the parameter server is a process of the client, so the run cannot be detached", remedy="use another --channel")


def session_of(folder: RunFolder) -> Path:
    """Folder of the daemon that hosts the functions of a detached run of this machine, its driver functions included."""
    return folder.path / FOLDER


def _memory_mb(header: RunHeader) -> int:
    """Memory of a driver function. One on a cloud is of the size of the run's."""
    if header.platform in CLOUDS:
        return header.memory_mb
    return _LARGE_MB if header.kind in ("study", "sparse") or header.platform == "simulated" else _MEMORY_MB


@contextlib.asynccontextmanager
async def driver_platform(
    folder: RunFolder, header: RunHeader, variables: Mapping[str, str], *, starting: bool = True
) -> AsyncIterator[Platform]:
    """The platform of a run's driver functions, which are to be started or, if not `starting`, looked at. They go on when it is left."""
    own = RunFolder(folder.path / FOLDER)
    own.path.mkdir(parents=True, exist_ok=True)
    if header.platform in CLOUDS:
        drivers = replace(header, run_id=prefix_of(header.run_id, header.detached), functions=SLOTS, detached="")
        platform: Platform = await (run_platform.start(own, drivers, {}) if starting else run_platform.attach(own, drivers))
    else:
        everything = {**os.environ, **variables, SESSION_VARIABLE: str(own.path.resolve())}
        platform = await LocalPlatform.start(own.path, env=everything)
    try:
        yield platform
    finally:
        await platform.close()


async def hand_over(folder: RunFolder, header: RunHeader, variables: Mapping[str, str]) -> None:
    """Has functions drive a run from now on. Returns when the first of them does.

    Args:
        folder, header: of the run, which is not driven.
        variables: of its channel.

    Raises:
        PlatformError: no function has begun to drive. The run's functions go on, and a client can attach.
        JobError: functions cannot drive it.
    """
    check(header)
    if header.platform in CLOUDS:
        find_kind(header.kind).pack(folder, header)
    header = replace(header, detached=secrets.token_hex(3))
    write_header(folder, header)
    launch = prefix_of(header.run_id, header.detached)
    folder.events.touch()  # it has begun
    is_local = header.platform not in CLOUDS
    beat_s = BEAT_S if is_local else CLOUD_BEAT_S
    request = DriverRequest(
        run=header.run_id,
        home=str(runs_folder().parent.resolve()) if is_local else "",
        folder=os.getcwd() if is_local else "",
        variables=_variables(header) if is_local else {},
        beat_s=beat_s,
        silent_s=_SILENT * beat_s,
        start_s=4 * _SILENT * beat_s,
        margin_s=3 * beat_s,
    )
    address = channel_of(folder, header)
    call = Call(
        run=launch,
        rank=0,
        attempt=0,
        memory_mb=_memory_mb(header),
        lifetime_s=LIFETIME_S,
        channel=address,
        origin=header.started_at,
        key=folder.signing_key().text,
        labels=header.labels,
    )
    with environment(variables):
        async with open_channel(address) as channel, driver_platform(folder, header, variables) as platform:
            # A time limit that the run has for its own functions may be shorter than what a driver takes to begin.
            call = replace(call, lifetime_s=min(LIFETIME_S, platform.limits.lifetime_s))
            records = DriverRecords(channel, launch, name=_client_name())
            if not is_local:
                await FolderCopy(channel, launch, folder, folder.signing_key(), 0).save()
            for slot in range(SLOTS):
                await records.create(f"claim/{slot}.0")
            started = [await platform.invoke(driver_call(call, slot, request)) for slot in range(SLOTS)]
            await _until_driven(folder, header, records, asyncio.ensure_future(started[0].wait()))


def _variables(header: RunHeader) -> dict[str, str]:
    """Of the process that drives on this machine."""
    found = {"HOME": str(Path.home())}
    if header.platform == "simulated":  # it computes, and rounds as this process would with its number of threads
        found |= {name: os.environ.get(name, "") for name in THREADS}
    return found


async def _until_driven(folder: RunFolder, header: RunHeader, records: DriverRecords, first: asyncio.Future[Any]) -> None:
    latest = time.monotonic() + _START_S
    while time.monotonic() < latest:
        look = await records.look()
        if look.is_over or (look.term and (is_remote(header) or is_driven(folder))):
            first.cancel()
            return
        if first.done() and first.result().status not in ("ok",):
            if (await records.look()).is_over:  # the other one has driven a short run to its end
                return
            break
        await asyncio.sleep(_LOOK_S if header.platform not in CLOUDS else _REMOTE_LOOK_S)
    why = f": {first.result().error.strip().splitlines()[-1:]}" if first.done() else f" within {_START_S:g} s"
    first.cancel()
    raise PlatformError(f"no function drives run {header.run_id}{why}; drive it from here: ephemeron attach {header.run_id}")


def ask_to_stop(folder: RunFolder, header: RunHeader, *, now: bool) -> None:
    """Asks the functions that drive a run to stop it.

    Raises:
        UserError: none does.
    """

    async def ask() -> None:
        async with open_channel(channel_of(folder, header)) as channel:
            records = DriverRecords(channel, prefix_of(folder.run_id, header.detached), name=_client_name())
            look = await records.look()
            if look.is_over or not look.claims:
                raise UserError(f"run {folder.run_id} is not running")
            await records.create(f"asked/{'now' if now else 'stop'}")

    blocking.run(lambda _: ask())


def follow(folder: RunFolder, header: RunHeader, again: Callable[[], Callable[[Event], None]]) -> tuple[int | None, bool]:
    """Shows what functions elsewhere drive, until the run is over or no function drives it.

    Args:
        folder, header: of the run.
        again: what makes callbacks, each for a reading of all events from the first on.

    Returns:
        The term that this process has taken to drive it; None: it is over, and its folder is here. And whether it was seen running.

    Raises:
        PlatformError: functions have given it up.
    """
    return blocking.run(lambda _: _follow(folder, header, again))


async def _follow(folder: RunFolder, header: RunHeader, again: Callable[[], Callable[[Event], None]]) -> tuple[int | None, bool]:
    loop, was_running = asyncio.get_running_loop(), False
    signs, offset, copied, on_event = _signs_of_life(), 0, -1, again()
    async with open_channel(channel_of(folder, header)) as channel:
        records, copy = _open_launch(channel, folder, header)
        while True:
            look, now = await records.look(), loop.time()
            try:
                term = await copy.restore(again=look.is_over)
            except ChannelEmptied:
                if not look.claims:
                    return None, was_running  # its records were deleted: what there is is here
                term = copied
            if term != copied:  # the copy of another term, which may have fewer events
                offset, copied, on_event = 0, term, again()
            offset += _show(folder, offset, on_event)
            if look.is_over:
                await _see_ends(folder, header)
                if error := await records.error():
                    remedy = f"go on with it: ephemeron resume {folder.run_id}"
                    raise PlatformError(f"functions on {header.platform} have given run {folder.run_id} up: {error}; {remedy}")
                return None, was_running
            was_running = True
            if await _is_left(records, look, signs, now) and await records.take(look.term + 1):
                await copy.restore()  # what was saved until then: the driver before may have deleted records since
                return look.term + 1, was_running
            await asyncio.sleep(_REMOTE_LOOK_S)


def _open_launch(channel: Channel, folder: RunFolder, header: RunHeader) -> tuple[DriverRecords, FolderCopy]:
    launch = prefix_of(folder.run_id, header.detached)
    return DriverRecords(channel, launch, name=_client_name()), FolderCopy(channel, launch, folder, folder.signing_key(), 0)


def _signs_of_life() -> SignsOfLife:
    return SignsOfLife(silent_s=_SILENT * CLOUD_BEAT_S, start_s=4 * _SILENT * CLOUD_BEAT_S)


async def _is_left(records: DriverRecords, look: Look, signs: SignsOfLife, now: float) -> bool:
    """Whether no function or client drives the run any more, and none will."""
    signs.see(look.beats, now)
    if any(signs.is_alive(name, now) for name in look.beats):
        return False
    return look.is_back or not signs.is_alive(await records.holder(look.term), now)


def take_back(folder: RunFolder, header: RunHeader) -> RunHeader:
    """Brings the folder of a run home whose functions elsewhere have driven it to an end, so that a client drives it from now on.

    Returns:
        The new header.

    Raises:
        RunAlreadyDriven: functions, or another client, still drive it.
    """
    if not is_remote(header):
        return header

    async def take() -> None:
        async with open_channel(channel_of(folder, header)) as channel:
            records, copy = _open_launch(channel, folder, header)
            if not (await records.look()).is_over:
                raise RunAlreadyDriven(folder.run_id, f"functions on {header.platform}")
            with contextlib.suppress(ChannelEmptied):
                await copy.restore()
            await _see_ends(folder, header)

    blocking.run(lambda _: take())
    header = replace(header, detached="")
    write_header(folder, header)
    return header


async def _see_ends(folder: RunFolder, header: RunHeader) -> None:
    """Waits until the ends of the driver functions are known, and with them their bill."""
    latest = asyncio.get_running_loop().time() + _ENDS_S
    with contextlib.suppress(EphemeronError, run_platform.NotRunning):
        async with driver_platform(folder, header, {}, starting=False):
            while unfinished(folder.path / FOLDER / "events.jsonl")[0] and asyncio.get_running_loop().time() < latest:  # noqa: ASYNC110
                await asyncio.sleep(_REMOTE_LOOK_S)


def _show(folder: RunFolder, offset: int, on_event: Callable[[Event], None]) -> int:
    """Passes on the whole lines behind an offset; returns how many bytes these are."""
    data = complete_lines(folder.events, offset)
    for event in events_in(data):
        on_event(event)
    return len(data)


@contextlib.contextmanager
def holding(folder: RunFolder, header: RunHeader, term: int, stop: Callable[[bool], None]) -> Iterator[None]:
    """Inside, this process drives a run whose functions drove it elsewhere: it gives signs of life, and saves the folder.

    Args:
        folder, header: of the run.
        term: that this process has taken.
        stop: stops the run, and kills its functions if True; called in another thread when another client requests it.
    """
    address, launch, ends = channel_of(folder, header), prefix_of(folder.run_id, header.detached), threading.Event()

    async def live() -> None:
        passed_on = ""
        async with open_channel(address) as channel:
            records = DriverRecords(channel, launch, name=_client_name())
            while not ends.is_set():
                await records.beat()
                if (asked := (await records.look()).asked) != passed_on:
                    with contextlib.suppress(UserError):  # it is not driven yet
                        await asyncio.to_thread(stop, asked == "now")
                        passed_on = asked
                await asyncio.to_thread(ends.wait, CLOUD_BEAT_S)
            if (folder.path / RESULT_FILE).exists():
                await records.end()
            else:
                await records.give_back(term)

    def warn() -> None:
        _log.warning(
            "another driver has taken run %s over, which counts this process as dead: watch it with ephemeron attach", folder.run_id
        )

    living = threading.Thread(target=lambda: asyncio.run(live()), name="driver-beat", daemon=True)
    living.start()
    copying = Copying(address, launch, folder, folder.signing_key(), term)
    try:
        with run_platform.driven_here(folder.run_id), copying.running(restored=False, term_over=warn):
            yield
    except TermOver:
        warn()
    finally:
        ends.set()
        living.join()


def await_ends(folder: RunFolder) -> None:
    """Waits a moment for the ends of functions on this machine that have driven a run which is over, and with them for their bill."""
    latest = time.monotonic() + _ENDS_S
    while has_drivers(folder) and time.monotonic() < latest:
        time.sleep(_LOOK_S)


def has_drivers(folder: RunFolder) -> bool:
    """Whether functions on this machine drive a run, or are about to: one that has died is followed by another."""
    session = session_of(folder)
    return bool(unfinished(session / "events.jsonl")[0]) and is_hosted(session)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivingCost:
    """What the functions that have driven a run have cost, at list prices, beside the run itself."""

    functions: int
    gb_seconds: float
    requests: int
    """To the store."""
    cost_usd: float

    def __str__(self) -> str:
        return (
            f"driven by {human_count(self.functions, 'function')}: {self.gb_seconds:.1f} GB-s and "
            f"{human_count(self.requests, 'request')}, ${self.cost_usd:.6f} beside it"
        )


def driving_cost(folder: RunFolder, header: RunHeader) -> DrivingCost | None:
    """What is known here of the cost of driving a run; None: its client has driven it."""
    own = RunFolder(folder.path / FOLDER)
    if not own.events.exists():
        return None
    meter = CostMeter(header.prices, memory_mb=_memory_mb(header))
    for event in events_of(own):
        meter.feed(event)
    t = meter.ended_at
    if unfinished(own.events)[0]:  # their end is not known here: so far
        t = max(t, time.time() - header.started_at)
    gb_seconds = meter.gb_seconds_at(t)
    usd = header.prices.functions_usd(gb_seconds, meter.invocations) + meter.storage_usd(t)
    return DrivingCost(
        functions=meter.invocations, gb_seconds=round(gb_seconds, 3), requests=meter.traffic.requests, cost_usd=round(usd, 9)
    )


_NAME = f"client-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _client_name() -> str:
    return "".join(c if c.isalnum() or c == "-" else "-" for c in _NAME)
