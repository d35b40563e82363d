"""H, compression, fragments and delay of an exchange from the measured link, the iteration time and a staleness limit. Pure.

A payload of b bytes occupies a link of bandwidth w for b / w seconds, and arrives after that and a round trip r; an iteration takes t. The choice is the
gentlest compression, and with it the smallest H, for which

    b / w <= share · H · t                the link is idle for the rest of the time, and computing hides the exchange
    H + delay <= limit                    parameters lack no more than the steps of so many iterations of the others
    delay = 2 (b / (F·w) + r) / t         iterations until a fragment has arrived, twice as many for safety
    delay < H                             a round is applied before the next one is sent

and F the largest number of fragments whose exchanges follow each other, each ended before the next one begins. Where nothing fits, the
strongest compression is used with the largest H, and regions wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ephemeron.config.typed import Count, NonNegative, Positive, Typed

COMPRESSIONS = {"none": 4.0, "int8": 4.0 * 257 / 1024, "int4": 4.0 * 33 / 256, "topk2:0.05": 0.07}
"""Bytes a float32 value by compression, the gentlest first."""
FRAGMENTS = (4, 2, 1)
SHARE = 0.5
"""Largest part of the time in which the link is used."""
LEAST_EVERY = 8
"""Smallest H: below, traffic grows and accuracy does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Typed):
    """Measured pace and link of a region."""

    iteration_s: Positive
    """Seconds of an iteration, exchanges left out."""
    bandwidth: Positive
    """Of the slowest link to it, bytes per second."""
    round_trip_s: NonNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation(Typed):
    """How often regions exchange, and how."""

    every: Count
    """H."""
    compression: str
    """Value of `regions.compression`."""
    fragments: Count
    delay: int
    """Iterations between sending and applying, below H."""


def adapted(measured: Measured, *, nbytes: int, limit: int) -> Adaptation:
    """The choice for a link.

    Args:
        measured: link and pace of the slowest region.
        nbytes: of the parameters as float32.
        limit: H and delay together are at most this, in iterations.
    """
    for compression, each in COMPRESSIONS.items():
        how = _smallest(compression, nbytes * each / 4, measured, limit)
        if how.every + how.delay <= limit:
            return how
    return Adaptation(every=limit, compression=list(COMPRESSIONS)[-1], fragments=1, delay=0)


def _smallest(compression: str, size: float, measured: Measured, limit: int) -> Adaptation:
    """The smallest H of a compression, and the fragments and the delay that follow."""
    every = max(min(LEAST_EVERY, limit), math.ceil(size / measured.bandwidth / (SHARE * measured.iteration_s) - 1e-9))
    fragments, delay = _fragments_and_delay(size, every, measured)
    if delay >= every:  # the round trip takes longer than the link is used
        every = delay + 1
        fragments, delay = _fragments_and_delay(size, every, measured)
    return Adaptation(every=every, compression=compression, fragments=fragments, delay=delay)


def slowest(found: list[Measured]) -> Measured | None:
    """The pace and the link that limit all regions; None: nothing is measured yet."""
    if not found:
        return None
    return Measured(
        iteration_s=max(each.iteration_s for each in found),
        bandwidth=min(each.bandwidth for each in found),
        round_trip_s=max(each.round_trip_s for each in found),
    )


def _fragments_and_delay(size: float, every: int, measured: Measured) -> tuple[int, int]:
    for fragments in FRAGMENTS:
        seconds = size / fragments / measured.bandwidth + measured.round_trip_s
        if fragments == 1 or seconds <= every // fragments * measured.iteration_s:
            break
    return fragments, math.ceil(2 * seconds / measured.iteration_s - 1e-9)
