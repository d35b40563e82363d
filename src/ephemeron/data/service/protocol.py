"""Calls between the parts of the service: their names, and the dataclasses of `messages`, checked where they arrive.

Parts of one service are of one release and have proved a shared token. Documents of the control plane are checked in full
(`config.typed`). Calls that are made for each batch are checked for their keys only (`checked=False`): their values are numbers
and text that the other end has just written, and seeds may be any integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from ephemeron.communication.rpc import BlockingClient
from ephemeron.config.typed import build, plain
from ephemeron.data.service.messages import (
    AccessReply,
    AnnounceRequest,
    ConsumerHeartbeat,
    ConsumerRequest,
    FlowRequest,
    GenerationReply,
    JoinReply,
    JoinRequest,
    LoaderRequest,
    LoaderWelcome,
    MarkReply,
    MarkRequest,
    Nothing,
    PingReply,
    ReaderRequest,
    ReadReply,
    ReadRequest,
    RegisterReply,
    RegisterRequest,
    RouterStatus,
    Routes,
    RoutesRequest,
    ShardStatus,
    StatusReply,
    StatusRequest,
    SyncReply,
    SyncRequest,
    TraverseReply,
    TraverseRequest,
)
from ephemeron.errors import ProtocolError

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Buffers: TypeAlias = Sequence[Any]
"""Raw memory beside a message: bytes, memory views or arrays."""


# -- methods ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """A call that a part of the service answers."""

    name: str
    request: type[Request]
    reply: type[Reply]
    checked: bool = True
    """Whether values are checked against their types; else only keys are."""

    def call(self, client: BlockingClient, request: Request, buffers: Buffers = (), *, timeout_s: float) -> tuple[Reply, list[Any]]:
        """Sends a request, and returns the reply with its buffers.

        Raises:
            ConnectionLost, CallTimedOut: no reply.
            RemoteError: the handler raised.
            ProtocolError, JobError: the reply is not of this method.
        """
        reply, parts = client.call(self.name, self._written(request), buffers, timeout_s=timeout_s)
        return self._read(self.reply, reply, "reply to"), parts

    def answer(
        self, handler: Callable[[Request, list[Any]], tuple[Reply, Buffers]], params: Mapping[str, Any], buffers: list[Any]
    ) -> tuple[dict[str, Any], Buffers]:
        """The reply of a handler, as it is sent."""
        reply, parts = handler(self._read(self.request, params, "request"), buffers)
        return self._written(reply), parts

    def _read(self, cls: type[Any], raw: Mapping[str, Any], what: str) -> Any:
        if self.checked:
            return build(cls, raw, where=f"{what} {self.name}")
        try:
            return cls(**raw)
        except TypeError as e:
            raise ProtocolError(f"{what} {self.name}: {e}") from None

    def _written(self, message: Any) -> dict[str, Any]:
        if self.checked:
            written: dict[str, Any] = plain(message)
            return written
        return {name: getattr(message, name) for name in message.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class CallDispatcher:
    """Answers calls by their methods. It is a `BlockingHandler`."""

    part: str
    """Kind of the process, for errors."""
    _handlers: dict[str, Callable[[Mapping[str, Any], list[Any]], tuple[dict[str, Any], Buffers]]] = field(default_factory=dict)

    def add(self, method: Method[Request, Reply], handler: Callable[[Request, list[Any]], tuple[Reply, Buffers]]) -> None:
        """Answers a method by a function of the request and its buffers."""
        self._handlers[method.name] = lambda params, buffers: method.answer(handler, params, buffers)

    def __call__(self, name: str, params: Mapping[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], Buffers]:
        if name not in self._handlers:
            raise ProtocolError(f"a {self.part} has no method {name!r}")
        return self._handlers[name](params, buffers)


REGISTER = Method("register", RegisterRequest, RegisterReply)
ACCESS = Method("access", FlowRequest, AccessReply)
LIST_FLOWS = Method("list", Nothing, StatusReply)
DELETE_FLOW = Method("delete", FlowRequest, Nothing)
PING = Method("ping", Nothing, PingReply)

ROUTES = Method("routes", RoutesRequest, Routes)
HEARTBEAT_READER = Method("heartbeat_reader", ReaderRequest, GenerationReply)
REMOVE_READER = Method("remove_reader", ReaderRequest, Nothing)
JOIN = Method("join", JoinRequest, JoinReply, checked=False)
TRAVERSE = Method("traverse", TraverseRequest, TraverseReply, checked=False)
MARK = Method("mark", MarkRequest, MarkReply)
ROUTER_STATUS = Method("status", Nothing, RouterStatus)

READ = Method("read", ReadRequest, ReadReply, checked=False)
ANNOUNCE = Method("announce", AnnounceRequest, Nothing, checked=False)
HEARTBEAT_CONSUMER = Method("heartbeat_consumer", ConsumerHeartbeat, Nothing, checked=False)
REMOVE_CONSUMER = Method("remove_consumer", ConsumerRequest, Nothing)
ADD_LOADER = Method("add_loader", LoaderRequest, LoaderWelcome)
SYNC = Method("sync", SyncRequest, SyncReply, checked=False)
HEARTBEAT_LOADER = Method("heartbeat_loader", LoaderRequest, Nothing)
REMOVE_LOADER = Method("remove_loader", LoaderRequest, Nothing)
SHARD_STATUS = Method("status", StatusRequest, ShardStatus)
