"""Direct links between functions, as the performance model sees them: time, failures and prices.

With S MB of vector, W functions, L seconds of latency and B MB/s that a function sends while it receives as much, one round is

    two phases     reduce-scatter by owner, all-gather; every rank owns 1/W:       2·L + 2·(W − 1)/W·S/B
    one phase      everybody sends its vector to all, if (W − 1)·S is small:         L + (W − 1)·S/B

Pieces are sent, received and added up at once, so that where CPU time is scarce 1/B is its sum for one MB. K < W owners would take (W − 1)/K·S/B a phase, never less than (W − 1)/W·S/B, and send no fewer bytes: so plans have K = W.

Where the hole punching of a pair fails, with probability p and independently of other pairs, the messages between the two are puts
and gets. Of the W·(W − 1)/2 pairs, p·W·(W − 1)/2 are expected to fail; each has four messages in a round of two phases and two in one of
one phase:

    puts = gets =  2·W·(W − 1)·p          or       W·(W − 1)·p

All ranks wait for the slowest pair, so a round takes as long as over the store with the probability 1 − (1 − p)^(W·(W − 1)/2) that
some pair fails. Members forward messages for a pair where they can, which is not counted: times and requests err to the high side.

At the start, and after each hand-off, a function puts its endpoint, lists those of the others, reads them (W − 1 gets at most: of those
that come later it learns by their connection), and sets up its links: `setup_s` + `setup_each_s`·(W − 1) seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ephemeron.config.typed import NonNegative, Positive, Within
from ephemeron.training.planner.model.rates import Array

ENDPOINT_PUTS, ENDPOINT_LISTS = 1, 1
"""Requests of a function for its own endpoint and for the names of the others."""
KEPT_VERSIONS = 3
"""Versions of which a member keeps its contribution and the merged vector, until all are known to have applied them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLinks:
    """Links of one function to all others."""

    latency_s: NonNegative
    """Seconds from sending a small message until it is handled."""
    mb_s: Positive
    """MB/s that a function sends to all others together while it receives as much."""
    cpu_s_per_mb: NonNegative = 0.0
    """CPU seconds, on one whole vCPU, to send one MB and to receive one."""
    setup_s: NonNegative = 0.0
    """Seconds until the first link is established."""
    setup_each_s: NonNegative = 0.0
    """Seconds for each further link."""
    failure: Annotated[float, Within(0, 1)] = 0.0
    """Probability that two functions get no link, and exchange through the store."""
    one_phase_mb: NonNegative = 0.0
    """MB that everybody sends at most where vectors are sent whole, in one phase."""
    store: Literal["objects", "cache"] = "objects"
    """Kind of the store of endpoints, checkpoints and pairs without a link."""
    route: Literal["private", "public", "punched"] = "private"
    """Addresses that functions reach each other at, which decide on prices: those of one network, public ones, or public ones
    behind NAT, whose holes are punched with the help of a service."""
    price_mb: NonNegative = 0.0
    """Per MB that is sent, leaving one function and entering another together."""
    price_service_hour: NonNegative = 0.0
    """Per hour of the service through which functions behind NAT meet, if there is one."""
    source: str = ""
    """How the coefficients were found."""

    def one_phase(self, workers: Array, vector_mb: float) -> Array:
        """Whether vectors of that size are sent whole."""
        return np.asarray(vector_mb * (workers - 1) <= self.one_phase_mb)

    def s_per_mb(self, share: Array, more_s: Array | float = 0.0) -> Array:
        """Seconds per MB sent and received.

        Args:
            share: of one vCPU: one thread does both.
            more_s: seconds of the same thread for something else, per MB.
        """
        return np.maximum(1 / self.mb_s, self.cpu_s_per_mb / share + more_s)

    def setup(self, workers: Array | float) -> Array:
        """Seconds until a function has its links; one alone has none."""
        w = np.asarray(workers, dtype=float)
        return np.where(w > 1, self.setup_s + self.setup_each_s * (w - 1), 0.0)

    def some_fails(self, workers: Array) -> Array:
        """Probability that any of the pairs has no link."""
        return np.asarray(1 - (1 - self.failure) ** (workers * (workers - 1) / 2))

    def through_store(self, workers: Array, whole: Array) -> Array:
        """Expected messages of a round that are puts, and are read once each.

        Args:
            workers: W.
            whole: whether vectors are sent whole.
        """
        return np.asarray(np.where(whole, 1, 2) * workers * (workers - 1) * self.failure)

    def memory_mb(self, up_mb: float, down_mb: float) -> float:
        """MB that a function needs beside those of an exchange through the store.

        Args:
            up_mb: of a contribution.
            down_mb: of a merged vector.
        """
        return KEPT_VERSIONS * (up_mb + down_mb)
