"""When will it be there? Predictions for stores that must be polled.

A poll too early costs a request; a poll too late costs everybody's time. Each stream (a kind of object from a
given rank) remembers how long after a reference moment its last objects appeared, and the first poll is made when
all of those but one would have been there: one first poll in nine finds nothing, and an object that is very late
(its sender died, or started last) moves nothing. A life begins with a memory of three and more misses, which grows with
what was heard: the first rounds are slow, and a long memory would keep them in everybody's estimates for as many rounds
again as there are waits in a round. A successor is told what its predecessor expected.

A poll that succeeds does not say how long the object had been there. Its sender's time stamp would, if clocks
agreed and if it were known how long the put took; but a poll that succeeds just after one that missed has found
the object fresh, and so the age that it has by then is what to compare with. Whatever is wrong with the clocks is
in both numbers. Until a poll has missed nothing is predicted, and polls are made at once.

What did not help: aiming at fewer misses. Where times vary by as much as a round takes, halving the polls delays
the round by a tenth, because everybody's lateness is in everybody's estimates; a poll is cheaper than that. Nor did
a single estimate that moves up and down by steps: what one late start had taught it, it took a hundred rounds to
forget, each of them as late as the one before had made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MEMORY = 16
"""Rounds that count, once enough were heard: all but one of them would have been there at the time predicted."""
FEWEST, SLOWLY = 3, 4
"""Rounds that count at first, and the rounds heard after which one more does."""
DOUBT = 0.01
"""Share of the step between polls by which objects are taken for older while no poll misses."""


@dataclass(slots=True)
class _Stream:
    appeared: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """Seconds after the reference."""
    heard: int = 0
    """Rounds, in this life."""
    fresh_age_s: float | None = None
    """Age, as clocks tell, of an object that has just appeared; about, since it was asked for once in a `gap_s`."""
    gap_s: float = 0.0

    def predict(self) -> float | None:
        if len(self.appeared) < 2:
            return None
        recent = list(self.appeared)[-min(MEMORY, FEWEST + self.heard // SLOWLY) :]
        return sorted(recent)[-2]

    def observe(self, after_s: float, gap_s: float, age_s: float) -> float:
        fresh = self.fresh_age_s
        if gap_s > 0:
            self.gap_s = gap_s
            after_s -= gap_s / 2
            middle = age_s - gap_s / 2
            known = middle if fresh is None else min(max(fresh, age_s - gap_s), age_s)
            self.fresh_age_s = known + 0.3 * (middle - known)
        elif fresh is None:
            return after_s
        else:
            after_s -= max(0.0, age_s - fresh)
            self.fresh_age_s = min(fresh, age_s) - DOUBT * self.gap_s
        self.heard += 1
        self.appeared.append(after_s)
        return after_s


@dataclass(slots=True)
class Expectation:
    """Per stream, seconds between a reference moment and the object's appearance."""

    streams: dict[str, _Stream] = field(default_factory=dict)

    def predict(self, stream: str, reference: float) -> float | None:
        """Time at which to poll first, or None if nothing is known yet."""
        s = self.streams.get(stream)
        after_s = None if s is None else s.predict()
        return None if after_s is None else reference + after_s

    def observe(self, stream: str, reference: float, *, found: float, gap_s: float, age_s: float) -> float:
        """The object was found by a request made at `found`.

        Args:
            stream: whose.
            reference: as in `predict`.
            found: time of the request.
            gap_s: time since a request that had found nothing; 0: there was none.
            age_s: seconds between the sender's time stamp and `found`, on whatever clocks.

        Returns:
            When it appeared, as far as that can be told.
        """
        return reference + self.streams.setdefault(stream, _Stream()).observe(found - reference, gap_s, age_s)

    def state(self) -> dict[str, list[float]]:
        """What a successor should expect: per stream the prediction, the age of what is fresh, and the last gap."""
        return {
            name: [round(after_s, 6), round(s.fresh_age_s, 6), round(s.gap_s, 6)]
            for name, s in self.streams.items()
            if (after_s := s.predict()) is not None and s.fresh_age_s is not None
        }

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """The inverse of `state`; what this life hears counts for more."""
        for name, (after_s, fresh_age_s, gap_s) in state.items():
            twice = deque([after_s, after_s], maxlen=MEMORY)
            self.streams[name] = _Stream(appeared=twice, fresh_age_s=fresh_age_s, gap_s=gap_s)
