"""Coupled sampling: as much sharing as exact uniformity permits; DynaGCS without its bias.

**Guarantee.** In every epoch each job's order is uniform over all permutations of its dataset, and from its second
epoch on (or from `free_epochs`) also independent of all orders that it has seen before, for any datasets, phases and
speeds of the other jobs. Only the dependence *between* jobs is designed. Two kinds of draws keep the guarantee:

**Fair draws.** In a round every sample gets one random number u from [0, 1), and each job with room in its buffer takes
those of its |R| remaining samples with u < k/|R|, in the order of u: k on average, more for faster jobs. For each job
alone that is a uniform subset of its remaining samples, in uniform order, given everything that happened before. Jointly
it is optimal among such draws: of the samples that two jobs have left, the less eager job takes only those that the
more eager one takes too, so min(k/|R|, l/|S|) · |R ∩ S| samples are shared on average, and two draws with these
probabilities cannot share more. This is Joader's coupling, for groups, for any number of jobs at once, and in
proportion to their speeds.

**Free draws.** In its first epoch a job has seen nothing that would distinguish its samples, so any rule that ignores
the indices of samples gives a uniform order. Then it first takes samples that others have loaded recently and it still
needs, then those that most other jobs need too. That doubles the overlap when jobs start at different times. In later
epochs it would introduce a bias: the remaining samples of a job are those that the other was not given, and two jobs
half an epoch apart would give each other the same halves in the same order for ever (measured: rank correlation 0.9
between epochs). `free_epochs=None` accepts that in exchange for overlap, 0 avoids it altogether.

Where datasets overlap partly, samples can be distinguished by the jobs that have them. So the union of all datasets is
cut into parts that belong to the same jobs, and the number of samples that a free draw takes from each part is drawn
fairly. Parts are only ever cut finer: otherwise samples loaded by a job that has left would be preferred by the
remaining jobs.

A job that leaves and joins again under any name counts as new. Costs: a round of fair draws O(N) (8 ms for a million samples
and four jobs, for half of a batch each), a free draw O(window + 1024). Four jobs of 1,000 samples: 2 to 4 µs per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.data.sampling.job_state import JobState
from ephemeron.data.sampling.sampler import CollaborativeSampler
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError

CHOICE = 1024
"""Number of samples among which a free draw looks for the most wanted ones."""


class Coupled(CollaborativeSampler):
    """Draws that are uniform for every job and coincide among jobs as often as possible.

    Args:
        seed: any integer.
        window: capacity of the cache in samples: that many loaded samples can be assumed to be still cached.
            It bounds how far ahead jobs draw, and the choice of free draws.
        free_epochs: number of first epochs of a job that are drawn freely, usually 1; None for all of them: more
            overlap, and orders that repeat.

    Raises:
        JobError: the window is below 1, or `free_epochs` below 0.
    """

    def __init__(self, *, seed: int, window: int, free_epochs: int | None = 1) -> None:
        super().__init__(seed=seed)
        if window < 1:
            raise JobError(
                f"window = {window} samples of a sampler is below 1", remedy="use the cache's capacity in samples"
            )
        if free_epochs is not None and free_epochs < 0:
            raise JobError(f"free_epochs = {free_epochs} is below 0", remedy="use 0, 1 or None")
        self.window = window
        self.free_epochs = free_epochs
        self._recent: dict[int, None] = {}  # samples, not slots: those are renumbered
        self._parts: Indices = np.zeros(0, dtype=np.intp)
        self._parted: Indices = np.zeros(0, dtype=np.intp)  # the samples that have parts, ascending

    def draws_freely(self, member: JobState) -> bool:
        """True if the epoch that is being drawn for a job is drawn freely."""
        return self.free_epochs is None or member.drawn_epoch < self.free_epochs

    def entered(self, member: JobState) -> None:
        """Cuts every part in two: the new job's samples, and the rest. Samples that no job had are parts 0 and 1."""
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
        """Number of samples that may be drawn ahead for a job that does not need them yet."""
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
        """Mean draw of each job: half of the smallest batch (3-8) for the main one, proportional to speed for others."""
        others = [
            m for m in self.jobs
            if m is not main and m.open_count and not self.draws_freely(m) and self.room(m) > 0
        ]  # fmt: skip
        size = min(wanted, max(1, min(m.batch // 2 for m in (main, *others))))
        rate = self.jobs.rate(main)
        return {main: float(size)} | {
            member: min(size * self.jobs.rate(member) / rate, float(self.room(member))) for member in others
        }

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
        """Number of samples to draw from each part of the job's dataset, distributed as in a fair draw."""
        parts = self._parts[member.open]
        if (parts == parts[0]).all():
            return {int(parts[0]): wanted}
        drawn = self.stream.shuffled(parts)[:wanted]
        kinds, counts = np.unique(drawn, return_counts=True)
        return dict(zip(kinds.tolist(), counts.tolist(), strict=True))

    def _best(self, candidates: Indices, quotas: dict[int, int]) -> Indices:
        """The first candidates within the quotas; reduces the quotas by them."""
        found: list[int] = []
        for slot, part in zip(candidates.tolist(), self._parts[candidates].tolist(), strict=True):
            if quotas.get(part, 0):
                quotas[part] -= 1
                found.append(slot)
        return np.array(found, dtype=np.intp)

    def _fresh(self, member: JobState, chosen: Indices, quotas: dict[int, int]) -> Indices:
        """Samples not loaded recently, those that most other jobs need first; random order among equals."""
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

    # -- recently loaded samples --------------------------------------------------------------------------------------

    def handed_out(self, member: JobState, slots: Sequence[int]) -> None:
        """Remembers loaded samples for free draws, also of jobs that join later. The least needed go first."""
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
        """For a job that draws freely: recently loaded samples that it still needs. Fair draws give no hints."""
        if not self.draws_freely(member) or not self._recent:
            return {}
        recent = np.fromiter(self._recent, dtype=np.intp, count=len(self._recent))
        still = member.open[np.searchsorted(self.jobs.indices, recent)]
        return dict.fromkeys(recent[still].tolist(), 1.0)

    def extra_state(self) -> dict[str, Any]:
        return {
            "window": self.window, "free_epochs": self.free_epochs, "recent": list(self._recent),
            "parts": self._parts.tolist(),
        }  # fmt: skip

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.window, self.free_epochs = state["window"], state["free_epochs"]
        self._recent = dict.fromkeys(state["recent"])
        self._parts = np.array(state["parts"], dtype=np.intp)
        self._parted = self.jobs.indices
