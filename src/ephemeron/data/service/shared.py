"""A batch stream whose order a service draws for all jobs together (traversal access, DPFlow figure 4-10)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.service.client import FlowClient
from ephemeron.data.service.messages import JoinRequest, MarkRequest, TraverseRequest
from ephemeron.data.service.protocol import JOIN, MARK, TRAVERSE
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError

AHEAD = 8
"""Batches drawn at a time; they are fixed from then on."""


class _Drawn:
    """Batches that the service has drawn for this rank; shared by all copies of the stream."""

    def __init__(self, client: FlowClient, job: str, chosen: Indices | None) -> None:
        self.client, self.job, self.chosen = client, job, chosen
        self.batches: dict[tuple[int, int], Indices] = {}
        self.left: dict[int, int] = {}
        self.joined: str | None = None
        self.reader = secrets.token_hex(8)
        self.lock = threading.Lock()
        places = None if chosen is None else {int(index): place for place, index in enumerate(chosen)}
        self.place_of = places

    def anew(self) -> _Drawn:
        """A new state of the same job, as for a job that resumes."""
        return _Drawn(self.client, self.job, self.chosen)

    def positions(self, indices: Sequence[int]) -> Indices:
        places = indices if self.place_of is None else [self.place_of[index] for index in indices]
        return np.array(places, dtype=np.intp)


@dataclass(slots=True, kw_only=True)
class SharedStream(BatchStream):
    """One rank's batches, in an order that is as random as its own would be and shares as much as possible with other jobs."""

    drawn: _Drawn = field(repr=False)
    resumed: str = ""
    """Samples that had been used of the epoch in which it was resumed (`MarkReply.consumed`)."""

    @classmethod
    def of(cls, stream: BatchStream, client: FlowClient, job: str, chosen: Indices | None) -> SharedStream:
        """The shared stream in place of an own one that has not begun."""
        if not stream.shuffle:
            raise JobError("sampling = 'shared' with shuffle = False", remedy="leave one of them out")
        return cls(
            samples=stream.samples,
            batch_size=stream.batch_size,
            seed=stream.seed,
            rank=stream.rank,
            world_size=stream.world_size,
            remainder=stream.remainder,
            epoch=stream.epoch,
            drawn=_Drawn(client, job, chosen),
        )

    def copy(self) -> SharedStream:
        return replace(self)

    @property
    def ordered(self) -> bool:
        return False

    def rest(self) -> Indices:
        """All samples, in no particular order."""
        return np.arange(self.samples)

    def following(self) -> Indices:
        return np.arange(self.samples)

    def steps_left(self) -> int:
        if self.epoch not in self.drawn.left:
            self._fetch()
        return self.drawn.left[self.epoch] - self.steps

    def next(self) -> Indices | None:
        if self.steps_left() == 0:
            return None
        key = (self.epoch, self.steps)
        if key not in self.drawn.batches:
            self._fetch()
        self.steps += 1
        for old in [k for k in self.drawn.batches if k < (self.epoch, self.steps - 2 * AHEAD - 64)]:
            self.drawn.batches.pop(old, None)
        return self.drawn.batches[key]

    def begin(self, epoch: int) -> SharedStream:
        """The stream at the beginning of an epoch. Draws continue only from the end of an epoch to the next one.

        In all other cases the service treats this as another job, as it does after a resumption: for the service, an epoch that
        was left before its end is not over.
        """
        if epoch == self.epoch and self.steps == 0 and not self.resumed:
            return self.copy()
        if epoch == self.epoch + 1 and self.drawn.joined is not None and self.steps_left() == 0:
            return replace(self, epoch=epoch, steps=0)
        return replace(self, epoch=epoch, steps=0, resumed="", drawn=self.drawn.anew())

    def state_dict(self) -> dict[str, object]:
        """The position as JSON; the same for every rank that has taken as many batches."""
        self._join()
        mark = self.drawn.client.router(MARK, MarkRequest(job=self._name, epoch=self.epoch, steps=self.steps))
        return {
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": "shared",
            "epoch": self.epoch,
            "consumed": mark.consumed,
            "count": mark.count,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for key, mine in (("samples", self.samples), ("seed", self.seed), ("shuffle", "shared")):
            if state.get(key) != mine:
                raise JobError(
                    f"the state has {key} = {state.get(key)!r}, this stream has {mine!r}",
                    remedy="resume with the dataset, seed and sampling that the state was saved with",
                )
        epoch = state.get("epoch")
        if not isinstance(epoch, int) or "consumed" not in state:
            raise JobError(f"the state has epoch = {epoch!r}", remedy="load a result of state_dict(), unchanged")
        self.epoch, self.steps = epoch, 0
        self.resumed = str(state["consumed"])
        self.drawn = self.drawn.anew()

    @property
    def _name(self) -> str:
        """Name of the job at the service. A resumed job gets another one, so that late requests do not disturb it."""
        assert self.drawn.joined is not None
        return self.drawn.joined

    def _join(self) -> None:
        drawn = self.drawn
        with drawn.lock:
            if drawn.joined is not None:
                return
            request = JoinRequest(
                job=drawn.job,
                rank=self.rank,
                reader=drawn.reader,
                samples=self.samples,
                seed=self.seed,
                batch=self.batch_size,
                world_size=self.world_size,
                remainder=self.remainder,
                epoch=self.epoch,
                consumed=self.resumed,
            )
            buffers = [] if drawn.chosen is None else [np.asarray(drawn.chosen, dtype=np.int64)]
            drawn.joined = drawn.client.router(JOIN, request, buffers).job

    def _fetch(self) -> None:
        self._join()
        request = TraverseRequest(job=self._name, rank=self.rank, epoch=self.epoch, sequence=self.steps, acked=0, count=AHEAD)
        found = self.drawn.client.router(TRAVERSE, request)
        for ahead, indices in enumerate(found.batches):
            self.drawn.batches[self.epoch, self.steps + ahead] = self.drawn.positions(indices)
        self.drawn.left[self.epoch] = found.left
