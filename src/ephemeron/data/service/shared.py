"""A stream whose order a service draws for all jobs together (traversal access, DPFlow figure 4-10)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.service.client import FlowClient
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError

AHEAD = 8
"""Batches that are drawn at a time: they are certain from then on."""


class _Drawn:
    """What the service has drawn for this rank; shared by all copies of the stream."""

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
        """Of the same job, as one that comes again."""
        return _Drawn(self.client, self.job, self.chosen)

    def positions(self, indices: list[int]) -> Indices:
        places = indices if self.place_of is None else [self.place_of[index] for index in indices]
        return np.array(places, dtype=np.intp)


@dataclass(slots=True, kw_only=True)
class SharedStream(BatchStream):
    """One rank's batches, in an order that is as random as its own and has as much in common with the others' as can be."""

    drawn: _Drawn = field(repr=False)
    resumed: str = ""
    """The samples that were used of the epoch in which it was resumed."""

    @classmethod
    def of(cls, stream: BatchStream, client: FlowClient, job: str, chosen: Indices | None) -> SharedStream:
        """Instead of that one, which has not begun."""
        if not stream.shuffle:
            raise JobError("sampling = 'shared' with shuffle = False", remedy="leave one of them out")
        return cls(
            samples=stream.samples, batch_size=stream.batch_size, seed=stream.seed, rank=stream.rank,
            world_size=stream.world_size, remainder=stream.remainder, epoch=stream.epoch,
            drawn=_Drawn(client, job, chosen),
        )  # fmt: skip

    def copy(self) -> SharedStream:
        return replace(self)

    @property
    def ordered(self) -> bool:
        return False

    def rest(self) -> Indices:
        """All samples, in no order."""
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
        """As of any stream. What was drawn goes on only from the end of an epoch to the one that follows it.

        From anywhere else the service takes this for another job, as it does after a resumption: to it, an epoch that was
        left before its end is not over.
        """
        if epoch == self.epoch and self.steps == 0 and not self.resumed:
            return self.copy()
        if epoch == self.epoch + 1 and self.drawn.joined is not None and self.steps_left() == 0:
            return replace(self, epoch=epoch, steps=0)
        return replace(self, epoch=epoch, steps=0, resumed="", drawn=self.drawn.anew())

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the same for every rank that has taken as many batches."""
        self._join()
        mark = self.drawn.client.router("mark", {"job": self._name, "epoch": self.epoch, "steps": self.steps})
        return {
            "samples": self.samples, "seed": self.seed, "shuffle": "shared", "epoch": self.epoch,
            "consumed": mark["consumed"], "count": mark["count"],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, mine in (("samples", self.samples), ("seed", self.seed), ("shuffle", "shared")):
            if state.get(key) != mine:
                raise JobError(
                    f"the state is of {key} = {state.get(key)!r}, this stream has {mine!r}",
                    remedy="resume with the dataset, seed and sampling that the state was saved with",
                )
        self.epoch, self.steps = int(state["epoch"]), 0
        self.resumed = str(state["consumed"])
        self.drawn = self.drawn.anew()

    @property
    def _name(self) -> str:
        """Of the job as it is now: one that was resumed is another one, which no late request of before can disturb."""
        assert self.drawn.joined is not None
        return self.drawn.joined

    def _join(self) -> None:
        drawn = self.drawn
        with drawn.lock:
            if drawn.joined is not None:
                return
            found = drawn.client.router(
                "join",
                {"job": drawn.job, "rank": self.rank, "reader": drawn.reader, "samples": self.samples, "seed": self.seed, "batch": self.batch_size,
                 "world_size": self.world_size, "remainder": self.remainder, "epoch": self.epoch,
                 "consumed": self.resumed},
                [] if drawn.chosen is None else [np.asarray(drawn.chosen, dtype=np.int64)],
            )  # fmt: skip
            drawn.joined = found["job"]

    def _fetch(self) -> None:
        self._join()
        found = self.drawn.client.router(
            "traverse",
            {"job": self._name, "rank": self.rank, "epoch": self.epoch, "sequence": self.steps, "acked": 0,
             "count": AHEAD},
        )  # fmt: skip
        for ahead, indices in enumerate(found["batches"]):
            self.drawn.batches[self.epoch, self.steps + ahead] = self.drawn.positions(indices)
        self.drawn.left[self.epoch] = found["left"]
