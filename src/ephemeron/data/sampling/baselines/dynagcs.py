"""DynaGCS, dynamic grouped collaborative sampling, as published (DPFlow section 3.4.4, algorithm 3.11).

A job that runs out of samples becomes the main job of a round. The tree is descended from the largest set of jobs that it is in:
samples drawn from those that all jobs of a set have left go to the buffers of all of them. Where the text leaves a choice:

- A round draws one group of g samples for the main job (3-8), from the top of the tree, and goes down only for what
  is missing. Algorithm 3.11 draws g from *every* node on the way, but then most samples come from small sets and the
  overlap of 75 % that section 5.2.2 reports for equal jobs cannot be; and its text says "at most one group".
- All jobs of a node get its samples (line 16), also those whose buffers are full.

Measured (`benchmarks/sampling.py`), and the reason why `Coupled` exists: orders are uniform only where all jobs have the
same dataset and each epoch is looked at alone. With partly overlapping datasets, shared samples come first in every epoch. With
jobs that are out of phase, an epoch repeats the order of the last one, because what one job has left decides what
the other is given. And what is dealt to a slow job has left the cache by the time it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.data.sampling.baselines.tree import IntersectionTree, intersection
from ephemeron.data.sampling.job_state import JobState
from ephemeron.data.sampling.sampler import CollaborativeSampler
from ephemeron.data.stored import document, restore


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeState:
    """The tree of `DynaGCS`, as it is stored."""

    levels: Sequence[Sequence[Sequence[str]]]


class DynaGCS(CollaborativeSampler):
    """Group sampling down an intersection tree, with a certain future (buffers) and a likely one (nodes passed).

    Args:
        seed: any integer.
    """

    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.tree = IntersectionTree()

    def entered(self, member: JobState) -> None:
        self.tree.insert(member, list(self.jobs), self.jobs.rate)

    def departed(self, member: JobState) -> None:
        self.tree.remove(member.job)

    def draw(self, member: JobState, wanted: int) -> None:
        while len(member.queue) < wanted:
            self._round(member)

    def _round(self, main: JobState) -> None:
        missing = self.group_size(main)
        for _, node in list(self.tree.downwards(main.job)):
            members = [self.jobs[job] for job in sorted(node)]
            shared = np.flatnonzero(intersection(members))
            if not len(shared):
                continue
            slots = self.stream.shuffled(shared)[:missing]
            missing -= len(slots)
            drawn = [member for member in members if member.deal(slots)]
            for member in drawn:
                self._epoch_drawn(member)
            if not missing or main in drawn:
                return

    def group_size(self, main: JobState) -> int:
        """g: half of the smallest batch among jobs with room in their buffers, at least 1 (equation 3-8)."""
        ready = [m for m in self.jobs if m is main or len(m.queue) < m.batch]
        return max(1, min(m.batch // 2 for m in ready))

    def _epoch_drawn(self, member: JobState) -> None:
        """Removes a job from the tree, and inserts it again with all of its samples if another epoch follows."""
        self.tree.remove(member.job)
        if member.open_count:
            self.tree.insert(member, list(self.jobs), self.jobs.rate)

    def likely(self, member: JobState) -> Mapping[int, float]:
        """Samples left in the nodes of the job, with the weight level + 1 of the largest such node."""
        weights: dict[int, float] = {}
        for level, node in self.tree.downwards(member.job):
            shared = intersection(self.jobs[job] for job in node)
            for index in self.jobs.indices[shared].tolist():
                weights.setdefault(index, level + 1.0)
        return weights

    def extra_state(self) -> dict[str, object]:
        return document(TreeState(levels=[[sorted(node) for node in level] for level in self.tree.levels]))

    def load_extra_state(self, state: object) -> None:
        self.tree = IntersectionTree(restore(TreeState, state, where="sampler state: extra").levels)
