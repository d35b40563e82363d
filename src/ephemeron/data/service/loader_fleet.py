"""The loader functions of a shard: as many as wanted, on a function platform, started again when they end.

A loader is an ordinary function of the platform, with a memory quota, a share of the CPU and a lifetime; at its end it
says goodbye and another one takes its place. It learns where its shard is from its call, and the token from its
environment. The platform works on an event loop in a thread of its own; everybody else calls from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ephemeron.data.service.address import TOKEN_VARIABLE, LoaderRequest, ServiceAddress
from ephemeron.errors import InvocationRefused
from ephemeron.functions.base import Call, Invocation, Outcome, Platform
from ephemeron.functions.local import LocalPlatform

ENTRY = "ephemeron.data.service.loader:run_loader"
PRELOAD = "ephemeron.data.flow,ephemeron.data.catalog,ephemeron.data.service.loader"
"""Imported by every loader before its first call, after what the settings name."""
RUN = "loading"


async def local_platform(folder: Path, env: Mapping[str, str]) -> Platform:
    """Functions of this machine."""
    return await LocalPlatform.start(folder, env=env, linger_s=0.5, forks=False)


class LoaderFleet:
    """Keeps a number of loaders running.

    Args:
        folder: for the platform.
        shard: where they find their work.
        token: that they prove.
        memory_mb: quota of each.
        lifetime_s: of each.
        preload: modules that they import before their first call, with commas; those not installed are passed over.
        ended: told of each that has ended, and how; in the crew's thread.
        platform: makes the platform from folder and the functions' environment.
    """

    def __init__(
        self, folder: Path, *, shard: ServiceAddress, token: str, memory_mb: int, lifetime_s: float,
        preload: str, ended: Callable[[str, Outcome], None],
        platform: Callable[[Path, Mapping[str, str]], Coroutine[Any, Any, Platform]] = local_platform,
    ) -> None:  # fmt: skip
        self._folder, self._shard = folder, shard
        self._env = {
            "EPHEMERON_ENTRY": ENTRY, "EPHEMERON_PRELOAD": ",".join(filter(None, (preload, PRELOAD))),
            TOKEN_VARIABLE: token,
        }  # fmt: skip
        self._memory_mb, self._lifetime_s = memory_mb, lifetime_s
        self._ended = ended
        self._make_platform = platform
        self._platform: Platform | None = None
        self._invocations: dict[str, Invocation | None] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that run or are being started."""
        with self._lock:
            return tuple(self._invocations)

    def start(self) -> str:
        """Starts one more, and returns its name at once."""
        name = f"loader-{next(self._numbers)}"
        with self._lock:
            self._invocations[name] = None
        asyncio.run_coroutine_threadsafe(self._one(name), self._loop)
        return name

    def cancel(self, name: str) -> None:
        """Ends one that is of no use any more."""
        with self._lock:
            invocation = self._invocations.get(name)
        if invocation is not None:
            asyncio.run_coroutine_threadsafe(invocation.cancel(), self._loop)

    def close(self) -> None:
        """Ends all of them, and the platform."""
        with contextlib.suppress(Exception):  # whatever is left ends with its lifetime
            asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _one(self, name: str) -> None:
        call = Call(
            run=RUN, rank=int(name.rpartition("-")[2]), attempt=0, memory_mb=self._memory_mb,
            lifetime_s=self._lifetime_s, channel="folder", request=asdict(LoaderRequest(loader=name, shard=self._shard)),
        )  # fmt: skip
        try:
            if self._platform is None:
                self._platform = await self._make_platform(self._folder, self._env)
            invocation = await self._platform.invoke(call)
            with self._lock:
                self._invocations[name] = invocation
            outcome = await invocation.wait()
        except InvocationRefused as e:  # the platform is there, and others run on it
            outcome = Outcome(status="error", error=str(e))
        except Exception as e:  # noqa: BLE001 - a loader that is never said to have ended would never be replaced
            self._platform = None
            outcome = Outcome(status="error", error=str(e) or type(e).__name__)
        with self._lock:
            del self._invocations[name]
        self._ended(name, outcome)

    async def _shutdown(self) -> None:
        if isinstance(self._platform, LocalPlatform):
            await self._platform.shutdown()
        elif self._platform is not None:
            await self._platform.cancel_all(RUN)
            await self._platform.close()
