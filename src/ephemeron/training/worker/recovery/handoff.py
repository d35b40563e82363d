"""Decisions on when an invocation starts its successor and hands off to it. Pure: the clock is an argument.

The formulas are those of `planner.model.lives`, by which the planner counts invocations. This module adds what an
invocation measures of itself: durations of requests, of loading, of evaluations, and of reading and writing its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ephemeron.training.planner.model import lives

LEAST_ITERATION_S = 0.001
"""Iteration time assumed until one iteration has ended undisturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The next evaluation, and those after it."""

    after: int = 1
    """Iterations until it."""
    every: int = 1
    """Iterations between two."""
    seconds: float = 0.0
    """Time of one; 0: there is none, or it is not known."""


NO_EVALUATION = Evaluation()


@dataclass(slots=True, kw_only=True)
class HandOff:
    """State of one invocation's hand-off.

    Arguments named `left_s` are the seconds until the platform ends the invocation, `typical_s` is the typical time of an
    iteration (0: unknown).
    """

    lifetime_s: float
    """Time limit of an invocation."""
    cold_start_s: float
    """Expected time of a cold start."""
    start_s: float
    """Time that the start of this invocation took after the launch of the run."""
    attempt: int
    request_s: float = 0.0
    """Duration of one request."""
    load_s: float = 0.0
    """Time from the start of the invocation until all but the state was loaded."""
    write_s: float = 0.0
    """Duration of the last transfer of the state."""

    def closing_s(self) -> float:
        """Seconds needed to end the invocation in good order."""
        return float(lives.closing_s(self.lifetime_s, self.write_s, self.request_s))

    def is_closing(self, left_s: float) -> bool:
        """Whether a longer wait, or replacing a peer first, would leave no time to end in good order."""
        return left_s < 2 * self.closing_s()

    def is_due(self, left_s: float, typical_s: float) -> bool:
        """Whether another iteration may not fit into the time left."""
        return left_s < self._reserve_s(typical_s)

    def is_due_before(self, left_s: float, evaluation_s: float, *, others: bool) -> bool:
        """Whether an evaluation may not fit into the time left; or might not, and other ranks hand off.

        Args:
            others: whether they do.
        """
        return left_s < (self._leaving_s(evaluation_s) if others else self._reserve_s(evaluation_s))

    def is_announced(self, left_s: float, typical_s: float, passed_s: float, evaluation_s: float = 0.0) -> bool:
        """Whether this iteration tells the other ranks to hand off after it, so that the run stops once for all.

        Args:
            passed_s: seconds since the iteration began.
            evaluation_s: of the evaluation that follows; 0: none does.
        """
        then_s = left_s - max(typical_s - passed_s, 0.0)
        return then_s < self._leaving_s(evaluation_s or typical_s)

    def is_past_middle(self, left_s: float) -> bool:
        """Whether a hand-off now wastes less than half of the invocation's time limit."""
        return left_s < 0.5 * self.lifetime_s

    def needs_successor(self, left_s: float, typical_s: float, iterations_left: int, evaluation: Evaluation = NO_EVALUATION) -> bool:
        """Whether a successor is needed, and would not be ready in time if it were started one iteration later."""
        each_s = max(typical_s, LEAST_ITERATION_S)
        evaluations_s = evaluation.seconds * math.ceil(iterations_left / evaluation.every)
        rest_s = 1.5 * (iterations_left * each_s + evaluations_s)
        if left_s > self._reserve_s(typical_s) + rest_s + 0.2 * self.lifetime_s:
            return False  # this invocation will finish the run, even if it has to wait for others at the end
        # From the second hand-off on, the predecessor's environment is warm and free. The first successors start as the
        # first functions did: all at once, and maybe more slowly than one alone.
        first = self.attempt == 0
        start_s = max(self.cold_start_s, self.start_s) if first else lives.WARM_START_S
        leaving_s, stop_s = self._leaving_s(typical_s), float(lives.stop_s(self.write_s, self.request_s))
        early = lives.ahead(
            self.lifetime_s,
            each_s,
            leaving_s,
            lead_s=start_s + 2 * self.load_s,
            stop_s=stop_s,
            share=lives.FIRST_SHARE if first else lives.SHARE,
        )
        until = lives.until_hand_off(
            left_s,
            each_s,
            leaving_s,
            between=evaluation.after,
            evaluation_s=evaluation.seconds,
            evaluation_leaving=self._leaving_s(evaluation.seconds),
            every=evaluation.every,
        )
        return bool(until <= early)

    def _reserve_s(self, typical_s: float) -> float:
        return float(lives.reserve_s(self.lifetime_s, typical_s, self.closing_s()))

    def _leaving_s(self, typical_s: float) -> float:
        return float(lives.leaving_s(self.lifetime_s, typical_s, self.closing_s()))
