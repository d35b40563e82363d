"""Samplers to compare `Coupled` with, and the adapter that experiments use. No product path imports them.

    Independent, CoorDL         whole epochs, drawn beforehand (Independent: PyTorch's)
    Joader                      dependent sampling, one sample at a time
    IntersectionTree, DynaGCS   as published
    Forecast                    turns the draws of any sampler into events for a cache of `ephemeron.data.cache`

`benchmarks/sampling.py` and `benchmarks/sharing.py` measure them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.data.cache.events import Announced, Event, Joined, Left, Likely
from ephemeron.data.sampling.job_state import JobState, Mask
from ephemeron.data.sampling.sampler import CollaborativeSampler, SharedBatch, epoch_words
from ephemeron.data.shuffle import Indices
from ephemeron.data.stored import document, restore
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeState:
    """The tree of `DynaGCS`, as it is stored."""

    levels: Sequence[Sequence[Sequence[str]]]


class DynaGCS(CollaborativeSampler):
    """Group sampling down an intersection tree, with a certain future (buffers) and a likely one (nodes passed).

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


# -- dynaGCS's intersection tree ----------------------------------------------------------------------------------


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
    """The nodes of each level. Which samples they stand for follows from what the jobs have left.

    DynaGCS's intersection tree: which sets of jobs are worth drawing for together (DPFlow section 3.4.4).

    Level l holds sets of l+1 jobs. There are 2^n sets, so each level keeps only the n of greatest contribution:

        c = |I| / Σ_j |S_j| · speed        (3-6)   I: samples that all jobs of the set have left; S_j: those that job j has left
        speed = exp(-sqrt(mean over jobs of ((v_j - v̄)/v̄)²))    (3-7)   1 if all are equally fast
    """

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


# -- joader's dependent sampling (NeurIPS 2022), from its published idea ------------------------------------------


class Joader(CollaborativeSampler):
    """Samples drawn one at a time for all jobs with room in their buffers, tied pairwise as far as uniformity allows.

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


# -- samplers that draw whole epochs beforehand -------------------------------------------------------------------


class _WholeEpochs(CollaborativeSampler):
    """Draws an epoch as soon as the first sample of the one `ahead` before it is taken.

    Both know all draws in advance, which suits a cache. They share differently: independent orders share the samples that a cache
    happens to hold, and need a large one; a common order shares all samples while jobs run in step, and none once one of them is a
    cache's length behind.
    """

    def __init__(self, *, seed: int, ahead: int = 0) -> None:
        super().__init__(seed=seed)
        if ahead < 0:
            raise JobError(f"ahead = {ahead} epochs of a sampler is below 0", remedy="use 0 or 1")
        self.ahead = ahead

    @abstractmethod
    def order(self, member: JobState, epoch: int) -> Indices:
        """The slots of an epoch of a job, in order."""

    def entered(self, member: JobState) -> None:
        self._fill(member)

    def draw(self, member: JobState, wanted: int) -> None:
        self._fill(member)

    def handed_out(self, member: JobState, slots: object) -> None:
        self._fill(member)

    def _fill(self, member: JobState) -> None:
        ends = member.epoch + 1 + self.ahead
        if member.epochs is not None:
            ends = min(ends, member.epochs)
        while member.drawn_epoch < ends:
            member.deal(self.order(member, member.drawn_epoch))


class Independent(_WholeEpochs):
    """Every job has its own uniformly random order in every epoch, as with PyTorch's random sampler.

    Args:
        seed: any integer.
        ahead: epochs that are drawn before they begin. 1 costs N numbers of memory per job, and tells a cache what follows
            this epoch, which is worth 3 points of hit rate (see `ephemeron.data.cache.nextuse`).
    """

    def order(self, member: JobState, epoch: int) -> Indices:
        words = epoch_words(member.size, seed=self.stream.seed, epoch=epoch, job=member.number + 1)
        return np.flatnonzero(member.owns)[np.argsort(words, kind="stable")]


class CoorDL(_WholeEpochs):
    """All jobs go through an epoch in the same uniformly random order (coordinated preparation, VLDB 2021).

    The original serves jobs in lockstep, all on one dataset. Here no job waits: a late or slow job uses the same order later.
    With different datasets the order is that of the common numbering, filtered.

    Args:
        seed: any integer.
        ahead: epochs that are drawn before they begin.
    """

    def order(self, member: JobState, epoch: int) -> Indices:
        words = epoch_words(int(member.indices[-1]) + 1, seed=self.stream.seed, epoch=epoch, job=0)
        return np.flatnonzero(member.owns)[np.argsort(words[member.indices], kind="stable")]


# -- from a sampler to a cache ------------------------------------------------------------------------------------


class Forecast:
    """Turns a sampler's draws into events for a cache, each draw once.

    forecast = Forecast(sampler)
        batch, news = forecast.take(job, now_s=clock())
        for event in news:
            cache.observe(event)
        for index in batch.indices.tolist():
            cache.lookup(job, index, now_s=clock())

    A sampler may draw for one job during a call of another. So with every `take` the new draws of all jobs are announced, the samples of
    the batch itself first. Likely futures change with every draw and can be as long as a dataset; they are renewed only now and then.

    Args:
        sampler: whose jobs to follow.
        likely_every: samples taken by any job between two renewals of the likely futures, as a part of all samples.
    """

    def __init__(self, sampler: CollaborativeSampler, *, likely_every: float = 1 / 64) -> None:
        self.sampler = sampler
        self.likely_every = likely_every
        self._announced: dict[str, tuple[int, int]] = {}
        self._hinted: set[str] = set()
        self._since_renewal = 0

    def take(self, job: str, count: int | None = None, *, now_s: float) -> tuple[SharedBatch, list[Event]]:
        """The sampler's next batch for a job, and the events that a cache needs before the batch is looked up.

        Raises:
            JobError: as from the sampler.
        """
        batch = self.sampler.take(job, count, now_s=now_s)
        return batch, self.news(batch)

    def news(self, batch: SharedBatch | None = None) -> list[Event]:
        """Events since the last call: jobs that left or joined, draws, likely samples.

        Args:
            batch: samples that were taken meanwhile, and that are not announced yet.
        """
        events: list[Event] = []
        here = {member.job: member.number for member in self.sampler.jobs}
        for job, (number, _) in list(self._announced.items()):
            if here.get(job) != number:
                del self._announced[job]
                self._hinted.discard(job)
                events.append(Left(job=job))
        for member in self.sampler.jobs:
            events += self._of(member, batch if batch is not None and batch.job == member.job else None)
        self._since_renewal += 0 if batch is None else len(batch.indices)
        if self._since_renewal >= self.likely_every * self.sampler.jobs.slots:
            self._since_renewal = 0
            for member in self.sampler.jobs:
                weights = self.sampler.likely(member)
                if weights or member.job in self._hinted:
                    events.append(Likely(job=member.job, weights=weights))
                    (self._hinted.add if weights else self._hinted.discard)(member.job)
        return events

    def _of(self, member: JobState, batch: SharedBatch | None) -> list[Event]:
        events: list[Event] = []
        just_taken = [] if batch is None else batch.indices.tolist()
        if member.job not in self._announced:
            self._announced[member.job] = (member.number, member.taken - len(just_taken))
            events.append(Joined(job=member.job, keys=frozenset(member.indices.tolist())))
        number, announced = self._announced[member.job]
        if member.drawn > announced:
            drawn = just_taken + self.sampler.future(member.job).certain.tolist()
            events.append(Announced(job=member.job, keys=drawn[announced - member.drawn :]))
            self._announced[member.job] = (number, member.drawn)
        return events


__all__ = ["CoorDL", "DynaGCS", "Forecast", "Independent", "IntersectionTree", "Joader", "contribution", "speed_similarity"]
