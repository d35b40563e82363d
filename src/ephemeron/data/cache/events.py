"""What jobs tell a cache: five small facts, of which the accesses are the only ones that cost time.

A training job knows its own future better than any workload a cache was ever built for: every epoch is a permutation
that was drawn beforehand. These events carry that knowledge to a policy (DPFlow section 3.4.3, figure 3-15):

    Joined      which samples a job will go through in every epoch, and how much it counts
    Announced   S_c, the certain future: what it will access next, in order. May reach beyond this epoch
    Likely      S_uc, the likely future: weights of samples whose order is not drawn yet
    Accessed    it has used a sample now; in an epoch each of its samples is accessed once
    Left        it will never come back

What is neither announced nor likely nor already used in this epoch is S_uk, the unknown future.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Key: TypeAlias = Hashable
"""An object of the cache: a sample as one chain of preprocessing leaves it. An index will do where there is one chain."""

JobId: TypeAlias = Hashable
"""A training job, by whatever name it has."""


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
    """What a job will access after everything that it announced before, in this order."""

    job: JobId
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """What a job may access soon; replaces what it called likely before. Weights need not add up to 1."""

    job: JobId
    weights: Mapping[Any, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accessed:
    """A job used a key; nobody is told whether that was a hit."""

    job: JobId
    key: Key
    now_s: float
    """The caller's clock, in seconds since whenever; must not run backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A job will access nothing more."""

    job: JobId


Event: TypeAlias = Joined | Announced | Likely | Accessed | Left
