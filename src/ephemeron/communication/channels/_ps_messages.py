"""Requests to a parameter server and its replies, beside the buffers of the frames that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ephemeron.config.typed import AtLeast, Count, NonNegative


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
