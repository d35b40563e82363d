"""The entry `sparse-part`: one function trains a share of a sparse job.

Its progress is in the store, from which another function goes on; the events that it emits are for people.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from ephemeron.config.typed import Count, plain
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError, ServiceRefused
from ephemeron.events import Loaded, Phase, Progress, Traffic
from ephemeron.functions.context import Context
from ephemeron.sparse.job.programs import compression_of, model_of
from ephemeron.sparse.store.functions import token_of
from ephemeron.sparse.store.shard import TOKEN_VARIABLE
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.part import PHASES, Part, PartReport, train
from ephemeron.training.job.sparse_spec import SparseProgram

ENTRY = "sparse-part"
LAST_S = 20.0
"""Seconds before the time limit at which a function stops where it is; at most a quarter of the limit."""
PHASE_OF: dict[str, Phase] = {"get_minibatch": "load", "get_model": "download", "compute": "compute", "send_gradient": "upload"}
"""Phases of a step, as runs name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePartRequest:
    """Arguments of the entry `sparse-part`."""

    program: SparseProgram | None = None
    batch_size: Count = 1
    epochs: Count = 1
    workers: Count = 1
    seed: int = 0
    addresses: tuple[str, ...] = ()
    """Of the shards."""
    session: str = ""
    """Of the client; see `Part.session`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePartResult:
    """Result of the entry `sparse-part`."""

    outcome: str
    """`finished`, `relayed`: another function goes on; `fenced`: one does already; `refused`: the data or the job are wrong."""
    report: dict[str, object] = field(default_factory=dict)
    """The last `PartReport`."""
    problem: str = ""
    remedy: str = ""
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes to and from the shards, and requests for partitions."""


async def run_sparse_part(ctx: Context, request: SparsePartRequest) -> SparsePartResult:
    """Trains the share of the call's rank until it is done, the time is up, or the client stops the run."""
    loop, program = asyncio.get_running_loop(), request.program
    if program is None:
        raise JobError(f"entry {ENTRY} needs a program")
    left_s = max(0.0, ctx.deadline - loop.time())
    dataset = await asyncio.to_thread(TableDataset.open, program.dataset)
    reporter = _Reporter(ctx, dataset)
    part = Part(
        run=ctx.call.run,
        rank=ctx.call.rank,
        attempt=ctx.call.attempt,
        model=model_of(program.spec),
        dataset=dataset,
        schedule=Schedule(
            rows=program.rows, batch_size=request.batch_size, epochs=request.epochs, workers=request.workers, seed=request.seed
        ),
        addresses=request.addresses,
        ring=program.spec.ring,
        time_s=left_s - min(LAST_S, left_s / 4),
        compression=compression_of(program.spec),
        session=request.session,
        token=os.environ.get(TOKEN_VARIABLE, "") if program.spec.store else token_of(ctx.call.key),
    )
    try:
        report = await train(part, reporter.told)
    except JobError as e:
        return SparsePartResult(outcome="refused", problem=e.problem, remedy=e.remedy or "")
    except ServiceRefused:
        return SparsePartResult(outcome="fenced")
    outcome = "finished" if report.finished else "relayed"
    return SparsePartResult(outcome=outcome, report=plain(report), traffic=plain(reporter.traffic))


class _Reporter:
    """Reports of a share as events of the run.

    Args:
        ctx: of the invocation.
        dataset: that it reads.
    """

    def __init__(self, ctx: Context, dataset: TableDataset) -> None:
        self._ctx, self._dataset, self._first = ctx, dataset, True
        self._exchanged = Traffic()

    @property
    def traffic(self) -> Traffic:
        """So far: with the shards, and for partitions in an object store."""
        return self._exchanged + Traffic(gets=self._dataset.requests, bytes_down=self._dataset.nbytes_read)

    def told(self, before: PartReport, report: PartReport, waited_s: float) -> None:
        """Emits the steps since the report before as one `Progress`. Its phases are sums over these steps, laid end to end."""
        ctx = self._ctx
        now = asyncio.get_running_loop().time() - ctx.origin
        if report.steps == before.steps:
            return
        lengths = {PHASE_OF[phase]: report.seconds[phase] - before.seconds[phase] for phase in PHASES}
        spans: list[tuple[Phase, float, float]] = [("wait", now - waited_s, now)]
        start = now - waited_s - sum(lengths.values())
        if self._first:
            self._first = False
            ctx.emit(Loaded(t=start, rank=report.rank, attempt=report.attempt, iteration=before.steps))
        for phase, seconds in lengths.items():
            spans.append((phase, start, start + seconds))
            start += seconds
        self._exchanged += Traffic(
            direct_bytes_sent=report.bytes_up - before.bytes_up, direct_bytes_received=report.bytes_down - before.bytes_down
        )
        ctx.emit(
            Progress(
                t=now,
                rank=report.rank,
                attempt=report.attempt,
                iteration=report.steps - 1,
                epoch=max(0, len(report.epochs) - 1),
                samples=report.samples - before.samples,
                loss=report.loss,
                version=0,
                spans=spans,
                traffic=self.traffic,
                cpu_s=ctx.cpu_time(),
            )
        )
