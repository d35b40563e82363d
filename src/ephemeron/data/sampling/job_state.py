"""One job of a sampler, and the set of them: the samples that each job still needs.

Samples are numbered densely over the union of the jobs' datasets (slots), so that what a job has left is one array of
booleans and an intersection is an `&`. A job that joins with new samples renumbers; that happens once per join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ephemeron.data.cache.access_forecast import RateEstimator, RateState, assumed_rate
from ephemeron.data.shuffle import Indices
from ephemeron.data.stored import restore
from ephemeron.errors import JobError

Mask = npt.NDArray[np.bool_]


class JobState:
    """A job: its samples, those that are not drawn yet, and those that are drawn and not taken yet."""

    __slots__ = ("batch", "drawn", "epochs", "indices", "job", "number", "open", "open_count", "owns", "queue", "rate_estimator", "taken")

    def __init__(self, job: str, number: int, indices: Indices, *, batch: int, epochs: int | None) -> None:
        self.job = job
        self.number = number
        """Number of jobs that joined before."""
        self.indices = indices
        """Its dataset, ascending."""
        self.batch = batch
        self.epochs = epochs
        """Number of its epochs; None: until it leaves."""
        self.taken = 0
        """Samples handed out over all epochs."""
        self.drawn = 0
        """Samples drawn over all epochs."""
        self.queue: deque[int] = deque()
        """Slots that are drawn and not taken, in order: its certain future."""
        self.rate_estimator = RateEstimator()
        self.owns: Mask = np.zeros(0, dtype=bool)
        """Its dataset, over slots."""
        self.open: Mask = np.zeros(0, dtype=bool)
        """Samples that are not drawn yet in the epoch that is being drawn, over slots."""
        self.open_count = 0

    @property
    def size(self) -> int:
        """N: samples per epoch."""
        return len(self.indices)

    @property
    def epoch(self) -> int:
        """The epoch from which samples are being taken, from 0."""
        return self.taken // self.size

    @property
    def drawn_epoch(self) -> int:
        """The epoch that is being drawn, from 0."""
        return self.drawn // self.size

    @property
    def left_to_take(self) -> int:
        """Samples of its present epoch that it has not taken; 0 after its last epoch."""
        if self.epochs is not None and self.epoch >= self.epochs:
            return 0
        return self.size - self.taken % self.size

    def deal(self, slots: Indices) -> bool:
        """Appends drawn slots to the queue.

        Returns:
            Whether the epoch is drawn completely; if there is a next one, everything is open again.
        """
        assert self.open[slots].all(), "each sample once per epoch"
        self.open[slots] = False
        self.open_count -= len(slots)
        self.drawn += len(slots)
        self.queue.extend(slots.tolist())
        if self.open_count:
            return False
        if self.epochs is None or self.drawn_epoch < self.epochs:
            self.open = self.owns.copy()
            self.open_count = self.size
        return True


class JobSet:
    """The jobs of a sampler by name, in the order in which they joined, over one numbering of samples."""

    def __init__(self) -> None:
        self._members: dict[str, JobState] = {}
        self.joined = 0
        self.indices: Indices = np.zeros(0, dtype=np.intp)
        """The sample of each slot, ascending."""

    def __iter__(self) -> Iterator[JobState]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, job: str) -> bool:
        return job in self._members

    def __getitem__(self, job: str) -> JobState:
        try:
            return self._members[job]
        except KeyError:
            raise JobError(f"no job {job!r} takes part in sampling", remedy="add it first") from None

    @property
    def slots(self) -> int:
        """Samples in the union of all datasets."""
        return len(self.indices)

    def add(self, member: JobState) -> None:
        """Adds a job; slots are renumbered if it has samples that no other job has."""
        self._members[member.job] = member
        self.joined = max(self.joined, member.number + 1)
        if not np.isin(member.indices, self.indices, assume_unique=True).all():
            self._renumber(np.union1d(self.indices, member.indices))
        member.owns = self._mask(member.indices)
        member.open = member.owns.copy()
        member.open_count = member.size

    def remove(self, job: str) -> JobState:
        """Removes a job. The numbering stays until no job is left: it costs less to keep than to change."""
        member = self[job]
        del self._members[job]
        if not self._members:
            self.indices = np.zeros(0, dtype=np.intp)
        return member

    def rate(self, member: JobState) -> float:
        """Samples per second, or the others' mean while the job has none (DPFlow section 3.4.4)."""
        return assumed_rate(member.rate_estimator, (other.rate_estimator for other in self))

    def _mask(self, indices: Indices) -> Mask:
        mask = np.zeros(len(self.indices), dtype=bool)
        mask[np.searchsorted(self.indices, indices)] = True
        return mask

    def _renumber(self, indices: Indices) -> None:
        old, self.indices = self.indices, indices
        for member in self:
            if len(member.owns):
                member.open = self._mask(old[member.open])
                member.owns = self._mask(member.indices)
                member.queue = deque(np.searchsorted(indices, old[list(member.queue)]).tolist())

    def state(self) -> JobSetState:
        """The whole state."""
        return JobSetState(
            joined=self.joined,
            indices=self.indices.tolist(),
            members=[
                SavedJob(
                    job=m.job,
                    number=m.number,
                    indices=m.indices.tolist(),
                    batch=m.batch,
                    epochs=m.epochs,
                    taken=m.taken,
                    drawn=m.drawn,
                    queue=list(m.queue),
                    open=np.flatnonzero(m.open).tolist(),
                    pace=m.rate_estimator.state(),
                )
                for m in self
            ],
        )

    @classmethod
    def from_state(cls, state: JobSetState) -> JobSet:
        """The inverse of `state`."""
        jobs = cls()
        jobs.joined = state.joined
        jobs.indices = np.array(state.indices, dtype=np.intp)
        for saved in state.members:
            indices = np.array(saved.indices, dtype=np.intp)
            member = JobState(saved.job, saved.number, indices, batch=saved.batch, epochs=saved.epochs)
            member.taken, member.drawn = saved.taken, saved.drawn
            member.queue = deque(saved.queue)
            member.rate_estimator = RateEstimator.from_state(saved.pace)
            member.owns = jobs._mask(indices)
            member.open = np.zeros(jobs.slots, dtype=bool)
            member.open[np.array(saved.open, dtype=np.intp)] = True
            member.open_count = len(saved.open)
            jobs._members[member.job] = member
        return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob:
    """State of one job, as it is stored."""

    job: str
    number: int
    indices: Sequence[int]
    batch: int
    epochs: int | None
    taken: int
    drawn: int
    queue: Sequence[int]
    open: Sequence[int]
    """Slots that have not been drawn in the present epoch."""
    pace: RateState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetState:
    """State of a `JobSet`, as it is stored."""

    joined: int
    indices: Sequence[int]
    members: Sequence[SavedJob]

    @classmethod
    def read(cls, raw: object) -> JobSetState:
        """The inverse of `dataclasses.asdict`.

        Raises:
            JobError: a key is unknown or missing.
        """
        found = restore(cls, raw, where="sampler state: jobs")
        members = []
        for each in found.members:
            saved = restore(SavedJob, each, where="sampler state: job")
            pace = restore(RateState, saved.pace, where=f"sampler state: job {saved.job}: pace")
            members.append(replace(saved, pace=pace))
        return replace(found, members=members)
