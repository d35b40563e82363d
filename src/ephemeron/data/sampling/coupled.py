"""Coupled sampling: as much sharing as exact uniformity permits. What DynaGCS becomes when its bias is mended.

**The promise.** In every epoch each job's order is uniform over all permutations of its dataset, and from its second epoch
on (or from `free_epochs`) also independent of all orders that it has seen before; for any datasets, phases and speeds of the other
jobs. Only the dependence *between* jobs is designed. Two ways of drawing keep it:

**Fair draws.** In a round every sample gets one random number u from [0, 1), and each job with room in its buffer takes those that
it has left with u < k/|R|, in the order of u: k on average, more for faster jobs, out of the |R| that it has left. For each
job alone that is a uniform subset of what it has left, in uniform order, given everything that happened before. Together it is
the best that such draws can do: a sample that two jobs have left is taken by the less eager one only if the more eager one
takes it too, so min(k/|R|, l/|S|) · |R ∩ S| samples are shared on average, and two draws with these chances cannot share more.
This is Joader's coupling, for groups, for any number of jobs at once, and in proportion to their speeds.

**Free draws.** In its first epoch a job has seen nothing that would tell its samples apart, so any rule that does not look at
the numbers of samples gives a uniform order. Then it takes first what others have loaded lately and it still needs, and for the
rest what most others need too. That is worth twice the overlap when jobs start at different times. Later it would not be
harmless: what a job has left is what the other was not given, and two jobs half an epoch apart would give each other the same
halves in the same order for ever (measured: rank correlation 0.9 between epochs). `free_epochs=None` accepts
that for the sake of overlap, 0 forgoes it.

Where datasets overlap partly, samples can be distinguished by the jobs that use them. So the union of all datasets is cut into parts
that belong to the same jobs, and how many samples a free draw takes from each part is drawn fairly. Parts are only ever cut
finer: what was loaded by a job that has left would otherwise be preferred by those that stay.

A job that leaves and joins again under any name counts as new. Costs: a round of fair draws O(N) (8 ms for a million samples
and four jobs, for half of a batch each), a free draw O(window + 1024). Four jobs of 1,000 samples: 2 to 4 µs per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ephemeron.data.sampling.job_state import JobState
from ephemeron.data.sampling.sampler import CollaborativeSampler
from ephemeron.data.shuffle import Indices
from ephemeron.data.stored import document, restore
from ephemeron.errors import JobError

CHOICE = 1024
"""Samples among which a free draw looks for the most wanted ones, if there are many more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledState:
    """State of `Coupled` beside its jobs, as it is stored."""

    window: int
    free_epochs: int | None
    recent: Sequence[int]
    parts: Sequence[int]


class Coupled(CollaborativeSampler):
    """Draws that are uniform for every job and as common to all as they can be.

    Args:
        seed: any integer.
        window: samples that can be counted on to be still cached after they were loaded: the cache's capacity in
            samples. It bounds how far ahead jobs draw, and what free draws choose from.
        free_epochs: epochs of a job that are drawn freely, usually 1; None for all of them: more overlap, and orders
            that repeat themselves.

    Raises:
        JobError: the window is below 1, or `free_epochs` below 0.
    """

    def __init__(self, *, seed: int, window: int, free_epochs: int | None = 1) -> None:
        super().__init__(seed=seed)
        if window < 1:
            raise JobError(f"window = {window} samples of a sampler is below 1", remedy="use the cache's capacity in samples")
        if free_epochs is not None and free_epochs < 0:
            raise JobError(f"free_epochs = {free_epochs} is below 0", remedy="use 0, 1 or None")
        self.window = window
        self.free_epochs = free_epochs
        self._recent: dict[int, None] = {}  # samples, not slots: those are renumbered
        self._parts: Indices = np.zeros(0, dtype=np.intp)
        self._parted: Indices = np.zeros(0, dtype=np.intp)  # the samples that have parts, ascending

    def draws_freely(self, member: JobState) -> bool:
        """Whether the epoch that is being drawn for a job is one of its free ones."""
        return self.free_epochs is None or member.drawn_epoch < self.free_epochs

    def entered(self, member: JobState) -> None:
        """Divides every part: samples of the new job, and the rest. Samples that no job had before are parts 0 and 1."""
        parts = np.zeros(self.jobs.slots, dtype=np.intp)
        known = np.isin(self.jobs.indices, self._parted, assume_unique=True)
        parts[known] = 1 + self._parts[np.searchsorted(self._parted, self.jobs.indices[known])]
        self._parts = np.unique(2 * parts + member.owns, return_inverse=True)[1].astype(np.intp)
        self._parted = self.jobs.indices

    def departed(self, member: JobState) -> None:
        if not len(self.jobs):
            self._recent.clear()
            self._parts = self._parted = np.zeros(0, dtype=np.intp)

    def draw(self, member: JobState, wanted: int) -> None:
        while len(member.queue) < wanted:
            if self.draws_freely(member):
                self._draw_freely(member, wanted - len(member.queue))
            else:
                self._draw_fairly(member, wanted - len(member.queue))

    def room(self, member: JobState) -> int:
        """Samples that may be drawn ahead for a job that does not need them yet."""
        return max(member.batch, self.window // 4) - len(member.queue)

    # -- fair -----------------------------------------------------------------------------------------------------

    def _draw_fairly(self, main: JobState, wanted: int) -> None:
        words = self.stream.words(self.jobs.slots)
        for member, size in self._group_sizes(main, wanted).items():
            slots = np.flatnonzero(member.open)
            if size < member.open_count:
                slots = slots[words[slots] < np.uint64(int(size / member.open_count * 2**64))]
            if len(slots):
                member.deal(slots[np.argsort(words[slots], kind="stable")])

    def _group_sizes(self, main: JobState, wanted: int) -> dict[JobState, float]:
        """Samples that each job draws on average: half of the smallest batch (3-8) for the main one, others by their speeds."""
        others = [m for m in self.jobs if m is not main and m.open_count and not self.draws_freely(m) and self.room(m) > 0]
        size = min(wanted, max(1, min(m.batch // 2 for m in (main, *others))))
        rate = self.jobs.rate(main)
        return {main: float(size)} | {member: min(size * self.jobs.rate(member) / rate, float(self.room(member))) for member in others}

    # -- free -----------------------------------------------------------------------------------------------------

    def _draw_freely(self, member: JobState, wanted: int) -> None:
        wanted = min(wanted, member.open_count)
        parts = self._quotas(member, wanted)
        recent = np.searchsorted(self.jobs.indices, np.fromiter(self._recent, dtype=np.intp, count=len(self._recent)))
        recent = recent[member.open[recent]]
        chosen = self._best(recent[np.argsort(self._wanted_by_others(recent, member), kind="stable")], parts)
        if len(chosen) < wanted:
            chosen = np.concatenate([chosen, self._fresh(member, chosen, parts)])
        member.deal(self.stream.shuffled(chosen))

    def _quotas(self, member: JobState, wanted: int) -> dict[int, int]:
        """Number of samples to draw from each part of the dataset that belongs to the same jobs, as in a fair draw."""
        parts = self._parts[member.open]
        if (parts == parts[0]).all():
            return {int(parts[0]): wanted}
        drawn = self.stream.shuffled(parts)[:wanted]
        kinds, counts = np.unique(drawn, return_counts=True)
        return dict(zip(kinds.tolist(), counts.tolist(), strict=True))

    def _best(self, candidates: Indices, quotas: dict[int, int]) -> Indices:
        """The first candidates that the quotas have room for; reduces the quotas by them."""
        found: list[int] = []
        for slot, part in zip(candidates.tolist(), self._parts[candidates].tolist(), strict=True):
            if quotas.get(part, 0):
                quotas[part] -= 1
                found.append(slot)
        return np.array(found, dtype=np.intp)

    def _fresh(self, member: JobState, chosen: Indices, quotas: dict[int, int]) -> Indices:
        """Samples that were not loaded lately, those first that most other jobs need too; among equals in random order."""
        wanted = sum(quotas.values())
        taken = np.zeros(self.jobs.slots, dtype=bool)
        taken[chosen] = True
        first = max(CHOICE, 16 * wanted) * self.jobs.slots // member.open_count
        for order in self.stream.prefixes(self.jobs.slots, first):
            open_now = order[member.open[order] & ~taken[order]]
            ranked = open_now[np.argsort(-self._wanted_by_others(open_now, member), kind="stable")]
            left = dict(quotas)
            found = self._best(ranked, left)
            if len(found) == wanted:
                return found
        raise AssertionError("quotas are of samples that the job has left")

    def _wanted_by_others(self, slots: Indices, member: JobState) -> npt.NDArray[np.int64]:
        """Number of other jobs that have each of these slots left."""
        wanted = np.zeros(len(slots), dtype=np.int64)
        for other in self.jobs:
            if other is not member:
                wanted += other.open[slots]
        return wanted

    # -- what was loaded lately ---------------------------------------------------------------------------------------

    def handed_out(self, member: JobState, slots: Sequence[int]) -> None:
        """Stores the samples that a free draw may take next, also for jobs that join later. Those that fewest need go first."""
        for index in self.jobs.indices[slots].tolist():
            self._recent.setdefault(index)
        excess = len(self._recent) - self.window
        if excess <= 0:
            return
        recent = np.fromiter(self._recent, dtype=np.intp, count=len(self._recent))
        at = np.searchsorted(self.jobs.indices, recent)
        wanted = np.zeros(len(at), dtype=np.int64)
        for other in self.jobs:
            if self.draws_freely(other):
                wanted += other.open[at]
        keep = np.ones(len(recent), dtype=bool)
        keep[np.argsort(wanted, kind="stable")[:excess]] = False
        self._recent = dict.fromkeys(recent[keep].tolist())

    def likely(self, member: JobState) -> Mapping[int, float]:
        """For a job that draws freely: samples that were loaded lately and that it still needs. Fair draws have none."""
        if not self.draws_freely(member) or not self._recent:
            return {}
        recent = np.fromiter(self._recent, dtype=np.intp, count=len(self._recent))
        still = member.open[np.searchsorted(self.jobs.indices, recent)]
        return dict.fromkeys(recent[still].tolist(), 1.0)

    def extra_state(self) -> dict[str, object]:
        return document(
            CoupledState(window=self.window, free_epochs=self.free_epochs, recent=list(self._recent), parts=self._parts.tolist())
        )

    def load_extra_state(self, state: object) -> None:
        found = restore(CoupledState, state, where="sampler state: extra")
        self.window, self.free_epochs = found.window, found.free_epochs
        self._recent = dict.fromkeys(found.recent)
        self._parts = np.array(found.parts, dtype=np.intp)
        self._parted = self.jobs.indices
