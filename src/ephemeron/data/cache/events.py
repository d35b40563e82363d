"""Events from jobs to a cache.

A training job knows its own accesses in advance: every epoch is a permutation that was drawn beforehand. These events carry
that knowledge to a policy (DPFlow section 3.4.3, figure 3-15):

    Joined      the samples that a job uses in every epoch, and its weight
    Announced   S_c, the certain future: the next accesses, in order. May reach beyond this epoch
    Likely      S_uc, the likely future: weights of samples whose order is not drawn yet
    Accessed    the job has used a sample; in an epoch each of its samples is accessed once
    Left        the job accesses nothing more

Samples that are neither announced nor likely nor already used in this epoch are S_uk, the unknown future.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Key: TypeAlias = Hashable
"""An object of the cache: a sample after one chain of preprocessing. With a single chain, its index is enough."""

JobId: TypeAlias = Hashable
"""Name of a training job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A job starts to use the cache."""

    job: JobId
    keys: Collection[Key]
    """Every key that it accesses in an epoch, each once. A `range` is kept as it is."""
    weight: float = 1.0
    """α_j of equation 3-5 before it is normalised: how much the job counts beside others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The accesses of a job after those that it announced before, in order."""

    job: JobId
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """Likely accesses of a job; replaces those of before. Weights need not add up to 1."""

    job: JobId
    weights: Mapping[Any, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accessed:
    """A job used a key, whether that was a hit or a miss."""

    job: JobId
    key: Key
    now_s: float
    """Seconds on the caller's clock, which must not run backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A job will access nothing more."""

    job: JobId


Event: TypeAlias = Joined | Announced | Likely | Accessed | Left
