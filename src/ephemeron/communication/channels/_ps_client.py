"""Client of parameter servers, exported and documented by `parameter_server`."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, TypeAlias, TypeVar
from urllib.parse import urlsplit

import numpy as np

from ephemeron.communication.channels.base import Buffer, Channel, Received, Traits
from ephemeron.communication.channels.credentials import public_address, variable
from ephemeron.communication.channels.reduction import SupportsReduction, Vector
from ephemeron.communication.rpc import Client
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.config.typed import AtLeast, Count, NonNegative, build
from ephemeron.errors import (
    ChannelError,
    ChannelRefused,
    ChannelTimeout,
    ChannelUnreachable,
    JobError,
    KeyExists,
    ProtocolError,
    RemoteError,
    TokenRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyParams:
    """Parameters of `fetch` and `heard`."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutParams:
    """Parameters of `put`; the object is the buffers, joined."""

    key: str
    create: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GetParams:
    """Parameters of `get`; the object is the reply's buffer."""

    key: str
    wait_s: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class GetReply:
    """Reply to `get`."""

    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReply:
    """Reply to `fetch`; the object, if found, is the buffer."""

    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteParams:
    """Parameters of `delete`."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListParams:
    """Parameters of `list`."""

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReply:
    """Reply to `list`."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceParams:
    """Parameters of `reduce`; the vector is the buffers, joined."""

    key: str
    rank: Annotated[int, AtLeast(0)]
    world: Count
    weight: float
    dtype: str
    """Name of a NumPy type of floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateParams:
    """Parameters of `accumulate`; the difference is the buffers, joined, and the total is the reply's buffer."""

    key: str
    rank: Annotated[int, AtLeast(0)]
    iteration: int
    dtype: str
    """Same as in `ReduceParams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardReply:
    """Reply to `heard`."""

    heard: Mapping[int, int]
    """Latest iteration of each rank."""


# --  ps client ---------------------------------------------------------------------------------------------------


P = TypeVar("P")

_log = logging.getLogger(__name__)

TOKEN = "EPHEMERON_CHANNEL_TOKEN"
"""The environment variable with the shared secret."""

_Params: TypeAlias = KeyParams | PutParams | GetParams | DeleteParams | ListParams | ReduceParams | AccumulateParams
_Reply: TypeAlias = tuple[Mapping[str, object], Sequence[memoryview]]

_CONNECT_S = 5.0
_ANSWER_S = 60.0
"""A server that has not answered this long after it should have is dead."""


class ParameterServerChannel(Channel, SupportsReduction):
    """A channel over one or several parameter servers; a key is stored on the one that its hash selects.

    Args:
        url: `ps://host:port,host:port`. All functions must list the servers in the same order.
        token: the shared secret; from `EPHEMERON_CHANNEL_TOKEN` by default. Never shown.

    Raises:
        JobError: no such URL, or no token.
    """

    def __init__(self, url: str, *, token: Token | None = None) -> None:
        self.url, secrets = public_address(url)
        self._token = (token_text(token) if token else "") or secrets.get(TOKEN) or variable(TOKEN) or ""
        self._servers = [_Remote(host, port) for host, port in _addresses(self.url)]
        if not self._token:
            raise JobError(f"no token for {self.url}", remedy=f"set {TOKEN} to what its servers were started with")
        self.traits = Traits(service="server", waits=True, shared=True, latency_s=0.0005)

    def __repr__(self) -> str:
        return f"ParameterServerChannel({self.url!r})"

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self._call("put", PutParams(key=key, create=create), buffers)

    async def fetch(self, key: str) -> memoryview | None:
        reply, buffers = await self._call("fetch", KeyParams(key=key))
        return buffers[0] if _read(FetchReply, reply).found else None

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
        reply, buffers = await self._call("get", GetParams(key=key, wait_s=wait_s), wait_s=wait_s)
        return Received(buffers[0], _read(GetReply, reply).waited_s)

    async def delete(self, keys: Iterable[str]) -> None:
        shares: dict[int, list[str]] = {}
        for key in keys:
            shares.setdefault(self._shard(key), []).append(key)
        calls = (self._call_server(self._servers[i], None, "delete", DeleteParams(keys=tuple(share))) for i, share in shares.items())
        await asyncio.gather(*calls)

    async def list(self, prefix: str) -> list[str]:
        calls = (self._call_server(server, None, "list", ListParams(prefix=prefix)) for server in self._servers)
        return sorted(key for reply, _ in await asyncio.gather(*calls) for key in _read(ListReply, reply).keys)

    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        params = ReduceParams(key=key, rank=rank, world=world, weight=float(weight), dtype=vector.dtype.str)
        await self._call("reduce", params, [_bytes_of(vector)])

    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        params = AccumulateParams(key=key, rank=rank, iteration=iteration, dtype=delta.dtype.str)
        _, buffers = await self._call("accumulate", params, [_bytes_of(delta)])
        return np.frombuffer(buffers[0], dtype=delta.dtype)

    async def heard(self, key: str) -> dict[int, int]:
        reply, _ = await self._call("heard", KeyParams(key=key))
        return dict(_read(HeardReply, reply).heard)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))

    def _shard(self, key: str) -> int:
        return zlib.crc32(key.encode()) % len(self._servers)

    async def _call(
        self,
        method: str,
        params: KeyParams | PutParams | GetParams | ReduceParams | AccumulateParams,
        buffers: Sequence[Buffer] = (),
        wait_s: float = 0.0,
    ) -> _Reply:
        server = self._servers[self._shard(params.key)]
        return await self._call_server(server, params.key, method, params, buffers, wait_s)

    async def _call_server(
        self, server: _Remote, key: str | None, method: str, params: _Params, buffers: Sequence[Buffer] = (), wait_s: float = 0.0
    ) -> _Reply:
        async with _errors(server, key), asyncio.timeout(wait_s + _ANSWER_S):
            client = await server.client(self._token)
            return await client.call(method, asdict(params), buffers)


def _read(cls: type[P], reply: Mapping[str, object]) -> P:
    return build(cls, reply, where="reply of the parameter server")


class _Remote:
    """One server. Connects on first use, and again after the connection was lost."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def client(self, token: str) -> Client:
        async with self._connecting:
            if self._client is None or not self._client.connected:
                _log.debug("%s is connected to%s", self, "" if self._client is None else " again")
                await self.close()
                self._client = await Client.connect_tcp(self.host, self.port, token=token, timeout_s=_CONNECT_S)
            return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def __str__(self) -> str:
        return f"the parameter server {self.host}:{self.port}"


@asynccontextmanager
async def _errors(server: _Remote, key: str | None) -> AsyncIterator[None]:
    try:
        yield
    except RemoteError as e:
        if e.type == "KeyExists":
            raise KeyExists("the key is taken", key=key) from e
        if e.type == "ChannelTimeout":
            raise ChannelTimeout("nothing there at the deadline", key=key) from e
        raise ChannelError(f"{server} refused: {e.text}", key=key) from e
    except TokenRefused as e:
        raise ChannelRefused(f"{server} has another token; set {TOKEN} to the one it was started with") from e
    except TimeoutError as e:
        raise ChannelUnreachable(f"{server} does not answer", key=key) from e
    except (ConnectionError, ProtocolError) as e:
        raise ChannelUnreachable(f"{server} is not there ({e}); check that it runs", key=key) from e


def _addresses(url: str) -> list[tuple[str, int]]:
    parts = urlsplit(url)
    found = []
    for address in parts.netloc.split(","):
        host, _, port = address.rpartition(":")
        if parts.scheme != "ps" or not host or not port.isdigit():
            raise JobError(f"{url} names no parameter server", remedy="write ps://host:port,host:port")
        found.append((host.strip("[]"), int(port)))
    return found


def _bytes_of(vector: Vector) -> Buffer:
    flat = np.ascontiguousarray(vector)
    return flat.data.cast("B") if flat.size else b""
