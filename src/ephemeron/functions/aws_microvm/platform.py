"""Platform of AWS Lambda MicroVMs: one client's access to the calls of one run, and to the states of its MicroVMs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.errors import PlatformError
from ephemeron.events import Suspended, Woken, from_json
from ephemeron.functions.async_invoke.call_tracker import CallState
from ephemeron.functions.async_invoke.collector import EVENTS_FILE
from ephemeron.functions.async_invoke.invoker import pauses
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.records import RecordKeys, SuspendedRecord, WokenRecord, calls_prefix
from ephemeron.functions.aws.settings import THROTTLED, code_of
from ephemeron.functions.aws_microvm.api import ENDED, LONGEST_S, SUSPENDED, LaunchSpec, MicrovmApi, MicrovmInfo
from ephemeron.functions.aws_microvm.invoker import AGAIN, MicrovmSender
from ephemeron.functions.aws_microvm.payload import own_secrets
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client, explain
from ephemeron.functions.base import Limits, Suspendable

_SUSPEND_ROUNDS, _SETTLE_S = 20, 0.5
MARGIN_S = 60
"""Seconds of a MicroVM's longest life that calls do not get: for its start, its last report and its end."""
LIMITS = Limits(
    memory_min_mb=512,
    memory_max_mb=8192,
    memory_step_mb=512,
    mb_per_vcpu=2048.0,
    lifetime_s=float(LONGEST_S - MARGIN_S),
    payload_bytes=16_000_000,
    concurrency=1_000,
)
"""Baselines of 512 to 8,192 MB with one vCPU for 2 GB, eight hours. Calls of more than 4 kB go through the store."""


class AwsMicrovmPlatform(AsyncInvokePlatform, Suspendable):
    """Functions of one run on AWS Lambda MicroVMs. Made by `open`.

    Args:
        run_dir: folder of the run, for `events.jsonl` and `calls.jsonl`.
        settings: of the image; located.
        launch: what MicroVMs are started with.
        limits: of the images; every call has the memory of one.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        names: of the records.
        api: of the service.
    """

    name = "aws-microvm"

    def __init__(
        self,
        run_dir: Path,
        settings: AwsMicrovmSettings,
        launch: LaunchSpec,
        limits: Limits,
        channel: Channel,
        names: RecordKeys,
        api: MicrovmApi,
    ) -> None:
        self.settings, self.launch, self.api = settings, launch, api
        self.unenforced = (
            f"A cancelled function ends when its supervisor looks, every {settings.every_s:g} s.",
            "CPU time above the baseline is not prevented, and is billed.",
        )
        super().__init__(run_dir, limits, channel, names, every_s=settings.every_s)

    def sender(self) -> MicrovmSender:
        async def api() -> MicrovmApi:
            return self.api

        return MicrovmSender(
            self.settings,
            api,
            self.launch,
            own_secrets(),
            channel=self._channel,
            names=self._names,
            announce=self._announce,
            every_s=self._every_s,
        )

    @classmethod
    async def open(
        cls, run_dir: Path, settings: AwsMicrovmSettings, launch: LaunchSpec, *, channel: str, run: str, limits: Limits = LIMITS
    ) -> AwsMicrovmPlatform:
        """Opens the calls of a run, earlier ones included.

        Args:
            run_dir: made when missing.
            settings: which image; `located` fills in the region.
            launch: see `preflight.inspect`.
            channel: address of the run's channel.
            run: its name, which the names of the records begin with.
            limits: see `preflight.inspect`.

        Raises:
            JobError: no region, or no channel at that address.
            MissingExtra: boto3 or a library of the channel is absent.
        """
        settings = settings.located()
        run_dir.mkdir(parents=True, exist_ok=True)
        api = MicrovmApi(await asyncio.to_thread(client, settings))
        self = cls(run_dir, settings, launch, limits, open_channel(channel), RecordKeys(calls_prefix(run)), api)
        states = MicrovmStates(api, settings, launch.image_arns, open=self.open_requests, ended=self.ended_requests)
        try:
            await self.hold(channel, states)
        except BaseException:
            await self.close()
            raise
        return self

    def open_requests(self) -> list[str]:
        """MicroVMs whose call has not ended."""
        known = self._known.sent
        return [request for id in self._known.open for request in sorted(known[id].requests)]

    def ended_requests(self) -> list[str]:
        """MicroVMs whose call has ended."""
        return [request for sent in self._known.sent.values() if not sent.open for request in sorted(sent.requests)]

    async def suspend(self, run: str) -> int:
        suspended: dict[str, float] = {}
        for _ in range(_SUSPEND_ROUNDS):  # a successor or a replacement may be starting
            ids = self._by_request()
            states = await self.api.states(self.launch.image_arns, [id for id in ids if id not in suspended])
            running = [id for id, state in states.items() if state == "RUNNING"]
            starting = [id for id, state in states.items() if state == "PENDING"]
            await self._all(self._suspend_one, running)
            suspended |= {id: ids[id].call.memory_mb / 1024 for id in running}
            if not starting and not running:
                break
            await asyncio.sleep(_SETTLE_S)
            await self._read_on()
        if suspended:
            event = Suspended(t=self._t(suspended), functions=len(suspended), gb=sum(suspended.values()))
            await self.emit(run, event)
        return len(suspended)

    async def wake(self, run: str) -> int:
        ids = self._by_request()
        states = await self.api.states(self.launch.image_arns, list(ids))
        asleep = {id: ids[id].call.memory_mb / 1024 for id, state in states.items() if state in SUSPENDED}
        await self._all(self._wake_one, list(asleep))
        if asleep:
            t = self._t(asleep)
            since = await self._suspended_since(run, t)
            await self.emit(run, Woken(t=t, functions=len(asleep), gb=sum(asleep.values()), seconds=max(0.0, t - since)))
        return len(asleep)

    async def cancel_all(self, run: str) -> None:
        with contextlib.suppress(Exception):  # the service may not answer: what runs is cancelled all the same
            await self.wake(run)  # a suspended function does not look whether it is cancelled
        await super().cancel_all(run)

    async def _suspend_one(self, id: str) -> None:
        # Before the request: a collector must not take the silence of a suspended function for its end.
        await self._announce(SuspendedRecord(id=self._by_request()[id].id))
        try:
            await self._repeated(self.api.suspend, id)
        except Exception as e:
            if code_of(e) != "ConflictException":  # it has ended meanwhile
                raise

    async def _wake_one(self, id: str) -> None:
        await self._repeated(self.api.resume, id)
        await self._announce(WokenRecord(id=self._by_request()[id].id))

    async def _all(self, act: Callable[[str], Awaitable[None]], ids: Sequence[str]) -> None:
        done = await asyncio.gather(*(act(id) for id in ids), return_exceptions=True)
        failed = [e for e in done if isinstance(e, Exception)]
        if failed:
            problem, remedy = explain(failed[0], self.settings, doing="lambda:SuspendMicrovm and lambda:ResumeMicrovm")
            raise PlatformError(f"{len(failed)} of {len(ids)} MicroVMs: {problem}; {remedy}")

    def _by_request(self) -> dict[str, CallState]:
        """Open calls by their MicroVM."""
        return {request: sent for id in self._known.open for sent in [self._known.sent[id]] for request in sent.requests}

    def _t(self, ids: Collection[str]) -> float:
        """The run's time."""
        return time.time() - self._by_request()[next(iter(ids))].call.origin

    async def _suspended_since(self, run: str, t: float) -> float:
        """When the run was suspended, by its events; `t`: they do not say."""
        since = t
        for line in await asyncio.to_thread(_lines, self.run_dir / EVENTS_FILE):
            if '"kind":"suspended"' in line:
                since = from_json(line).t
        return since

    async def shutdown(self) -> None:
        """As for every platform; also terminates MicroVMs that are left."""
        if self._closed:
            return
        await self._read_on()
        everything = [*self.open_requests(), *self.ended_requests()]
        await super().shutdown()
        with contextlib.suppress(Exception):  # they terminate themselves; this is for those that cannot
            states = await self.api.states(self.launch.image_arns, everything)
            left = [id for id, state in states.items() if state not in ENDED]
            await asyncio.gather(*(self._repeated(self.api.terminate, id) for id in left))

    async def _repeated(self, act: Callable[[str], Awaitable[None]], id: str) -> None:
        """Does something to a MicroVM, again while requests are throttled."""
        waits = pauses(random.Random(id))
        while True:
            try:
                return await act(id)
            except Exception as e:
                pause = next(waits, None) if code_of(e) in AGAIN else None
                if pause is None:
                    raise
            await asyncio.sleep(pause)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


LEFT_S = 10.0
"""Seconds that a MicroVM has to terminate itself after its call has ended."""
MISSING_S = 15.0
"""Seconds after which a MicroVM that the service does not know is gone."""
_log = logging.getLogger(__name__)


class MicrovmStates:
    """States of MicroVMs as log source: those that ended without an outcome, and MicroVMs that outlive their call.

    One request lists the MicroVMs of an image, those of other runs included; a second one asks about each MicroVM that has ended
    while its call has not. A MicroVM whose call has ended terminates itself; where it cannot, it is terminated from here.

    Args:
        api: of the service.
        settings: for messages.
        image_arns: of the images.
        open: requests (ids of MicroVMs) whose call has not ended, as far as it is known.
        ended: requests whose call has.
        clock: seconds.
    """

    def __init__(
        self,
        api: MicrovmApi,
        settings: AwsMicrovmSettings,
        image_arns: Sequence[str],
        *,
        open: Callable[[], Collection[str]],
        ended: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""
        """Why states cannot be read; empty: they can."""
        self._api, self._settings, self._image_arns, self._clock = api, settings, image_arns, clock
        self._open, self._ended = open, ended
        self._told: set[str] = set()
        self._gone: set[str] = set()
        """Ended, as their calls have."""
        self._left_since: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}

    async def poll(self) -> list[LogReport | Death]:
        """MicroVMs that have ended before their call did; none while requests are throttled or refused."""
        waiting = [id for id in self._open() if id not in self._told]
        try:
            ended = [id for id in self._ended() if id not in self._gone]
            states = await self._api.states(self._image_arns, [*waiting, *ended])
            out: list[LogReport | Death] = []
            for id in waiting:
                if states[id] in ENDED:
                    microvm = await self._api.get(id)
                    if microvm.state in ENDED if microvm is not None else self._missing(id):
                        self._told.add(id)
                        out += _reports(id, microvm)
            await self._terminate_left([id for id in ended if states[id] not in ENDED])
            self._gone.update(id for id in ended if states[id] in ENDED)
            self.problem = ""
            return out
        except Exception as e:  # noqa: BLE001 - botocore makes its error classes at run time
            if code_of(e) not in THROTTLED:
                self.problem = "; ".join(explain(e, self._settings, doing="lambda:ListMicrovms"))
            return []

    async def tail(self, stream: str, request: str) -> list[str]:
        """None: CloudWatch keeps the output of functions."""
        return []

    def _missing(self, id: str) -> bool:
        """Whether a MicroVM has been unknown for long: the service tells of new ones a moment late."""
        now = self._clock()
        return now - self._missing_since.setdefault(id, now) >= MISSING_S

    async def _terminate_left(self, ids: Collection[str]) -> None:
        now = self._clock()
        self._left_since = {id: self._left_since.get(id, now) for id in ids}
        for id in [id for id, since in self._left_since.items() if now - since >= LEFT_S]:
            _log.info("MicroVM %s has not terminated itself", id)
            await self._api.terminate(id)


def _reports(id: str, microvm: MicrovmInfo | None) -> list[LogReport | Death]:
    """End and bill of a MicroVM; None: the service does not know it any more."""
    if microvm is None:
        return [Death(request=id, stream="", timed_out=False, text="its MicroVM is gone")]
    late = microvm.lived_s >= microvm.maximum_s
    text = f"its MicroVM ended: {microvm.reason or 'no reason was given'}"
    death = Death(request=id, stream="", timed_out=late, text=text)
    if not microvm.lived_s:
        return [death]
    # Suspensions included: an upper bound, and the only figure for a MicroVM that is gone.
    billed_s = float(math.ceil(microvm.lived_s))
    return [LogReport(request=id, stream="", billed_s=billed_s, size_mb=1.0, used_mb=0.0), death]
