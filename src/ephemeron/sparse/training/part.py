"""What one function does: for each minibatch it gets the rows that it needs, computes their gradient, and sends it.

How far it is, the store knows: every `REPORT_STEPS` steps, and at the end of each epoch, a function waits until its pushes are acknowledged and then
stores its progress there. Each push carries the number of its step, so steps that a replacement repeats from there change nothing on the
shards that have them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from ephemeron.config.typed import build, plain
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError
from ephemeron.sparse.models.base import SparseModel
from ephemeron.sparse.store import Compression, SparseStore
from ephemeron.sparse.store.shard import TOKEN_VARIABLE
from ephemeron.sparse.training.minibatches import Loaded, Ring, Schedule

REPORT_STEPS = 100
LATE_S = 1.0
"""Seconds from one report to the next, at least, when the time is up and steps are slow."""
PHASES = ("get_minibatch", "get_model", "compute", "send_gradient")
"""Parts of a step (survey 2.1, figure 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """Progress of one function, over all its attempts."""

    rank: int
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    """Mean over the last steps."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """By phase, of the acknowledged steps."""
    repeated: int = 0
    """Steps that were computed again after a function was lost."""
    bytes_up: int = 0
    bytes_down: int = 0
    finished: bool = False
    attempt: int = 0
    """Of the function that reports."""
    began_at: float = 0.0
    """Unix time of its start."""
    at: float = 0.0
    """Unix time of the report."""
    epochs: list[tuple[float, int]] = field(default_factory=list)
    """Of each epoch that has begun: sum of the samples' losses, each before the step of its batch, and number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A function's share of a run."""

    run: str
    rank: int
    attempt: int
    model: SparseModel
    dataset: TableDataset
    schedule: Schedule
    addresses: tuple[str, ...]
    ring: int = 16
    """Minibatches that are loaded ahead."""
    time_s: float = 600.0
    """Seconds after which the function stops where it is; another one goes on."""
    compression: Compression = field(default_factory=Compression)
    session: str = ""
    """Of the client. The function ends at its next report when the store has this at `stop_key`."""
    token: str = field(default="", repr=False)
    """Of the store; empty: the environment variable has it."""


def stop_key(run: str) -> str:
    """Where the store has the session that is to end."""
    return f"{run}/stop"


def progress_key(run: str, rank: int) -> str:
    """Where a function's report is in the store."""
    return f"{run}/progress/{rank}"


OnReport: TypeAlias = Callable[[PartReport, PartReport, float], None]
"""Called with the report before, the new one, and the seconds that the function has waited for acknowledgements."""


def _ignore(before: PartReport, report: PartReport, waited_s: float) -> None:
    pass


def train_part(part: Part) -> PartReport:
    """Trains until the share is done, or the time is up. Raises as `train` does."""
    return asyncio.run(train(part))


async def train(part: Part, on_report: OnReport = _ignore) -> PartReport:
    """Trains until the share is done, the time is up, or the client stops the run.

    Raises:
        JobError: a sample has a feature or a label that the model does not take.
        ServiceRefused: a later attempt has begun.
        ServiceUnreachable: the store does not answer.
        DatasetDamaged, DatasetUnreachable: from the dataset.
    """
    token = part.token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise JobError(f"{TOKEN_VARIABLE} is not set in the function", remedy="set it where functions get their variables")
    began = time.monotonic()
    client = f"{part.run}-{part.rank}"
    async with await SparseStore.connect(part.addresses, token, client=client, attempt=part.attempt, compression=part.compression) as store:
        return await _Share(part, store, on_report).trained(ends_at=began + part.time_s)


class _Share:
    """A share while one function trains it.

    Args:
        part: the share.
        store: the function's connection.
        on_report: told of each report.
    """

    def __init__(self, part: Part, store: SparseStore, on_report: OnReport) -> None:
        self._part, self._store, self._on_report = part, store, on_report
        self._key, self._tables = progress_key(part.run, part.rank), list(part.model.tables)
        self._report = PartReport(rank=part.rank)
        self._begin()

    def _begin(self) -> None:
        """What is counted from one report to the next."""
        self._spent, self._samples = dict.fromkeys(PHASES, 0.0), 0
        self._losses: list[float] = []
        self._epochs = dict(enumerate(self._report.epochs))
        self._up, self._down = self._store.bytes_up, self._store.bytes_down
        self._reported_at = time.monotonic()

    async def trained(self, *, ends_at: float) -> PartReport:
        """The report with which this function ends.

        Args:
            ends_at: `time.monotonic()` at which it stops where it is.
        """
        part = self._part
        await self._take_up()
        done, clock = self._report.steps, time.perf_counter
        with Ring(part.dataset, part.schedule, part.rank, part.model.rows, after=done, size=part.ring) as ring:
            began = clock()
            for loaded in ring:
                await self._step(loaded, began)
                done = loaded.step.step + 1
                now = time.monotonic()
                late = now >= ends_at
                if done % REPORT_STEPS == 0 or loaded.step.last or (late and now >= self._reported_at + LATE_S):
                    await self._acknowledged(done, False)
                    if late or await self._store.get(stop_key(part.run)) == part.session.encode():
                        return self._report
                began = clock()
        for name in self._tables:
            await self._store.push_residual(name)
        return await self._acknowledged(done, True)

    async def _take_up(self) -> None:
        """Goes on from the predecessor's report."""
        stored = await self._store.get(self._key)
        report = self._report if stored is None else _report(stored)
        # What was sent after the last report may have been lost with the predecessor, or be there.
        sent = -(-self._store.sequence // len(self._tables))
        self._report = replace(
            report, repeated=report.repeated + max(0, sent - report.steps), attempt=self._part.attempt, began_at=time.time(), at=time.time()
        )
        await self._store.set(self._key, json.dumps(plain(self._report)).encode())
        self._begin()

    async def _step(self, loaded: Loaded, began: float) -> None:
        model, store, clock = self._part.model, self._store, time.perf_counter
        step, batch, rows = loaded
        ready = clock()
        values = {name: await store.multi_get(name, rows[name]) for name in self._tables}
        got = clock()
        found = model.step(batch, rows, values, step.step)
        computed = clock()
        for at, name in enumerate(self._tables):
            sequence = step.step * len(self._tables) + at + 1
            await store.push(name, rows[name], found.gradients[name], sequence=sequence)
        moments = itertools.pairwise((began, ready, got, computed, clock()))
        for phase, (start, end) in zip(PHASES, moments, strict=True):
            self._spent[phase] += end - start
        self._losses.append(found.loss)
        self._samples += batch.samples
        total, samples = self._epochs.get(step.epoch, (0.0, 0))
        self._epochs[step.epoch] = total + found.loss * batch.samples, samples + batch.samples

    async def _acknowledged(self, done: int, finished: bool) -> PartReport:
        """Waits until all pushes are acknowledged, and reports."""
        store, before, began = self._store, self._report, time.perf_counter()
        await store.flush()
        self._report = replace(
            before,
            steps=done,
            samples=before.samples + self._samples,
            loss=float(np.mean(self._losses)) if self._losses else before.loss,
            seconds={phase: before.seconds[phase] + self._spent[phase] for phase in PHASES},
            finished=finished,
            bytes_up=before.bytes_up + store.bytes_up - self._up,
            at=time.time(),
            bytes_down=before.bytes_down + store.bytes_down - self._down,
            epochs=[self._epochs.get(epoch, (0.0, 0)) for epoch in range(max(self._epochs, default=-1) + 1)],
        )
        # Told first: a function that is killed in between is replaced by one that tells these steps again, and none is missing.
        self._on_report(before, self._report, time.perf_counter() - began)
        await store.set(self._key, json.dumps(plain(self._report)).encode())
        self._begin()
        return self._report


def _report(data: bytes) -> PartReport:
    return build(PartReport, json.loads(data), where="progress of a function")
