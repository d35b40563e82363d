"""DynaGCS's intersection tree: which sets of jobs are worth drawing for together (DPFlow section 3.4.4).

Level l holds sets of l+1 jobs. There are 2^n sets, so each level keeps only the n of greatest contribution:

    c = |I| / Σ_j |S_j| · speed        (3-6)   I: samples that all jobs of the set have left; S_j: those that job j has left
    speed = exp(-sqrt(mean over jobs of ((v_j - v̄)/v̄)²))    (3-7)   1 if all are equally fast
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from ephemeron.data.sampling.job_state import JobState, Mask

Node = frozenset[str]
"""The jobs of a node."""


def speed_similarity(rates: Collection[float]) -> float:
    """Similarity of the speeds of jobs, from 0 to 1 (equation 3-7).

    Args:
        rates: samples per second, each above 0, at least one.
    """
    mean = sum(rates) / len(rates)
    return math.exp(-math.sqrt(sum(((v - mean) / mean) ** 2 for v in rates) / len(rates)))


def intersection(members: Iterable[JobState]) -> Mask:
    """I: what all of these jobs have left, over slots."""
    first, *others = members
    mask = first.open.copy()
    for member in others:
        mask &= member.open
    return mask


def contribution(members: Sequence[JobState], rate: Callable[[JobState], float]) -> float:
    """Contribution of a set of jobs to sharing (equation 3-6); 0 if none of them has samples left."""
    left = sum(m.open_count for m in members)
    if not left:
        return 0.0
    shared = int(np.count_nonzero(intersection(members)))
    return shared / left * speed_similarity([rate(m) for m in members])


class IntersectionTree:
    """The nodes of each level. Which samples they stand for follows from what the jobs have left."""

    def __init__(self, levels: Iterable[Iterable[Iterable[str]]] = ()) -> None:
        self.levels: list[list[Node]] = [[frozenset(node) for node in level] for level in levels]

    def insert(self, member: JobState, members: Sequence[JobState], rate: Callable[[JobState], float]) -> None:
        """A job joins every node of every level; then each level is pruned to as many nodes as there are jobs.

        Args:
            member: who joins.
            members: all jobs, with this one.
            rate: samples per second of a job.
        """
        by_name = {m.job: m for m in members}
        joined = [[node | {member.job} for node in below] for below in [[frozenset[str]()], *self.levels]]
        self.levels = [[*(self.levels[level] if level < len(self.levels) else []), *new] for level, new in enumerate(joined)]
        width = len(self.levels[0])
        for level, nodes in enumerate(self.levels):
            worth = {node: contribution([by_name[job] for job in sorted(node)], rate) for node in nodes}
            self.levels[level] = sorted(nodes, key=lambda n: (-worth[n], sorted(n)))[:width]

    def remove(self, job: str) -> None:
        """A job leaves its nodes. What is left of them belongs one level lower; what is there already is dropped."""
        kept: list[dict[Node, None]] = [{} for _ in self.levels]
        for nodes in self.levels:
            for node in nodes:
                rest = node - {job}
                if rest:
                    kept[len(rest) - 1][rest] = None
        while kept and not kept[-1]:
            kept.pop()
        width = len(kept[0]) if kept else 0
        self.levels = [list(nodes)[:width] for nodes in kept]

    def downwards(self, job: str) -> Iterable[tuple[int, Node]]:
        """The nodes that a job is in, from the largest set to the job alone, with their levels."""
        for level in range(len(self.levels) - 1, -1, -1):
            for node in self.levels[level]:
                if job in node:
                    yield level, node
