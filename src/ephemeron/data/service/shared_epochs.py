"""Jobs that draw their samples together, so that one loads what the others use too (DPFlow sections 3.4.4 and 4.3.3).

What a job is given is the sampler's affair (`Coupled`), who of its ranks gets which of it, and that each sample comes once
in an epoch, is `Delivery`'s. The order of an epoch is drawn as it is needed and remembered until the epoch is over.

State survives the router: every call that changes something is appended to a journal before it is answered, and the same
calls give the same samples. A journal is shortened by writing down the whole state now and then.

A job that resumes says which samples of its epoch it has used; the rest of that epoch is drawn at once, and from the next
epoch on it draws with the others again.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ephemeron.data.sampling import Coupled
from ephemeron.data.scheduler import DeliveredBatch, Delivery, DeliveryRefused, EpochEnd, EpochPartition, Remainder
from ephemeron.data.service.daemon import write_json
from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.errors import JobError

SNAPSHOT_EVERY = 20_000
"""Lines of the journal before the whole state is written down."""
BEGINNING_S = 60.0
"""For so long ranks that do not agree are taken for those of one job, which is an error."""
FORGOTTEN_S = 3600.0
"""A job that nobody reads any more is forgotten after so long."""


class _EpochJob:
    """One job's epochs.

    Args:
        base: what its readers call it.
        terms: what its ranks have to agree in.
        indices: its samples.
        delivery: who gets what.
        first: the epoch that the sampler's epoch 0 is.
        begun_at: samples of the epoch before that had been used when the job was resumed in it.
    """

    def __init__(
        self, base: str, terms: list[Any], indices: Indices, delivery: Delivery, first: int, begun_at: int = 0
    ) -> None:
        self.base, self.terms, self.indices, self.delivery = base, terms, indices, delivery
        self.first, self.begun_at = first, begun_at
        self.readers: dict[int, str] = {}
        """Who reads as which rank."""
        self.orders: dict[int, list[int]] = {}
        self.seen_at = 0.0

    @property
    def oldest(self) -> int:
        """The epoch of the last of its ranks."""
        return min(int(epoch) for epoch, _ in self.delivery.state_dict()["at"])


class SharedEpochs:
    """All jobs of a flow that draw together.

    Args:
        folder: for the journal; made when missing.
        window: samples that are likely to be still there after they were loaded.
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
            job.seen_at = now  # or all would be forgotten that have not asked yet
        self._log = self._journal.open("ab")

    @property
    def _journal(self) -> Path:
        return self._folder / f"journal-{self._number}.jsonl"

    def join(
        self, *, job: str, rank: int, reader: str, samples: int, seed: int, batch: int, world_size: int,
        remainder: Remainder, epoch: int, consumed: str = "", buffers: list[Any], now: float,
    ) -> dict[str, Any]:  # fmt: skip
        """A rank begins, or goes on from a state. Repeating it changes nothing.

        Ranks that agree in everything read together. A rank that comes again as another reader, as after a crash, begins
        anew, and the others, coming again as well, join it: what was drawn before does not bind them.

        Args:
            reader: who this is, and nobody else.
            samples: of its view.
            consumed: the samples of `epoch` that it has used, as `mark` gave them.
            buffers: its samples, where it does not have all of them.

        Returns:
            `job`: the name to ask with from now on.

        Raises:
            JobError: a sample twice, a state of other samples, or ranks that do not agree.
        """
        chosen = np.frombuffer(buffers[0], np.int64).tolist() if buffers else None
        self._check(job, samples, batch, world_size, remainder, consumed, chosen)
        view = [samples, epoch, _digest(consumed), _digest(json.dumps(chosen))]
        terms = [*view, batch, world_size, remainder, seed]
        name = self._place(job, rank, reader, terms, len(view), now)
        if name is None:
            name = f"{job}#{self._joined}"
            self._do(
                "join", name, job, terms, samples, seed, batch, world_size, remainder, epoch, consumed, chosen, now
            )
        found = self._jobs[name]
        if found.readers.get(rank) != reader:
            self._do("enter", name, rank, reader)
        found.seen_at = now
        return {"job": name}

    def _check(
        self, job: str, samples: int, batch: int, world_size: int, remainder: Remainder, consumed: str,
        chosen: list[int] | None,
    ) -> None:  # fmt: skip
        EpochPartition(count=samples, batch=batch, world_size=world_size, remainder=remainder)
        if chosen is not None and (len(chosen) != samples or len(set(chosen)) != samples or min(chosen, default=0) < 0):
            raise JobError(
                f"job {job}: a view that has a sample twice cannot be drawn with others",
                remedy="leave out repeated indices, or sampling = 'shared'",
            )
        if consumed and len(base64.b64decode(consumed)) != -(-samples // 8):
            raise JobError(f"job {job}: the state is not of {samples} samples", remedy="resume with the view of then")

    def _place(self, job: str, rank: int, reader: str, terms: list[Any], view: int, now: float) -> str | None:
        """The job that a rank belongs to, if it has begun."""
        others = {name: found for name, found in self._jobs.items() if found.base == job}
        for name, found in others.items():
            if found.readers.get(rank) == reader:
                return name
        for name, found in reversed(others.items()):
            if rank in found.readers or found.terms[:view] != terms[:view]:
                continue
            if found.terms == terms:
                return name
            if len(found.readers) < found.delivery.world_size and now - found.seen_at < BEGINNING_S:
                raise JobError(
                    f"job {job} reads with batch, world_size, remainder, seed = {found.terms[view:]}, "
                    f"rank {rank} says {terms[view:]}",
                    remedy="give each job a name of its own, and all its ranks the same numbers",
                )
        return None

    def request(
        self, *, job: str, rank: int, epoch: int, sequence: int, acked: int, count: int, now: float
    ) -> dict[str, Any]:
        """Batches of a rank, from number `sequence` on.

        Returns:
            `batches`: at most `count` lists of samples; fewer where the epoch ends. `left`: batches of the epoch.
        """
        found = self._known(job)
        found.seen_at = now
        batches = []
        for number in range(sequence, sequence + count):
            answer = found.delivery.request(rank=rank, epoch=epoch, sequence=number, acked=acked, generation=0)
            if isinstance(answer, DeliveryRefused):
                raise JobError(f"job {job}: {answer.reason}", remedy="resume from a state instead")
            if isinstance(answer, EpochEnd):
                break
            batches.append(self._samples(job, found, answer, now))
        for old in [e for e in found.orders if e < found.oldest - 1]:
            del found.orders[old]
        return {"batches": batches, "left": found.delivery.batches(epoch)}

    def mark(self, *, job: str, epoch: int, steps: int, buffers: list[Any], now: float) -> dict[str, Any]:
        """What a job has used of an epoch once all its ranks have had so many batches: for its checkpoint.

        Raises:
            JobError: there is no such job, or all of its ranks have long left the epoch.
        """
        found = self._known(job)
        found.seen_at = now
        if epoch < found.oldest:
            raise JobError(f"epoch {epoch} of job {job} is over", remedy="take the state before the next epoch begins")
        used = np.zeros(len(found.indices), dtype=bool)
        places = {int(index): place for place, index in enumerate(found.indices)}
        for rank in range(found.delivery.world_size):
            for number in range(steps):
                batch = found.delivery.batch(rank=rank, epoch=epoch, sequence=number)
                used[[places[index] for index in self._samples(job, found, batch, now)]] = True
        if epoch == found.first - 1:  # resumed in it before
            used[[places[index] for index in found.orders[epoch][: found.begun_at]]] = True
        return {"consumed": base64.b64encode(np.packbits(used).tobytes()).decode(), "count": int(used.sum())}

    def end(self, *, job: str, buffers: list[Any], now: float) -> dict[str, Any]:
        """A job will not come back."""
        if job in self._jobs:
            self._do("leave", job)
        return {}

    def settle(self, *, alive: set[str], now: float) -> None:
        """Forgets jobs of which nobody was heard for long.

        Args:
            alive: jobs, as their readers call them, of which somebody reads though he draws nothing.
        """
        for name, found in list(self._jobs.items()):
            if found.base in alive:
                found.seen_at = now
            elif now - found.seen_at > FORGOTTEN_S:
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

    def _join(
        self, job: str, base: str, terms: list[Any], samples: int, seed: int, batch: int, world_size: int, remainder: Remainder, epoch: int,
        consumed: str, chosen: list[int] | None, now: float,
    ) -> None:  # fmt: skip
        indices = np.arange(samples) if chosen is None else np.asarray(chosen, dtype=np.intp)
        delivery = Delivery(samples=samples, batch=batch, world_size=world_size, remainder=remainder)
        found = _EpochJob(base, terms, indices, delivery, epoch)
        if consumed:
            used = np.unpackbits(np.frombuffer(base64.b64decode(consumed), np.uint8), count=samples).astype(bool)
            rest = indices[~used]
            order = permutation(len(rest), seed=seed, purpose=Purpose.EPOCH, epoch=epoch)
            found.orders[epoch] = [*indices[used].tolist(), *rest[order].tolist()]
            found.first, found.begun_at = epoch + 1, int(used.sum())
            state = delivery.state_dict()
            state["at"] = [[epoch, 0]] * world_size
            state["left"] = {str(epoch): [[found.begun_at, samples]]}
            delivery.load_state_dict(state)
        found.seen_at = now
        self._jobs[job] = found
        self._joined += 1
        if samples:
            self._sampler.add_job(job, indices, batch=max(1, batch * world_size))

    def _enter(self, job: str, rank: int, reader: str) -> None:
        self._jobs[job].readers[rank] = reader

    def _leave(self, job: str) -> None:
        found = self._jobs.pop(job)
        if found.delivery.samples:
            self._sampler.remove_job(job)

    # -- the journal --------------------------------------------------------------------------------------

    def _do(self, method: str, *args: Any) -> None:
        """Writes down what is done, and does it."""
        end = self._log.tell()
        try:
            self._log.write(json.dumps([method, *args]).encode() + b"\n")
            self._log.flush()
        except OSError:
            self._log.truncate(end)  # half a line would hide all that come after it
            raise
        self._lines += 1
        self._apply(method, args)
        if self._lines >= SNAPSHOT_EVERY or not self._jobs:
            self._write_down()

    def _apply(self, method: str, args: Iterable[Any]) -> None:
        changes: dict[str, Callable[..., None]] = {
            "join": self._join, "enter": self._enter, "take": self._take, "leave": self._leave
        }  # fmt: skip
        changes[method](*args)

    def _write_down(self) -> None:
        jobs = {
            name: {
                "base": j.base, "terms": j.terms, "readers": {str(r): who for r, who in j.readers.items()},
                "indices": None if np.array_equal(j.indices, np.arange(len(j.indices))) else j.indices.tolist(),
                "samples": len(j.indices), "delivery": j.delivery.state_dict(), "first": j.first, "begun_at": j.begun_at,
                "orders": {str(e): order for e, order in j.orders.items()},
            }
            for name, j in self._jobs.items()
        }  # fmt: skip
        old, self._number = self._journal, self._number + 1
        state = {"journal": self._number, "joined": self._joined, "sampler": self._sampler.state_dict(), "jobs": jobs}
        write_json(self._snapshot, state)  # from now on the old journal is void
        self._log.close()
        old.unlink()
        self._log = self._journal.open("wb")
        self._lines = 0

    def _restore(self) -> None:
        if self._snapshot.exists():
            state = json.loads(self._snapshot.read_text())
            self._number, self._joined = state["journal"], state["joined"]
            self._sampler.load_state_dict(state["sampler"])
            for name, saved in state["jobs"].items():
                deal = saved["delivery"]
                delivery = Delivery(samples=saved["samples"], batch=deal["batch"], world_size=len(deal["at"]))
                delivery.load_state_dict(deal)
                chosen = saved["indices"]
                indices = np.arange(saved["samples"]) if chosen is None else np.asarray(chosen, dtype=np.intp)
                self._jobs[name] = job = _EpochJob(
                    saved["base"], saved["terms"], indices, delivery, saved["first"], saved["begun_at"]
                )
                job.readers = {int(r): who for r, who in saved["readers"].items()}
                job.orders = {int(e): order for e, order in saved["orders"].items()}
        for old in self._folder.glob("journal-*.jsonl"):
            if old != self._journal:  # it ended between a snapshot and the removal of what that replaced
                old.unlink()
        if not self._journal.exists():
            return
        whole, newline, rest = self._journal.read_bytes().rpartition(b"\n")
        if rest:  # the last line was cut short: what it says was not answered, and the next one must not join it
            os.truncate(self._journal, len(whole) + len(newline))
        for line in whole.splitlines():
            method, *args = json.loads(line)
            self._apply(method, args)
            self._lines += 1


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
