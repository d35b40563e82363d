"""Settings of the service and of its parts, as they are handed from one part to the next.

Timeouts after which a part of the service is considered lost.

Killed processes are noticed at once: their connections end and their locks are released. These timeouts are for processes that
are alive and silent: stopped, overloaded or disconnected. Shorter ones recover sooner, and replace slow processes needlessly;
that costs work, never samples.

Addresses of the parts of the service: one for this machine and for others.

Every part listens on a Unix socket and on TCP. Clients on the same machine use the Unix socket, with large data in shared memory;
all others use TCP.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ephemeron.communication.rpc import BlockingClient, BlockingHandler, BlockingServer, FrameLimits, Options
from ephemeron.config.typed import AtLeast, Count, NonNegative, Positive, Typed
from ephemeron.errors import JobError, ProtocolError, ServiceRefused, ServiceUnreachable, TokenRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimeouts(Typed):
    """Timeouts in seconds, all above 0."""

    reader_lease_s: Positive = 15.0
    """A reader without a heartbeat for so long is removed."""
    loader_lease_s: Positive = 10.0
    """A loader without a heartbeat for so long is given up."""
    shard_s: Positive = 10.0
    """A shard that is alive and does not answer for so long is replaced."""
    router_s: Positive = 15.0
    """A router that is alive and does not answer for so long is replaced."""
    orphan_s: Positive = 60.0
    """A router or shard that is not monitored for so long ends, once it has no readers."""
    loaders_idle_s: Positive = 60.0
    """Loaders without work end after so long."""


# -- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(Typed):
    """Settings of a service, for all of its flows."""

    shards: Count = 1
    """Shards of each flow."""
    loaders: Count = 2
    """Loader functions of each flow, at most."""
    loader_memory_mb: Count = 1769
    """Memory quota of each loader; CPU is in proportion to it."""
    loader_lifetime_s: Positive = 900.0
    buffer_mb: Positive = 1024.0
    """Buffer of each flow for samples that readers have requested."""
    cache_mb: NonNegative = 1024.0
    """Cache of each flow for samples that are kept beyond that; 0: none."""
    idle_s: Positive = 60.0
    """A flow without readers for so long runs nothing any more."""
    ends_when_idle: bool = False
    """Whether the coordinator ends once no flow runs."""
    run: str = ""
    """Folder of the run that keeps the service alive, and ends it by its own end; empty: there is none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of that run."""
    host: str = "127.0.0.1"
    port: Annotated[int, AtLeast(0)] = 0
    allow_remote: bool = False
    preload: str = "torch,PIL.Image"
    """Modules that loaders import before their first call, separated by commas; those not installed are left out."""
    timeouts: ServiceTimeouts = field(default_factory=ServiceTimeouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings(Typed):
    """Settings that a router gives a shard."""

    flow: str
    number: Annotated[int, AtLeast(0)]
    generation: Annotated[int, AtLeast(0)]
    random: bool
    """Whether samples differ between epochs."""
    fixed: int
    """Number of stages that do not; see `Definition.fixed`."""
    paths: tuple[str, ...]
    payload: str
    """File of the pickled flow."""
    loaders: Count
    """Loaders at most."""
    loader_memory_mb: Count
    loader_lifetime_s: Positive
    buffer_mb: Positive
    cache_mb: NonNegative
    host: str = "127.0.0.1"
    allow_remote: bool = False
    dataset: str = ""
    """Description of the dataset, for errors."""
    origin: float = 0.0
    """Unix time of t = 0 in the events of its loaders; 0: that of their host's start."""
    preload: str = ""
    """Modules that loaders import before their first call, separated by commas."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the loaders' calls."""
    timeouts: ServiceTimeouts = field(default_factory=ServiceTimeouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(Typed):
    """Settings that a coordinator gives a router."""

    samples: Annotated[int, AtLeast(0)]
    shards: Count
    whole: ShardSettings
    """Settings as for a single shard: loaders, buffer and cache are those of all shards together."""

    def shard(self, number: int, generation: int) -> ShardSettings:
        """Settings of one of the shards."""
        whole = self.whole
        return replace(
            whole,
            number=number,
            generation=generation,
            loaders=max(1, (whole.loaders + number) // self.shards),
            buffer_mb=whole.buffer_mb / self.shards,
            cache_mb=whole.cache_mb / self.shards,
        )

    def edges(self) -> tuple[int, ...]:
        """Bounds of the shards: shard k has the samples from edges[k] to below edges[k + 1]."""
        return tuple(self.samples * k // self.shards for k in range(self.shards + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoaderOptions:
    """Options of a loader's call."""

    loader: str
    """Its name."""
    shard: ServiceAddress


# -- addresses of the parts of the service ------------------------------------------------------------------------


TOKEN_VARIABLE = "EPHEMERON_DATA_TOKEN"
"""Environment variable that passes the token on: it is never in an argument, a settings file or a log."""
OPTIONS = Options(limits=FrameLimits(max_frame=2 << 30, max_buffers=1 << 17, max_tag=16 << 20), shared_bytes=1 << 30)
"""Limits for large batches of many samples, several of which are in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Address of one process."""

    unix: str
    """Path of the Unix socket; empty: there is none."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> ServiceAddress:
        """The address that `HOST:PORT` names.

        Raises:
            JobError: the text has another form.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal():
            raise JobError(f"address {text!r} of a data service", remedy="write HOST:PORT")
        return cls(unix="", host=host.strip("[]"), port=int(port))

    def connect(self, token: str, *, timeout_s: float = 5.0) -> BlockingClient:
        """A connection: by the Unix socket where it exists, else by TCP.

        Raises:
            ServiceRefused: the service has another token.
            ServiceUnreachable: no answer before the deadline.
        """
        try:
            if self.unix and os.path.exists(self.unix):
                with contextlib.suppress(ConnectionError):
                    return BlockingClient.connect_shared(self.unix, token=token, timeout_s=timeout_s, options=OPTIONS)
            return BlockingClient.connect_tcp(self.host, self.port, token=token, timeout_s=timeout_s, options=OPTIONS)
        except TokenRefused as e:
            raise ServiceRefused(
                f"the data service at {self} refuses this token; give the one that it was started with "
                f"(token=…, or the variable {TOKEN_VARIABLE})"
            ) from e
        except (OSError, ProtocolError) as e:  # ConnectionError is an OSError
            raise ServiceUnreachable(f"no data service answers at {self} within {timeout_s:g} s ({e})") from e


class Endpoint:
    """A server on a Unix socket and on TCP.

    Args:
        handler: answers calls, in threads.
        token: secret that callers have to prove.
        host: address to listen on.
        port: port to listen on; 0: any free one.
        allow_remote: whether `host` may be reachable from other machines.
    """

    def __init__(self, handler: BlockingHandler, *, token: str, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False) -> None:
        self.server = BlockingServer(handler, token=token, options=OPTIONS, max_threads=256)
        where, number = self.server.listen_tcp(host, port, allow_remote=allow_remote)
        # Not in the state folder: the path of a Unix socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ephemeron-")) if hasattr(socket, "AF_UNIX") else None
        path = "" if self._folder is None else str(self._folder / "socket")
        if path:
            self.server.listen_unix(path)
        self.address = ServiceAddress(unix=path, host=_reachable(where), port=number)

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self.server.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
