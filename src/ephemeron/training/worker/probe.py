"""The entry `probe`, which measures a function instead of training: raw seconds and megabytes.

It reads the same objects as a worker (specification, code, data, initial weights) and uses the same trainer on the same compute
thread, so that measurements hold for training.

CPU quotas are enforced in periods (100 ms on Linux): a single step may run at full speed and the next one be paused. The time
of a step is therefore always the mean of a window of many.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import Keys
from ephemeron.communication.object_frame import Framed, opened, sealed
from ephemeron.communication.signing import SigningKey
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.own_processes import forget_peak, peak_mb
from ephemeron.data import Sampler, plan_split
from ephemeron.functions.context import Context
from ephemeron.training.tensors import MessageHeader, codec_by_name, decode_state, encode_state, pack, unpack
from ephemeron.training.worker.link_probe import measure_links
from ephemeron.training.worker.probe_messages import (
    FoldResult,
    ParallelTransferRow,
    ProbeRequest,
    ProbeResult,
    StepProbe,
    StepTiming,
    TransferProbe,
    TransferResult,
    TransferTiming,
)
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.factory import build_torch_trainer, open_feed
from ephemeron.units import MB, MIB

if TYPE_CHECKING:
    from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer

T = TypeVar("T")

LOAD_TIMEOUT_S = 60.0
SMALL_MB = 0.05
"""Size of objects whose transfer time is that of the request."""
_LEAST_STEPS = 3


async def run_probe(ctx: Context, request: ProbeRequest) -> ProbeResult:
    """Measures what the request asks for."""
    entered = time.time()
    result = ProbeResult(entered_wall=entered, cold=ctx.cold, memory_mb=ctx.call.memory_mb)
    if request.transfer is not None:
        result = replace(result, transfer=await _transfers(ctx, request.transfer))
    if request.links is not None:
        result = replace(result, links=await measure_links(ctx, request.links))
    if request.probe is not None or request.fold is not None:
        with contextlib.ExitStack() as at_end:
            steps = await _Steps.load(ctx)
            at_end.callback(steps.trainer.close)
            result = replace(result, load_s=time.time() - entered, load_peak_mb=peak_mb())
            if request.fold is not None:
                result = replace(result, fold=await steps.fold(request.fold.repeats))
            if request.probe is not None:
                result = replace(result, steps=tuple(await steps.measure(request.probe)))
            model_bytes = steps.trainer.size * steps.trainer.dtype.itemsize
            result = replace(result, model_bytes=model_bytes, state_bytes=steps.state_bytes)
    return result


@dataclass(slots=True)
class _Windows:
    """Measurements of one batch size."""

    batch: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    applied_s: float = 0.0
    quickest_s: float = float("inf")
    peak_mb: float = 0.0
    steps: int = 0

    def result(self) -> StepTiming:
        return StepTiming(
            batch=self.batch,
            seconds=tuple(self.seconds),
            cpu_s=tuple(self.cpu_s),
            quickest_s=self.quickest_s,
            apply_s=self.applied_s / self.steps,
            peak_mb=self.peak_mb,
            steps=self.steps,
        )


class _Steps:
    """A worker's trainer, with a variable batch size."""

    def __init__(self, ctx: Context, spec: RunSpec, trainer: TorchTrainer) -> None:
        self.ctx, self.spec, self.trainer = ctx, spec, trainer
        self._iteration = 0
        self._per_epoch = spec.split.iterations
        self.state_bytes = 0
        """Size of a checkpoint."""

    @classmethod
    async def load(cls, ctx: Context) -> _Steps:
        keys = Keys(ctx.call.run)
        spec = RunSpec.from_bytes(await _get(ctx, keys.spec))
        code, data, test, init = await asyncio.gather(*(_get(ctx, key) for key in (keys.code, keys.data(0), keys.test(0), keys.init)))
        folders: list[Path] = [] if ctx.scratch is None else unbundle(bytes(code), ctx.scratch / "code")
        feed = open_feed(spec, data, test, folders=folders, own_process=ctx.own_process)
        trainer = build_torch_trainer(spec, 0, folders=folders, feed=feed)
        trainer.load(*decode_state(init, key=keys.init))
        return cls(ctx, spec, trainer)

    async def measure(self, wanted: StepProbe) -> list[StepTiming]:
        """Steps of each batch size. The batches take turns, so that a machine that is slower for a while is so for all."""
        batches, window_s, windows = wanted.batches, wanted.window_s, wanted.windows
        parts = [_Windows(batch) for batch in sorted(batches)]
        for turn in range(windows):
            for part in parts:
                split = plan_split(self.spec.samples, [part.batch])
                self.trainer.sampler, self._per_epoch = Sampler(split, 0, self.spec.seed), split.iterations
                if turn == 0:
                    gc.collect()
                    forget_peak()
                elif turn >= 2 and sum(part.seconds) > windows * window_s:
                    continue  # a step longer than a window needs no more of them
                for _ in range(_LEAST_STEPS if turn == 0 else 1):  # these allocate, and make the optimiser's state
                    if (await self._step())[0] > window_s:
                        break
                await self._window(part, window_s)
                if turn == 0:
                    await self.ctx.compute(self._exchange_and_save, samples=0)
                    part.peak_mb = peak_mb() + children_mb()
        return [part.result() for part in parts]

    async def _window(self, part: _Windows, window_s: float) -> None:
        spent = worked = 0.0
        steps, end = 0, time.perf_counter() + window_s
        while steps < 1 or time.perf_counter() < end:
            took, computing, applying = await self._step()
            spent, worked, steps = spent + took, worked + computing, steps + 1
            part.applied_s += applying
            part.quickest_s = min(part.quickest_s, took)
        part.seconds.append(spent / steps)
        part.cpu_s.append(worked / steps)
        part.steps += steps

    async def _step(self) -> tuple[float, float, float]:
        """Seconds of computing one gradient, CPU seconds of the same, and CPU seconds of applying it."""
        full = max(1, self._per_epoch - 1)  # the last batch of an epoch may be smaller
        iteration = (self._iteration // full) * self._per_epoch + self._iteration % full
        self._iteration += 1
        began = time.perf_counter()
        step, cpu = await self.ctx.compute(lambda: _timed(partial(self.trainer.compute, iteration)), samples=0)
        took = time.perf_counter() - began
        vector = np.zeros_like(step.vector)  # weights stay: a diverging model would measure something else
        _, applying = await self.ctx.compute(lambda: _timed(partial(self.trainer.apply, vector)), samples=0)
        return took, cpu, applying

    def _exchange_and_save(self) -> None:
        """Makes the messages and checkpoints of a worker, which take memory, too."""
        self._fold(1)
        self.state_bytes = len(encode_state(*self.trainer.state()))

    async def fold(self, repeats: int) -> FoldResult:
        """CPU seconds to pack the whole vector, and to unpack it and add it up, each `repeats` times."""
        return await self.ctx.compute(lambda: self._fold(repeats), samples=0)

    def _fold(self, repeats: int) -> FoldResult:
        vector = np.ones(self.trainer.size, dtype=self.trainer.dtype)
        codec = codec_by_name("none")
        envelope = MessageHeader(kind="contribution", rank=0, attempt=0, iteration=0, shard=0, weight=1.0, applied=0, durable=0)
        total, packing, adding = np.zeros_like(vector), [], []
        for _ in range(repeats):
            began = time.thread_time()
            payload = codec.encode(vector)
            message = pack(envelope, payload, codec=codec, dtype=self.trainer.dtype, elements=len(vector))
            buffers = sealed(message, key="run/fold")
            packed = time.thread_time()
            data = memoryview(b"".join(bytes(b) for b in buffers))
            joined = time.thread_time()
            total += unpack(opened(data, key="run/fold"), key="run/fold")[1]
            adding.append(time.thread_time() - joined)
            packing.append(packed - began)
        return FoldResult(mb=vector.nbytes / MB, pack_s=tuple(packing), unpack_add_s=tuple(adding))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Its result, and the CPU seconds of this thread."""
    before = time.thread_time()
    result = work()
    return result, time.thread_time() - before


async def _transfers(ctx: Context, wanted: TransferProbe) -> TransferResult:
    sizes_mb, repeats, parallel = wanted.sizes_mb, wanted.repeats, wanted.parallel
    channel, prefix = Framed(ctx.channel, owner=ctx.invocation), f"{ctx.call.run}/probe.{ctx.invocation}"
    polls = []
    for _ in range(3 + repeats):
        began = time.perf_counter()
        await channel.fetch(f"{prefix}.absent")
        polls.append(time.perf_counter() - began)
    rows = []
    noise = np.random.default_rng(0).bytes(max(1, round(max(sizes_mb) * MB)))
    for size in sizes_mb:
        data = noise[: max(1, round(size * MB))]
        await _both(channel, f"{prefix}.0", data)  # connections are made
        for _ in range(repeats):
            up, down = await _both(channel, f"{prefix}.0", data)
            rows.append(TransferTiming(size_mb=len(data) / MB, up_s=up, down_s=down))
    together = []
    keys = [f"{prefix}.{i}" for i in range(parallel)]
    for size in (SMALL_MB, max(sizes_mb) / parallel):
        data = noise[: max(1, round(size * MB))]
        for _ in range(repeats):
            alone = await _both(channel, keys[0], data)
            began = time.perf_counter()
            await asyncio.gather(*(channel.put(key, [data]) for key in keys))
            put = time.perf_counter()
            await asyncio.gather(*(channel.fetch(key) for key in keys))
            fetched = time.perf_counter()
            together.append(
                ParallelTransferRow(
                    size_mb=len(data) / MB, up_s=put - began, down_s=fetched - put, up_alone_s=alone[0], down_alone_s=alone[1]
                )
            )
    await channel.delete(keys)
    await channel.delete([f"{prefix}.0"])
    return TransferResult(rows=tuple(rows), together=tuple(together), parallel=parallel, polls_s=tuple(polls[3:]))


async def _both(channel: Channel, key: str, data: bytes) -> tuple[float, float]:
    began = time.perf_counter()
    await channel.put(key, [data])
    put = time.perf_counter()
    received = await channel.fetch(key)
    fetched = time.perf_counter()
    assert received is not None
    return put - began, fetched - put


async def _get(ctx: Context, key: str) -> memoryview:
    channel = RunChannel(ctx.channel, owner=ctx.invocation, signing=SigningKey.from_text(ctx.call.key))
    return (await channel.get(key, deadline=asyncio.get_running_loop().time() + LOAD_TIMEOUT_S)).data


def children_mb() -> float:
    """Memory that the processes started by this one have to themselves now, MiB: loaders that were forked from it."""
    import psutil

    nbytes = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, AttributeError):
            nbytes += child.memory_full_info().uss
    return nbytes / MIB
