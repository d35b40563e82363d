"""Objects in Redis or Valkey: a long-lived server in memory, at which readers can wait.

About 0.2 ms a small object and no polls, so synchronisation is quick and waiting is free of requests; in return a
server runs (and is paid for) all the time, its memory bounds the objects that exist at once, and its one thread
is shared by all functions. Works with Redis 6 and later and with Valkey.

Each object is a stream with a single entry. A plain value can be read by many but waited for by none, a list can
be waited for but each element goes to one reader only; a stream gives every blocked reader the same entry. The
entry always has the id `1-1`, so adding it to a stream that already has it fails, which makes create-only puts
atomic; a put that may replace deletes and adds in one transaction. Against `SET` this costs one more copy inside
the server: 47 MB take about 140 ms instead of 115 to put, and 100 instead of 80 to get.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ephemeron.communication.channels.base import Buffer, Channel, Received, SupportsSizes, Traits, joined
from ephemeron.communication.channels.credentials import public_address, variable
from ephemeron.communication.channels.tls import authority, explain_tls, is_refused
from ephemeron.errors import (
    ChannelError,
    ChannelRefused,
    ChannelThrottled,
    ChannelTimeout,
    ChannelUnreachable,
    JobError,
    KeyExists,
    MissingExtra,
)
from ephemeron.units import MB

_BLOCK_S = 10.0
"""One blocking read asks for at most this long and is then repeated."""
_ANSWER_S = 30.0
"""A server that has not answered this long after it should have is dead; time enough for a large object."""
_CONNECT_S = 3.0
_READERS = 4096
"""Connections of one process; each blocked reader holds one."""
_LARGEST = 512 * 1024 * 1024
"""Redis refuses longer values (proto-max-bulk-len)."""
_MEASURABLE = 64 * 1024


class CacheChannel(Channel, SupportsSizes):
    """A channel over a Redis or Valkey server.

    Args:
        url: `redis://host:port/db`, or `rediss://` for TLS, which is always verified; see `channels.tls` for authorities
            of one's own. A password comes from `EPHEMERON_CHANNEL_PASSWORD` (and a user name from
            `EPHEMERON_CHANNEL_USER`) unless the URL has one; it is never shown.

    Raises:
        MissingExtra: redis-py is not installed.
        JobError: not such a URL, or an authority that cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url, secrets = public_address(url)
        parts = urlsplit(self.url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise JobError(f"{self.url} is no cache", remedy="write redis://host:port/db")
        if unknown := sorted(set(parse_qs(parts.query, keep_blank_values=True)) - {"db"}):
            raise JobError(
                f"{self.url}: a cache's address takes no {', '.join(unknown)}",
                remedy="write rediss://host:port/db; TLS is always verified, by EPHEMERON_CHANNEL_CA where that is set",
            )
        self.traits = Traits(service="cache", waits=True, shared=True, latency_s=0.0005)
        self._tls = parts.scheme == "rediss"
        self._redis = _connect(parts.hostname, parts.port or 6379, _database(self.url), secrets, self._tls)
        self._bytes_per_s = math.inf

    def __repr__(self) -> str:
        return f"CacheChannel({self.url!r})"

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        data = joined(buffers)
        nbytes = memoryview(data).nbytes
        if nbytes > _LARGEST:
            raise ChannelError(f"{nbytes / MB:.0f} MB exceed the 512 MB that a cache keeps in one object", key=key)
        async with self._errors(key):
            if create:
                await self._redis.execute_command("XADD", key, "1-1", "d", data)
                return
            async with self._redis.pipeline(transaction=True) as both:
                both.execute_command("DEL", key)
                both.execute_command("XADD", key, "1-1", "d", data)
                await both.execute()

    async def fetch(self, key: str) -> memoryview | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        data = await self._read(key)
        if data is not None and data.nbytes >= _MEASURABLE:
            self._bytes_per_s = data.nbytes / max(loop.time() - began, 1e-6)
        return data

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        loop = asyncio.get_running_loop()
        began = loop.time()
        data = await self.fetch(key)
        if data is not None:
            return Received(data, 0.0)
        while (left := deadline - loop.time()) > 0:
            data = await self._read(key, block_s=min(left, _BLOCK_S))
            if data is not None:
                # The server sends as soon as the object is there, so the transfer is in the measured time.
                return Received(data, max(0.0, loop.time() - began - data.nbytes / self._bytes_per_s))
        raise ChannelTimeout(f"nothing there after {loop.time() - began:.1f} s", key=key)

    async def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        async with self._errors(None):
            for at in range(0, len(names), 1000):
                await self._redis.execute_command("UNLINK", *names[at : at + 1000])

    async def exists(self, key: str) -> bool:
        async with self._errors(key):
            return bool(await self._redis.exists(key))

    async def list(self, prefix: str) -> list[str]:
        pattern = re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix) + "*"
        async with self._errors(None):
            found = {key async for key in self._redis.scan_iter(match=pattern, count=1000)}
        return sorted(key.decode() for key in found)

    async def sizes(self, prefix: str) -> dict[str, int]:
        keys = await self.list(prefix)
        async with self._errors(None), self._redis.pipeline(transaction=False) as all_at_once:
            for key in keys:
                all_at_once.execute_command("MEMORY USAGE", key)
            found = await all_at_once.execute()
        return {key: int(nbytes) for key, nbytes in zip(keys, found, strict=True) if nbytes is not None}

    async def script(self, source: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Runs a Lua script, one atomic step of the server. For structures that need more than objects (`functions.tasks`).

        Raises:
            ChannelUnreachable: the server does not answer; the script may have run.
        """
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        async with self._errors(keys[0] if keys else None):
            import redis.exceptions as errors

            try:
                return await self._redis.execute_command("EVALSHA", digest, len(keys), *keys, *arguments)
            except errors.NoScriptError:
                return await self._redis.execute_command("EVAL", source, len(keys), *keys, *arguments)

    async def command(self, name: str, key: str, *arguments: Any) -> Any:
        """Runs one command on one key, with its reply as the client library has it.

        Raises:
            ChannelUnreachable: the server does not answer; the command may have run.
        """
        async with self._errors(key):
            return await self._redis.execute_command(name, key, *arguments)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read(self, key: str, block_s: float | None = None) -> memoryview | None:
        # BLOCK 0 would wait for ever.
        block = () if block_s is None else ("BLOCK", max(1, math.ceil(block_s * 1000)))
        async with self._errors(key, block_s or 0.0):
            reply = await self._redis.execute_command("XREAD", "COUNT", 1, *block, "STREAMS", key, "0")
        if not reply:
            return None
        ((_, ((_, (_, data)),)),) = reply  # one stream, one entry, one field
        return memoryview(data)

    @asynccontextmanager
    async def _errors(self, key: str | None, wait_s: float = 0.0) -> AsyncIterator[None]:
        import redis.exceptions as errors

        # Not redis-py's own socket_timeout: it uses asyncio.wait_for, which on Python 3.11 swallows a
        # cancellation that comes just when the command has been written.
        try:
            async with asyncio.timeout(wait_s + _ANSWER_S):
                yield
        except TimeoutError as e:
            raise ChannelUnreachable(f"{self.url}: no answer in time; check the server and the network", key=key) from e
        except errors.RedisError as e:
            text = str(e)
            if "equal or smaller than the target stream" in text:
                raise KeyExists("the key is taken", key=key) from e
            raise _error_of(e, text)(f"{self.url}: {_explain(e, text, tls=self._tls)}", key=key) from e
        except (OSError, asyncio.IncompleteReadError) as e:
            raise ChannelUnreachable(f"{self.url}: cannot connect; check that the server runs", key=key) from e


def _connect(host: str, port: int, database: int, secrets: dict[str, str], tls: bool) -> Any:
    try:
        import redis.asyncio as client
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as e:
        raise MissingExtra("redis", "cache") from e
    pool = client.ConnectionPool(
        **(_secured(client.SSLConnection) if tls else {"connection_class": client.Connection}),
        max_connections=_READERS,
        host=host,
        port=port,
        db=database,
        username=secrets.get("EPHEMERON_CHANNEL_USER") or variable("EPHEMERON_CHANNEL_USER"),
        password=secrets.get("EPHEMERON_CHANNEL_PASSWORD") or variable("EPHEMERON_CHANNEL_PASSWORD"),
        socket_timeout=None,
        socket_connect_timeout=_CONNECT_S,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),  # `channels.retrying` does it, for all stores alike, and counts
        protocol=2,
    )
    redis: Any = client.Redis.from_pool(pool)
    # Raw replies: redis-py's own shape of XREAD differs between its versions.
    redis.set_response_callback("XREAD", lambda reply, **_: reply)
    return redis


def _secured(kind: Any) -> dict[str, Any]:
    """Options of a pool whose connections verify the server.

    Args:
        kind: redis-py's connection over TLS.
    """
    authorities = authority()
    shared = ssl.create_default_context()
    shared.minimum_version = ssl.TLSVersion.TLSv1_2
    if authorities is not None:
        shared.load_verify_locations(cadata=authorities)

    class Verified(kind):  # type: ignore[misc]
        """One context for all: redis-py reads the system's authorities for each connection, 30 ms of CPU time."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.ssl_context.context = shared

    # In full, in case a release ignores the context: some verify no host names by default.
    return {
        "connection_class": Verified,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_data": authorities,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }


def _database(url: str) -> int:
    parts = urlsplit(url)
    text = unquote(parts.path).strip("/") or parse_qs(parts.query).get("db", ["0"])[0]
    if not text.isdigit():
        raise JobError(f"{url}: {text!r} is no database number", remedy="write redis://host:port/0")
    return int(text)


def _error_of(e: Exception, text: str) -> type[ChannelUnreachable]:
    """Error class of a failure; see `channels.retrying`."""
    import redis.exceptions as errors

    if isinstance(e, errors.OutOfMemoryError) or "maxmemory" in text or text.startswith("OOM"):
        return ChannelThrottled
    if isinstance(e, errors.MaxConnectionsError) or "max number of clients" in text:
        return ChannelThrottled
    if isinstance(e, errors.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return ChannelRefused
    if is_refused(e):
        return ChannelRefused
    connection = (errors.ConnectionError, errors.TimeoutError, errors.InvalidResponse)
    passing = isinstance(e, (*connection, errors.ReadOnlyError, errors.TryAgainError))
    starting = text.startswith(("LOADING", "CLUSTERDOWN", "MASTERDOWN", "UNBLOCKED", "NOREPLICAS"))
    return ChannelUnreachable if passing or starting else ChannelRefused


def _explain(e: Exception, text: str, *, tls: bool) -> str:
    import redis.exceptions as errors

    if tls and (problem := explain_tls(e)):
        return problem
    if isinstance(e, errors.OutOfMemoryError) or "maxmemory" in text or "OOM" in text:
        return "the server is out of memory; raise its maxmemory, or delete old runs"
    if isinstance(e, errors.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return "the server refuses us; set EPHEMERON_CHANNEL_PASSWORD to its password"
    if isinstance(e, errors.MaxConnectionsError):
        return f"more than {_READERS} reads wait at once in this process"
    if isinstance(e, errors.TimeoutError):
        return "no answer in time; check the server and the network" + ("; if the port is not one for TLS, write redis://" if tls else "")
    if isinstance(e, errors.InvalidResponse) or "Connection closed by server" in text:
        # A server with TLS answers plain text with an alert, or not at all.
        return "the connection was closed" + (
            "; check that the server runs" if tls else "; check that the server runs; if it wants TLS, write rediss://"
        )
    if isinstance(e, errors.ConnectionError):
        return "cannot connect, or the connection was lost; check that the server runs"
    return f"the server answered: {text[:200]}"
