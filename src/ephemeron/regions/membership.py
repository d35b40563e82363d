"""Which regions take part in which rounds, as every region derives it from the same payloads. Pure.

A region that joins is announced twice by the coordinator, the first region of those that take part: with `keeps`, from when on all keep their
updates for it, so that a state of the run and the rounds after it are all that it needs; and with `enters`, two rounds before its first one.
As all regions apply a round before they send the next one, all know before that round is sent. A region that leaves says so in its last round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.config.typed import Typed

LEAD = 2
"""Rounds from the announcement of a region to its first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakesPart(Typed):
    """Rounds of one region."""

    first: int | None = 1
    """None: it has none yet."""
    last: int | None = None
    """None: it stays to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance(Typed):
    """A region that joins; also what a payload says of it."""

    region: str
    kept_from: int = 0
    """Round of the coordinator in which all were told to keep their updates for it."""
    first: int | None = None
    """Its first round, once that is agreed on."""


class RegionMembers:
    """Regions of a run.

    Args:
        names: that take part from the first round on, unless they are found to be absent; contributions are summed in this order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._rounds: dict[str, TakesPart] = {name: TakesPart() for name in names}
        self.entrance: Entrance | None = None
        """Of the region that joins; None: none does, or it has been heard."""

    @property
    def names(self) -> list[str]:
        """All that are known, in the order of summation."""
        return list(self._rounds)

    def active(self, round: int) -> list[str]:
        """Regions that take part in a round, in the order of summation."""
        return [name for name in self._rounds if self.takes_part(name, round)]

    def takes_part(self, name: str, round: int) -> bool:
        """Whether a region takes part in a round."""
        rounds = self._rounds.get(name, TakesPart(first=None))
        return rounds.first is not None and rounds.first <= round <= (round if rounds.last is None else rounds.last)

    def coordinator(self, round: int) -> str:
        """The region that announces others with its part of a round; "": there is none."""
        return next(iter(self.active(round)), "")

    def first_round(self, name: str) -> int | None:
        """First round of a region; None: it has none yet."""
        return self._rounds.get(name, TakesPart(first=None)).first

    def last_round(self, name: str) -> int | None:
        """Last round of a region that leaves; None: it stays."""
        return self._rounds.get(name, TakesPart(first=None)).last

    def is_absent(self, name: str) -> None:
        """A region that was to take part from the beginning could not be started."""
        self._rounds[name] = TakesPart(first=None)

    def keeps_for(self, name: str, round: int) -> None:
        """From a round of the coordinator on, updates are kept for a region that joins."""
        self._rounds.setdefault(name, TakesPart(first=None))
        if self.entrance is None or self.entrance.region != name:
            self.entrance = Entrance(region=name, kept_from=round)

    def enters(self, name: str, first: int) -> None:
        """A region takes part from a round on."""
        known = self.entrance
        self._rounds[name] = TakesPart(first=first)
        kept_from = 0 if known is None else known.kept_from
        self.entrance = Entrance(region=name, kept_from=kept_from, first=first)

    def is_heard(self, name: str) -> None:
        """An update of a region has come."""
        if self.entrance is not None and self.entrance.region == name:
            self.entrance = None

    def leaves(self, name: str, last: int) -> None:
        """A region takes part in no round after one."""
        self._rounds[name] = TakesPart(first=self.first_round(name), last=last)

    def state(self) -> Mapping[str, TakesPart]:
        """Rounds by region."""
        return dict(self._rounds)

    def load(self, rounds: Mapping[str, TakesPart], entrance: Entrance | None) -> None:
        """Restores what `state` and `entrance` were."""
        if rounds:
            self._rounds = dict(rounds)
        self.entrance = entrance
