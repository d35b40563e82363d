"""One retry policy for all stores: which failures are transient, and the pause before the next request.

There are three classes of failures. *Throttled* (503 SlowDown, 429, a cache out of memory): the request was understood, and more of
them make it worse, so pauses begin long. *Unavailable* (refused, reset, cut short, timed out, 500, a server that starts):
the result is unknown, and most such failures are short, so the first pause is short. *Refused* (403, no such bucket, a wrong
password, an untrusted certificate): no request will ever succeed, so none is made. The class of an error tells its kind.

Pauses double from the first to the longest, each drawn from its upper half, so that hundreds of functions that failed
together do not retry together (a full draw would give some of them very short pauses; a fixed pause keeps them in step). After
`total_s` of failures without an answer the last error is raised, with the number of requests that it cost.

Repeating is safe by operation: `put`, `delete`, `reduce` and `accumulate` are idempotent by contract, reads change
nothing, and a create-only put whose answer was lost is resolved by reading the stored object (`channels.retrying`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ephemeron.errors import ChannelRefused, ChannelThrottled, ChannelUnreachable

CHANNEL_RETRY_S = 300.0
"""By default a run survives five minutes without its store: a restart, a failover, a long throttling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBackoff:
    """Pauses for one class of errors."""

    first_s: float
    most_s: float
    growth: float = 2.0

    def pause_s(self, tries: int, rng: random.Random) -> float:
        """Seconds before the next request, after so many failed ones, at least one."""
        longest = min(self.most_s, self.first_s * self.growth ** min(tries - 1, 60))
        return longest * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Pauses and limits of repeated requests."""

    total_s: float = CHANNEL_RETRY_S
    """Seconds of failures, by the loop's clock, after which an operation fails; 0: at once."""
    unavailable: RetryBackoff = field(default_factory=lambda: RetryBackoff(first_s=0.05, most_s=10.0))
    throttled: RetryBackoff = field(default_factory=lambda: RetryBackoff(first_s=0.4, most_s=20.0))

    def pause_s(self, error: ChannelUnreachable, *, tries: int, failing_s: float, rng: random.Random) -> float | None:
        """Seconds until the next request; None: there is none.

        Args:
            error: of the latest request.
            tries: requests that failed.
            failing_s: since the first of these was made.
            rng: of this writer alone.
        """
        if isinstance(error, ChannelRefused) or failing_s >= self.total_s:
            return None
        backoff = self.throttled if isinstance(error, ChannelThrottled) else self.unavailable
        return min(backoff.pause_s(tries, rng), self.total_s - failing_s)  # the last request is made at the very end


BRIEF = RetryPolicy(total_s=3.0)
"""Policy of interactive commands: a wrong address must fail at once."""
