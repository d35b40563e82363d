"""How long a peer for which nobody waits may be silent before it is suspected. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SLOWER = 10.0
"""Times its usual interval that a peer may need before it is suspected."""


@dataclass(slots=True)
class PeerPace:
    """When something new came from one peer.

    Args:
        since_s: a moment at which it was heard, or at which listening began.
    """

    since_s: float
    usual_s: float = 0.0
    """Longest interval that was seen, where nothing better is known of it."""
    tells: bool = False
    """Whether it says itself how long its iterations take."""
    asked_s: float = 0.0
    """When it was suspected last."""

    def came(self, now_s: float) -> None:
        """Something new is there."""
        self.since_s = now_s

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Whether it has been silent for too long. Says so once in that time.

        Args:
            now_s: seconds, as for `came`.
            timeout_s: the shortest silence that counts.
        """
        if now_s - max(self.since_s, self.asked_s) <= timeout_s:
            return False
        self.asked_s = now_s
        return True
