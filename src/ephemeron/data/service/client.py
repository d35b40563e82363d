"""A flow of a service as its readers see it: where its router and shards are, and how to keep in touch with them.

Whatever dies is found again: a shard through the router, the router through the coordinator, the coordinator, where
the service is this machine's own, by starting it. All of that has one deadline: after `timeout_s` without anybody who
answers, `ServiceUnreachable` is raised.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ephemeron.communication.rpc import BlockingClient
from ephemeron.config.paths import home
from ephemeron.data.service.address import TOKEN_VARIABLE, ServiceAddress
from ephemeron.data.service.coordinator import ServiceSettings
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.flow_definition import Definition
from ephemeron.errors import (
    CallTimedOut,
    ConnectionLost,
    EphemeronError,
    JobError,
    LoadersLost,
    RemoteError,
    ServiceRefused,
    ServiceUnreachable,
)

CONNECT_S = 5.0
CALL_S = 10.0
"""After so long a call is made again, in case its answer was lost."""
PAUSE_S = 0.1
LEAST_S = 0.1
LEAVE_S = 0.5
T = TypeVar("T")
_RAISED: dict[str, type[EphemeronError]] = {"JobError": JobError, "LoadersLost": LoadersLost}


_FORKED: weakref.WeakSet[Any] = weakref.WeakSet()
"""What has locks that a fork may find taken."""


Over: TypeAlias = Callable[[], bool]


def _never() -> bool:
    return False


class Cancelled(Exception):
    """Who asked does not want to know any more."""


class Service:
    """A service, found or started.

    Args:
        address: `HOST:PORT` of its coordinator; None: this machine's own, which is started if it does not run.
        token: its secret; None: from the variable `EPHEMERON_DATA_TOKEN`, or of this machine's own service.
        folder: where this machine's own service keeps its state; None: in the home folder.
        settings: of this machine's own, if it has to be started.
        timeout_s: how long to try.

    Raises:
        JobError: an address without a token.
    """

    def __init__(
        self, address: str | None = None, *, token: str | None = None, folder: Path | None = None,
        settings: ServiceSettings | None = None, timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        self.timeout_s = timeout_s
        self._address = None if address is None else ServiceAddress.parse(address)
        self._settings = settings or ServiceSettings(ends_when_idle=True)
        token = token or os.environ.get(TOKEN_VARIABLE)
        if self._address is not None and not token:
            raise JobError(
                f"the data service at {self._address} wants a token", remedy=f"give token=… or set {TOKEN_VARIABLE}"
            )
        place = folder or home() / "data-service"
        self.token = token if self._address is not None and token else own_token(place)
        self._part = ManagedProcess("coordinator", place, self.token)
        self._lock = threading.Lock()
        _FORKED.add(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def call(self, method: str, params: Mapping[str, Any], buffers: Sequence[Any] = ()) -> dict[str, Any]:
        """Asks the coordinator.

        Raises:
            ServiceUnreachable, ServiceRefused: nobody answers in time, or the token is another one.
            JobError: it refuses, and says why.
        """

        end = time.monotonic() + self.timeout_s

        def ask() -> dict[str, Any]:
            with self._lock:
                where = self._address or self._part.ensure(asdict(self._settings))
            left_s = max(LEAST_S, end - time.monotonic())
            client = where.connect(self.token, timeout_s=min(CONNECT_S, left_s))
            try:
                return client.call(method, params, buffers, timeout_s=left_s)[0]
            finally:
                client.close()

        return trying(ask, self.timeout_s)


def own_token(folder: Path) -> str:
    """The token of this machine's own service; made when there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "token"
    while True:
        try:
            with open(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
        except FileExistsError:
            if token := place.read_text().strip():
                return token
            time.sleep(0.01)  # another process is just writing it


def trying(
    work: Callable[[], T], timeout_s: float, *, again: Callable[[], None] = lambda: None, over: Over = _never
) -> T:
    """Does something until it works, for as long as what goes wrong is somebody's death.

    Args:
        again: called before each repetition.
        over: whether nobody wants it any more; asked before each try.

    Raises:
        Stale: nobody does.
    """
    end = time.monotonic() + timeout_s
    while True:
        if over():
            raise Cancelled
        try:
            return work()
        except (ServiceUnreachable, ConnectionLost, CallTimedOut) as e:
            if time.monotonic() > end:
                if isinstance(e, ServiceUnreachable):
                    raise
                raise ServiceUnreachable(f"the data service does not answer within {timeout_s:g} s: {e}") from e
        except RemoteError as e:
            if e.type == "ServiceUnreachable":  # whom we asked has asked another one in vain
                if time.monotonic() > end:
                    raise ServiceUnreachable(f"{e.text} (for {timeout_s:g} s)") from None
            elif e.type in _RAISED:
                raise _RAISED[e.type](e.text) from None
            else:
                raise
        time.sleep(PAUSE_S)
        again()


class FlowClient:
    """A registered flow.

    Args:
        service: that has it.
        definition: of the flow.

    Raises:
        JobError: the service knows the flow otherwise.
        ServiceUnreachable, ServiceRefused: as from `Service.call`.
    """

    def __init__(self, service: Service, definition: Definition) -> None:
        self.name = definition.name
        self._service = service
        self._definition = definition
        self._lock = threading.RLock()
        self._router: BlockingClient | None = None
        self._routes: dict[str, Any] | None = None
        self._shards: dict[int, BlockingClient] = {}
        _FORKED.add(self)
        self._register()

    @property
    def timeout_s(self) -> float:
        return self._service.timeout_s

    def router(
        self, method: str, params: Mapping[str, Any], buffers: Sequence[Any] = (), *, timeout_s: float | None = None,
        over: Over = _never,
    ) -> dict[str, Any]:  # fmt: skip
        """Asks the router; whoever has died is found again, unless it is `over`."""

        def ask() -> dict[str, Any]:
            return self._router_client().call(method, params, buffers, timeout_s=CALL_S)[0]

        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return trying(ask, limit_s, again=self._lose_router, over=over)

    def edges(self) -> list[int]:
        """Shard k has the samples from edges[k] to below edges[k + 1]."""
        edges: list[int] = self._known_routes()["edges"]
        return edges

    def shard(
        self, number: int, method: str, params: Mapping[str, Any], buffers: Sequence[Any] = (),
        *, over: Over = _never,
    ) -> tuple[dict[str, Any], list[Any]]:  # fmt: skip
        """Asks a shard, with the present generation beside the parameters; whoever has died is found again.

        Args:
            over: asked now and then; if so, `Cancelled` is raised.
        """
        end, used = time.monotonic() + self.timeout_s, 0
        while True:
            if over():
                raise Cancelled
            try:
                with self._lock:
                    routes, client = self._known_routes(), self._shard_client(number)
                    used = routes["generation"]
                return client.call(method, {**params, "generation": used}, buffers, timeout_s=CALL_S)
            except CallTimedOut:
                end = time.monotonic() + self.timeout_s  # it is at work, or the router will see that it is not
                continue
            except RemoteError as e:
                if e.type in _RAISED:
                    raise _RAISED[e.type](e.text) from None
                if e.type != "StaleRoute":
                    raise
                problem: Exception = e
            except (ConnectionLost, ServiceUnreachable) as e:
                problem = e
            if time.monotonic() > end:
                raise ServiceUnreachable(
                    f"shard {number} of flow {self.name} does not come back within {self.timeout_s:g} s: {problem}"
                ) from problem
            time.sleep(PAUSE_S)
            self.refresh(used, over=over)

    def refresh(self, used: int, *, over: Over = _never) -> None:
        """The routes of that generation led nowhere."""
        with self._lock:
            if self._routes is not None and self._routes["generation"] != used:
                return
        fresh = self.router("routes", {"generation": used}, over=over)
        with self._lock:
            for client in self._shards.values():
                client.close()
            self._routes, self._shards = fresh, {}

    def noticed(self, generation: int, *, over: Over = _never) -> None:
        """Somebody said that this is the present generation."""
        if self._routes is not None and generation != self._routes["generation"]:
            self.refresh(self._routes["generation"], over=over)

    def say_leave(self, reader: str) -> None:
        """A reader has ended. Those who do not hear of it give it up soon, being silent."""
        calls: list[tuple[BlockingClient | None, dict[str, Any]]] = [
            (client, {"consumer": reader}) for client in self._shards.values()
        ]
        for client, params in [*calls, (self._router, {"reader": reader})]:
            if client is not None and client.connected:
                with contextlib.suppress(EphemeronError):
                    client.call("leave", params, timeout_s=LEAVE_S)

    def close(self) -> None:
        """Ends the connections."""
        with self._lock:
            for client in (*self._shards.values(), *filter(None, [self._router])):
                client.close()
            self._forget()

    # -- connections --------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._router, self._routes, self._shards = None, None, {}

    def _after_fork(self) -> None:
        """A child makes connections of its own, and waits for no thread that was not forked."""
        self._lock = threading.RLock()
        self._forget()

    def _register(self) -> None:
        d = self._definition
        self._service.call(
            "register",
            {"name": d.name, "version": d.version, "signature": d.signature, "samples": d.samples, "random": d.random, "fixed": d.fixed,
             "dataset": d.dataset, "paths": list(d.paths)},
            [d.payload],
        )  # fmt: skip

    def _router_client(self) -> BlockingClient:
        with self._lock:
            if self._router is None or not self._router.connected:
                try:
                    found = self._service.call("access", {"flow": self.name})
                except JobError:  # the coordinator has lost its memory
                    self._register()
                    found = self._service.call("access", {"flow": self.name})
                self._router = ServiceAddress.from_dict(found["router"]).connect(self._service.token)
            return self._router

    def _lose_router(self) -> None:
        with self._lock:
            if self._router is not None and not self._router.connected:
                self._router = None

    def _known_routes(self) -> dict[str, Any]:
        with self._lock:
            if self._routes is None:
                self._routes = self.router("routes", {})
            return self._routes

    def _shard_client(self, number: int) -> BlockingClient:
        client = self._shards.get(number)
        if client is None or not client.connected:
            assert self._routes is not None
            address = ServiceAddress.from_dict(self._routes["shards"][number])
            client = self._shards[number] = address.connect(self._service.token)
        return client


def _after_fork() -> None:
    for each in list(_FORKED):
        each._after_fork()


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["Cancelled", "FlowClient", "Service", "ServiceRefused", "own_token", "trying"]
