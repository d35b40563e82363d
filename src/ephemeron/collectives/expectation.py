"""When will it be there? Predictions for stores that must be polled.

A poll too early costs a request; a poll too late costs time. Each stream (a kind of object from a given rank)
keeps an estimate of how long after a reference moment its objects appear. The estimate moves up when the first
poll found nothing and slowly down while it succeeds, ten to one, so that about one first poll in ten misses:
few polls, little delay, and no model of the store. A sender's clock, where it is close to ours, shortens the way
down after a change; nothing depends on it being right.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Stream:
    after_s: float
    spread_s: float


@dataclass(slots=True)
class Expectation:
    """Per stream, seconds between a reference moment and the object's appearance."""

    streams: dict[str, _Stream] = field(default_factory=dict)

    def predict(self, stream: str, reference: float) -> float | None:
        """Time at which to poll first, or None if nothing is known yet."""
        s = self.streams.get(stream)
        return None if s is None else reference + s.after_s

    def observe(self, stream: str, reference: float, *, found: float, missed: bool, slack_s: float = 0.0) -> None:
        """The object was found by a request made at `found`.

        Args:
            missed: an earlier request had found nothing.
            slack_s: how long it had been there by then, as far as its sender's clock tells; 0 if unknown.
        """
        after = found - reference
        s = self.streams.get(stream)
        if s is None:
            self.streams[stream] = _Stream(after, max(0.002, 0.02 * abs(after)))
        elif missed:
            late = max(0.0, after - s.after_s)
            s.spread_s += 0.3 * (min(late, 4 * s.spread_s + 0.001) - s.spread_s)
            s.after_s += min(late, 8 * s.spread_s + 0.001)
        else:
            s.spread_s = max(0.0005, s.spread_s * 0.97)
            s.after_s -= 0.1 * s.spread_s
            if slack_s > 4 * s.spread_s:
                s.after_s -= 0.25 * slack_s
