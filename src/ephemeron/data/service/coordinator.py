"""The coordinator: which flows there are, and a router for each that is read (DPFlow section 4.3.2).

Readers register what they read and get the address of its router. Definitions and states are stored with every change, so a
coordinator that was killed resumes where it was: routers and shards are not affected, and are found again. A flow without
readers loses its router and all that runs for it; its description stays.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ephemeron.config.typed import build, plain
from ephemeron.data.service.daemon import ManagedProcess, write_json
from ephemeron.data.service.messages import (
    AccessReply,
    FlowEntry,
    FlowRequest,
    Nothing,
    PingReply,
    RegisterReply,
    RegisterRequest,
    Registry,
    RouterStatus,
    StatusReply,
)
from ephemeron.data.service.protocol import ACCESS, DELETE_FLOW, LIST_FLOWS, PING, REGISTER, ROUTER_STATUS, Buffers, CallDispatcher
from ephemeron.data.service.settings import Endpoint, RouterSettings, ServiceSettings, ShardSettings
from ephemeron.errors import EphemeronError
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.lock import is_driven

TICK_S = 0.5
JOIN_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDefinition:
    """The part of a flow's definition that its router needs."""

    payload: str
    """File of the pickled flow."""
    paths: tuple[str, ...]
    random: bool
    fixed: int
    samples: int
    dataset: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """The stored state of a coordinator (`flows.json`)."""

    flows: tuple[FlowEntry, ...]
    definitions: dict[str, StoredDefinition]


class Coordinator:
    """Serves until `close`.

    Args:
        settings: of the service.
        folder: of its state.
        token: shared secret of the service.
        on_end: called when it is not needed any more.
    """

    def __init__(self, settings: ServiceSettings, folder: Path, token: str, on_end: Callable[[], None]) -> None:
        self.settings = settings
        self._folder, self._token = folder, token
        self._run = RunFolder(Path(settings.run)) if settings.run else None
        header = None if self._run is None else read_header(self._run)
        self._origin = 0.0 if header is None else header.started_at
        self._registry = Registry(idle_s=settings.idle_s)
        self._file = folder / "flows.json"
        self._definitions: dict[str, StoredDefinition] = {}
        self._routers: dict[str, ManagedProcess] = {}
        self._answered: dict[str, float] = {}
        self._status: dict[str, RouterStatus] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._on_end = on_end
        self._restore()
        calls = CallDispatcher("coordinator")
        calls.add(REGISTER, self._register)
        calls.add(ACCESS, self._access)
        calls.add(LIST_FLOWS, self._list)
        calls.add(DELETE_FLOW, self._delete)
        calls.add(PING, self._ping)
        self.endpoint = Endpoint(calls, token=token, host=settings.host, port=settings.port, allow_remote=settings.allow_remote)
        self._controller = threading.Thread(target=self._control, name="control", daemon=True)
        self._controller.start()

    def close(self) -> None:
        """Ends all routers, and with them their shards, and stops serving."""
        self._over.set()
        self._controller.join(timeout=JOIN_S)
        for name in self._registry.flows:
            self._router(name).kill(gently=True, wait_s=20)
        self.endpoint.close()

    # -- calls --------------------------------------------------------------------------------------------

    def _register(self, p: RegisterRequest, buffers: list[Any]) -> tuple[RegisterReply, Buffers]:
        with self._lock:
            result = self._registry.register(name=p.name, version=p.version, signature=p.signature, samples=p.samples, now=time.monotonic())
            known = self._definitions.get(p.name)
            if result == "same" and known is not None and p.fixed < known.fixed:
                # Another reader has found it to be random: samples are named by epoch and seed from now on.
                self._definitions[p.name] = replace(known, fixed=p.fixed, random=p.random)
                _log.info("flow %s is random behind %d stages; its router is restarted", p.name, p.fixed)
                self._router(p.name).kill(gently=True)
                self._save()
            if result == "updated":
                self._router(p.name).kill(gently=True)
            if result != "same" or known is None:
                _log.info("flow %s, version %d is registered (%s)", p.name, p.version, result)
                self._define(p, bytes(buffers[0]))
            return RegisterReply(result=result), ()

    def _define(self, p: RegisterRequest, payload: bytes) -> None:
        old = self._definitions.get(p.name)
        place = self._folder / "payloads" / f"{_slug(p.name)}@{p.version}.pickle"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(payload)
        self._definitions[p.name] = StoredDefinition(
            payload=str(place), paths=p.paths, random=p.random, fixed=p.fixed, samples=p.samples, dataset=p.dataset
        )
        self._save()
        if old is not None and old.payload != str(place):
            Path(old.payload).unlink(missing_ok=True)

    def _list(self, p: Nothing, buffers: list[Any]) -> tuple[StatusReply, Buffers]:
        with self._lock:
            return StatusReply(flows=self._registry.entries(), routers=dict(self._status)), ()

    def _ping(self, p: Nothing, buffers: list[Any]) -> tuple[PingReply, Buffers]:
        return PingReply(settings=plain(self.settings)), ()

    def _delete(self, p: FlowRequest, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        with self._lock:
            self._registry.delete(p.flow)
            definition = self._definitions.pop(p.flow, None)
            self._save()
            self._router(p.flow).kill()
            del self._routers[p.flow]
            shutil.rmtree(self._folder / "flows" / _slug(p.flow), ignore_errors=True)
            if definition is not None:
                Path(definition.payload).unlink(missing_ok=True)
        _log.info("flow %s is deleted", p.flow)
        return Nothing(), ()

    def _access(self, p: FlowRequest, buffers: list[Any]) -> tuple[AccessReply, Buffers]:
        with self._lock:
            return self._start_router(p.flow), ()

    # -- routers ------------------------------------------------------------------------------------------

    def _start_router(self, name: str) -> AccessReply:
        """The address of a flow's router, which is started if it does not run."""
        self._registry[name]  # raises if there is none
        router, wanted = self._router(name), self._router_settings(name, self._definitions[name])
        silent = time.monotonic() - self._answered.get(name, time.monotonic()) > self.settings.timeouts.router_s
        # An earlier coordinator, with other settings or an older version of the flow, may have left one behind.
        if silent or router.settings() not in (None, json.loads(json.dumps(plain(wanted)))):
            _log.warning("router of flow %s is replaced: %s", name, "it is silent" if silent else "its settings are old")
            router.kill(gently=not silent)
        address = router.ensure(wanted)
        self._registry.set_serving(name, now=time.monotonic())
        self._answered[name] = time.monotonic()
        self._save()
        return AccessReply(router=address)

    def _router_settings(self, name: str, definition: StoredDefinition) -> RouterSettings:
        s = self.settings
        whole = ShardSettings(
            flow=f"{name}@{self._registry[name].version}",
            number=0,
            generation=0,
            random=definition.random,
            fixed=definition.fixed,
            paths=definition.paths,
            payload=definition.payload,
            loaders=s.loaders,
            loader_memory_mb=s.loader_memory_mb,
            loader_lifetime_s=s.loader_lifetime_s,
            buffer_mb=s.buffer_mb,
            cache_mb=s.cache_mb,
            host=s.host,
            allow_remote=s.allow_remote,
            dataset=definition.dataset,
            origin=self._origin,
            preload=s.preload,
            labels=s.labels,
            timeouts=s.timeouts,
        )
        samples = definition.samples
        return RouterSettings(samples=samples, shards=max(1, min(s.shards, samples)), whole=whole)

    def _router(self, name: str) -> ManagedProcess:
        if name not in self._routers:
            self._routers[name] = ManagedProcess("router", self._folder / "flows" / _slug(name), self._token)
        return self._routers[name]

    # -- control ------------------------------------------------------------------------------------------

    def _control(self) -> None:
        """Heartbeats, and the states that follow from them."""
        try:
            self._watch()
        except Exception:  # noqa: BLE001 - it is logged, and the process ends
            _log.exception("the control thread of the coordinator in %s failed", self._folder)
        finally:
            self._on_end()  # also if its folder is gone: without control it would never end

    def _watch(self) -> None:
        quiet_since = time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            if self._run is not None and not is_driven(self._run):
                _log.warning("the process that keeps the service alive has ended")
                return
            with self._lock:
                busy = self._registry.busy
            for name in busy:
                self._monitor(name, now)
            with self._lock:
                idle = self._registry.tick(now=now)
                for name in idle:
                    _log.info("flow %s is idle; its router is ended", name)
                    self._router(name).kill(gently=True)
                    self._status.pop(name, None)
                    self._answered.pop(name, None)
                if idle:
                    self._save()
                if self._registry.busy:
                    quiet_since = now
            if self.settings.ends_when_idle and now - quiet_since > self.settings.idle_s:
                return

    def _monitor(self, name: str, now: float) -> None:
        router = self._router(name)
        try:
            status = router.call(ROUTER_STATUS, Nothing(), timeout_s=2.0)
        except (EphemeronError, OSError) as e:
            router.forget()
            with self._lock, suppress(EphemeronError):  # it is tried again; readers learn of it when they ask
                if router.alive:
                    if now - self._answered.get(name, now) > self.settings.timeouts.router_s:
                        _log.warning("router of flow %s does not answer and is ended: %s", name, e)
                        router.kill()
                elif self._registry.should_restart(name, now=now):
                    _log.warning("router of flow %s has ended and is restarted: %s", name, e)
                    self._start_router(name)
            return
        with self._lock:
            self._answered[name] = time.monotonic()
            self._status[name] = status
            if name in self._registry.flows:
                self._registry.set_readers(name, readers=status.readers, now=now)

    def _save(self) -> None:
        write_json(self._file, CoordinatorState(flows=self._registry.entries(), definitions=self._definitions))

    def _restore(self) -> None:
        if self._file.exists():
            state = build(CoordinatorState, json.loads(self._file.read_text()), where=str(self._file))
            self._registry.restore(state.flows, now=time.monotonic())
            self._definitions = state.definitions


def _slug(name: str) -> str:
    return name.replace("/", "--")
