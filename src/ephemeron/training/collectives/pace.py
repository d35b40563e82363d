"""Progress of one peer over time, and when its silence is suspicious. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SLOWER = 10.0
"""Multiple of an iteration for which a peer may be silent before it is suspected."""


@dataclass(slots=True)
class PeerPace:
    """Progress of one peer.

    Args:
        since_s: loop time of its last progress, or of the start of the observation.
    """

    since_s: float
    iteration_s: float = 0.0
    """Slowest iteration as observed from outside, for a peer that does not report its iteration times."""
    reports: bool = False
    """Whether messages of the peer report its iteration times."""
    suspected_s: float = 0.0
    """Loop time of the last suspicion."""

    def record(self, now_s: float) -> None:
        """Records progress."""
        self.since_s = now_s

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Whether the peer has been silent for longer than `timeout_s`. True at most once in that time."""
        if now_s - max(self.since_s, self.suspected_s) <= timeout_s:
            return False
        self.suspected_s = now_s
        return True
