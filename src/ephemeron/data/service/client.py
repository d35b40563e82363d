"""Clients of the service: calls to the coordinator, and to the router and shards of a flow.

Processes that die are found again: a shard through the router, the router through the coordinator, and the coordinator of this
machine's own service by starting it. After `timeout_s` without an answer of any of them,
`ServiceUnreachable` is raised: each that comes back starts the time anew (`Deadline`), because the next one may have to come back, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from ephemeron.communication.rpc import BlockingClient
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.config.paths import home
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.flow_definition import Definition
from ephemeron.data.service.messages import ConsumerRequest, FlowRequest, ReaderRequest, RegisterRequest, Routes, RoutesRequest
from ephemeron.data.service.protocol import ACCESS, REGISTER, REMOVE_CONSUMER, REMOVE_READER, ROUTES, Buffers, Method
from ephemeron.data.service.settings import TOKEN_VARIABLE, ServiceAddress, ServiceSettings
from ephemeron.errors import CallTimedOut, ConnectionLost, EphemeronError, JobError, LoadersLost, RemoteError, ServiceUnreachable

CONNECT_S = 5.0
CALL_S = 10.0
"""A call without an answer is repeated after this time."""
PAUSE_S = 0.1
LEAST_S = 0.1
LEAVE_S = 0.5
T = TypeVar("T")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
_RAISED: dict[str, type[EphemeronError]] = {"JobError": JobError, "LoadersLost": LoadersLost}


MOST_RENEWALS = 3
"""Of a deadline: a coordinator, a router and a shard that come back."""
STALE_ROUTE = "_StaleRoute"
"""Name of the error of a shard whose reader has the routes of another generation."""
_log = logging.getLogger(__name__)


class _Forkable(Protocol):
    """An object whose locks may be held by another thread at a fork."""

    def _after_fork(self) -> None: ...


_FORKED: weakref.WeakSet[_Forkable] = weakref.WeakSet()
"""Objects to renew in a forked child."""


Over: TypeAlias = Callable[[], bool]
"""Whether the caller does not need the answer any more."""


def _never() -> bool:
    return False


class _Cancelled(Exception):
    """The caller does not need the answer any more."""


class Deadline:
    """Time for an answer, for which several processes may have to come back one after the other.

    Args:
        timeout_s: without any answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._renewals = 0
        self._end = time.monotonic() + timeout_s
        self._answered_by: object = None

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def renew(self, answered_by: object) -> None:
        """Starts the time anew, if that process was not the last to do so; bounded, so that no call goes on for ever."""
        if answered_by is not self._answered_by and self._renewals < MOST_RENEWALS:
            self._answered_by = answered_by
            self._renewals += 1
            self.restart()

    def restart(self) -> None:
        """Starts the time anew."""
        self._end = time.monotonic() + self.timeout_s


class Service:
    """A data service, found or started.

    Args:
        address: `HOST:PORT` of its coordinator; None: this machine's own, which is started if it does not run.
        token: its secret; None: from the variable `EPHEMERON_DATA_TOKEN`, or of this machine's own service.
        folder: where this machine's own service keeps its state; None: in the home folder.
        settings: of this machine's own service, if it has to be started.
        timeout_s: how long to try.

    Raises:
        JobError: an address without a token.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: Token | None = None,
        folder: Path | None = None,
        settings: ServiceSettings | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.timeout_s = timeout_s
        self._address = None if address is None else ServiceAddress.parse(address)
        self._settings = settings or ServiceSettings(ends_when_idle=True)
        token = token_text(token) if token else os.environ.get(TOKEN_VARIABLE)
        if self._address is not None and not token:
            raise JobError(f"the data service at {self._address} wants a token", remedy=f"give token=… or set {TOKEN_VARIABLE}")
        place = folder or home() / "data-service"
        self.token = token if self._address is not None and token else own_token(place)
        self._part = ManagedProcess("coordinator", place, self.token)
        self._lock = threading.Lock()
        _FORKED.add(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def call(self, method: Method[Request, Reply], request: Request, buffers: Buffers = ()) -> Reply:
        """Calls the coordinator.

        Raises:
            ServiceUnreachable, ServiceRefused: no answer in time, or the service has another token.
            JobError: the coordinator refuses the request; the message says why.
        """
        deadline = Deadline(self.timeout_s)

        def attempt() -> Reply:
            with self._lock:
                where = self._address or self._part.ensure(self._settings)
            client = where.connect(self.token, timeout_s=max(LEAST_S, min(CONNECT_S, deadline.left_s)))
            deadline.renew(client)  # it may have been started first, and has to start a router now
            try:
                return method.call(client, request, buffers, timeout_s=max(LEAST_S, deadline.left_s))[0]
            finally:
                client.close()

        return retrying(attempt, deadline)


def own_token(folder: Path) -> str:
    """The token of this machine's own service; created on first use."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "token"
    while True:
        try:
            with open(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
        except FileExistsError:
            if token := place.read_text().strip():
                return token
            time.sleep(0.01)  # another process is writing it


def retrying(work: Callable[[], T], deadline: Deadline, *, before_retry: Callable[[], None] = lambda: None, over: Over = _never) -> T:
    """Repeats a call until it works, as long as it fails because a process is gone or silent.

    Args:
        work: the call.
        deadline: how long to try; `work` may renew it.
        before_retry: called before each repetition.
        over: whether the answer is not needed any more; called before each attempt.

    Raises:
        _Cancelled: the answer is not needed any more.
        ServiceUnreachable: the call has failed until the deadline.
    """
    timeout_s = deadline.timeout_s
    while True:
        if over():
            raise _Cancelled
        try:
            return work()
        except (ServiceUnreachable, ConnectionLost, CallTimedOut) as e:
            if deadline.left_s < 0:
                if isinstance(e, ServiceUnreachable):
                    raise
                raise ServiceUnreachable(f"the data service does not answer within {timeout_s:g} s: {e}") from e
        except RemoteError as e:
            if e.type == "ServiceUnreachable":  # the process that we called has called another one in vain
                if deadline.left_s < 0:
                    raise ServiceUnreachable(f"{e.text} (for {timeout_s:g} s)") from None
            elif e.type in _RAISED:
                raise _RAISED[e.type](e.text) from None
            else:
                raise
        _log.debug("a call to the data service is repeated")
        time.sleep(PAUSE_S)
        before_retry()


class FlowClient:
    """A flow that is registered with a service.

    Args:
        service: where to register it.
        definition: of the flow.

    Raises:
        JobError: the service has another definition of this version.
        ServiceUnreachable, ServiceRefused: as from `Service.call`.
    """

    def __init__(self, service: Service, definition: Definition) -> None:
        self.name = definition.name
        self._service = service
        self._definition = definition
        self._lock = threading.RLock()
        self._router: BlockingClient | None = None
        self._routes: Routes | None = None
        self._shards: dict[int, BlockingClient] = {}
        _FORKED.add(self)
        self._register()

    @property
    def timeout_s(self) -> float:
        return self._service.timeout_s

    def router(
        self,
        method: Method[Request, Reply],
        request: Request,
        buffers: Buffers = (),
        *,
        timeout_s: float | None = None,
        over: Over = _never,
    ) -> Reply:
        """Calls the router; one that has died is found again, unless the call is `over`."""

        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)

        def attempt() -> Reply:
            client = self._router_client()
            deadline.renew(client)
            return method.call(client, request, buffers, timeout_s=CALL_S)[0]

        return retrying(attempt, deadline, before_retry=self._drop_router, over=over)

    def edges(self) -> tuple[int, ...]:
        """Bounds of the shards: shard k has the samples from edges[k] to below edges[k + 1]."""
        return self._known_routes().edges

    def shard(
        self, number: int, method: Method[Request, Reply], request: Callable[[int], Request], buffers: Buffers = (), *, over: Over = _never
    ) -> tuple[Reply, list[Any]]:
        """Calls a shard; one that has died is found again.

        Args:
            number: of the shard.
            method: to call.
            request: makes the request for a generation of routes.
            buffers: beside it.
            over: called now and then; if true, `_Cancelled` is raised.
        """
        deadline, used = Deadline(self.timeout_s), 0
        while True:
            if over():
                raise _Cancelled
            try:
                with self._lock:
                    routes, client = self._known_routes(), self._shard_client(number)
                    used = routes.generation
                deadline.renew(client)
                return method.call(client, request(used), buffers, timeout_s=CALL_S)
            except CallTimedOut:
                deadline.restart()  # it is working, or the router will notice that it is not
                continue
            except RemoteError as e:
                if e.type in _RAISED:
                    raise _RAISED[e.type](e.text) from None
                if e.type != STALE_ROUTE:
                    raise
                problem: Exception = e
            except (ConnectionLost, ServiceUnreachable) as e:
                problem = e
            if deadline.left_s < 0:
                raise ServiceUnreachable(
                    f"shard {number} of flow {self.name} does not come back within {self.timeout_s:g} s: {problem}"
                ) from problem
            _log.debug("%s of shard %d of flow %s is repeated: %s", method.name, number, self.name, problem)
            time.sleep(PAUSE_S)
            self.refresh(used, over=over)

    def remove_consumer(self, number: int, consumer: str) -> None:
        """Tells a shard that a reader has ended."""
        self.shard(number, REMOVE_CONSUMER, lambda generation: ConsumerRequest(consumer=consumer))

    def refresh(self, used: int, *, over: Over = _never) -> None:
        """Gets new routes in place of those of generation `used`, which have failed."""
        with self._lock:
            if self._routes is not None and self._routes.generation != used:
                return
        fresh = self.router(ROUTES, RoutesRequest(generation=used), over=over)
        _log.info("routes of flow %s are now of generation %d", self.name, fresh.generation)
        with self._lock:
            for client in self._shards.values():
                client.close()
            self._routes, self._shards = fresh, {}

    def observe_generation(self, generation: int, *, over: Over = _never) -> None:
        """Gets new routes if the present ones are of another generation."""
        if self._routes is not None and generation != self._routes.generation:
            self.refresh(self._routes.generation, over=over)

    def deregister(self, reader: str) -> None:
        """Tells shards and router that a reader has ended. Those that are not reached remove it after its lease."""
        for client in self._shards.values():
            if client.connected:
                with contextlib.suppress(EphemeronError):
                    REMOVE_CONSUMER.call(client, ConsumerRequest(consumer=reader), timeout_s=LEAVE_S)
        if self._router is not None and self._router.connected:
            with contextlib.suppress(EphemeronError):
                REMOVE_READER.call(self._router, ReaderRequest(reader=reader), timeout_s=LEAVE_S)

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            for client in (*self._shards.values(), *filter(None, [self._router])):
                client.close()
            self._forget()

    # -- connections --------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._router, self._routes, self._shards = None, None, {}

    def _after_fork(self) -> None:
        """A forked child makes connections of its own, and waits for no thread of its parent."""
        self._lock = threading.RLock()
        self._forget()

    def _register(self) -> None:
        d = self._definition
        request = RegisterRequest(
            name=d.name,
            version=d.version,
            signature=d.signature,
            samples=d.samples,
            random=d.random,
            fixed=d.fixed,
            dataset=d.dataset,
            paths=d.paths,
        )
        self._service.call(REGISTER, request, [d.payload])

    def _router_client(self) -> BlockingClient:
        with self._lock:
            if self._router is None or not self._router.connected:
                request = FlowRequest(flow=self.name)
                try:
                    found = self._service.call(ACCESS, request)
                except JobError:  # the coordinator has lost its state
                    _log.warning("flow %s is unknown to its service and is registered again", self.name)
                    self._register()
                    found = self._service.call(ACCESS, request)
                self._router = found.router.connect(self._service.token)
            return self._router

    def _drop_router(self) -> None:
        with self._lock:
            if self._router is not None and not self._router.connected:
                self._router = None

    def _known_routes(self) -> Routes:
        with self._lock:
            if self._routes is None:
                self._routes = self.router(ROUTES, RoutesRequest())
            return self._routes

    def _shard_client(self, number: int) -> BlockingClient:
        client = self._shards.get(number)
        if client is None or not client.connected:
            assert self._routes is not None
            client = self._shards[number] = self._routes.shards[number].connect(self._service.token)
        return client


def _after_fork() -> None:
    for each in list(_FORKED):
        each._after_fork()


os.register_at_fork(after_in_child=_after_fork)
