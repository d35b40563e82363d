"""Platform of Lithops: one client's access to the calls of one run. See `async_invoke`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.records import RecordKeys, calls_prefix
from ephemeron.functions.base import Limits
from ephemeron.functions.lithops.function import run_call
from ephemeron.functions.lithops.invoker import Executor, LithopsSender
from ephemeron.functions.lithops.settings import LOCALHOST, LithopsSettings, lithops_module


def limits_of(settings: LithopsSettings) -> Limits:
    """Limits of calls."""
    return Limits(lifetime_s=settings.lifetime_s, concurrency=settings.places, payload_bytes=16_000_000, mb_per_vcpu=settings.mb_per_vcpu)


class FutureWatch:
    """A log source: ends of this client's calls, by their futures in Lithops.

    Args:
        executor: whose futures they are.
        clock: seconds.
    """

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        self._executor, self._clock = executor, clock
        self._open: dict[str, tuple[Any, float]] = {}

    def started(self, request: str, future: Any) -> None:
        """A call has been sent."""
        self._open[request] = (future, self._clock())

    async def poll(self) -> list[LogReport | Death]:
        """Calls that have ended since."""
        if not self._open:
            return []
        try:
            await asyncio.to_thread(self._executor.look, [future for future, _ in self._open.values()])
            self.problem = ""
        except Exception as e:  # noqa: BLE001 - any error of Lithops or its storage; the next round asks again
            self.problem = f"{type(e).__name__}: {e}"
            return []
        out: list[LogReport | Death] = []
        for request, (future, since) in list(self._open.items()):
            if future.error or future.ready or future.success or future.done:
                del self._open[request]
                billed_s = math.ceil((self._clock() - since) * 1000) / 1000
                text = "Lithops: its task has ended" + (" with an error" if future.error else "")
                out.append(LogReport(request=request, stream="", billed_s=billed_s, size_mb=1.0, used_mb=0.0))
                out.append(Death(request=request, stream="", timed_out=False, text=text))
        return out

    async def tail(self, stream: str, request: str) -> list[str]:
        """None: they are in Lithops' own logs."""
        return []


class LithopsPlatform(AsyncInvokePlatform):
    """Functions of one run, started by Lithops. Made by `open`.

    Args:
        run_dir: folder of the run, for `events.jsonl` and `calls.jsonl`.
        settings: which backend.
        limits: what it allows.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        names: of the records.
    """

    name = "lithops"

    def __init__(self, run_dir: Path, settings: LithopsSettings, limits: Limits, channel: Channel, names: RecordKeys) -> None:
        self.settings = settings
        here = (
            "Functions of backend localhost end with the client's process.",
            "CPU time is not limited; a function gets as many threads as its share has whole CPUs.",
        )
        self.unenforced = (
            *(here if settings.backend == LOCALHOST else ()),
            "Memory is watched every 30 ms: a burst between two looks can exceed the quota before its function is killed.",
            f"A cancelled function ends when its supervisor looks, every {settings.every_s:g} s.",
            "The death of a whole task that this client has not sent is noticed by its silence, after its lifetime.",
        )
        self._executor = Executor(settings, run_call)
        self._watch = FutureWatch(self._executor)
        super().__init__(run_dir, limits, channel, names, every_s=settings.every_s)

    def sender(self) -> LithopsSender:
        return LithopsSender(
            self._executor,
            started=self._watch.started,
            channel=self._channel,
            names=self._names,
            announce=self._announce,
            every_s=self._every_s,
        )

    @classmethod
    async def open(
        cls, run_dir: Path, settings: LithopsSettings, *, channel: str, run: str, limits: Limits | None = None
    ) -> LithopsPlatform:
        """Opens the calls of a run, earlier ones included.

        Args:
            run_dir: made when missing.
            settings: which backend.
            channel: address of the run's channel, which the backend's functions reach.
            run: its name.
            limits: None: those of the settings.

        Raises:
            JobError: a setting is out of range, or there is no channel at that address.
            MissingExtra: Lithops or a library of the channel is absent.
        """
        settings = settings.located()
        lithops_module()
        run_dir.mkdir(parents=True, exist_ok=True)
        self = cls(run_dir, settings, limits or limits_of(settings), open_channel(channel), RecordKeys(calls_prefix(run)))
        try:
            await self.hold(channel, self._watch)
        except BaseException:
            await self.close()
            raise
        return self

    async def shutdown(self) -> None:
        """Ends all functions, removes what calls have left in Lithops' storage, and detaches. Nothing once closed."""
        await super().shutdown()
        with contextlib.suppress(Exception):  # objects that stay there are small and unused
            await asyncio.to_thread(self._executor.clean)
