"""Settings of the service and of its parts, as they are handed from one part to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from ephemeron.config.typed import AtLeast, Count, NonNegative, Positive, Typed
from ephemeron.data.service.address import ServiceAddress
from ephemeron.data.service.timeouts import ServiceTimeouts


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
