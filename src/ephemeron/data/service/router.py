"""A router: the shards of one flow, which samples each has, and the orders that jobs draw together (DPFlow section 4.3.3).

Samples are cut into as many consecutive ranges as there are shards. The router starts the shards and monitors them: one that is
gone, or does not answer, is replaced. Routes have a generation, which rises with every change; a shard refuses readers that
come with another generation, and they ask here again. No data passes through here.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.config.typed import plain
from ephemeron.data.service.daemon import ManagedProcess, write_json
from ephemeron.data.service.messages import (
    GenerationReply,
    JoinReply,
    JoinRequest,
    MarkReply,
    MarkRequest,
    Nothing,
    ReaderRequest,
    RouterStatus,
    Routes,
    RoutesRequest,
    ShardStatus,
    StatusRequest,
    TraverseReply,
    TraverseRequest,
)
from ephemeron.data.service.protocol import (
    HEARTBEAT_READER,
    JOIN,
    MARK,
    REMOVE_READER,
    ROUTER_STATUS,
    ROUTES,
    SHARD_STATUS,
    TRAVERSE,
    Buffers,
    CallDispatcher,
)
from ephemeron.data.service.settings import Endpoint, RouterSettings
from ephemeron.data.service.shared_epochs import SharedEpochs
from ephemeron.errors import EphemeronError

TICK_S = 0.5
JOIN_S = 10.0
_log = logging.getLogger(__name__)


class Router:
    """Serves until `close`.

    Args:
        settings: from the coordinator.
        folder: of this router; the shards' folders are in it.
        token: shared secret of the service.
        on_end: called when it is not needed any more.
    """

    def __init__(self, settings: RouterSettings, folder: Path, token: str, on_end: Callable[[], None]) -> None:
        self.settings = settings
        self._generation_file = folder / "generation"
        self._generation = int(self._generation_file.read_text()) if self._generation_file.exists() else 0
        self._shards = [ManagedProcess("shard", folder / f"shard-{k}", token) for k in range(settings.shards)]
        self._answered = [time.monotonic()] * settings.shards
        self._status = [ShardStatus()] * settings.shards
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._monitored_at = time.monotonic()
        self._on_end = on_end
        self._readers: dict[str, float] = {}
        window = max(1, settings.samples // 2)
        self._epochs = SharedEpochs(folder / "traversals", window=window, now=time.time())
        for number, shard in enumerate(self._shards):
            if not self._is_current(shard.settings(), number):
                shard.kill()
        self._monitor()
        calls = CallDispatcher("router")
        calls.add(ROUTES, self._routes)
        calls.add(HEARTBEAT_READER, self._heartbeat)
        calls.add(REMOVE_READER, self._remove_reader)
        calls.add(TRAVERSE, self._traverse)
        calls.add(MARK, self._mark)
        calls.add(JOIN, self._join)
        calls.add(ROUTER_STATUS, self._report)
        self.endpoint = Endpoint(calls, token=token, host=settings.whole.host, allow_remote=settings.whole.allow_remote)
        self._controller = threading.Thread(target=self._control, name="control", daemon=True)
        self._controller.start()

    def close(self) -> None:
        """Ends the shards and stops serving."""
        self._over.set()
        self._controller.join(timeout=JOIN_S)
        for shard in self._shards:
            shard.kill(gently=True)
        self.endpoint.close()

    # -- calls --------------------------------------------------------------------------------------------

    def _routes(self, p: RoutesRequest, buffers: list[Any]) -> tuple[Routes, Buffers]:
        """The shards' addresses. A reader that names the present generation has failed to reach one: test them at once."""
        if p.generation is not None and p.generation == self._generation:
            self._monitor()
        with self._lock:
            shards = tuple(shard.address() for shard in self._shards)
            return Routes(generation=self._generation, edges=self.settings.edges(), shards=shards), ()

    def _heartbeat(self, p: ReaderRequest, buffers: list[Any]) -> tuple[GenerationReply, Buffers]:
        with self._lock:
            if p.reader not in self._readers:
                _log.info("reader %s joins flow %s", p.reader, self.settings.whole.flow)
            self._readers[p.reader] = time.monotonic()
            return GenerationReply(generation=self._generation), ()

    def _remove_reader(self, p: ReaderRequest, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        with self._lock:
            if self._readers.pop(p.reader, None) is not None:
                _log.info("reader %s leaves flow %s", p.reader, self.settings.whole.flow)
        return Nothing(), ()

    def _traverse(self, p: TraverseRequest, buffers: list[Any]) -> tuple[TraverseReply, Buffers]:
        with self._lock:
            return self._epochs.request(p, now=time.time()), ()

    def _mark(self, p: MarkRequest, buffers: list[Any]) -> tuple[MarkReply, Buffers]:
        with self._lock:
            return self._epochs.mark(p, now=time.time()), ()

    def _join(self, p: JoinRequest, buffers: list[Any]) -> tuple[JoinReply, Buffers]:
        chosen = np.frombuffer(buffers[0], np.int64).tolist() if buffers else None
        with self._lock:
            return self._epochs.join(p, chosen, now=time.time()), ()

    def _report(self, p: Nothing, buffers: list[Any]) -> tuple[RouterStatus, Buffers]:
        with self._lock:
            self._monitored_at = time.monotonic()
            self._remove_silent()
            status = RouterStatus(readers=len(self._readers), generation=self._generation, shards=tuple(self._status))
            return status, ()

    # -- control ------------------------------------------------------------------------------------------

    def _remove_silent(self) -> None:
        """Removes readers whose heartbeats have stopped."""
        after = time.monotonic() - self.settings.whole.timeouts.reader_lease_s
        for reader in [reader for reader, at in self._readers.items() if at <= after]:
            _log.warning("reader %s of flow %s is silent and is removed", reader, self.settings.whole.flow)
            del self._readers[reader]

    def _control(self) -> None:
        try:
            self._watch()
        except Exception:  # noqa: BLE001 - it is logged, and the process ends
            _log.exception("the control thread of the router of flow %s failed", self.settings.whole.flow)
        finally:
            self._on_end()  # also if its folder is gone: without control it would never end

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            with suppress(EphemeronError):  # it is tried again; readers learn of it when they ask
                self._monitor()
            with self._lock:
                self._remove_silent()
                alive = {reader.rpartition("/")[0] for reader in self._readers}
                self._epochs.remove_silent(alive=alive, now=time.time())
                unmonitored_s = time.monotonic() - self._monitored_at
                unused = not self._readers and unmonitored_s > self.settings.whole.timeouts.orphan_s
            if unused:
                return

    def _is_current(self, found: object, number: int) -> bool:
        """Whether a shard that an earlier router has left behind has the settings that this one would give it."""
        if found is None:
            return True
        generation = found.get("generation") if isinstance(found, Mapping) else None
        if not isinstance(generation, int):
            return False
        return bool(found == json.loads(json.dumps(plain(self.settings.shard(number, generation)))))

    def _monitor(self) -> None:
        """Replaces shards that are gone or silent, and tells all of them the generation."""
        with self._lock:
            gone = [k for k, shard in enumerate(self._shards) if not shard.alive or self._is_silent(k)]
            if gone or self._generation == 0:
                self._generation += 1
                write_json(self._generation_file, self._generation)
            for k in gone:
                _log.info("shard %d of flow %s is started, generation %d", k, self.settings.whole.flow, self._generation)
                self._shards[k].kill()
                self._shards[k].ensure(self.settings.shard(k, self._generation))
                self._answered[k] = time.monotonic()
            for k, shard in enumerate(self._shards):
                try:
                    request = StatusRequest(generation=self._generation)
                    self._status[k] = shard.call(SHARD_STATUS, request, timeout_s=2.0)
                    self._answered[k] = time.monotonic()
                except (EphemeronError, OSError) as e:
                    _log.warning("shard %d of flow %s does not answer: %s", k, self.settings.whole.flow, e)
                    shard.forget()

    def _is_silent(self, k: int) -> bool:
        return time.monotonic() - self._answered[k] > self.settings.whole.timeouts.shard_s
