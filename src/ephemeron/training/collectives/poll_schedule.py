"""Poll schedule: prediction of the time at which an awaited object appears in a store that has to be polled.

A poll too early costs a request; a poll too late costs the time of all ranks. Each stream (a kind of object from a
given rank) remembers how long after a reference time its last objects appeared. The first poll is made at the time that
would have cost least for these appearances: the delay after each of them, and `worth_s` for every poll that finds
nothing. Where appearances scatter by more than a poll is worth, that time is early; where they do not, one poll in some
ten finds nothing. The latest appearance is left out: an object that is very late (its sender died, or started last)
changes nothing.

An invocation begins with a memory of three rounds, which grows with the number of observations: the first rounds are slow,
and a long memory would keep them in the estimates of all ranks for as many rounds again as there are waits in a round. A
successor starts with its predecessor's estimates.

A poll that succeeds does not tell how long the object had been stored. The sender's time stamp would, if clocks agreed and
if the duration of the put were known; but a poll that succeeds just after one that found nothing has found the object fresh,
and so the age of that object is the one to compare with. An error of the clocks is in both numbers. Until a poll has found
nothing, there is no prediction and polls are made at once; and while every poll succeeds, objects are taken for older and
older, until one poll finds nothing.

What did not help: always waiting until all but one of the objects would have appeared. Where times scatter, the lateness of
one rank is in the waits of all: with steps of 100 ms that scatter by 15 ms, rounds took 28 % longer than over a store that
can wait (now 11 %). Nor did larger intervals between polls: they save as many polls as a later first poll does, for more
time. Nor did a single estimate that moves up and down by steps: it took a hundred rounds to forget one late start, each of
them as late as the one before had made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ephemeron.communication.channels.base import GROWTH, LEAST_STEP_S
from ephemeron.training.collectives.state import Arrivals

MEMORY = 16
"""Rounds in memory, once there were enough; the latest of these does not count."""
FEWEST, SLOWLY = 3, 4
"""Rounds in memory at first, and the number of rounds after which the memory grows by one."""
AGEING, AGEING_GROWTH = 0.01, 1.1
"""Share of the interval between polls by which objects are taken for older while every poll succeeds, and its growth."""


def cheapest(appeared: Sequence[float], latency_s: float, worth_s: float) -> float:
    """Time of the first poll that would have cost least for all these appearances.

    Args:
        appeared: seconds, ascending, at least one.
        latency_s: duration of a request.
        worth_s: seconds of waiting that a poll which finds nothing is worth.

    Returns:
        One of `appeared`; the last one of several with the same cost.
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
    observed: int = 0
    """Number of rounds in this invocation."""
    fresh_age_s: float | None = None
    """Age, by the clocks, of an object that has just appeared; exact to about `gap_s`, the interval between polls."""
    gap_s: float = 0.0
    """Interval between the last two polls when the first of them found nothing; grows with every round since."""
    chosen: float | None = None
    """The prediction, until the next appearance is known."""

    def recent(self) -> list[float]:
        """Appearances that count, ascending."""
        return sorted(list(self.appeared)[-min(MEMORY, FEWEST + self.observed // SLOWLY) :])[:-1]

    def typical(self) -> tuple[float, float, float]:
        """Earliest, median and latest of these."""
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
            self.gap_s *= AGEING_GROWTH
            self.fresh_age_s = min(fresh, age_s) - AGEING * self.gap_s
        self.observed, self.chosen = self.observed + 1, None
        self.appeared.append(after_s)
        return after_s


@dataclass(slots=True)
class ArrivalPredictor:
    """Prediction of arrivals: by stream, seconds between a reference time and the appearance of the object."""

    latency_s: float = 0.0
    """Duration of a request: at first the store's usual one, later that of polls that found nothing, if it is less."""
    worth_s: float = 0.005
    """Seconds of waiting that cost as much as a poll which finds nothing."""
    streams: dict[str, _KeyStream] = field(default_factory=dict)

    def predict(self, stream: str, reference: float) -> float | None:
        """Time at which to poll first, or None if nothing is known yet."""
        s = self.streams.get(stream)
        after_s = None if s is None else s.predict(self.latency_s, self.worth_s)
        return None if after_s is None else reference + after_s

    def polled(self, took_s: float) -> None:
        """Takes in the duration of a request that found nothing."""
        self.latency_s += 0.3 * (min(took_s, self.latency_s) - self.latency_s)

    def observe(self, stream: str, reference: float, *, found: float, gap_s: float, age_s: float) -> float:
        """Takes in that an object was found by a request made at `found`.

        Args:
            stream: of the object.
            reference: as in `predict`.
            found: time of the request.
            gap_s: seconds since the request before, which found nothing; 0: there was none.
            age_s: seconds between the sender's time stamp and `found`, each by its own clock.

        Returns:
            Estimated time at which it appeared.
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
