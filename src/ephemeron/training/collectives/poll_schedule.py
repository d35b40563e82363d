"""When will it be there? Predictions for stores that must be polled.

A poll too early costs a request; a poll too late costs everybody's time. Each stream (a kind of object from a
given rank) remembers how long after a reference moment its last objects appeared. The first poll is made when it
would have cost least for these appearances: the delay after each of them, and `worth_s` for every poll that finds
nothing. Where appearances scatter by more than a poll is worth, that is early; where they do not, one poll in some
ten finds nothing. The latest appearance is left out: an object that is very late (its sender died, or started last)
moves nothing.

An invocation begins with a memory of three rounds, which grows with the observations: the first rounds are slow, and a long
memory would keep them in the estimates of all ranks for as many rounds again as there are waits in a round. A successor
gets the estimates of its predecessor.

A poll that succeeds does not say how long the object had been there. Its sender's time stamp would, if clocks
agreed and if it were known how long the put took; but a poll that succeeds just after one that missed has found
the object fresh, and so the age that it has by then is what to compare with. Whatever is wrong with the clocks is
in both numbers. Until a poll has missed nothing is predicted, and polls are made at once; and while none misses,
objects are taken for older and older, until one does.

What did not help: always waiting until all but one would have been there. Where times scatter, the lateness of each rank
is in the wait of all others: with steps of 100 ms that scatter by 15 ms, rounds took 28 % longer than over a store that
can wait (now 11 %). Nor did larger steps between polls: they save as many polls as a later first poll does, for more
time. Nor did a single estimate that moves up and down by steps: what one late start had taught it, it took a hundred
rounds to forget, each of them as late as the one before had made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ephemeron.communication.channels.base import GROWTH, LEAST_STEP_S
from ephemeron.training.collectives.state import Arrivals

MEMORY = 16
"""Rounds that count, once enough were heard; of these the latest one does not."""
FEWEST, SLOWLY = 3, 4
"""Rounds that count at first, and the rounds heard after which one more does."""
DOUBT, GROWING = 0.01, 1.1
"""Share of the step between polls by which objects are taken for older while no poll misses, and its growth."""


def cheapest(appeared: Sequence[float], latency_s: float, worth_s: float) -> float:
    """The first poll that would have cost least, had it been made for all these appearances.

    Args:
        appeared: seconds, ascending, at least one.
        latency_s: of a request.
        worth_s: seconds of waiting that a poll which finds nothing is worth.

    Returns:
        One of `appeared`; of equals the last.
    """
    return min(reversed(appeared), key=lambda at: _cost(appeared, at, latency_s, worth_s))


def _cost(appeared: Sequence[float], at: float, latency_s: float, worth_s: float) -> float:
    cost, missed, step = 0.0, 0.0, max(latency_s, LEAST_STEP_S)
    for x in appeared:
        while at < x:
            at, step, missed = at + latency_s + step, step * GROWTH, missed + worth_s
        cost += at - x + missed
    return cost


@dataclass(slots=True)
class _KeyStream:
    appeared: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """Seconds after the reference."""
    heard: int = 0
    """Rounds, in this life."""
    fresh_age_s: float | None = None
    """Age, as clocks tell, of an object that has just appeared; about, since it was asked for once in a `gap_s`."""
    gap_s: float = 0.0
    """Between the last two polls when one missed; larger with every round since."""
    chosen: float | None = None
    """The prediction, until the next appearance is known."""

    def recent(self) -> list[float]:
        """Appearances that count, ascending."""
        return sorted(list(self.appeared)[-min(MEMORY, FEWEST + self.heard // SLOWLY) :])[:-1]

    def typical(self) -> tuple[float, float, float]:
        """Early, usual and late."""
        recent = self.recent()
        return recent[0], recent[len(recent) // 2], recent[-1]

    def predict(self, latency_s: float, worth_s: float) -> float | None:
        if self.chosen is None and len(self.appeared) > 1:
            self.chosen = cheapest(self.recent(), latency_s, worth_s)
        return self.chosen

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
            self.gap_s *= GROWING
            self.fresh_age_s = min(fresh, age_s) - DOUBT * self.gap_s
        self.heard, self.chosen = self.heard + 1, None
        self.appeared.append(after_s)
        return after_s


@dataclass(slots=True)
class ArrivalPredictor:
    """Per stream, seconds between a reference moment and the object's appearance."""

    latency_s: float = 0.0
    """Latency of a request: at first the store's usual one, then that of requests that found nothing, if it is lower."""
    worth_s: float = 0.005
    """Seconds of waiting that a poll which finds nothing is worth."""
    streams: dict[str, _KeyStream] = field(default_factory=dict)

    def predict(self, stream: str, reference: float) -> float | None:
        """Time at which to poll first, or None if nothing is known yet."""
        s = self.streams.get(stream)
        after_s = None if s is None else s.predict(self.latency_s, self.worth_s)
        return None if after_s is None else reference + after_s

    def polled(self, took_s: float) -> None:
        """Records the duration of a request that found nothing."""
        self.latency_s += 0.3 * (min(took_s, self.latency_s) - self.latency_s)

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
        return reference + self.streams.setdefault(stream, _KeyStream()).observe(found - reference, gap_s, age_s)

    def state(self) -> Arrivals:
        """State for a successor: per stream three appearances, the age of a fresh object, and the last gap, in seconds."""
        return {
            name: tuple(round(x, 6) for x in (*s.typical(), s.fresh_age_s, s.gap_s))
            for name, s in self.streams.items()
            if len(s.appeared) > 1 and s.fresh_age_s is not None
        }

    def load(self, state: Arrivals) -> None:
        """Restores what `state` returned; observations of this invocation count for more."""
        for name, (*typical, fresh_age_s, gap_s) in state.items():
            appeared = deque([*typical, typical[-1]], maxlen=MEMORY)
            self.streams[name] = _KeyStream(appeared=appeared, fresh_age_s=fresh_age_s, gap_s=gap_s)
