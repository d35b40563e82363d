"""Sender of calls by an executor. The same for a client and for a function that invokes its successor."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ephemeron import logs
from ephemeron.config.typed import plain
from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.base import Call
from ephemeron.functions.lithops.settings import LOCALHOST, MARGIN_S, LithopsSettings, lithops_module, overridden

INLINE_BYTES = 64_000
"""Larger calls go through the channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LithopsTask:
    """Argument of `lithops.function.run_call`."""

    event: str
    """An `InvokeRequest`."""
    request: str
    """Id of the call, for the collector."""
    memory_mb: int
    """Quota of the call."""
    settings: LithopsSettings


class Executor:
    """Lithops' FunctionExecutor, made when first needed and used by one thread at a time.

    Args:
        settings: of the platform.
        run: `lithops.function.run_call`, which Lithops is to run.
    """

    def __init__(self, settings: LithopsSettings, run: Callable[[Mapping[str, object]], str]) -> None:
        self.settings = settings
        self._run = run
        self._one = threading.Lock()
        self._executor: Any = None

    def call(self, event: bytes, request: str, call: Call) -> Any:
        """Starts a function; returns its future. Blocks."""
        with self._one:
            executor = self._made()
            task = LithopsTask(event=event.decode(), request=request, memory_mb=call.memory_mb, settings=self._settings_of_task())
            return executor.call_async(
                self._run,
                {"message": plain(task)},
                # Lithops would kill the function without a report; its supervisor ends it before.
                timeout=math.ceil(min(call.lifetime_s + MARGIN_S, self.settings.timeout_s)),
                runtime_memory=None if self.settings.backend == LOCALHOST else call.memory_mb,
                # The runtime has this package; Lithops would pack every module that it can see.
                exclude_modules=["ephemeron"],
            )

    def _settings_of_task(self) -> LithopsSettings:
        """The settings, with this process's log level for functions."""
        return replace(self.settings, variables={**logs.variables(), **self.settings.variables})

    def look(self, futures: list[Any]) -> None:
        """Updates the states of futures. Blocks."""
        with self._one:
            self._made().wait(futures, return_when=_always(), throw_except=False, show_progressbar=False, download_results=False)

    def clean(self) -> None:
        """Removes the objects of calls from Lithops' storage. Blocks; only after all calls have ended."""
        with self._one:
            if self._executor is not None:
                self._executor.clean(clean_cloudobjects=False, force=True)

    def _made(self) -> Any:
        if self._executor is None:
            lithops = lithops_module()
            config = _user_config()
            self._executor = lithops.FunctionExecutor(config=overridden(config, self.settings), log_level=None)
        return self._executor


class LithopsSender(RecordedSender):
    """Sends each call as one call of Lithops.

    Args:
        executor: to call with.
        started: called with each request and its future.
        sender: further arguments of `RecordedSender`.
    """

    def __init__(self, executor: Executor, *, started: Callable[[str, Any], None], **sender: Any) -> None:
        super().__init__(inline_bytes=INLINE_BYTES, variables={**os.environ, **executor.settings.variables}, **sender)
        self._executor, self._started = executor, started

    async def request(self, event: bytes, call: Call) -> str:
        # Lithops tries again what its storage or its backend refuses; a call that is started twice does no harm.
        name = secrets.token_hex(8)
        try:
            future = await asyncio.to_thread(self._executor.call, event, name, call)
        except Exception as e:
            raise InvocationRefused(f"Lithops does not take the call: {type(e).__name__}: {e}") from e
        self._started(name, future)
        return name


def _always() -> Any:
    from lithops.wait import ALWAYS

    return ALWAYS


def _user_config() -> Mapping[str, Any]:
    """Configuration of the user, or within a function of Lithops itself; empty where there is none."""
    from lithops.config import load_config

    logging.getLogger("lithops").setLevel(logging.ERROR)
    try:
        return dict(load_config(log=False) or {})
    except FileNotFoundError:
        return {}
