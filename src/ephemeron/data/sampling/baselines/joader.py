"""Joader's dependent sampling (NeurIPS 2022), from its published idea.

Jobs draw one sample each at the same moment. Each draw has to be uniform over what that job has left, but the draws of
different jobs need not be independent: for two jobs with remaining sets R ⊇ or ∩ S, |R| ≥ |S|, the same sample can serve both
with probability at most |R ∩ S| / |R|, and that bound is reached by drawing x uniformly from R, giving it to the second
job too if it is in S, and otherwise drawing for that job from S with the probabilities that are left over,
1/|S| - [z ∈ R]/|R|. For more jobs, the one with most left draws first and each is tied to the one before it.

Given everything that happened before, every draw of every job is uniform over what it has left. So orders are exactly
uniform permutations, independent between the epochs of a job, also over datasets that overlap only partly.

Jobs draw together while their buffers are not full (one batch). A faster job draws more often, hence partly alone: that
is what the method loses to unequal speeds.
"""

from __future__ import annotations

import numpy as np

from ephemeron.data.sampling.job_state import JobState
from ephemeron.data.sampling.sampler import CollaborativeSampler


class Joader(CollaborativeSampler):
    """Samples drawn one at a time for all jobs with room in their buffers, tied pairwise as far as uniformity allows."""

    def draw(self, member: JobState, wanted: int) -> None:
        rounds = wanted - len(member.queue)
        for words in self.stream.words(rounds * len(self.jobs)).reshape(rounds, -1).tolist():
            ready = [m for m in self.jobs if m.open_count and (m is member or len(m.queue) < m.batch)]
            self._round(sorted(ready, key=lambda m: (-m.open_count, m.number)), words)

    def _round(self, members: list[JobState], words: list[int]) -> None:
        dealt: list[int] = []
        before: JobState | None = None
        for member, word in zip(members, words, strict=False):
            if before is not None and member.open[dealt[-1]]:
                dealt.append(dealt[-1])
            elif before is None or not (before.open & member.open).any():
                slots = np.flatnonzero(member.open)
                dealt.append(int(slots[word % len(slots)]))
            else:
                dealt.append(self._left_over(member, before, word))
            before = member
        for member, slot in zip(members, dealt, strict=True):
            member.deal(np.array([slot]))

    def _left_over(self, member: JobState, before: JobState, word: int) -> int:
        """A slot of `member` with probability in proportion to 1/|S| - [z in R]/|R|, which is whole times 1/(|R||S|)."""
        shared = member.open & before.open
        own = np.flatnonzero(member.open & ~before.open)
        common = np.flatnonzero(shared)
        gap = before.open_count - member.open_count
        at = word % (len(own) * before.open_count + len(common) * gap)
        if at < len(own) * before.open_count:
            return int(own[at // before.open_count])
        return int(common[(at - len(own) * before.open_count) // gap])
