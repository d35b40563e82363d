"""Jobs that draw their samples together, so that one loads what the others use too (DPFlow sections 3.4.4 and 4.3.3).

The sampler (`Coupled`) decides which samples a job gets; `Delivery` decides which of its ranks gets which of them, and that each
comes once in an epoch. The order of an epoch is drawn as it is needed and kept until the epoch is over.

State survives the router: every call that changes something is appended to a journal before it is answered, and the same calls
give the same samples. From time to time the whole state is stored, and the journal begins anew.

A job that resumes names the samples of its epoch that it has used; the rest of that epoch is drawn at once, and from the next
epoch on it draws with the others again.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from ephemeron.config.typed import build
from ephemeron.data.sampling import Coupled
from ephemeron.data.scheduler import DeliveredBatch, Delivery, DeliveryRefused, EpochEnd, EpochPartition, Remainder
from ephemeron.data.scheduler.delivery import DeliveryState
from ephemeron.data.service.daemon import write_json
from ephemeron.data.service.messages import JoinReply, JoinRequest, MarkReply, MarkRequest, TraverseReply, TraverseRequest
from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.data.stored import document, restore
from ephemeron.errors import JobError

SNAPSHOT_EVERY = 20_000
"""Lines of the journal before the whole state is stored."""
BEGINNING_S = 60.0
"""Time within which ranks that do not agree count as ranks of one job, which is an error."""
FORGOTTEN_S = 3600.0
"""A job without readers is removed after so long."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The numbers in which the ranks of a job have to agree."""

    samples: int
    epoch: int
    consumed: str
    """Digest of the samples used before."""
    chosen: str
    """Digest of the view's samples."""
    batch: int
    world_size: int
    remainder: Remainder
    seed: int

    def same_view(self, other: _Terms) -> bool:
        """Whether both are of the same samples, from the same position on."""
        mine = (self.samples, self.epoch, self.consumed, self.chosen)
        return mine == (other.samples, other.epoch, other.consumed, other.chosen)


class _EpochJob:
    """One job's epochs.

    Args:
        base: the name that its readers use.
        terms: the numbers in which its ranks agree.
        indices: its samples.
        delivery: which rank gets which position.
        first: the epoch that is the sampler's epoch 0.
        begun_at: samples of the epoch before that had been used when the job was resumed in it.
    """

    def __init__(self, base: str, terms: _Terms, indices: Indices, delivery: Delivery, first: int, begun_at: int = 0) -> None:
        self.base, self.terms, self.indices, self.delivery = base, terms, indices, delivery
        self.first, self.begun_at = first, begun_at
        self.readers: dict[int, str] = {}
        """Reader of each rank."""
        self.orders: dict[int, list[int]] = {}
        self.seen_at = 0.0

    @property
    def oldest(self) -> int:
        """The epoch of its slowest rank."""
        return min(epoch for epoch, _ in self.delivery.state().at)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedJob:
    """State of a job, as it is stored."""

    base: str
    terms: _Terms
    readers: Mapping[str, str]
    indices: Sequence[int] | None
    """Samples of its view; None: all samples, in order."""
    samples: int
    delivery: Mapping[str, object]
    first: int
    begun_at: int
    orders: Mapping[str, list[int]]

    @classmethod
    def of(cls, job: _EpochJob) -> _SavedJob:
        """The state of a job."""
        whole = np.array_equal(job.indices, np.arange(len(job.indices)))
        return cls(
            base=job.base,
            terms=job.terms,
            readers={str(rank): reader for rank, reader in job.readers.items()},
            indices=None if whole else job.indices.tolist(),
            samples=len(job.indices),
            delivery=job.delivery.state_dict(),
            first=job.first,
            begun_at=job.begun_at,
            orders={str(epoch): order for epoch, order in job.orders.items()},
        )

    def restored(self) -> _EpochJob:
        """The inverse of `of`."""
        state = build(DeliveryState, self.delivery, where="journal: delivery")
        delivery = Delivery(samples=self.samples, batch=state.batch, world_size=len(state.at))
        delivery.load(state)
        indices = np.arange(self.samples) if self.indices is None else np.asarray(self.indices, dtype=np.intp)
        terms = restore(_Terms, self.terms, where="journal: terms")
        job = _EpochJob(self.base, terms, indices, delivery, self.first, self.begun_at)
        job.readers = {int(rank): reader for rank, reader in self.readers.items()}
        job.orders = {int(epoch): order for epoch, order in self.orders.items()}
        return job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """The whole state, as it is stored."""

    journal: int
    """Number of the journal that continues it."""
    joined: int
    sampler: Mapping[str, object]
    jobs: Mapping[str, Mapping[str, object]]


class SharedEpochs:
    """All jobs of a flow that draw together.

    Args:
        folder: for the journal; made when missing.
        window: samples that are likely to be still in memory after they were loaded.
        now: on the clock of all later calls.
        seed: of all draws.
    """

    def __init__(self, folder: Path, *, window: int, now: float, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._snapshot, self._number = folder, folder / "state.json", 0
        self._sampler = Coupled(seed=seed, window=window)
        self._jobs: dict[str, _EpochJob] = {}
        self._joined = self._lines = 0
        self._restore()
        for job in self._jobs.values():
            job.seen_at = now  # else jobs whose readers have not called yet would be removed
        self._log = self._journal.open("ab")

    @property
    def _journal(self) -> Path:
        return self._folder / f"journal-{self._number}.jsonl"

    def join(self, p: JoinRequest, chosen: list[int] | None, *, now: float) -> JoinReply:
        """Adds a rank that begins, or resumes from a state. Repeating the call changes nothing.

        Ranks that agree in all numbers read together. A rank that returns as another reader, as after a crash, begins anew, and
        the others, which return as well, join it: they are not bound by what was drawn before.

        Args:
            p: the rank and its numbers.
            chosen: its samples, where its view does not have all of them.
            now: on the caller's clock.

        Raises:
            JobError: a sample twice, a state of other samples, or ranks that do not agree.
        """
        self._check(p, chosen)
        terms = _Terms(
            samples=p.samples,
            epoch=p.epoch,
            consumed=_digest(p.consumed),
            chosen=_digest(json.dumps(chosen)),
            batch=p.batch,
            world_size=p.world_size,
            remainder=p.remainder,
            seed=p.seed,
        )
        name = self._find(p, terms, now)
        if name is None:
            name = f"{p.job}#{self._joined}"
            self._do("join", name, p.job, document(terms), p.consumed, chosen, now)
            _log.info("job %s draws samples together with %d others", name, len(self._jobs) - 1)
        found = self._jobs[name]
        if found.readers.get(p.rank) != p.reader:
            self._do("enter", name, p.rank, p.reader)
        found.seen_at = now
        return JoinReply(job=name)

    def _check(self, p: JoinRequest, chosen: list[int] | None) -> None:
        EpochPartition(count=p.samples, batch=p.batch, world_size=p.world_size, remainder=p.remainder)
        repeated = chosen is not None and (len(chosen) != p.samples or len(set(chosen)) != p.samples)
        if repeated or min(chosen or [0]) < 0:
            raise JobError(
                f"job {p.job}: a view that has a sample twice cannot be drawn with others",
                remedy="leave out repeated indices, or sampling = 'shared'",
            )
        if p.consumed and len(base64.b64decode(p.consumed)) != -(-p.samples // 8):
            raise JobError(
                f"job {p.job}: the state is not of {p.samples} samples", remedy="resume with the view that the state was saved with"
            )

    def _find(self, p: JoinRequest, terms: _Terms, now: float) -> str | None:
        """The job that a rank belongs to; None: it has not begun."""
        others = {name: found for name, found in self._jobs.items() if found.base == p.job}
        for name, found in others.items():
            if found.readers.get(p.rank) == p.reader:
                return name
        for name, found in reversed(others.items()):
            if p.rank in found.readers or not found.terms.same_view(terms):
                continue
            if found.terms == terms:
                return name
            if len(found.readers) < found.delivery.world_size and now - found.seen_at < BEGINNING_S:
                had = [found.terms.batch, found.terms.world_size, found.terms.remainder, found.terms.seed]
                says = [p.batch, p.world_size, p.remainder, p.seed]
                raise JobError(
                    f"job {p.job} reads with batch, world_size, remainder, seed = {had}, rank {p.rank} has {says}",
                    remedy="give each job a name of its own, and all its ranks the same numbers",
                )
        return None

    def request(self, p: TraverseRequest, *, now: float) -> TraverseReply:
        """Batches of a rank.

        Raises:
            JobError: no such job, or batches that it has had.
        """
        found = self._known(p.job)
        found.seen_at = now
        batches = []
        for number in range(p.sequence, p.sequence + p.count):
            answer = found.delivery.request(rank=p.rank, epoch=p.epoch, sequence=number, acked=p.acked, generation=0)
            if isinstance(answer, DeliveryRefused):
                raise JobError(f"job {p.job}: {answer.reason}", remedy="resume from a state instead")
            if isinstance(answer, EpochEnd):
                break
            batches.append(self._samples(p.job, found, answer, now))
        for old in [e for e in found.orders if e < found.oldest - 1]:
            del found.orders[old]
        return TraverseReply(batches=batches, left=found.delivery.batches(p.epoch))

    def mark(self, p: MarkRequest, *, now: float) -> MarkReply:
        """The samples that a job has used of an epoch once all its ranks have had so many batches: for its checkpoint.

        Raises:
            JobError: there is no such job, or all of its ranks have left the epoch.
        """
        found = self._known(p.job)
        found.seen_at = now
        if p.epoch < found.oldest:
            raise JobError(f"epoch {p.epoch} of job {p.job} is over", remedy="take the state before the next epoch begins")
        used = np.zeros(len(found.indices), dtype=bool)
        places = {int(index): place for place, index in enumerate(found.indices)}
        for rank in range(found.delivery.world_size):
            for number in range(p.steps):
                batch = found.delivery.batch(rank=rank, epoch=p.epoch, sequence=number)
                used[[places[index] for index in self._samples(p.job, found, batch, now)]] = True
        if p.epoch == found.first - 1:  # resumed in it before
            used[[places[index] for index in found.orders[p.epoch][: found.begun_at]]] = True
        return MarkReply(consumed=base64.b64encode(np.packbits(used).tobytes()).decode(), count=int(used.sum()))

    def remove_silent(self, *, alive: set[str], now: float) -> None:
        """Removes jobs whose readers have been silent for long.

        Args:
            alive: jobs, by the names that readers use, with a reader that is alive though it draws nothing.
            now: on the caller's clock.
        """
        for name, found in list(self._jobs.items()):
            if found.base in alive:
                found.seen_at = now
            elif now - found.seen_at > FORGOTTEN_S:
                _log.info("job %s is silent and is removed", name)
                self._do("leave", name)

    def _known(self, job: str) -> _EpochJob:
        if job not in self._jobs:
            raise JobError(f"no job {job!r} draws here any more", remedy="read again, from a state if there is one")
        return self._jobs[job]

    # -- drawing ------------------------------------------------------------------------------------------

    def _samples(self, job: str, found: _EpochJob, batch: DeliveredBatch, now: float) -> list[int]:
        if not batch.positions:
            return []
        highest = max(batch.positions)
        while len(order := found.orders.get(batch.epoch, [])) <= highest:
            if batch.epoch < found.first + self._sampler.jobs[job].epoch:
                raise JobError(f"epoch {batch.epoch} of job {job} is over", remedy="resume from a state instead")
            self._do("take", job, highest + 1 - len(order), now)
        return [order[position] for position in batch.positions]

    def _take(self, job: str, count: int, now: float) -> None:
        found = self._jobs[job]
        drawn = self._sampler.take(job, count, now_s=now)
        found.orders.setdefault(found.first + drawn.epoch, []).extend(int(i) for i in drawn.indices)

    def _join(self, job: str, base: str, terms: Mapping[str, object], consumed: str, chosen: list[int] | None, now: float) -> None:
        agreed = restore(_Terms, terms, where="journal: terms")
        samples, epoch = agreed.samples, agreed.epoch
        indices = np.arange(samples) if chosen is None else np.asarray(chosen, dtype=np.intp)
        delivery = Delivery(samples=samples, batch=agreed.batch, world_size=agreed.world_size, remainder=agreed.remainder)
        found = _EpochJob(base, agreed, indices, delivery, epoch)
        if consumed:
            used = np.unpackbits(np.frombuffer(base64.b64decode(consumed), np.uint8), count=samples).astype(bool)
            rest = indices[~used]
            order = permutation(len(rest), seed=agreed.seed, purpose=Purpose.EPOCH, epoch=epoch)
            found.orders[epoch] = [*indices[used].tolist(), *rest[order].tolist()]
            found.first, found.begun_at = epoch + 1, int(used.sum())
            left: dict[str, tuple[tuple[int, int], ...]] = {str(epoch): ((found.begun_at, samples),)}
            delivery.load(replace(delivery.state(), at=((epoch, 0),) * agreed.world_size, left=left))
        found.seen_at = now
        self._jobs[job] = found
        self._joined += 1
        if samples:
            self._sampler.add_job(job, indices, batch=max(1, agreed.batch * agreed.world_size))

    def _enter(self, job: str, rank: int, reader: str) -> None:
        self._jobs[job].readers[rank] = reader

    def _leave(self, job: str) -> None:
        found = self._jobs.pop(job)
        if found.delivery.samples:
            self._sampler.remove_job(job)

    # -- the journal --------------------------------------------------------------------------------------

    def _do(self, method: str, *args: object) -> None:
        """Appends a change to the journal, and makes it."""
        end = self._log.tell()
        try:
            self._log.write(json.dumps([method, *args]).encode() + b"\n")
            self._log.flush()
        except OSError:
            self._log.truncate(end)  # half a line would hide all lines after it
            raise
        self._lines += 1
        self._apply(method, args)
        if self._lines >= SNAPSHOT_EVERY or not self._jobs:
            self._write_down()

    def _apply(self, method: str, args: Iterable[object]) -> None:
        changes: dict[str, Callable[..., None]] = {"join": self._join, "enter": self._enter, "take": self._take, "leave": self._leave}
        changes[method](*args)

    def _write_down(self) -> None:
        old, self._number = self._journal, self._number + 1
        snapshot = _Snapshot(
            journal=self._number,
            joined=self._joined,
            sampler=self._sampler.state_dict(),
            jobs={name: document(_SavedJob.of(job)) for name, job in self._jobs.items()},
        )
        write_json(self._snapshot, document(snapshot))  # from now on the old journal is void
        _log.debug("state of %d jobs is stored; journal %d begins", len(self._jobs), self._number)
        self._log.close()
        old.unlink()
        self._log = self._journal.open("wb")
        self._lines = 0

    def _restore(self) -> None:
        if self._snapshot.exists():
            state = restore(_Snapshot, json.loads(self._snapshot.read_text()), where=str(self._snapshot))
            self._number, self._joined = state.journal, state.joined
            self._sampler.load_state_dict(state.sampler)
            for name, saved in state.jobs.items():
                self._jobs[name] = restore(_SavedJob, saved, where=f"{self._snapshot}: job {name}").restored()
        for old in self._folder.glob("journal-*.jsonl"):
            if old != self._journal:  # the process ended between a snapshot and the removal of the old journal
                old.unlink()
        if not self._journal.exists():
            return
        whole, newline, rest = self._journal.read_bytes().rpartition(b"\n")
        if rest:  # the last line was cut short: its call was not answered, and the next line must not be appended to it
            os.truncate(self._journal, len(whole) + len(newline))
        for line in whole.splitlines():
            method, *args = json.loads(line)
            self._apply(method, args)
            self._lines += 1


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
