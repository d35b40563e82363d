"""The coordinator: which flows there are, and a router for each that is read (DPFlow section 4.3.2).

Readers register what they read and are told where its router is. Definitions and states are written down with every
change, so a coordinator that was killed goes on where it was: routers and shards did not notice, and are found again.
A flow that nobody reads loses its router and with it everything that runs; the description stays.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ephemeron.data.service.address import Endpoint
from ephemeron.data.service.daemon import ManagedProcess, write_json
from ephemeron.data.service.lifecycle import Registry
from ephemeron.data.service.router import RouterSettings
from ephemeron.data.service.shard import ShardSettings
from ephemeron.data.service.timeouts import ServiceTimeouts
from ephemeron.errors import EphemeronError, JobError

TICK_S = 0.5
JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """How a service behaves; for all of its flows."""

    shards: int = 1
    """Of each flow."""
    loaders: int = 2
    """Loader functions of each flow, at most."""
    loader_memory_mb: int = 1769
    """Memory quota of each; it brings CPU in proportion."""
    loader_lifetime_s: float = 900.0
    buffer_mb: float = 1024.0
    """For samples that were asked for, of each flow."""
    cache_mb: float = 1024.0
    """For samples kept beyond that, of each flow; 0 keeps none."""
    idle_s: float = 60.0
    """A flow that nobody reads for so long runs nothing any more."""
    ends_when_idle: bool = False
    """Whether the coordinator ends as well, once no flow runs."""
    host: str = "127.0.0.1"
    port: int = 0
    allow_remote: bool = False
    preload: str = "torch,PIL.Image"
    """Modules that loaders import before their first call, with commas; those not installed are passed over."""
    patience: ServiceTimeouts = field(default_factory=ServiceTimeouts)

    def __post_init__(self) -> None:
        for name, least in (("shards", 1), ("loaders", 1), ("loader_memory_mb", 1), ("cache_mb", 0), ("port", 0)):
            if getattr(self, name) < least:
                raise JobError(f"{name} = {getattr(self, name)} of a data service should be at least {least}")
        for name in ("loader_lifetime_s", "buffer_mb", "idle_s"):
            if not getattr(self, name) > 0:
                raise JobError(f"{name} = {getattr(self, name)} of a data service should be above 0")


class Coordinator:
    """Serves until `close`.

    Args:
        settings: see there.
        folder: where everything is kept.
        token: shared secret of the service.
        ending: called when nobody needs it any more.
    """

    def __init__(self, settings: ServiceSettings, folder: Path, token: str, ending: Callable[[], None]) -> None:
        self.settings = settings
        self._folder, self._token = folder, token
        self._registry = Registry(idle_s=settings.idle_s)
        self._file = folder / "flows.json"
        self._definitions: dict[str, dict[str, Any]] = {}
        self._routers: dict[str, ManagedProcess] = {}
        self._answered: dict[str, float] = {}
        self._status: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._ending = ending
        self._restore()
        self.endpoint = Endpoint(
            self._answer, token=token, host=settings.host, port=settings.port, allow_remote=settings.allow_remote
        )
        self._controller = threading.Thread(target=self._control, name="control", daemon=True)
        self._controller.start()

    def close(self) -> None:
        """Ends all routers, and with them everything, and stops serving."""
        self._over.set()
        self._controller.join(timeout=JOIN_S)
        for name in self._registry.flows:
            self._router(name).kill(gently=True, wait_s=20)
        self.endpoint.close()

    def _answer(self, method: str, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            match method:
                case "register":
                    return self._register(p, bytes(buffers[0])), []
                case "access":
                    return self._access(p["flow"]), []
                case "list":
                    return {"flows": self._registry.state_dict()["flows"], "routers": self._status}, []
                case "delete":
                    self._delete(p["flow"])
                    return {}, []
                case "ping":
                    return {"settings": asdict(self.settings)}, []
        raise ValueError(f"a coordinator knows no {method!r}")

    def _register(self, p: dict[str, Any], payload: bytes) -> dict[str, Any]:
        name = p["name"]
        result = self._registry.register(
            name=name, version=p["version"], signature=p["signature"], samples=p["samples"], now=time.monotonic()
        )
        known = self._definitions.get(name)
        if result == "same" and known is not None and p["fixed"] < known.get("fixed", 0):
            # Another reader has found it to be random: samples are named by epoch and seed from now on.
            self._definitions[name] = {**known, "fixed": p["fixed"], "random": p["random"]}
            self._router(name).kill(gently=True)
            self._save()
        if result == "updated":
            self._router(name).kill(gently=True)
        if result != "same" or name not in self._definitions:
            old = self._definitions.get(name)
            place = self._folder / "payloads" / f"{_slug(name)}@{p['version']}.pickle"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(payload)
            self._definitions[name] = {
                "payload": str(place), "paths": p["paths"], "random": p["random"], "fixed": p["fixed"],
                "samples": p["samples"], "dataset": p["dataset"],
            }  # fmt: skip
            self._save()
            if old is not None and old["payload"] != str(place):
                Path(old["payload"]).unlink(missing_ok=True)
        return {"result": result}

    def _delete(self, name: str) -> None:
        self._registry.delete(name)
        definition = self._definitions.pop(name, None)
        self._save()
        self._router(name).kill()
        del self._routers[name]
        shutil.rmtree(self._folder / "flows" / _slug(name), ignore_errors=True)
        if definition is not None:
            Path(definition["payload"]).unlink(missing_ok=True)

    def _access(self, name: str) -> dict[str, Any]:
        """Where the flow's router is; started if it does not run."""
        self._registry[name]  # raises if there is none
        definition = self._definitions[name]
        router, wanted = self._router(name), asdict(self._router_settings(name, definition))
        silent = time.monotonic() - self._answered.get(name, time.monotonic()) > self.settings.patience.router_s
        # Or an earlier coordinator, with other settings or an older version of the flow, has left it behind.
        if silent or router.settings() not in (None, json.loads(json.dumps(wanted))):
            router.kill(gently=not silent)
        address = router.ensure(wanted)
        self._registry.serving(name, now=time.monotonic())
        self._answered[name] = time.monotonic()
        self._save()
        return {"router": address.to_dict()}

    def _router_settings(self, name: str, definition: dict[str, Any]) -> RouterSettings:
        s = self.settings
        whole = ShardSettings(
            flow=f"{name}@{self._registry[name].version}", number=0, generation=0, random=definition["random"],
            fixed=definition.get("fixed", 0),
            paths=tuple(definition["paths"]), payload=definition["payload"], loaders=s.loaders,
            loader_memory_mb=s.loader_memory_mb, loader_lifetime_s=s.loader_lifetime_s, buffer_mb=s.buffer_mb,
            cache_mb=s.cache_mb, host=s.host, allow_remote=s.allow_remote, dataset=definition.get("dataset", ""),
            preload=s.preload, patience=s.patience,
        )  # fmt: skip
        samples = definition["samples"]
        return RouterSettings(samples=samples, shards=max(1, min(s.shards, samples)), whole=whole)

    def _router(self, name: str) -> ManagedProcess:
        if name not in self._routers:
            self._routers[name] = ManagedProcess("router", self._folder / "flows" / _slug(name), self._token)
        return self._routers[name]

    def _control(self) -> None:
        """Heartbeats, and the states that follow from them."""
        try:
            self._watch()
        finally:
            self._ending()  # also if its folder is gone: without control it would stay for ever

    def _watch(self) -> None:
        quiet_since = time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                busy = self._registry.busy
            for name in busy:
                self._look_after(name, now)
            with self._lock:
                idle = self._registry.tick(now=now)
                for name in idle:
                    self._router(name).kill(gently=True)
                    self._status.pop(name, None)
                    self._answered.pop(name, None)
                if idle:
                    self._save()
                if self._registry.busy:
                    quiet_since = now
            if self.settings.ends_when_idle and now - quiet_since > self.settings.idle_s:
                return

    def _look_after(self, name: str, now: float) -> None:
        router = self._router(name)
        try:
            status = router.call("guard", timeout_s=2.0)
        except (EphemeronError, OSError):
            router.forget()
            with self._lock, suppress(EphemeronError):  # it will be tried again; readers are told when they ask
                if router.alive:
                    if now - self._answered.get(name, now) > self.settings.patience.router_s:
                        router.kill()
                elif self._registry.wanted(name, now=now):
                    self._access(name)
            return
        with self._lock:
            self._answered[name] = time.monotonic()
            self._status[name] = status
            if name in self._registry.flows:
                self._registry.seen(name, readers=status["readers"], now=now)

    def _save(self) -> None:
        write_json(self._file, {**self._registry.state_dict(), "definitions": self._definitions})

    def _restore(self) -> None:
        if self._file.exists():
            state = json.loads(self._file.read_text())
            self._registry.load_state_dict(state, now=time.monotonic())
            self._definitions = state["definitions"]


def _slug(name: str) -> str:
    return name.replace("/", "--")
