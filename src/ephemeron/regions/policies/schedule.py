"""When a region sends and applies which rounds of which fragments: arithmetic on iterations, so that every rank and replacement agrees.

Regions have rounds 1 to `rounds`, with H iterations between two of a fragment, and a last one of all fragments at the end of the run. The
fragments are offset by H / F. What was sent before iteration t is applied before iteration t + delay.

Rounds whose H, compression, fragments and delay change during the run, as all regions know before they begin.

The first region decides the plan of round r + 2 when it sends the first fragment of round r, and sends it along. All regions wait for that payload, so all
have the plan before round r + 2 begins, whatever their pace; and as the payload is stored before it is sent, replacements read the same.

Payloads always have `PARTS` fragments; a plan of F fragments sends PARTS / F of them at once. Iterations of plans are those of the first region. Others
have theirs in proportion.

H, compression, fragments and delay of an exchange from the measured link, the iteration time and a staleness limit. Pure.

A payload of b bytes occupies a link of bandwidth w for b / w seconds, and arrives after that and a round trip r; an iteration takes t. The choice is the
gentlest compression, and with it the smallest H, for which

    b / w <= share · H · t                the link is idle for the rest of the time, and computing hides the exchange
    H + delay <= limit                    parameters lack no more than the steps of so many iterations of the others
    delay = 2 (b / (F·w) + r) / t         iterations until a fragment has arrived, twice as many for safety
    delay < H                             a round is applied before the next one is sent

and F the largest number of fragments whose exchanges follow each other, each ended before the next one begins. Where nothing fits, the
strongest compression is used with the largest H, and regions wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ephemeron.config.typed import Count, NonNegative, Positive, Typed


class Due(NamedTuple):
    """A round of a fragment."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSchedule:
    """Rounds of one region.

    `every` and `iterations` may differ among regions, all else is alike.
    """

    iterations: int
    """Of the region's run."""
    every: int
    """H."""
    rounds: int
    """Rounds of each fragment before the last one, all before `iterations`."""
    fragments: int = 1
    delay: int = 0
    """Iterations between sending and applying, below H."""

    @property
    def last(self) -> int:
        """Number of the round at the end of the run."""
        return self.rounds + 1

    def sent_before(self, due: Due) -> int:
        """Iteration before which a round is sent; 0: round 0, the beginning."""
        if due.round > self.rounds:
            return self.iterations
        offset = (self.fragments - 1 - due.fragment) * self.every // self.fragments
        return max(0, due.round * self.every - offset)

    def applied_before(self, due: Due) -> int:
        """Iteration before which a round is applied."""
        return min(self.sent_before(due) + self.delay, self.iterations)

    def late(self, due: Due) -> float:
        """Part of H that passes between sending a round and applying it."""
        return self.delay / self.every

    def sends(self, iteration: int) -> list[Due]:
        """Rounds that are sent before an iteration."""
        if iteration == self.iterations:
            return [Due(fragment, self.last) for fragment in range(self.fragments)]
        return [due for due in self._near(iteration) if self.sent_before(due) == iteration]

    def applies(self, iteration: int) -> list[Due]:
        """Rounds that are applied before an iteration, in the order in which they were sent."""
        if iteration < self.iterations:
            return [due for due in self._near(iteration - self.delay) if self.applied_before(due) == iteration]
        waiting = [due for back in range(self.delay + 1) for due in self._near(iteration - back) if self.applied_before(due) == iteration]
        ordered = sorted(set(waiting), key=lambda due: (self.sent_before(due), due.fragment))
        return [*ordered, *(Due(fragment, self.last) for fragment in range(self.fragments))]

    def is_due(self, iteration: int) -> bool:
        """Whether there is anything to do before an iteration."""
        return iteration == self.iterations or (iteration > 0 and bool(self.sends(iteration) or self.applies(iteration)))

    def decides(self, iteration: int) -> bool:
        """Whether rounds are applied before an iteration: else nothing is decided, and only rank 0 has anything to do."""
        return iteration == self.iterations or (iteration > 0 and bool(self.applies(iteration)))

    def part(self, fragment: int, elements: int) -> slice:
        """Elements of a fragment: contiguous, as equal as can be."""
        return contiguous(fragment, self.fragments, elements)

    def _near(self, iteration: int) -> list[Due]:
        """Rounds that may be sent before an iteration, the last ones left out."""
        found = iteration // self.every
        return [Due(fragment, number) for number in (found, found + 1) if 1 <= number <= self.rounds for fragment in range(self.fragments)]


def contiguous(fragment: int, fragments: int, elements: int) -> slice:
    """Elements of one of several fragments: contiguous, as equal as can be."""
    return slice(fragment * elements // fragments, (fragment + 1) * elements // fragments)


# -- rounds whose H -----------------------------------------------------------------------------------------------


PARTS = 4
KEPT = 6
"""Plans that are kept: rounds under way, and the two that are known ahead."""
_UNKNOWN = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan(Typed):
    """Plan of one round."""

    round: int
    begin: int
    """Iteration at which the round before has sent its last fragment."""
    how: Adaptation
    last: bool = False
    """Whether this is the round at the end of the run."""

    @property
    def end(self) -> int:
        """Iteration at which the next round begins."""
        return self.begin + self.how.every

    def sent(self, part: int) -> int:
        """Iteration before which a part is sent."""
        group = part * self.how.fragments // PARTS
        return self.begin + (group + 1) * self.how.every // self.how.fragments

    def applied(self, part: int) -> int:
        """Iteration before which it is applied."""
        return self.sent(part) + self.how.delay


class AdaptiveSchedule:
    """Rounds of one region; see `ExchangeSchedule`, whose queries it answers.

    Args:
        iterations: of the region's run.
        reference: iterations of the first region's run.
        plans: of the first rounds; see `first_plans`.
    """

    fragments = PARTS

    def __init__(self, *, iterations: int, reference: int, plans: Sequence[RoundPlan]) -> None:
        self.iterations, self._reference = iterations, reference
        self._plans = {plan.round: plan for plan in plans}

    def learn(self, plans: Sequence[RoundPlan]) -> None:
        """Takes plans, those of former rounds included, in place of what is known."""
        self._plans = {plan.round: plan for plan in plans}

    @property
    def plans(self) -> tuple[RoundPlan, ...]:
        """All that are known, in their order."""
        return tuple(plan for _, plan in sorted(self._plans.items()))

    def plan(self, round: int) -> RoundPlan | None:
        """Plan of a round; None: it is not known, or there is no such round."""
        return self._plans.get(round)

    @property
    def last(self) -> int:
        """Number of the round at the end of the run; a very large one while it is not known."""
        return next((plan.round for plan in self._plans.values() if plan.last), _UNKNOWN)

    @property
    def rounds(self) -> int:
        """Rounds before the last one."""
        return self.last - 1

    def sent_before(self, due: Due) -> int:
        """As `ExchangeSchedule.sent_before`."""
        if due.round == 0:
            return 0
        plan = self._plans[due.round]
        return self.iterations if plan.last else self._own(plan.sent(due.fragment))

    def applied_before(self, due: Due) -> int:
        """As `ExchangeSchedule.applied_before`."""
        plan = self._plans[due.round]
        return self.iterations if plan.last else min(self._own(plan.applied(due.fragment)), self.iterations)

    def late(self, due: Due) -> float:
        """As `ExchangeSchedule.late`."""
        how = self._plans[due.round].how
        return how.delay / how.every

    def sends(self, iteration: int) -> list[Due]:
        """As `ExchangeSchedule.sends`."""
        return [due for due in self._known() if self.sent_before(due) == iteration]

    def applies(self, iteration: int) -> list[Due]:
        """As `ExchangeSchedule.applies`."""
        found = [due for due in self._known() if self.applied_before(due) == iteration]
        return sorted(found, key=lambda due: (self.sent_before(due), due.fragment))

    def is_due(self, iteration: int) -> bool:
        """As `ExchangeSchedule.is_due`."""
        return iteration == self.iterations or (iteration > 0 and bool(self.sends(iteration) or self.applies(iteration)))

    def decides(self, iteration: int) -> bool:
        """As `ExchangeSchedule.decides`."""
        return iteration == self.iterations or (iteration > 0 and bool(self.applies(iteration)))

    def part(self, fragment: int, elements: int) -> slice:
        """As `ExchangeSchedule.part`."""
        return contiguous(fragment, PARTS, elements)

    def _own(self, iteration: int) -> int:
        return iteration * self.iterations // self._reference

    def _known(self) -> list[Due]:
        return [Due(part, number) for number in sorted(self._plans) for part in range(PARTS)]


def first_plans(first: Adaptation, *, reference: int) -> list[RoundPlan]:
    """Plans of the two rounds before which nothing is measured.

    Args:
        first: how these are.
        reference: iterations of the first region.
    """
    plans = [_ended(RoundPlan(round=1, begin=0, how=first), reference)]
    if not plans[0].last:
        plans.append(_ended(RoundPlan(round=2, begin=plans[0].end, how=first), reference))
    return plans


def next_plan(before: RoundPlan, wanted: Adaptation, *, reference: int, least: int = 1) -> RoundPlan | None:
    """Plan of the round after another one; None: that is the last.

    H grows where parts of the round before would not be applied before they are sent again.

    Args:
        before: of the round before.
        wanted: how the round should be.
        reference: iterations of the first region.
        least: iterations of the first region in which every other one has at least one.
    """
    if before.last:
        return None
    every = max(wanted.every, least * wanted.fragments)
    while True:
        how = Adaptation(every=every, compression=wanted.compression, fragments=wanted.fragments, delay=wanted.delay)
        plan = RoundPlan(round=before.round + 1, begin=before.end, how=how)
        if all(plan.sent(part) >= before.applied(part) for part in range(PARTS)):
            return _ended(plan, reference)
        every += 1


def _ended(plan: RoundPlan, reference: int) -> RoundPlan:
    """The same, or the last one, if the run ends before it does."""
    if plan.end < reference:
        return plan
    return RoundPlan(round=plan.round, begin=plan.begin, how=plan.how, last=True)


# -- H ------------------------------------------------------------------------------------------------------------


COMPRESSIONS = {"none": 4.0, "int8": 4.0 * 257 / 1024, "int4": 4.0 * 33 / 256, "topk2:0.05": 0.07}
"""Bytes a float32 value by compression, the gentlest first."""
FRAGMENTS = (4, 2, 1)
SHARE = 0.5
"""Largest part of the time in which the link is used."""
LEAST_EVERY = 8
"""Smallest H: below, traffic grows and accuracy does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Typed):
    """Measured pace and link of a region."""

    iteration_s: Positive
    """Seconds of an iteration, exchanges left out."""
    bandwidth: Positive
    """Of the slowest link to it, bytes per second."""
    round_trip_s: NonNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation(Typed):
    """How often regions exchange, and how."""

    every: Count
    """H."""
    compression: str
    """Value of `regions.compression`."""
    fragments: Count
    delay: int
    """Iterations between sending and applying, below H."""


def adapted(measured: Measured, *, nbytes: int, limit: int) -> Adaptation:
    """The choice for a link.

    Args:
        measured: link and pace of the slowest region.
        nbytes: of the parameters as float32.
        limit: H and delay together are at most this, in iterations.
    """
    for compression, each in COMPRESSIONS.items():
        how = _smallest(compression, nbytes * each / 4, measured, limit)
        if how.every + how.delay <= limit:
            return how
    return Adaptation(every=limit, compression=list(COMPRESSIONS)[-1], fragments=1, delay=0)


def _smallest(compression: str, size: float, measured: Measured, limit: int) -> Adaptation:
    """The smallest H of a compression, and the fragments and the delay that follow."""
    every = max(min(LEAST_EVERY, limit), math.ceil(size / measured.bandwidth / (SHARE * measured.iteration_s) - 1e-9))
    fragments, delay = _fragments_and_delay(size, every, measured)
    if delay >= every:  # the round trip takes longer than the link is used
        every = delay + 1
        fragments, delay = _fragments_and_delay(size, every, measured)
    return Adaptation(every=every, compression=compression, fragments=fragments, delay=delay)


def slowest(found: list[Measured]) -> Measured | None:
    """The pace and the link that limit all regions; None: nothing is measured yet."""
    if not found:
        return None
    return Measured(
        iteration_s=max(each.iteration_s for each in found),
        bandwidth=min(each.bandwidth for each in found),
        round_trip_s=max(each.round_trip_s for each in found),
    )


def _fragments_and_delay(size: float, every: int, measured: Measured) -> tuple[int, int]:
    for fragments in FRAGMENTS:
        seconds = size / fragments / measured.bandwidth + measured.round_trip_s
        if fragments == 1 or seconds <= every // fragments * measured.iteration_s:
            break
    return fragments, math.ceil(2 * seconds / measured.iteration_s - 1e-9)
