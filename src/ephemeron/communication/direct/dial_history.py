"""The order in which a member tries transports, learned from its own attempts. Pure.

A transport that has failed with a machine since it last succeeded with it comes last there; one that has failed with two machines and
succeeded with none comes last with machines that were not tried: behind a symmetric NAT no pair then waits for punching first.
The others are tried by the time that a connection takes and that large messages take over it, the relay after all of them: its
bytes are paid for. What was not measured counts as quick, so that it is tried.

Times differ by less than a factor of two: the given order holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LAST = "relay"
FASTER = 2.0
"""How many times as fast another transport must be for a change."""
_FAILED_WITH = 2
_FIRST_S = {"shared": 0.001, "unix": 0.001, "tcp": 0.004, "websocket": 0.1, "punched": 0.2}
"""Expected seconds to connect, which count as one measurement."""
_MESSAGES = 100
"""Large messages for which a connection is made, as far as its choice is concerned."""


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
        self._message_s: dict[str, dict[str, float]] = {}
        """By transport and machine: seconds of the last large message."""

    def connected(self, transport: str, machine: str, seconds: float) -> None:
        """An attempt has succeeded within so many seconds."""
        self._seconds.setdefault(transport, []).append(seconds)
        self._failed.setdefault(transport, {})[machine] = False

    def failed(self, transport: str, machine: str) -> None:
        """An attempt has failed."""
        self._failed.setdefault(transport, {})[machine] = True

    def carried(self, transport: str, machine: str, seconds: float) -> None:
        """A large message was answered within so many seconds; see `upgrades.MEASURED_BYTES`."""
        self._message_s.setdefault(transport, {})[machine] = seconds

    def has_carried(self, transport: str, machine: str) -> bool:
        """Whether a large message was measured."""
        return machine in self._message_s.get(transport, {})

    def order(self, machine: str) -> list[str]:
        """Names of all transports, in the order in which to try them with a machine."""
        return sorted(self._by_time(machine), key=lambda name: self._fails(name, machine))

    def better(self, machine: str, *, than: str) -> list[str]:
        """Names of the transports worth a change from another one if they worked, the best first: `FASTER`, or any for the relay."""
        limit = math.inf if than == LAST else self._seconds_of(than, machine) / FASTER
        return [n for n in self._by_time(machine) if n not in (than, LAST) and self._seconds_of(n, machine) <= limit]

    def _by_time(self, machine: str) -> list[str]:
        def power_of_two(name: str) -> int:
            return math.floor(math.log2(max(1e-4, self._seconds_of(name, machine))))

        return sorted(self._transports, key=lambda name: (name == LAST, power_of_two(name)))

    def _fails(self, transport: str, machine: str) -> bool:
        outcomes = self._failed.get(transport, {})
        return outcomes.get(machine, len(outcomes) >= _FAILED_WITH and all(outcomes.values()))

    def _seconds_of(self, transport: str, machine: str) -> float:
        """Mean time to connect, and that of messages."""
        first = [_FIRST_S[transport]] if transport in _FIRST_S else [_FIRST_S["tcp"]]
        times = first + self._seconds.get(transport, [])
        measured = self._message_s.get(transport, {})
        message_s = measured.get(machine, sum(measured.values()) / max(1, len(measured)))
        return sum(times) / len(times) + _MESSAGES * message_s
