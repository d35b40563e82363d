"""Events from jobs to a cache: five small messages, of which only the accesses take time.

A training job knows its own access order, unlike the usual users of caches: every epoch is a permutation
that was drawn beforehand. These events pass that knowledge to a policy (DPFlow section 3.4.3, figure 3-15):

    Joined      samples that a job uses in every epoch, and the job's weight
    Announced   S_c, the certain future: its next accesses, in order. May extend beyond this epoch
    Likely      S_uc, the likely future: weights of samples whose order is not drawn yet
    Accessed    it has used a sample now; in an epoch each of its samples is accessed once
    Left        it will not access the cache again

Samples that are neither announced nor likely nor used in this epoch are S_uk, the unknown future.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Key: TypeAlias = Hashable
"""An object of the cache: a sample after one chain of preprocessing. With a single chain, its index suffices."""

JobId: TypeAlias = Hashable
"""Name of a training job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A job starts to use the cache."""

    job: JobId
    keys: Collection[Key]
    """Every key that it accesses in an epoch, each once. A `range` is kept as it is."""
    weight: float = 1.0
    """α_j of equation 3-5 before normalisation: weight of the job relative to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """Accesses of a job that follow all previously announced ones, in this order."""

    job: JobId
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """Samples that a job may access soon; replaces its previous likely future. Weights need not add up to 1."""

    job: JobId
    weights: Mapping[Any, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accessed:
    """A job used a key; the event is the same for a hit and a miss."""

    job: JobId
    key: Key
    now_s: float
    """The caller's clock, in seconds from any origin; must not run backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A job ends: it makes no further access."""

    job: JobId


Event: TypeAlias = Joined | Announced | Likely | Accessed | Left
