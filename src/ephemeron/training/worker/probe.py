"""What a function runs to be measured instead of to train: raw seconds and megabytes, and no decisions.

The platform starts it with `EPHEMERON_ENTRY=ephemeron.training.worker.probe:run_probe`. It reads what a worker reads from the
channel (specification, code, data, initial weights) and uses the real trainer on the real compute thread, so that what
is measured is what will run. `call.options` say what to measure:

    probe       {"batches": [...], "window_s", "windows"}: steps, ascending in batch, so that the peak of the process
                after each batch is that batch's
    transfer    {"sizes_mb": [...], "repeats", "parallel"}: puts and gets of objects of those sizes, one alone and
                `parallel` at once, and reads of what is not there
    fold        {"repeats"}: what the CPU does to the exchanged vector

CPU quotas are enforced in periods (100 ms on Linux): a single step runs at full speed and the next one stands still.
Seconds of a step are therefore always the mean of a window of many.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.communication.object_frame import Framed, opened, sealed
from ephemeron.config.code_bundle import unbundle
from ephemeron.data import Sampler, plan_split
from ephemeron.functions.context import Context
from ephemeron.training.tensors import MessageHeader, codec_by_name, decode_state, encode_state, pack, unpack
from ephemeron.training.worker.factory import build_trainer, open_feed
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainer import Trainer
from ephemeron.units import MB, MIB

T = TypeVar("T")

LOAD_TIMEOUT_S = 60.0
SMALL_MB = 0.05
"""Objects of which requests, not bytes, take the time."""
_LEAST_STEPS = 3


async def run_probe(ctx: Context) -> dict[str, Any]:
    """Measures what the call asks for.

    Returns:
        `entered_wall`, `cold`, and per thing asked for its raw measurements: see the functions below.
    """
    entered = time.time()
    out: dict[str, Any] = {"entered_wall": entered, "cold": ctx.cold, "memory_mb": ctx.call.memory_mb}
    options = ctx.call.options
    if "transfer" in options:
        out["transfer"] = await _transfers(ctx, **options["transfer"])
    if "probe" in options or "fold" in options:
        with contextlib.ExitStack() as at_end:
            steps = await _Steps.load(ctx)
            at_end.callback(steps.trainer.close)
            out["load_s"] = time.time() - entered
            out["load_peak_mb"] = peak_mb()
            if "fold" in options:
                out["fold"] = await steps.fold(**options["fold"])
            if "probe" in options:
                out["steps"] = await steps.measure(**options["probe"])
            out["model_bytes"] = steps.trainer.size * steps.trainer.dtype.itemsize
            out["state_bytes"] = steps.state_bytes
    return out


@dataclass(slots=True)
class _Windows:
    """What was measured of one batch size."""

    batch: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    applied_s: float = 0.0
    quickest_s: float = float("inf")
    peak_mb: float = 0.0
    steps: int = 0

    def result(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "seconds": self.seconds, "cpu_s": self.cpu_s, "quickest_s": self.quickest_s,
            "apply_s": self.applied_s / self.steps, "peak_mb": self.peak_mb, "steps": self.steps,
        }  # fmt: skip


class _Steps:
    """A trainer as a worker has it, whose batch size can be changed."""

    def __init__(self, ctx: Context, spec: RunSpec, trainer: Trainer) -> None:
        self.ctx, self.spec, self.trainer = ctx, spec, trainer
        self._iteration = 0
        self.state_bytes = 0
        """Of a checkpoint."""

    @classmethod
    async def load(cls, ctx: Context) -> _Steps:
        keys = Keys(ctx.call.run)
        spec = RunSpec.from_bytes(await _get(ctx, keys.spec))
        code, data, test, init = await asyncio.gather(
            *(_get(ctx, key) for key in (keys.code, keys.data(0), keys.test(0), keys.init))
        )
        folders: list[Path] = [] if ctx.scratch is None else unbundle(bytes(code), ctx.scratch / "code")
        feed = open_feed(spec, data, test, folders=folders, own_process=ctx.own_process)
        trainer = build_trainer(spec, 0, folders=folders, feed=feed)
        if spec.trainer == "torch":
            trainer.load(*decode_state(init, key=keys.init))
        return cls(ctx, spec, trainer)

    async def measure(self, batches: list[int], window_s: float, windows: int) -> list[dict[str, Any]]:
        """Per batch: `seconds` and `cpu_s` of a step (forward, backward) per window, `apply_s` (CPU), `peak_mb`, `steps`.

        The batches take turns, so that a machine that is slower for a while is so for all of them.
        """
        parts = [_Windows(batch) for batch in sorted(batches)]
        for turn in range(windows):
            for part in parts:
                self.trainer.sampler = Sampler(plan_split(self.spec.samples, [part.batch]), 0, self.spec.seed)  # type: ignore[attr-defined]
                if turn == 0:
                    gc.collect()
                    _forget_peak()
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
        iterations = self.trainer.sampler.split.iterations  # type: ignore[attr-defined]
        full = max(1, iterations - 1)  # the last batch of an epoch may be smaller
        iteration = (self._iteration // full) * iterations + self._iteration % full
        self._iteration += 1
        began = time.perf_counter()
        step, cpu = await self.ctx.compute(lambda: _timed(partial(self.trainer.compute, iteration)), samples=0)
        took = time.perf_counter() - began
        vector = np.zeros_like(step.vector)  # weights stay: a diverging model would measure something else
        _, applying = await self.ctx.compute(lambda: _timed(partial(self.trainer.apply, vector)), samples=0)
        return took, cpu, applying

    def _exchange_and_save(self) -> None:
        """What else takes memory in a worker: messages and checkpoints."""
        self._fold(1)
        self.state_bytes = len(encode_state(*self.trainer.state()))

    async def fold(self, repeats: int) -> dict[str, Any]:
        """CPU seconds to pack the whole vector, and to unpack it and add it up, each `repeats` times."""
        return await self.ctx.compute(lambda: self._fold(repeats), samples=0)

    def _fold(self, repeats: int) -> dict[str, Any]:
        vector = np.ones(self.trainer.size, dtype=self.trainer.dtype)
        codec = codec_by_name("none")
        envelope = MessageHeader(
            kind="contribution", rank=0, attempt=0, iteration=0, shard=0, weight=1.0, applied=0, durable=0
        )
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
        return {"mb": vector.nbytes / MB, "pack_s": packing, "unpack_add_s": adding}


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Its result, and the CPU seconds of this thread."""
    before = time.thread_time()
    result = work()
    return result, time.thread_time() - before


async def _transfers(ctx: Context, sizes_mb: list[float], repeats: int, parallel: int) -> dict[str, Any]:
    """`rows` of {size_mb, up_s, down_s}, `together` of the same with `parallel` objects at once, and `polls_s`."""
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
            rows.append({"size_mb": len(data) / MB, "up_s": up, "down_s": down})
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
            together.append({
                "size_mb": len(data) / MB, "up_s": put - began, "down_s": fetched - put, "up_alone_s": alone[0],
                "down_alone_s": alone[1],
            })  # fmt: skip
    await channel.delete(keys)
    await channel.delete([f"{prefix}.0"])
    return {"rows": rows, "together": together, "parallel": parallel, "polls_s": polls[3:]}


async def _both(channel: Channel, key: str, data: bytes) -> tuple[float, float]:
    began = time.perf_counter()
    await channel.put(key, [data])
    put = time.perf_counter()
    received = await channel.fetch(key)
    fetched = time.perf_counter()
    assert received is not None
    return put - began, fetched - put


async def _get(ctx: Context, key: str) -> memoryview:
    channel = Framed(ctx.channel, owner=ctx.invocation)
    return (await channel.get(key, deadline=asyncio.get_running_loop().time() + LOAD_TIMEOUT_S)).data


def peak_mb() -> float:
    """Largest resident size since `_forget_peak`, MiB; where the system keeps none, since the process began."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most) / (1024 if sys.platform != "darwin" else 1024**2)


def children_mb() -> float:
    """Memory that the processes started by this one have to themselves now, MiB: loaders that were forked from it."""
    import psutil  # type: ignore[import-untyped]

    nbytes = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, AttributeError):
            nbytes += child.memory_full_info().uss
    return nbytes / MIB


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
