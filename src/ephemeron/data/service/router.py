"""A router: the shards of one flow, which of them has which samples, and what jobs draw together (DPFlow section 4.3.3).

Samples are cut into as many runs as there are shards. The router starts the shards and looks after them: one that is
gone, or does not answer, is started anew. Routes have a generation, which rises with every change; a shard refuses readers
that come with another one, and they ask here again. No data passes through here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ephemeron.data.service.address import Endpoint
from ephemeron.data.service.daemon import ManagedProcess, write_json
from ephemeron.data.service.shard import ShardSettings
from ephemeron.data.service.shared_epochs import SharedEpochs
from ephemeron.errors import EphemeronError

TICK_S = 0.5
JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What a coordinator tells a router."""

    samples: int
    shards: int
    whole: ShardSettings
    """As if there were one shard: loaders, buffer and cache are those of all shards together."""

    def shard(self, number: int, generation: int) -> ShardSettings:
        """Of one of the shards."""
        whole = self.whole
        return replace(
            whole, number=number, generation=generation, loaders=max(1, (whole.loaders + number) // self.shards),
            buffer_mb=whole.buffer_mb / self.shards, cache_mb=whole.cache_mb / self.shards,
        )  # fmt: skip

    def edges(self) -> list[int]:
        """Shard k has the samples from edges[k] to below edges[k + 1]."""
        return [self.samples * k // self.shards for k in range(self.shards + 1)]


class Router:
    """Serves until `close`.

    Args:
        settings: see there.
        folder: its own; shards have theirs in it.
        token: shared secret of the service.
        ending: called when nobody needs it any more.
    """

    def __init__(self, settings: RouterSettings, folder: Path, token: str, ending: Callable[[], None]) -> None:
        self.settings = settings
        self._folder = folder
        self._generation_file = folder / "generation"
        self._generation = int(self._generation_file.read_text()) if self._generation_file.exists() else 0
        self._shards = [ManagedProcess("shard", folder / f"shard-{k}", token) for k in range(settings.shards)]
        self._answered = [time.monotonic()] * settings.shards
        self._status: list[dict[str, Any]] = [{} for _ in range(settings.shards)]
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._guarded_at = time.monotonic()
        self._ending = ending
        self._readers: dict[str, float] = {}
        window = max(1, settings.samples // 2)
        self._traversals = SharedEpochs(folder / "traversals", window=window, now=time.time())
        for number, shard in enumerate(self._shards):
            if not self._is_of_now(shard.settings(), number):
                shard.kill()
        self._look_after()
        self.endpoint = Endpoint(
            self._answer, token=token, host=settings.whole.host, allow_remote=settings.whole.allow_remote
        )
        self._controller = threading.Thread(target=self._control, name="control", daemon=True)
        self._controller.start()

    def close(self) -> None:
        """Ends the shards and stops serving."""
        self._over.set()
        self._controller.join(timeout=JOIN_S)
        for shard in self._shards:
            shard.kill(gently=True)
        self.endpoint.close()

    def _answer(self, method: str, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        match method:
            case "routes":
                return self._routes(p.get("generation")), []
            case "attend":
                with self._lock:
                    self._readers[p["reader"]] = time.monotonic()
                    return {"generation": self._generation}, []
            case "leave":
                with self._lock:
                    self._readers.pop(p["reader"], None)
                return {}, []
            case "traverse":
                with self._lock:
                    found = self._traversals.request(**p, now=time.time())
                return found, []
            case "mark" | "join" | "end":
                with self._lock:
                    return getattr(self._traversals, method)(**p, buffers=buffers, now=time.time()), []
            case "guard":
                return self._guard(), []
        raise ValueError(f"a router knows no {method!r}")

    def _routes(self, known: int | None) -> dict[str, Any]:
        """Where the shards are. Whoever knows of the present generation has had trouble with it: look at once."""
        if known is not None and known == self._generation:
            self._look_after()
        with self._lock:
            return {
                "generation": self._generation, "edges": self.settings.edges(),
                "shards": [shard.address().to_dict() for shard in self._shards],
            }  # fmt: skip

    def _guard(self) -> dict[str, Any]:
        with self._lock:
            self._guarded_at = time.monotonic()
            self._forget_silent()
            return {"readers": len(self._readers), "generation": self._generation, "shards": self._status}

    def _forget_silent(self) -> None:
        """Readers who have not been heard of for long."""
        after = time.monotonic() - self.settings.whole.patience.reader_lease_s
        self._readers = {reader: at for reader, at in self._readers.items() if at > after}

    def _control(self) -> None:
        try:
            self._watch()
        finally:
            self._ending()  # also if its folder is gone: without control it would stay for ever

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            with suppress(EphemeronError):  # it will be tried again; readers are told when they ask
                self._look_after()
            with self._lock:
                self._forget_silent()
                alive = {reader.rpartition("/")[0] for reader in self._readers}
                self._traversals.settle(alive=alive, now=time.time())
                unused = (
                    not self._readers and time.monotonic() - self._guarded_at > self.settings.whole.patience.orphan_s
                )
            if unused:
                return

    def _is_of_now(self, found: dict[str, Any] | None, number: int) -> bool:
        """Whether what an earlier router has left behind is a shard as this one would start it, or nothing."""
        if found is None:
            return True
        return bool(found == json.loads(json.dumps(asdict(self.settings.shard(number, found["generation"])))))

    def _look_after(self) -> None:
        """Starts shards that are gone, and tells all of the generation."""
        with self._lock:
            gone = [k for k, shard in enumerate(self._shards) if not shard.alive or self._is_silent(k)]
            if gone or self._generation == 0:
                self._generation += 1
                write_json(self._generation_file, self._generation)
            for k in gone:
                self._shards[k].kill()
                self._shards[k].ensure(asdict(self.settings.shard(k, self._generation)))
                self._answered[k] = time.monotonic()
            for k, shard in enumerate(self._shards):
                try:
                    self._status[k] = shard.call("guard", {"generation": self._generation}, timeout_s=2.0)
                    self._answered[k] = time.monotonic()
                except (EphemeronError, OSError):
                    shard.forget()

    def _is_silent(self, k: int) -> bool:
        return time.monotonic() - self._answered[k] > self.settings.whole.patience.shard_s
