"""The loader functions of a shard: as many as requested, on a function platform, restarted when they end.

A loader is an ordinary function of the platform, with a memory quota, a share of the CPU and a time limit; at its end it
deregisters and another one takes its place. It gets the address of its shard from its call, and the token from its environment.
The platform works on an event loop in a thread of its own; the methods here may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ephemeron.data.service.settings import TOKEN_VARIABLE, ServiceAddress, ServiceLoaderOptions
from ephemeron.errors import InvocationRefused
from ephemeron.functions.base import Call, Invocation, Outcome, Platform
from ephemeron.functions.entries import PRELOAD_VARIABLE, PRELOADS
from ephemeron.functions.local import LocalPlatform

RUN = "loading"
_log = logging.getLogger(__name__)


async def local_platform(folder: Path, env: Mapping[str, str]) -> Platform:
    """Functions of this machine."""
    return await LocalPlatform.start(folder, env=env, linger_s=0.5, forks=False)


class LoaderFleet:
    """Starts and cancels loaders.

    Args:
        folder: for the platform.
        shard: address of their shard.
        token: shared secret of the service.
        memory_mb: memory quota of each.
        lifetime_s: time limit of each.
        preload: modules that they import before their first call and before those of `PRELOADS`, separated by commas; those not installed
            are left out.
        origin, labels: see `ShardSettings`.
        ended: called with the name and the outcome of each loader that has ended; in the fleet's thread.
        platform: makes the platform from the folder and the functions' environment.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shard: ServiceAddress,
        token: str,
        memory_mb: int,
        lifetime_s: float,
        preload: str,
        origin: float = 0.0,
        labels: Mapping[str, str] | None = None,
        ended: Callable[[str, Outcome], None],
        platform: Callable[[Path, Mapping[str, str]], Coroutine[Any, Any, Platform]] = local_platform,
    ) -> None:
        self._folder, self._shard = folder, shard
        self._env = {PRELOAD_VARIABLE: ",".join(filter(None, (preload, *PRELOADS["loader"]))), TOKEN_VARIABLE: token}
        self._memory_mb, self._lifetime_s = memory_mb, lifetime_s
        self._origin, self._labels = origin, labels or {}
        self._ended = ended
        self._make_platform = platform
        self._platform: Platform | None = None
        self._invocations: dict[str, Invocation | None] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loader-fleet", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaders that run or are being started."""
        with self._lock:
            return tuple(self._invocations)

    def start(self) -> str:
        """Starts another loader, and returns its name at once."""
        name = f"loader-{next(self._numbers)}"
        with self._lock:
            self._invocations[name] = None
        asyncio.run_coroutine_threadsafe(self._one(name), self._loop)
        return name

    def cancel(self, name: str) -> None:
        """Ends a loader that is not needed any more."""
        with self._lock:
            invocation = self._invocations.get(name)
        if invocation is not None:
            asyncio.run_coroutine_threadsafe(invocation.cancel(), self._loop)

    def close(self) -> None:
        """Ends all loaders, and the platform."""
        with contextlib.suppress(Exception):  # a loader that is left ends at its time limit
            asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _one(self, name: str) -> None:
        call = Call(
            run=RUN,
            rank=int(name.rpartition("-")[2]),
            attempt=0,
            memory_mb=self._memory_mb,
            lifetime_s=self._lifetime_s,
            channel="folder",
            entry="loader",
            origin=self._origin,
            labels=self._labels,
            request=asdict(ServiceLoaderOptions(loader=name, shard=self._shard)),
        )
        try:
            if self._platform is None:
                self._platform = await self._make_platform(self._folder, self._env)
                _log.debug("platform of loaders in %s is started", self._folder)
            invocation = await self._platform.invoke(call)
            with self._lock:
                self._invocations[name] = invocation
            outcome = await invocation.wait()
        except InvocationRefused as e:  # the platform works, and other loaders run on it
            outcome = Outcome(status="error", error=str(e))
        except Exception as e:  # noqa: BLE001 - a loader whose end is not reported would never be replaced
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
