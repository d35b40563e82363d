"""Rounds whose H, compression, fragments and delay change during the run, as all regions know before they begin.

The first region decides the plan of round r + 2 when it sends the first fragment of round r, and sends it along. All regions wait for that payload, so all
have the plan before round r + 2 begins, whatever their pace; and as the payload is stored before it is sent, replacements read the same.

Payloads always have `PARTS` fragments; a plan of F fragments sends PARTS / F of them at once. Iterations of plans are those of the first region. Others
have theirs in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.config.typed import Typed
from ephemeron.regions.policies.adaptation import Adaptation
from ephemeron.regions.policies.schedule import Due, contiguous

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
