"""Sends calls with an executor; the same for a client and for a function that invokes its successor."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.base import Call
from ephemeron.functions.lithops.settings import LOCALHOST, MARGIN_S, LithopsSettings, lithops_module, overridden

INLINE_BYTES = 64_000
"""Larger calls go through the channel."""


class Executor:
    """Lithops' FunctionExecutor, made when first needed and used by one thread at a time.

    Args:
        settings: of the platform.
        run: `lithops.function.run_call`, which Lithops is to run.
    """

    def __init__(self, settings: LithopsSettings, run: Callable[[dict[str, Any]], str]) -> None:
        self.settings = settings
        self._run = run
        self._one = threading.Lock()
        self._executor: Any = None

    def call(self, event: bytes, request: str, call: Call) -> Any:
        """Starts a function; returns its future. Blocks."""
        with self._one:
            executor = self._made()
            data = {
                "event": event.decode(),
                "request": request,
                "memory_mb": call.memory_mb,
                "told": asdict(self.settings),
            }
            return executor.call_async(
                self._run, {"message": data},
                # Lithops would kill the function without a last word; its supervisor does it before.
                timeout=math.ceil(min(call.lifetime_s + MARGIN_S, self.settings.timeout_s)),
                runtime_memory=None if self.settings.backend == LOCALHOST else call.memory_mb,
                # The runtime has us; Lithops would pack every module that it can see.
                exclude_modules=["ephemeron"],
            )  # fmt: skip

    def look(self, futures: list[Any]) -> None:
        """Brings the futures' states up to date. Blocks."""
        with self._one:
            self._made().wait(
                futures, return_when=_always(), throw_except=False, show_progressbar=False, download_results=False
            )  # fmt: skip

    def clean(self) -> None:
        """Removes what calls have left in Lithops' storage. Blocks; only when all have ended."""
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
    """One call of Lithops for each call of ours.

    Args:
        executor: to call with.
        started: told of every future, by its request.
        voice: see `RecordedSender`.
    """

    def __init__(self, executor: Executor, *, started: Callable[[str, Any], None], **voice: Any) -> None:
        super().__init__(inline_bytes=INLINE_BYTES, **voice)
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


def _user_config() -> dict[str, Any]:
    """What the user, or within a function Lithops itself, has configured; empty where nothing is."""
    from lithops.config import load_config

    logging.getLogger("lithops").setLevel(logging.ERROR)
    try:
        return dict(load_config(log=False) or {})
    except FileNotFoundError:
        return {}
