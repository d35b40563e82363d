"""JSON of frames and stored objects, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ephemeron.config.typed import AtLeast, Count, NonNegative

Whole = Annotated[int, AtLeast(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """First words of a client."""

    client: str
    """Name, unlike every other client's."""
    attempt: Whole = 0
    """A client that takes over the name of another one has a higher attempt; the other one is then refused."""
    shard: Whole
    shards: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReply:
    """What the shard knows of a client."""

    sequence: Whole
    """Last sequence number of the client's pushes that is safe."""
    calls: Whole
    """Last number of its other changes."""
    shard: Whole
    attempt: Whole
    """Of the shard."""
    loses_none: bool = False
    """What is acknowledged is in the log: a restart does not lose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initial:
    """Initial weights: `value`, plus normal noise of standard deviation `std`, the same however the table is divided."""

    value: float = 0.0
    std: NonNegative = 0.0
    seed: Whole = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """Settings of a table, and the rows that a shard keeps of it."""

    name: str
    rows: Count
    """Of the whole table."""
    width: Annotated[int, AtLeast(1)]
    """Values of a row."""
    optimizer: Mapping[str, Any]
    initial: Initial = field(default_factory=Initial)
    first: Whole
    """First row of the shard."""
    stop: Whole
    """Row after its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReply:
    """A table, as a shard has it."""

    number: Whole
    """In the heads of frames."""
    spec: TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRequest:
    """Names a table or a key."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundReply:
    """Whether there is such a table or key."""

    found: bool
    table: TableReply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """State of a shard."""

    shard: Whole = 0
    attempt: Whole = 0
    tables: Mapping[str, TableSpec] = field(default_factory=dict)
    keys: Whole = 0
    """Of the key/value part."""
    clients: Whole = 0
    connections: Whole = 0
    gets: Whole = 0
    pushes: Whole = 0
    """Applied; repeated ones are not counted."""
    repeated: Whole = 0
    """Pushes that had been applied before and were ignored."""
    nbytes: Whole = 0
    """Memory of the tables."""
    snapshots: Whole = 0
    """Written by this process."""
    log_objects: Whole = 0
    """Written by this process."""
    cpu_s: float = 0.0
    """CPU seconds of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """Why a request was refused."""

    kind: str
    """`user` for a mistake of the caller, `replaced` if another client has taken over the name, else a class of errors."""
    text: str
    remedy: str | None = None
