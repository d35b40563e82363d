"""The order in which a member tries transports, learned from its own attempts. Pure.

A transport that has failed with a machine since it last succeeded with it comes last there; one that has failed with two machines and
succeeded with none comes last with machines that were not tried: behind a symmetric NAT no pair then waits for punching first.
The others are tried by the time that a connection takes, the relay after all of them: its bytes are paid for.

Times differ by less than a factor of two: the given order holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LAST = "relay"
_FAILED_WITH = 2
_FIRST_S = {"shared": 0.001, "unix": 0.001, "tcp": 0.004, "websocket": 0.1, "punched": 0.2}
"""Expected seconds to connect, which count as one measurement."""


class DialHistory:
    """Attempts of one member.

    Args:
        transports: names, the preferred first.
    """

    def __init__(self, transports: Sequence[str]) -> None:
        self._transports = list(transports)
        self._seconds: dict[str, list[float]] = {}
        self._failed: dict[str, dict[str, bool]] = {}
        """By transport and machine: whether the last attempt has failed."""

    def connected(self, transport: str, machine: str, seconds: float) -> None:
        """An attempt has succeeded within so many seconds."""
        self._seconds.setdefault(transport, []).append(seconds)
        self._failed.setdefault(transport, {})[machine] = False

    def failed(self, transport: str, machine: str) -> None:
        """An attempt has failed."""
        self._failed.setdefault(transport, {})[machine] = True

    def order(self, machine: str) -> list[str]:
        """Names of all transports, in the order in which to try them with a machine."""
        return sorted(self._transports, key=lambda name: (self._fails(name, machine), name == LAST, self._time(name)))

    def _fails(self, transport: str, machine: str) -> bool:
        outcomes = self._failed.get(transport, {})
        return outcomes.get(machine, len(outcomes) >= _FAILED_WITH and all(outcomes.values()))

    def _time(self, transport: str) -> int:
        """Power of two of the mean time."""
        first = [_FIRST_S[transport]] if transport in _FIRST_S else [_FIRST_S["tcp"]]
        times = first + self._seconds.get(transport, [])
        return math.floor(math.log2(max(1e-4, sum(times) / len(times))))
