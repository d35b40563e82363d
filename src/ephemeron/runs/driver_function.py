"""Drivers of runs as functions: the entry `driver`, two of which keep a run driven without a client (`runs.detached`).

Each fills a slot. One drives: it holds the latest *term*, and runs what drives runs everywhere (`runs.driver_process`) in a process of its
own. The other one waits. Each gives signs of life, and starts another function where the other's are missing; the one that waits takes
the next term where the one that drives is silent, or has given its term back before its time limit. Whoever drives can die at any time:
nothing that a driver does rests on its memory.

Everything is in the channel of the driver functions, below `RUN-driver.LAUNCH/`, and what matters is create-only:

    claim/SLOT.ATTEMPT      the function is started, by the writer of this
    start/SLOT.ATTEMPT      it runs: a second delivery of the same call ends
    over/SLOT.ATTEMPT       it has handed over at its time limit
    beat/NAME.NUMBER        sign of life of a function or a client: the number has grown
    term/NUMBER             who drives, from here on; with the next number it does not
    back/NUMBER             the term was given back
    asked/stop, asked/now   the run is to be stopped
    end                     how the run has ended; all driver functions end
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import RetryPolicy
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.config import own_processes
from ephemeron.config.typed import Count, Positive, build, plain
from ephemeron.errors import EphemeronError, KeyExists
from ephemeron.events import Traffic
from ephemeron.functions.base import Call, Reason
from ephemeron.functions.context import Context
from ephemeron.runs.function_set import MOST_LOSSES, LossBudget

_log = logging.getLogger(__name__)

ENTRY = "driver"
SLOTS = 2
KEY_VARIABLE = "EPHEMERON_RUN_KEY"
"""Environment variable with the key of the run, for the process that drives."""
STEP_ASIDE = 75
"""Exit status of the process that drives when its term is over."""
_RETRY = RetryPolicy(total_s=30.0)


def prefix_of(run: str, launch: str = "") -> str:
    """Below which the objects of a run's driver functions are; also the name of their run.

    Args:
        run: its name.
        launch: of these functions, unlike that of those before them, which may still live; "": of all.
    """
    return f"{run}-driver.{launch}" if launch else f"{run}-driver"


@dataclass(frozen=True, slots=True)
class Look:
    """What a listing tells."""

    claims: Mapping[int, int]
    """By slot, the latest attempt that was started."""
    overs: Mapping[int, int]
    """By slot, the latest attempt that has handed over."""
    beats: Mapping[str, int]
    """By name, the sign of life."""
    term: int
    """The latest; 0: there is none yet."""
    is_back: bool
    """Whether that was given back."""
    asked: Literal["", "stop", "now"]
    is_over: bool


class DriverRecords:
    """The records of a run's driver functions, as one function or client sees them.

    Args:
        channel: of the driver functions.
        prefix: see `prefix_of`.
        name: of this function or client, unlike every other's.
    """

    def __init__(self, channel: Channel, prefix: str, *, name: str) -> None:
        self.name = name
        self._channel = RunChannel(channel, owner=f"driver-{name}", retry=_RETRY)
        self._prefix = f"{prefix}/"
        self._number = 0
        self._holders: dict[int, str] = {}

    @property
    def traffic(self) -> Traffic:
        """Requests so far."""
        return self._channel.traffic

    async def create(self, key: str, value: str = "") -> bool:
        """Whether this writer was the first."""
        try:
            await self._channel.put(self._prefix + key, [json.dumps([self.name, value]).encode()], create=True)
        except KeyExists:
            return await self._read(key) == [self.name, value]  # a put that was repeated
        return True

    async def beat(self) -> None:
        """Gives a sign of life."""
        before, self._number = self._number, self._number + 1
        await self._channel.put(f"{self._prefix}beat/{self.name}.{self._number}", [b"."])
        if before:
            await self._channel.delete([f"{self._prefix}beat/{self.name}.{before}"])

    async def look(self) -> Look:
        """The present state."""
        claims: dict[int, int] = {}
        overs: dict[int, int] = {}
        beats: dict[str, int] = {}
        terms, backs, asked = {0}, set(), set()
        is_over = False
        for key in await self._channel.list(self._prefix):
            kind, _, rest = key.removeprefix(self._prefix).partition("/")
            name, _, number = rest.rpartition(".")
            match kind:
                case "claim" | "over":
                    found = claims if kind == "claim" else overs
                    found[int(name)] = max(found.get(int(name), -1), int(number))
                case "beat":
                    beats[name] = max(beats.get(name, 0), int(number))
                case "term":
                    terms.add(int(rest))
                case "back":
                    backs.add(int(rest))
                case "asked":
                    asked.add(rest)
                case "end":
                    is_over = True
        wish: Literal["", "stop", "now"] = "now" if "now" in asked else "stop" if "stop" in asked else ""
        return Look(claims, overs, beats, max(terms), max(terms) in backs, wish, is_over)

    async def holder(self, term: int) -> str:
        """Name of the function or client that has created a term."""
        if term not in self._holders:
            found = await self._read(f"term/{term:06d}")
            if found is None:
                return ""
            self._holders[term] = found[0]
        return self._holders[term]

    async def take(self, term: int) -> bool:
        """Becomes the driver, unless another one does."""
        return await self.create(f"term/{term:06d}")

    async def give_back(self, term: int) -> None:
        """Says that this function, which holds the term, does not drive any more."""
        await self.create(f"back/{term:06d}")

    async def forget(self, slot: int, *, before: int, term: int) -> None:
        """Deletes what is not needed any more: records of earlier functions of a slot, but of the latest, and of earlier terms."""
        old = []
        for key in await self._channel.list(self._prefix):
            kind, _, rest = key.removeprefix(self._prefix).partition("/")
            name, _, number = rest.rpartition(".")
            if (
                (kind in ("claim", "start", "over") and name == str(slot) and int(number) < before - 1)
                or (kind == "beat" and name.startswith(f"{slot}-") and int(name.partition("-")[2]) < before)
                or (kind in ("term", "back") and int(rest) < term)
            ):
                old.append(key)
        await self._channel.delete(old)

    async def end(self, error: str = "") -> None:
        """Ends all driver functions of the launch.

        Args:
            error: why the run cannot be driven any further; "": it is over.
        """
        await self.create("end", error)

    async def error(self) -> str:
        """The error with which the driver functions have ended; "": there was none."""
        found = await self._read("end")
        return found[1] if found else ""

    async def _read(self, key: str) -> list[str] | None:
        data = await self._channel.fetch(self._prefix + key)
        return None if data is None else cast(list[str], json.loads(bytes(data)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRequest:
    """Arguments of the entry `driver`."""

    run: str
    """That is driven."""
    home: str = ""
    """Folder of all runs, which this function shares with its client; "": the run's folder is copied to here and back."""
    folder: str = ""
    """Of the process that drives; "": a folder of its own."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for it; "": without this one."""
    beat_s: Positive = 1.0
    """Between two signs of life."""
    silent_s: Positive = 6.0
    """Without one, a function counts as dead."""
    start_s: Positive = 20.0
    """The same for one that has just been started."""
    margin_s: Positive = 3.0
    """Before its time limit, when a function hands over."""
    slots: Count = SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverResult:
    """Result of the entry `driver`."""

    outcome: str
    """`finished`, `relayed` to a successor, `duplicate` of another delivery, or `failed`."""
    terms: int = 0
    """For which it has driven."""
    error: str = ""
    traffic: Traffic = field(default_factory=Traffic)


class SignsOfLife:
    """Whose signs of life go on, by the clock of one observer: clocks need not agree.

    Args:
        silent_s: without a new sign.
        start_s: the same for what has not given any yet.
    """

    def __init__(self, *, silent_s: float, start_s: float) -> None:
        self._silent_s, self._start_s = silent_s, start_s
        self._seen: dict[str, tuple[int, float]] = {}

    def see(self, names: Mapping[str, int], now: float) -> None:
        """Takes note of the signs in a listing."""
        for name, number in names.items():
            if self._seen.get(name, (-1, 0.0))[0] != number:
                self._seen[name] = (number, now)

    def is_alive(self, name: str, now: float) -> bool:
        """Whether a function or client counts as living. One that is unknown lives from now on."""
        number, at = self._seen.setdefault(name, (0, now))
        return now - at < (self._silent_s if number else self._start_s)


async def run_driver(ctx: Context, request: DriverRequest) -> DriverResult:
    """Drives a run, or waits for the other function that does, until the run is over or its own time limit is near."""
    name = name_of(ctx.call.rank, ctx.call.attempt)
    records = DriverRecords(ctx.channel, ctx.call.run, name=name)
    known = await records.look()
    is_late = known.claims.get(ctx.call.rank, -1) > ctx.call.attempt
    if is_late or not await records.create(f"start/{ctx.call.rank}.{ctx.call.attempt}", ctx.invocation):
        return DriverResult(outcome="duplicate", traffic=records.traffic)
    await records.forget(ctx.call.rank, before=ctx.call.attempt, term=known.term)
    assert ctx.scratch is not None
    slot = DriverSlot(ctx, request, records, ProcessDrive(request, ctx.call, name, ctx.scratch))
    outcome = await slot.run()
    traffic = records.traffic + _traffic_of_copies(ctx.scratch)
    return DriverResult(outcome=outcome, terms=slot.terms, error=slot.error, traffic=traffic)


def _traffic_of_copies(scratch: Path) -> Traffic:
    """Requests with which the processes of this function have copied the folder of the run."""
    found = Traffic()
    for path in scratch.glob("requests-*.json"):
        found += build(Traffic, json.loads(path.read_bytes()), where=path.name)
    return found


def name_of(slot: int, attempt: int) -> str:
    """Name of a driver function in its records."""
    return f"{slot}-{attempt}"


class Drive(ABC):
    """What drives a run while its function holds the term."""

    @abstractmethod
    async def start(self, term: int) -> None:
        """Begins to drive."""

    @abstractmethod
    async def wait(self) -> int:
        """Waits for its end: 0: the run is over, `STEP_ASIDE`: another term has begun, else it has failed."""

    @abstractmethod
    async def kill(self) -> None:
        """Ends it now, and returns when it has ended. What it was doing is done again by the next one."""

    @property
    def last_words(self) -> str:
        """What it has said last; empty: nothing."""
        return ""

    @abstractmethod
    async def stop_run(self, asked: str) -> bool:
        """Tells the run to stop: `stop` or `now`. False: it is not driven yet, or not any more."""


class ProcessDrive(Drive):
    """`runs.driver_process`, in a process below this function.

    Args:
        request: of the function.
        call: of the function.
        name: of the function, in its records.
        scratch: folder for the copy of the run's folder, and for what its processes say.
    """

    def __init__(self, request: DriverRequest, call: Call, name: str, scratch: Path) -> None:
        self._request, self._call, self._name = request, call, name
        self._home, self._scratch = request.home or str(scratch / "home"), scratch
        self._output = scratch / "driver.txt"
        self._process: asyncio.subprocess.Process | None = None
        self._term = 0

    async def start(self, term: int) -> None:
        self._term = term
        self._process = await self._begin("drive")

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    @property
    def last_words(self) -> str:
        lines = self._output.read_text(errors="replace").strip().splitlines() if self._output.exists() else []
        return lines[-1] if lines else ""

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def stop_run(self, asked: str) -> bool:
        return await (await self._begin(asked)).wait() == 0

    async def _begin(self, verb: str) -> asyncio.subprocess.Process:
        r = self._request
        Path(self._home).mkdir(parents=True, exist_ok=True)
        copied_from = "" if r.home else self._call.channel
        env = {**os.environ, **r.variables, "EPHEMERON_HOME": self._home, KEY_VARIABLE: self._call.key}
        request = {"verb": verb, "run": r.run, "launch": self._call.run, "term": self._term, "channel": copied_from}
        request["requests"] = str(self._scratch)
        with self._output.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *own_processes.command("driver", json.dumps(request)),
                env={name: value for name, value in env.items() if value or name not in r.variables},
                cwd=r.folder or None,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=own_processes.ends_with_parent,
            )


class DriverSlot:
    """A function in its slot.

    Args:
        ctx, request: of the function.
        records: as this function sees them.
        drive: what it does while it holds the term.
    """

    def __init__(self, ctx: Context, request: DriverRequest, records: DriverRecords, drive: Drive) -> None:
        self._ctx, self._request, self._records, self._drive = ctx, request, records, drive
        self._slot, self._attempt = ctx.call.rank, ctx.call.attempt
        self._signs = SignsOfLife(silent_s=request.silent_s, start_s=request.start_s)
        self._driving: asyncio.Task[int] | None = None
        self._term = 0
        """That it holds; 0: none."""
        self._failures = LossBudget()
        self._passed_on = ""
        """Request to stop that was passed on to the run. It is passed on again after a while: what drives may have begun in between."""
        self._passed_at = 0.0
        self._telling: asyncio.Task[bool] | None = None
        """That takes seconds, in which signs of life go on."""
        self.terms = 0
        self.error = ""

    async def run(self) -> str:
        """Drives, or waits, to the end of the run or of this function's time; returns which."""
        loop, r = asyncio.get_running_loop(), self._request
        ends_at = self._ctx.deadline - r.margin_s
        if self._slot and not self._attempt:  # the two do not reach their limits together
            ends_at -= (ends_at - loop.time()) / 2
        try:
            while True:
                look, now = await self._records.look(), loop.time()
                if look.is_over:
                    return "finished"
                self._signs.see(look.beats, now)
                if now > ends_at:
                    return await self._hand_over()
                await self._records.beat()
                await self._keep_others(look, now)
                await self._keep_term(look, now)
                self._pass_on(look.asked, now)
                if self._driving is None:
                    await asyncio.sleep(r.beat_s)
                    continue
                await asyncio.wait([self._driving], timeout=r.beat_s)
                if self._driving.done() and await self._has_ended(self._driving.result()):
                    return "failed" if self.error else "finished"
        finally:
            if self._telling is not None:
                self._telling.cancel()
            await self._stop_driving()

    def _pass_on(self, asked: str, now: float) -> None:
        """Tells the run of a request to stop, if it is driven here."""
        if self._telling is not None and self._telling.done():
            if not self._telling.result():
                self._passed_on = ""
            self._telling = None
        is_told = asked == self._passed_on and now < self._passed_at + self._request.silent_s
        if asked and self._term and not is_told and self._telling is None:
            self._passed_on, self._passed_at = asked, now
            self._telling = asyncio.create_task(self._drive.stop_run(asked))

    async def _stop_driving(self) -> None:
        driving, self._driving = self._driving, None
        await self._drive.kill()
        if driving is not None:
            await asyncio.wait([driving])

    async def _hand_over(self) -> str:
        await self._stop_driving()
        if self._term:
            await self._records.give_back(self._term)
        await self._records.create(f"over/{self._slot}.{self._attempt}")
        if await self._records.create(f"claim/{self._slot}.{self._attempt + 1}"):
            await self._invoke(self._slot, self._attempt + 1, "relay")
        return "relayed"

    async def _keep_others(self, look: Look, now: float) -> None:
        """Starts another function for a slot whose function is silent."""
        for slot in range(self._request.slots):
            latest = look.claims.get(slot, -1)
            if slot == self._slot or self._signs.is_alive(name_of(slot, latest), now):
                continue
            if latest - look.overs.get(slot, -1) > MOST_LOSSES:
                continue  # none of them has lived to its limit: this one is the last
            if await self._records.create(f"claim/{slot}.{latest + 1}"):
                _log.warning("driver function %s is silent: another one is started", name_of(slot, latest))
                await self._invoke(slot, latest + 1, "replacement")

    async def _keep_term(self, look: Look, now: float) -> None:
        """Drives from the time on at which no other does, and until another one has taken the next term."""
        if self._term and look.term > self._term:
            _log.warning("term %d was taken by another driver", look.term)
            await self._stop_driving()
            self._term = 0
        if self._term:
            return
        if look.term:
            is_held = not look.is_back and self._signs.is_alive(await self._records.holder(look.term), now)
        else:
            is_held = self._slot > 0 and self._signs.is_alive(name_of(0, 0), now)
        if is_held or not await self._records.take(look.term + 1):
            return
        self._term, self.terms, self._failures = look.term + 1, self.terms + 1, LossBudget()
        _log.info("drives run %s in term %d", self._request.run, self._term)
        await self._begin()

    async def _begin(self) -> None:
        await self._drive.start(self._term)
        self._driving = asyncio.ensure_future(self._drive.wait())

    async def _has_ended(self, status: int) -> bool:
        """Whether the run is over, now that what drove it has ended."""
        self._driving = None
        if status == STEP_ASIDE:
            self._term = 0
            return False
        if status and not self._failures.ended(f"status {status}"):
            said = self._drive.last_words
            _log.warning("the driver of run %s has ended with status %d, and is started again: %s", self._request.run, status, said)
            await asyncio.sleep(self._request.beat_s)
            await self._begin()
            return False
        if status:
            said = self._drive.last_words or f"status {status}"
            self.error = f"its driver has ended {self._failures.spent} times, the last time with: {said}"
        await self._records.end(self.error)
        return True

    async def _invoke(self, slot: int, attempt: int, reason: Reason) -> None:
        call = replace(self._ctx.call, rank=slot, attempt=attempt, reason=reason, duplicate=False, request=plain(self._request))
        try:
            await self._ctx.invoke(call)
        except EphemeronError as e:
            _log.warning("driver function %s is not started: %s", name_of(slot, attempt), e)


def driver_call(call: Call, slot: int, request: DriverRequest) -> Call:
    """The call of the first function of a slot.

    Args:
        call: with run, quotas, channel and key.
        slot: its number.
        request: of all driver functions.
    """
    return replace(call, rank=slot, attempt=0, entry=ENTRY, reason="start", request=plain(request))
