"""The port of samplers for several jobs, and the bookkeeping that guarantees its promises for every algorithm.

    sampler.add_job("lr=0.1", range(50_000), batch=128, epochs=20)
    batch = sampler.take("lr=0.1", now_s=clock())          # never crosses the end of an epoch
    certain, likely = sampler.future("lr=0.1")             # for a cache

**Guarantees**, implemented here and not by each algorithm:

- In every epoch a job gets each sample of its dataset exactly once, whichever jobs join, leave, are fast or slow.
- No job waits for another: `take` returns at once as many samples as were requested, or the rest of the epoch. There is no
  barrier, so no job can starve.
- The same seed and the same calls in the same order give the same samples, on any machine. Clocks are arguments;
  they are part of the calls, because speeds steer what is shared.
- `state_dict` is the whole state as plain numbers, strings and lists; a sampler that loads it continues exactly there.

A sampler chooses the order within an epoch. How random that order is, each algorithm documents; see `coupled`.

Random numbers that are counted, not carried: the n-th call gives the same on every machine and NumPy.

As in `ephemeron.data.shuffle`, numbers are Philox's raw words (`Generator` may change between versions, NEP 19), the key
is seed and purpose, and the counter says which call. A stream's whole state is the number of calls so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ephemeron.data.sampling.job_state import JobSet, JobSetState, JobState
from ephemeron.data.shuffle import Indices
from ephemeron.data.stored import document, restore
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
    """Forecast of the samples that a job will get."""

    certain: Indices
    """Drawn and not taken yet, in order; may reach into the next epoch."""
    likely: Mapping[int, float]
    """Weights of samples that are not drawn, but may be soon: the heavier, the sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """State of a sampler, as it is stored."""

    sampler: str
    """Name of its class."""
    seed: int
    calls: int
    jobs: JobSetState
    extra: object
    """State of the algorithm."""


class CollaborativeSampler(ABC):
    """Draws samples for several jobs so that they can share loaded samples.

    Subclasses implement the draw. They may give samples to any job at any time, as long as the calling job has enough.

    Args:
        seed: any integer; with the order of calls it determines all draws.
    """

    def __init__(self, *, seed: int) -> None:
        self.stream = CountedRandom(seed)
        self.jobs = JobSet()

    @abstractmethod
    def draw(self, member: JobState, wanted: int) -> None:
        """Draws samples until the job's queue holds `wanted`, which is at most the rest of its epoch."""

    def entered(self, member: JobState) -> None:
        """Called after a job has joined."""

    def departed(self, member: JobState) -> None:
        """Called after a job has left."""

    def handed_out(self, member: JobState, slots: Sequence[int]) -> None:
        """Called after a job has taken these slots."""

    def likely(self, member: JobState) -> Mapping[int, float]:
        """Weights of samples (not slots) that are not drawn yet."""
        return {}

    def extra_state(self) -> dict[str, object]:
        """State of the algorithm beside jobs and stream, as JSON."""
        return {}

    def load_extra_state(self, state: object) -> None:
        """The inverse of `extra_state`; called after jobs and stream were loaded."""

    def add_job(self, job: str, indices: Sequence[int] | Indices, *, batch: int, epochs: int | None = None) -> None:
        """Adds a job.

        Args:
            job: its name.
            indices: its dataset; numbers of samples, which jobs that share samples have in common.
            batch: samples that it usually takes at a time.
            epochs: how many epochs it will go through; None: until it leaves. A sampler that knows that another epoch
                follows can draw across its beginning.

        Raises:
            JobError: it takes part already, the dataset is empty or names a sample twice or below 0, or a number is
                below 1.
        """
        own = np.sort(np.asarray(indices, dtype=np.intp))
        if job in self.jobs:
            raise JobError(f"job {job!r} joined sampling twice", remedy="remove it first, or give it another name")
        if not len(own):
            raise JobError(f"job {job!r} has an empty dataset", remedy="leave it out")
        if own[0] < 0 or (own[1:] == own[:-1]).any():
            raise JobError(f"dataset of job {job!r} names a sample below 0 or twice", remedy="use distinct numbers from 0")
        if batch < 1 or (epochs is not None and epochs < 1):
            raise JobError(f"batch = {batch}, epochs = {epochs} of job {job!r}", remedy="use at least 1")
        member = JobState(job, self.jobs.joined, own, batch=batch, epochs=epochs)
        self.jobs.add(member)
        self.entered(member)

    def remove_job(self, job: str) -> None:
        """Removes a job, also in the middle of an epoch.

        Raises:
            JobError: there is no such job.
        """
        self.departed(self.jobs.remove(job))

    def take(self, job: str, count: int | None = None, *, now_s: float) -> SharedBatch:
        """The next samples of a job.

        Args:
            job: its name.
            count: samples; None: its batch size. At the end of an epoch there may be fewer.
            now_s: time on the caller's clock, from which the job's speed is estimated.

        Returns:
            At least one sample, all of one epoch.

        Raises:
            JobError: there is no such job, it has gone through all its epochs, or `count` is below 1.
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
        """Forecast of the samples that a job will get, for a cache or a prefetcher.

        Raises:
            JobError: there is no such job.
        """
        member = self.jobs[job]
        return Future(self.jobs.indices[list(member.queue)], self.likely(member))

    def state_dict(self) -> dict[str, object]:
        """The whole state, as plain numbers, strings, lists and dicts."""
        return document(
            SamplerState(
                sampler=type(self).__name__,
                seed=self.stream.seed,
                calls=self.stream.calls,
                jobs=self.jobs.state(),
                extra=self.extra_state(),
            )
        )

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues from a state of `state_dict`. The present state is discarded.

        Raises:
            JobError: the state is of another kind of sampler, or damaged.
        """
        if state.get("sampler") != type(self).__name__:
            raise JobError(
                f"state of sampler {state.get('sampler')!r} cannot be loaded by {type(self).__name__}",
                remedy="resume with the sampler that the run began with",
            )
        found = restore(SamplerState, state, where="sampler state")
        self.stream = CountedRandom(found.seed, found.calls)
        self.jobs = JobSet.from_state(JobSetState.read(found.jobs))
        self.load_extra_state(found.extra)


# -- random numbers that are counted ------------------------------------------------------------------------------


Words = npt.NDArray[np.uint64]

_WORD = 2**64
_PURPOSE = 64
"""Apart from the purposes of `ephemeron.data.shuffle`. Part of the results: never change it."""
_ROUNDS, _EPOCHS = 0, 1


class CountedRandom:
    """The draws of one sampler.

    Args:
        seed: any integer.
        calls: how many draws were made before.
    """

    __slots__ = ("calls", "seed")

    def __init__(self, seed: int, calls: int = 0) -> None:
        self.seed = seed
        self.calls = calls

    def words(self, count: int) -> Words:
        """Fresh 64-bit words. A longer answer to the same call would begin with the same words."""
        self.calls += 1
        return self._words(count, self.calls)

    def shuffled(self, values: Indices) -> Indices:
        """The same values in uniformly random order."""
        return values[np.argsort(self.words(len(values)), kind="stable")]

    def prefixes(self, count: int, first: int) -> Iterator[Indices]:
        """Ever longer beginnings of one uniformly random order of 0 … count-1, the last one whole.

        The first few of a million cost as much as a few. The reader may stop at any time: all prefixes are of one and the
        same order.

        Args:
            count: how many numbers there are.
            first: length from which the first beginning is made, at least 1.
        """
        self.calls += 2
        rest, block = self.calls - 1, self.calls
        drawn = max(first, 1)
        while 4 * drawn < count:
            words = self._words(drawn, block) % np.uint64(count)
            _, at = np.unique(words, return_index=True)
            yield words[np.sort(at)].astype(np.intp)
            drawn *= 4
        # What the next block adds is what has not come yet, in random order; and before any block, that is everything.
        drawn //= 4
        if drawn < max(first, 1):
            yield np.argsort(self._words(count, rest), kind="stable").astype(np.intp, copy=False)
            return
        words = self._words(drawn, block) % np.uint64(count)
        _, at = np.unique(words, return_index=True)
        begun = words[np.sort(at)].astype(np.intp)
        absent = np.ones(count, dtype=bool)
        absent[begun] = False
        others = np.flatnonzero(absent)
        yield np.concatenate([begun, others[np.argsort(self._words(len(others), rest), kind="stable")]])

    def _words(self, count: int, call: int) -> Words:
        return _raw(count, self.seed, _ROUNDS, call, 0)


def epoch_words(count: int, *, seed: int, epoch: int, job: int) -> Words:
    """Words for a whole epoch of one job, or of all jobs that call themselves the same. Needs no history."""
    return _raw(count, seed, _EPOCHS, epoch, job)


def _raw(count: int, seed: int, kind: int, first: int, second: int) -> Words:
    key = np.array([seed % _WORD, _PURPOSE + kind], dtype=np.uint64)
    counter = np.array([0, first, second, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)
