"""What one function does: for each minibatch it gets the rows that it needs, computes their gradient, and sends it.

How far it is, the store knows: every `REPORT_STEPS` steps, and at its end, a function waits until its pushes are acknowledged and then
stores its progress there. Each push carries the number of its step, so steps that a replacement repeats from there change nothing on the
shards that have them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from dataclasses import dataclass, field, replace

import numpy as np

from ephemeron.config.typed import build, plain
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError
from ephemeron.sparse.models.base import SparseModel
from ephemeron.sparse.store import Compression, SparseStore
from ephemeron.sparse.store.shard import TOKEN_VARIABLE
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.ring import Ring

REPORT_STEPS = 100
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A function's share of a run. The store's token comes by the environment variable `EPHEMERON_SPARSE_TOKEN`."""

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


def stop_key(run: str) -> str:
    """Where the store has the session that is to end."""
    return f"{run}/stop"


def progress_key(run: str, rank: int) -> str:
    """Where a function's report is in the store."""
    return f"{run}/progress/{rank}"


def train_part(part: Part) -> PartReport:
    """Trains until the share is done, or the time is up.

    Raises:
        JobError: a sample has a feature or a label that the model does not take.
        ServiceRefused: a later attempt has begun.
        ServiceUnreachable: the store does not answer.
        DatasetDamaged, DatasetUnreachable: from the dataset.
    """
    return asyncio.run(_train(part))


async def _train(part: Part) -> PartReport:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise JobError(
            f"{TOKEN_VARIABLE} is not set in the function", remedy="set it where functions get their variables"
        )
    began = time.monotonic()
    client = f"{part.run}-{part.rank}"
    async with await SparseStore.connect(
        part.addresses, token, client=client, attempt=part.attempt, compression=part.compression
    ) as store:
        return await _steps(part, store, ends_at=began + part.time_s)


async def _steps(part: Part, store: SparseStore, *, ends_at: float) -> PartReport:
    key, tables = progress_key(part.run, part.rank), list(part.model.tables)
    stored = await store.get(key)
    report = PartReport(rank=part.rank) if stored is None else _report(stored)
    # What was sent after the last report may have been lost with the predecessor, or be there.
    sent = -(-store.sequence // len(tables))
    report = replace(
        report, repeated=report.repeated + max(0, sent - report.steps), attempt=part.attempt, began_at=time.time(), at=time.time()
    )  # fmt: skip
    await store.set(key, json.dumps(plain(report)).encode())
    spent, samples = dict.fromkeys(PHASES, 0.0), 0
    losses: list[float] = []
    clock = time.perf_counter
    up, down = store.bytes_up, store.bytes_down

    async def acknowledged(done: int, finished: bool) -> PartReport:
        await store.flush()
        found = replace(
            report, steps=done, samples=report.samples + samples, loss=float(np.mean(losses)) if losses else report.loss,
            seconds={phase: report.seconds[phase] + spent[phase] for phase in PHASES}, finished=finished,
            bytes_up=report.bytes_up + store.bytes_up - up, bytes_down=report.bytes_down + store.bytes_down - down, at=time.time(),
        )  # fmt: skip
        await store.set(key, json.dumps(plain(found)).encode())
        return found

    done = report.steps
    with Ring(part.dataset, part.schedule, part.rank, part.model.rows, after=report.steps, size=part.ring) as ring:
        began = clock()
        for step, batch, rows in ring:
            loaded = clock()
            values = {name: await store.multi_get(name, rows[name]) for name in tables}
            got = clock()
            found = part.model.step(batch, rows, values, step.step)
            computed = clock()
            for at, name in enumerate(tables):
                sequence = step.step * len(tables) + at + 1
                await store.push(name, rows[name], found.gradients[name], sequence=sequence)
            ended = clock()
            moments = itertools.pairwise((began, loaded, got, computed, ended))
            for phase, (start, end) in zip(PHASES, moments, strict=True):
                spent[phase] += end - start
            losses.append(found.loss)
            samples += batch.samples
            done = step.step + 1
            if done % REPORT_STEPS == 0:
                report = await acknowledged(done, False)
                spent, losses, samples = dict.fromkeys(PHASES, 0.0), [], 0
                up, down = store.bytes_up, store.bytes_down
                if time.monotonic() >= ends_at or await store.get(stop_key(part.run)) == part.session.encode():
                    return report
            began = clock()
    for name in tables:
        await store.push_residual(name)
    return await acknowledged(done, True)


def _report(data: bytes) -> PartReport:
    return build(PartReport, json.loads(data), where="progress of a function")
