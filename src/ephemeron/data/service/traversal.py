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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.data.collaborative import Coupled
from ephemeron.data.scheduling import Batch, Delivery, EpochEnd, Refused, Remainder
from ephemeron.data.service.keeper import write_json
from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.errors import JobError

SNAPSHOT_EVERY = 20_000
"""Lines of the journal before the whole state is written down."""
FORGOTTEN_S = 3600.0
"""A job that nobody reads any more is forgotten after so long."""


class _Job:
    """One job's epochs.

    Args:
        indices: its samples.
        delivery: who gets what.
        first: the epoch that the sampler's epoch 0 is.
        begun_at: samples of the epoch before that had been used when the job was resumed in it.
    """

    def __init__(self, indices: Indices, delivery: Delivery, first: int, begun_at: int = 0) -> None:
        self.indices, self.delivery, self.first, self.begun_at = indices, delivery, first, begun_at
        self.orders: dict[int, list[int]] = {}
        self.seen_at = 0.0


class Traversals:
    """All jobs of a flow that draw together.

    Args:
        folder: for the journal; made when missing.
        window: samples that are likely to be still there after they were loaded.
        seed: of all draws.
    """

    def __init__(self, folder: Path, *, window: int, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._snapshot, self._number = folder, folder / "state.json", 0
        self._sampler = Coupled(seed=seed, window=window)
        self._jobs: dict[str, _Job] = {}
        self._lines = 0
        self._restore()
        self._log = self._journal.open("a")

    @property
    def _journal(self) -> Path:
        return self._folder / f"journal-{self._number}.jsonl"

    def join(
        self, *, job: str, samples: int, seed: int, batch: int, world_size: int, remainder: Remainder, epoch: int,
        consumed: str = "", buffers: list[Any], now: float,
    ) -> dict[str, Any]:  # fmt: skip
        """A job begins, or goes on. Every rank says so; the first one counts.

        Args:
            samples: of its view.
            consumed: the samples of `epoch` that it has used, as `mark` gave them.
            buffers: its samples, where it does not have all of them.
        """
        if job not in self._jobs:
            chosen = np.frombuffer(buffers[0], np.int64).tolist() if buffers else None
            self._do("join", job, samples, seed, batch, world_size, remainder, epoch, consumed, chosen, now)
        found = self._jobs[job]
        if (found.delivery.world_size, found.delivery.samples) != (world_size, samples):
            raise JobError(
                f"job {job} reads with {found.delivery.world_size} ranks and {found.delivery.samples} samples, "
                f"this rank says {world_size} and {samples}",
                remedy="give each job a name of its own, and all its ranks the same numbers",
            )
        found.seen_at = now
        return {}

    def request(
        self, *, job: str, rank: int, epoch: int, sequence: int, acked: int, count: int, now: float
    ) -> dict[str, Any]:
        """Batches of a rank, from number `sequence` on.

        Returns:
            `batches`: at most `count` lists of samples; fewer where the epoch ends. `left`: batches of the epoch.
        """
        if job not in self._jobs:
            raise JobError(f"no job {job!r} draws here", remedy="join first")
        found = self._jobs[job]
        found.seen_at = now
        batches = []
        for number in range(sequence, sequence + count):
            answer = found.delivery.request(rank=rank, epoch=epoch, sequence=number, acked=acked, generation=0)
            if isinstance(answer, Refused):
                raise JobError(f"job {job}: {answer.reason}", remedy="resume from a state instead")
            if isinstance(answer, EpochEnd):
                break
            batches.append(self._samples(job, found, answer, now))
        for old in [e for e in found.orders if e < epoch - 1]:
            del found.orders[old]
        return {"batches": batches, "left": found.delivery.batches(epoch)}

    def mark(self, *, job: str, epoch: int, steps: int, buffers: list[Any], now: float) -> dict[str, Any]:
        """What a job has used of an epoch once all its ranks have had so many batches: for its checkpoint."""
        found = self._jobs[job]
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
        """Forgets jobs of which nobody was heard for long."""
        for job in [j for j, found in self._jobs.items() if now - found.seen_at > FORGOTTEN_S and j not in alive]:
            self._do("leave", job)

    # -- drawing ------------------------------------------------------------------------------------------

    def _samples(self, job: str, found: _Job, batch: Batch, now: float) -> list[int]:
        if not batch.positions:
            return []
        order = found.orders.setdefault(batch.epoch, [])
        highest = max(batch.positions)
        if batch.epoch >= found.first:
            while len(order) <= highest:
                self._do("take", job, highest + 1 - len(order), batch.epoch, now)
        return [order[position] for position in batch.positions]

    def _take(self, job: str, count: int, epoch: int, now: float) -> None:
        found = self._jobs[job]
        drawn = self._sampler.take(job, count, now_s=now)
        found.orders.setdefault(found.first + drawn.epoch, []).extend(int(i) for i in drawn.indices)

    def _join(
        self, job: str, samples: int, seed: int, batch: int, world_size: int, remainder: Remainder, epoch: int,
        consumed: str, chosen: list[int] | None, now: float,
    ) -> None:  # fmt: skip
        indices = np.arange(samples) if chosen is None else np.asarray(chosen, dtype=np.intp)
        delivery = Delivery(samples=samples, batch=batch, world_size=world_size, remainder=remainder)
        found = _Job(indices, delivery, epoch)
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
        if samples:
            self._sampler.join(job, indices, batch=max(1, batch * world_size))

    def _leave(self, job: str) -> None:
        found = self._jobs.pop(job)
        if found.delivery.samples:
            self._sampler.leave(job)

    # -- the journal --------------------------------------------------------------------------------------

    def _do(self, method: str, *args: Any) -> None:
        """Writes down what is done, and does it."""
        self._log.write(json.dumps([method, *args]) + "\n")
        self._log.flush()
        self._lines += 1
        self._apply(method, args)
        if self._lines >= SNAPSHOT_EVERY or not self._jobs:
            self._write_down()

    def _apply(self, method: str, args: Iterable[Any]) -> None:
        changes: dict[str, Callable[..., None]] = {"join": self._join, "take": self._take, "leave": self._leave}
        changes[method](*args)

    def _write_down(self) -> None:
        jobs = {
            name: {
                "indices": None if len(j.indices) == j.indices.max(initial=-1) + 1 else j.indices.tolist(),
                "samples": len(j.indices), "delivery": j.delivery.state_dict(), "first": j.first, "begun_at": j.begun_at,
                "orders": {str(e): order for e, order in j.orders.items()},
            }
            for name, j in self._jobs.items()
        }  # fmt: skip
        old, self._number = self._journal, self._number + 1
        state = {"journal": self._number, "sampler": self._sampler.state_dict(), "jobs": jobs}
        write_json(self._snapshot, state)  # from now on the old journal is void
        self._log.close()
        old.unlink()
        self._log = self._journal.open("w")
        self._lines = 0

    def _restore(self) -> None:
        if self._snapshot.exists():
            state = json.loads(self._snapshot.read_text())
            self._number = state["journal"]
            self._sampler.load_state_dict(state["sampler"])
            for name, saved in state["jobs"].items():
                deal = saved["delivery"]
                delivery = Delivery(samples=saved["samples"], batch=deal["batch"], world_size=len(deal["at"]))
                delivery.load_state_dict(deal)
                chosen = saved["indices"]
                indices = np.arange(saved["samples"]) if chosen is None else np.asarray(chosen, dtype=np.intp)
                self._jobs[name] = job = _Job(indices, delivery, saved["first"], saved["begun_at"])
                job.orders = {int(e): order for e, order in saved["orders"].items()}
        if self._journal.exists():
            for line in self._journal.read_text().splitlines():
                try:
                    method, *args = json.loads(line)
                except ValueError:
                    break  # the last line was cut short: what it says was not answered
                self._apply(method, args)
                self._lines += 1
