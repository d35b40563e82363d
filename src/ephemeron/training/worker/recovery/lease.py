"""The right of one attempt to act for its rank. Pure: what is read from the channel is an argument.

An attempt holds the lease until a newer attempt of its rank is claimed by another party, the run is over, or it has
passed the lease on itself. `fencing` has the claims in the channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ephemeron.training.worker.recovery.fencing import Claim

Exit = Literal["finished", "relayed", "stopped", "duplicate", "fenced", "left", "released"]
"""Outcome of an invocation: the run is over; its successor goes on; the run was stopped at a checkpoint; another invocation
is the same attempt; a newer attempt has been claimed; the next generation goes on without this invocation."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """Lease of one attempt."""

    rank: int
    attempt: int
    tries: int
    """Replacements in a row, by peers, that led to this attempt."""
    has_successor: bool = False
    """Whether this attempt has claimed and invoked the next one."""
    passed_on: bool = False
    """Whether it has ended in the middle of an iteration, in favour of its successor."""

    @property
    def fencing_attempt(self) -> int:
        """First attempt whose claim, being another party's, supersedes this attempt."""
        return self.attempt + (2 if self.has_successor else 1)

    def claim_for_successor(self, run_s: float, *, not_after: int | None = None) -> Claim:
        """Claim of the next attempt.

        Args:
            run_s: seconds of the run.
            not_after: see `Claim`.
        """
        return Claim(at_s=run_s, not_after=not_after, tries=self.tries)

    def exit_after_timeout(self, *, fenced: bool, finished: bool, stopped: bool) -> Exit | None:
        """Outcome when a peer is late; None: this attempt still holds the lease.

        Args:
            fenced: a claim of `fencing_attempt` exists.
            finished: the run's result exists.
            stopped: the user has asked to stop.
        """
        return "fenced" if fenced else "finished" if finished else "stopped" if stopped else None

    def pass_on(self) -> bool:
        """Marks the lease as passed on; False where it was so already, by another wait that ended at the same time."""
        first, self.passed_on = not self.passed_on, True
        return first
