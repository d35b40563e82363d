"""Interface and guarantees of a sampler for many jobs, and the bookkeeping that ensures them for any algorithm.

    sampler.add_job("lr=0.1", range(50_000), batch=128, epochs=20)
    batch = sampler.take("lr=0.1", now_s=clock())          # never crosses the end of an epoch
    certain, likely = sampler.future("lr=0.1")             # for a cache

**Guarantees**, ensured here and not by each algorithm:

- In every epoch a job gets each sample of its dataset exactly once, even if jobs join, leave or differ in speed.
- No job waits for another: `take` always returns immediately with the requested number of samples, or the rest of the
  epoch. There is no barrier, so no job can starve.
- The same seed and the same calls in the same order give the same samples, on any machine. Clocks are arguments;
  they are part of the calls, because speeds affect what is shared.
- `state_dict` contains the whole state as plain numbers, strings and lists; a sampler that loads it continues exactly
there.

A sampler is free to choose the order within an epoch. `coupled` states how random its orders are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ephemeron.data.sampling.job_state import JobSet, JobState
from ephemeron.data.sampling.stream import CountedRandom
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatch:
    """Samples for one job to use next, in this order."""

    job: str
    epoch: int
    """The epoch they belong to, from 0; all of one epoch."""
    indices: Indices
    """Samples of the job's dataset, of shape (count,)."""


class Future(NamedTuple):
    """Known future samples of a job."""

    certain: Indices
    """Drawn and not taken yet, in order; may reach into the next epoch."""
    likely: Mapping[int, float]
    """Weights of samples that are not drawn yet, but may be soon: heavier ones are expected sooner."""


class CollaborativeSampler(ABC):
    """Draws samples for several jobs so that they can share what one of them has loaded.

    Subclasses define the draws. They may deal samples to any job at any time, as long as the requesting job has enough.

    Args:
        seed: any integer; with the order of calls it determines everything.
    """

    def __init__(self, *, seed: int) -> None:
        self.stream = CountedRandom(seed)
        self.jobs = JobSet()

    @abstractmethod
    def draw(self, member: JobState, wanted: int) -> None:
        """Deals samples until the job's queue holds `wanted`, which never exceeds what is left to it."""

    def entered(self, member: JobState) -> None:
        """A job has joined."""

    def departed(self, member: JobState) -> None:
        """A job has left."""

    def handed_out(self, member: JobState, slots: Sequence[int]) -> None:
        """A job has taken these slots."""

    def likely(self, member: JobState) -> Mapping[int, float]:
        """Weights of samples (not slots) that are not drawn yet."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """State of the algorithm besides jobs and stream."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `extra_state`, after jobs and stream were loaded."""

    def add_job(self, job: str, indices: Sequence[int] | Indices, *, batch: int, epochs: int | None = None) -> None:
        """A job joins.

        Args:
            job: its name.
            indices: its dataset; indices of samples, which are common to all jobs that share samples.
            batch: usual number of samples per `take`.
            epochs: number of epochs; None: until it leaves. A sampler that knows that another epoch
                follows can draw across its beginning.

        Raises:
            JobError: it has joined already, the dataset is empty or has an index twice or below 0, or a number is
                below 1.
        """
        own = np.sort(np.asarray(indices, dtype=np.intp))
        if job in self.jobs:
            raise JobError(f"job {job!r} joined sampling twice", remedy="remove it first, or give it another name")
        if not len(own):
            raise JobError(f"job {job!r} has an empty dataset", remedy="leave it out")
        if own[0] < 0 or (own[1:] == own[:-1]).any():
            raise JobError(
                f"dataset of job {job!r} names a sample below 0 or twice", remedy="use distinct numbers from 0"
            )
        if batch < 1 or (epochs is not None and epochs < 1):
            raise JobError(f"batch = {batch}, epochs = {epochs} of job {job!r}", remedy="use at least 1")
        member = JobState(job, self.jobs.joined, own, batch=batch, epochs=epochs)
        self.jobs.add(member)
        self.entered(member)

    def remove_job(self, job: str) -> None:
        """A job leaves, in the middle of an epoch or not.

        Raises:
            JobError: there is no such job.
        """
        self.departed(self.jobs.remove(job))

    def take(self, job: str, count: int | None = None, *, now_s: float) -> SharedBatch:
        """The next samples of a job.

        Args:
            job: name of the job.
            count: number of samples; None: its batch size. At the end of an epoch there may be fewer.
            now_s: the caller's clock in seconds, from which the job's speed is estimated.

        Returns:
            At least one sample, all of one epoch.

        Raises:
            JobError: there is no such job, its last epoch is over, or `count` is below 1.
        """
        member = self.jobs[job]
        if count is not None and count < 1:
            raise JobError(f"count = {count} samples for job {job!r}", remedy="take at least 1")
        if not member.left_to_take:
            raise JobError(f"job {job!r} has gone through its {member.epochs} epochs", remedy="remove it")
        wanted = min(member.batch if count is None else count, member.left_to_take)
        if len(member.queue) < wanted:
            self.draw(member, wanted)
        assert len(member.queue) >= wanted, "draw has to deal what is asked for"
        slots = [member.queue.popleft() for _ in range(wanted)]
        epoch = member.epoch
        member.taken += wanted
        member.rate_estimator.observe(now_s, wanted)
        self.handed_out(member, slots)
        return SharedBatch(job=job, epoch=epoch, indices=self.jobs.indices[slots])

    def future(self, job: str) -> Future:
        """Known future samples of a job, for a cache or a prefetcher.

        Raises:
            JobError: there is no such job.
        """
        member = self.jobs[job]
        return Future(self.jobs.indices[list(member.queue)], self.likely(member))

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as plain numbers, strings, lists and dicts."""
        return {
            "sampler": type(self).__name__,
            "seed": self.stream.seed,
            "calls": self.stream.calls,
            "jobs": self.jobs.state_dict(),
            "extra": self.extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of `state_dict`. The previous state is discarded.

        Raises:
            JobError: the state is that of another kind of sampler.
        """
        if state.get("sampler") != type(self).__name__:
            raise JobError(
                f"state of sampler {state.get('sampler')!r} cannot be loaded by {type(self).__name__}",
                remedy="resume with the sampler that the run began with",
            )
        self.stream = CountedRandom(state["seed"], state["calls"])
        self.jobs = JobSet.from_state(state["jobs"])
        self.load_extra_state(state["extra"])
