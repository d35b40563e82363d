"""When will it be there? Predictions for stores that must be polled.

A poll too early costs a request; a poll too late costs everybody's time. Each stream (a kind of object from a
given rank) keeps an estimate of how long after a reference moment its objects appear. The estimate moves up when
the first poll found nothing and slowly down while it succeeds, nine to one, so that about one first poll in ten
misses: few polls, little delay, and no model of the store. While nothing misses at all it falls ever faster.

A poll that succeeds does not say how long the object had been there. Its sender's time stamp would, if clocks
agreed and if it were known how long the put took; but a poll that succeeds just after one that missed has found
the object fresh, and so the age that it has by then is what to compare with. Whatever is wrong with the clocks is
in both numbers.

What did not help: aiming at fewer misses. Where times vary by as much as a round takes, halving the polls delays
the round by a tenth, because everybody's lateness is in everybody's estimates; a poll is cheaper than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MISSES = 0.1
"""Share of first polls that should find nothing."""
MARGIN = 2.0
"""Objects may have been there for so many spreads before time stamps say that they are fetched too late."""
PULL = 0.1
"""Share of the rest that is taken off at a time. More would follow single early objects, and poll too early."""
LEAST_SPREAD_S = 0.0005


@dataclass(slots=True)
class _Stream:
    after_s: float
    spread_s: float
    """How much later than expected objects are when they are late."""
    coarse_s: float
    """How much of `after_s` may be due to slow polling before anything was known; halved by every success."""
    fresh_age_s: float | None = None
    """Age, as clocks tell, of an object that has just appeared."""
    successes: int = 0
    """Since the last miss."""

    def late(self, by_s: float, gap_s: float, age_s: float | None) -> None:
        """A first poll missed. One that is very late (its sender died) must not move much."""
        self.successes, self.coarse_s = 0, 0.0
        self.spread_s += 0.3 * (min(by_s, 4 * self.spread_s + 0.005) - self.spread_s)
        step_s = min(by_s, 8 * self.spread_s + 0.1 * abs(self.after_s))
        self.after_s += max(step_s, (1 - MISSES) * self.spread_s)
        self.appeared(gap_s, age_s)

    def appeared(self, gap_s: float, age_s: float | None) -> None:
        """An object was found that had not been there `gap_s` before."""
        if age_s is not None:
            age_s -= gap_s / 2
            known = age_s if self.fresh_age_s is None else self.fresh_age_s
            self.fresh_age_s = min(age_s, known + 0.3 * (age_s - known))

    def in_time(self, age_s: float | None) -> None:
        self.successes += 1
        self.spread_s = max(LEAST_SPREAD_S, self.spread_s * 0.97)
        self.coarse_s /= 2
        self.after_s -= self.coarse_s + MISSES * self.spread_s * 1.2 ** min(40, max(0, self.successes - 12))
        if age_s is not None and self.fresh_age_s is not None:
            self.fresh_age_s = min(self.fresh_age_s, age_s)
            self.after_s -= PULL * max(0.0, age_s - self.fresh_age_s - MARGIN * self.spread_s)


@dataclass(slots=True)
class Expectation:
    """Per stream, seconds between a reference moment and the object's appearance."""

    streams: dict[str, _Stream] = field(default_factory=dict)

    def predict(self, stream: str, reference: float) -> float | None:
        """Time at which to poll first, or None if nothing is known yet."""
        s = self.streams.get(stream)
        return None if s is None else reference + s.after_s

    def observe(self, stream: str, reference: float, *, found: float, gap_s: float, age_s: float | None = None) -> None:
        """The object was found by a request made at `found`.

        Args:
            stream: whose.
            reference: as in `predict`.
            found: time of the request.
            gap_s: time since a request that had found nothing; 0: there was none.
            age_s: seconds between the sender's time stamp and `found`, on whatever clocks; None if unknown.
        """
        after = found - reference
        s = self.streams.get(stream)
        if s is None:
            s = self.streams[stream] = _Stream(after, max(0.002, 0.02 * abs(after)), gap_s)
            s.appeared(gap_s, age_s)
        elif gap_s > 0:
            s.late(max(0.0, after - s.after_s), gap_s, age_s)
        else:
            s.in_time(age_s)
