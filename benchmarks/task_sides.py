"""The sides of `benchmarks.tasks`: each runs n tasks on W workers that are up, and returns what each task says that it took."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import ROOT
from benchmarks.provisioner import executor_call
from benchmarks.servers import started_valkey
from benchmarks.task_functions import pause, pause_of
from ephemeron.communication.channels import open_channel
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.local import LocalPlatform, default_memory_mb
from ephemeron.functions.tasks import TaskQueue, TaskSpec
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.open_queue import open_queue

PER_BATCH_S = 0.5
"""Seconds of work in a batch."""
MOST_PER_BATCH = 250


class Side(ABC):
    """One way to run tasks. A context manager: inside, its workers are up."""

    name: str
    at_most: int | None = None
    """Tasks of one turn; None: any number."""
    began = ended = 0.0
    """Of the latest turn."""

    @abstractmethod
    def run(self, n: int, seconds: float) -> list[float]:
        """Runs n tasks that sleep so long."""

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[Side]:
        yield self


class Queue(Side):
    """Executors of the local platform at a queue.

    Args:
        adapter: of the queue.
    """

    def __init__(self, adapter: Literal["objects", "redis"]) -> None:
        self.name = f"ephemeron, {'folder' if adapter == 'objects' else 'Valkey'}"
        self._adapter: Literal["objects", "redis"] = adapter
        self._turn = 0

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[Side]:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._address = "folder"
            if self._adapter == "redis":
                server = started_valkey(folder, durable=False)
                stack.callback(server.stop)
                self._address = f"redis://127.0.0.1:{server.port}/0"
            self._folder, self._workers = folder, workers
            yield self

    def run(self, n: int, seconds: float) -> list[float]:
        self._turn += 1
        return asyncio.run(self._tasks(f"turn-{self._turn}", n, seconds))

    async def _executors(self, platform: LocalPlatform, name: str, queue: TaskQueue) -> None:
        """Starts the executors and waits until they have announced themselves."""
        memory_mb = default_memory_mb(self._workers)
        request = ExecutorRequest(queue=name, adapter=self._adapter, functions=("benchmarks.task_functions",), idle_s=120.0, poll_s=0.05)
        origin = Call(run="run", rank=0, attempt=0, memory_mb=memory_mb, lifetime_s=600, channel=self._address, origin=time.time())
        for number in range(self._workers):
            await platform.invoke(executor_call(origin, request, number + 1, memory_mb, 600))
        while True:
            if len((await queue.depth()).executors) == self._workers:
                return
            await asyncio.sleep(0.02)

    async def _tasks(self, name: str, n: int, seconds: float) -> list[float]:
        per_batch = max(1, min(MOST_PER_BATCH, round(PER_BATCH_S / seconds) if seconds else MOST_PER_BATCH))
        environment = {
            "EPHEMERON_PRELOAD": "ephemeron.functions.tasks.executor_entry,benchmarks.task_functions",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        run_dir = self._folder / name
        platform = await LocalPlatform.start(run_dir, limits=Limits(memory_max_mb=4096), env=environment)
        try:
            async with open_channel(self._address, base=run_dir / "channel") as channel:
                queue = open_queue(channel, name, owner="client", adapter=self._adapter)
                await self._executors(platform, name, queue)
                self.began = time.perf_counter()
                tasks = [
                    TaskSpec(id=f"t{i}", function="benchmarks.task_functions:pause", arguments={"n": i, "seconds": seconds})
                    for i in range(n)
                ]
                publishing = asyncio.create_task(queue.publish_all(tasks, per_batch=per_batch))
                reader, took = queue.reader(), list[float]()
                while len(took) < n:
                    took += [float(str(result.value)) for result in await reader.read()]
                    await asyncio.sleep(0.02)
                self.ended = time.perf_counter()
                await publishing
                await queue.clear()
                return took
        finally:
            await platform.shutdown()


class Pool(Side):
    """`concurrent.futures.ProcessPoolExecutor`.

    Args:
        is_batched: tasks go to a worker in chunks of the same size as the queue's batches.
    """

    def __init__(self, *, is_batched: bool) -> None:
        self.name = f"ProcessPoolExecutor{', chunks' if is_batched else ''}"
        self._is_batched = is_batched

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[Side]:
        with ProcessPoolExecutor(workers) as self._pool:
            list(self._pool.map(pause_of, [(0, 0.05)] * workers))
            yield self

    def run(self, n: int, seconds: float) -> list[float]:
        chunk = max(1, min(MOST_PER_BATCH, round(PER_BATCH_S / seconds) if seconds else MOST_PER_BATCH))
        self.began = time.perf_counter()
        took = list(self._pool.map(pause_of, [(i, seconds) for i in range(n)], chunksize=chunk if self._is_batched else 1))
        self.ended = time.perf_counter()
        return took


class Ray(Side):
    """Ray tasks, one for each task."""

    name = "Ray"

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[Side]:
        import ray

        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._pause: Any = ray.remote(pause)
        self._get = ray.get
        try:
            ray.get([self._pause.remote(0, 0.1) for _ in range(workers)])
            yield self
        finally:
            ray.shutdown()

    def run(self, n: int, seconds: float) -> list[float]:
        self.began = time.perf_counter()
        took: list[float] = self._get([self._pause.remote(i, seconds) for i in range(n)])
        self.ended = time.perf_counter()
        return took


class Lithops(Side):
    """Lithops' localhost backend, one call for each task."""

    name = "Lithops localhost"
    at_most = 8

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[Side]:
        import lithops

        # Its runner is started as `python`.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

        def paused(n: int, seconds: float) -> float:  # shipped by value: modules of this repository are not
            import time

            began = time.perf_counter()
            time.sleep(seconds)
            return time.perf_counter() - began

        self._pause = paused
        config = {
            "lithops": {"backend": "localhost", "storage": "localhost", "monitoring_interval": 0.1},
            "localhost": {"worker_processes": workers},
        }
        with lithops.FunctionExecutor(config=config, log_level="ERROR") as self._executor:
            self._executor.get_result(self._executor.map(paused, [(0, 0.05)] * workers))
            yield self

    def run(self, n: int, seconds: float) -> list[float]:
        self.began = time.perf_counter()
        took: list[float] = self._executor.get_result(self._executor.map(self._pause, [(i, seconds) for i in range(n)]))
        self.ended = time.perf_counter()
        return took


def sides() -> list[Side]:
    """All sides; those of libraries that are not installed say so when they are opened."""
    return [Queue("objects"), Queue("redis"), Pool(is_batched=True), Pool(is_batched=False), Ray(), Lithops()]
