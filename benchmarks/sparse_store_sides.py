"""Both ends of the parameter servers that `sparse_store` measures: ours, on our two RPC engines, on torch.distributed.rpc, and a Ray actor.

    python -m benchmarks.sparse_store_sides server SIDE CLIENTS         prints where it is and its process, and serves
    python -m benchmarks.sparse_store_sides client SIDE CLIENTS NUMBER WHERE

All hold one table of 2^20 values and apply AdaGrad; the table on PyTorch is a tensor, all others NumPy. For each line of its input a client
prints one line: `gets N` the microseconds of N multi-gets in turn, `steps S` how many steps (multi-get and push of the same
1,000 entries, the push asynchronous, all acknowledged in the end) it made in S seconds and the CPU seconds that they took.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import SEED
from ephemeron.sparse.store import AdaGrad, Compression, SparseStore
from ephemeron.sparse.store.messages import TableSpec
from ephemeron.sparse.store.optimizers import document
from ephemeron.sparse.store.state import Table

ROWS, BATCHES = 1 << 20, 64
ENTRIES_VARIABLE = "SPARSE_STORE_ENTRIES"
ENTRIES = int(os.environ.get(ENTRIES_VARIABLE, "1000"))
"""Of a multi-get and a push."""
TOKEN = "a benchmark on loopback"
_RATE, _EPSILON = 0.01, 1e-8
_PENDING = 64
"""Pushes of a peer that may be under way; ours has a window of bytes."""
SIDES = ("ours", "ours-compressed", "rpc-asyncio", "rpc-blocking", "torch-rpc", "ray-actor")

Get = Callable[[np.ndarray], Any]
Push = Callable[[np.ndarray, np.ndarray], Any]
Drain = Callable[[], Any]


def batches(number: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Indices and gradient of a client, the same for every side: ascending, distinct, uniform."""
    rng = np.random.default_rng([SEED, number])
    rows = [np.sort(rng.choice(ROWS, ENTRIES, replace=False)) for _ in range(BATCHES)]
    return rows, rng.standard_normal(ENTRIES).astype(np.float32)


def main() -> None:
    role, side, clients = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "server":
        _SERVERS[side](clients)
    else:
        number, where = int(sys.argv[4]), sys.argv[5]
        _CLIENTS[side](where, number, clients)


def _ready(where: str, pid: int | None = None) -> None:
    print(json.dumps({"where": where, "pid": pid or os.getpid()}), flush=True)


# clients


def _measure(get: Get, push: Push, drain: Drain, number: int) -> None:
    """Serves the lines of the input; blocking."""
    rows, gradient = batches(number)
    for batch in rows:
        get(batch)
        push(batch, gradient)
    drain()
    print("ready", flush=True)
    for line in sys.stdin:
        what, amount = line.split()
        if what == "gets":
            took = []
            for i in range(int(amount)):
                begun = time.perf_counter()
                get(rows[i % BATCHES])
                took.append(round(1e6 * (time.perf_counter() - begun), 1))
            print(json.dumps(took), flush=True)
        else:
            begun, cpu, steps = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - begun < float(amount):
                batch = rows[steps % BATCHES]
                get(batch)
                push(batch, gradient)
                steps += 1
            drain()
            seconds = time.perf_counter() - begun
            print(json.dumps({"steps": steps, "s": seconds, "cpu_s": time.process_time() - cpu}), flush=True)
    os._exit(0)


async def _measure_async(
    get: Callable[[np.ndarray], Awaitable[Any]],
    push: Callable[[np.ndarray, np.ndarray], Awaitable[Any]],
    drain: Callable[[], Awaitable[Any]],
    number: int,
) -> None:
    """`_measure` on an event loop."""
    rows, gradient = batches(number)
    for batch in rows:
        await get(batch)
        await push(batch, gradient)
    await drain()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, amount = line.split()
        if what == "gets":
            took = []
            for i in range(int(amount)):
                begun = time.perf_counter()
                await get(rows[i % BATCHES])
                took.append(round(1e6 * (time.perf_counter() - begun), 1))
            print(json.dumps(took), flush=True)
        else:
            begun, cpu, steps = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - begun < float(amount):
                batch = rows[steps % BATCHES]
                await get(batch)
                await push(batch, gradient)
                steps += 1
            await drain()
            seconds = time.perf_counter() - begun
            print(json.dumps({"steps": steps, "s": seconds, "cpu_s": time.process_time() - cpu}), flush=True)
    os._exit(0)


def _ours_client(where: str, number: int, clients: int) -> None:
    asyncio.run(_ours(where, number, "float32", Compression()))


def _compressed_client(where: str, number: int, clients: int) -> None:
    asyncio.run(_ours(where, number, "float16", Compression(values="int8")))


async def _ours(where: str, number: int, values: str, compression: Compression) -> None:
    store = await SparseStore.connect(where.split(","), TOKEN, values=values, compression=compression)
    await store.create("w", ROWS, optimizer=AdaGrad(learning_rate=_RATE, epsilon=_EPSILON))
    await _measure_async(lambda rows: store.multi_get("w", rows), lambda rows, g: store.push("w", rows, g), store.flush, number)


def _rpc_asyncio_client(where: str, number: int, clients: int) -> None:
    from ephemeron.communication.rpc import Client

    async def client() -> None:
        host, port = where.split(":")
        connection = await Client.connect_tcp(host, int(port), token=TOKEN)
        pending: set[asyncio.Task[Any]] = set()

        async def get(rows: np.ndarray) -> np.ndarray:
            _, (data,) = await connection.call("get", {}, [memoryview(rows.astype(np.int32)).cast("B")])
            return np.frombuffer(data, np.float32)

        async def push(rows: np.ndarray, gradient: np.ndarray) -> None:
            buffers = [memoryview(rows.astype(np.int32)).cast("B"), memoryview(gradient).cast("B")]
            task = asyncio.create_task(connection.call("push", {}, buffers))
            pending.add(task)
            task.add_done_callback(pending.discard)
            if len(pending) >= _PENDING:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

        async def drain() -> None:
            await asyncio.gather(*pending)

        await _measure_async(get, push, drain, number)

    asyncio.run(client())


def _rpc_blocking_client(where: str, number: int, clients: int) -> None:
    from ephemeron.communication.rpc import BlockingClient

    host, port = where.split(":")
    connection = BlockingClient.connect_tcp(host, int(port), token=TOKEN)

    def get(rows: np.ndarray) -> np.ndarray:
        _, (data,) = connection.call("get", {}, [memoryview(rows.astype(np.int32)).cast("B")])
        return np.frombuffer(data, np.float32)

    def push(rows: np.ndarray, gradient: np.ndarray) -> None:
        # This engine has no calls in the background: the push is waited for.
        connection.call("push", {}, [memoryview(rows.astype(np.int32)).cast("B"), memoryview(gradient).cast("B")])

    _measure(get, push, lambda: None, number)


def _torch_client(where: str, number: int, clients: int) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    _join_torch(f"client{number}", number + 1, clients, where)
    pending: list[Any] = []

    def get(rows: np.ndarray) -> np.ndarray:
        values: np.ndarray = rpc.rpc_sync("server", torch_get, args=(torch.from_numpy(rows),)).numpy()
        return values

    def push(rows: np.ndarray, gradient: np.ndarray) -> None:
        pending.append(rpc.rpc_async("server", torch_push, args=(torch.from_numpy(rows), torch.from_numpy(gradient))))
        if len(pending) >= _PENDING:
            pending.pop(0).wait()

    def drain() -> None:
        while pending:
            pending.pop().wait()

    _measure(get, push, drain, number)


def _ray_client(where: str, number: int, clients: int) -> None:
    import ray

    ray.init(address=where, namespace="sparse", logging_level="ERROR", log_to_driver=False)
    actor: Any = ray.get_actor("server")
    pending: list[Any] = []

    def push(rows: np.ndarray, gradient: np.ndarray) -> None:
        pending.append(actor.push.remote(rows, gradient))
        if len(pending) >= _PENDING:
            ray.get(pending.pop(0))

    def drain() -> None:
        ray.get(pending)
        pending.clear()

    _measure(lambda rows: ray.get(actor.get.remote(rows)), push, drain, number)


# servers


def _table() -> Table:
    optimizer = document(AdaGrad(learning_rate=_RATE, epsilon=_EPSILON))
    return Table(TableSpec(name="w", rows=ROWS, width=1, optimizer=optimizer, first=0, stop=ROWS))


def _handle(table: Table, method: str, buffers: Sequence[Any]) -> tuple[Mapping[str, object], Sequence[memoryview]]:
    rows = np.frombuffer(buffers[0], np.int32).astype(np.int64)
    if method == "get":
        return {}, [memoryview(table.take(rows).data).cast("B")]
    table.apply(rows, np.frombuffer(buffers[1], np.float32))
    return {}, []


def _rpc_asyncio_server(clients: int) -> None:
    from ephemeron.communication.rpc import Server

    table = _table()

    async def handle(method: str, params: dict[str, Any], buffers: list[Any]) -> Any:
        return _handle(table, method, buffers)

    async def serve() -> None:
        server = Server(handle, token=TOKEN)
        host, port = await server.listen_tcp()
        _ready(f"{host}:{port}")
        await asyncio.Event().wait()

    asyncio.run(serve())


def _rpc_blocking_server(clients: int) -> None:
    from ephemeron.communication.rpc import BlockingServer

    table, lock = _table(), threading.Lock()

    def handle(method: str, params: dict[str, Any], buffers: list[Any]) -> Any:
        with lock:
            return _handle(table, method, buffers)

    server = BlockingServer(handle, token=TOKEN)
    host, port = server.listen_tcp()
    _ready(f"{host}:{port}")
    threading.Event().wait()


_torch: dict[str, Any] = {}


def torch_get(rows: Any) -> Any:
    """Multi-get at the server on torch.distributed.rpc."""
    return _torch["weights"][rows]


def torch_push(rows: Any, gradient: Any) -> None:
    """AdaGrad there. Its threads take turns."""
    with _torch["lock"]:
        squares = _torch["squares"][rows] + gradient * gradient
        _torch["squares"][rows] = squares
        _torch["weights"][rows] -= _RATE * gradient / (squares.sqrt() + _EPSILON)


def _join_torch(name: str, rank: int, clients: int, where: str) -> None:
    from torch.distributed import rpc

    # TCP, as on all other sides: the transport through shared memory has threads that poll, of which each takes a core.
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{where}", rpc_timeout=60, _transports=["uv"], _channels=["basic"])
    rpc.init_rpc(name, rank=rank, world_size=1 + clients, rpc_backend_options=options)


def _torch_server(clients: int) -> None:
    import torch

    torch.set_num_threads(1)
    _torch.update(weights=torch.zeros(ROWS), squares=torch.zeros(ROWS), lock=threading.Lock())
    # Clients find the functions in this module under its name.
    sys.modules["benchmarks.sparse_store_sides"] = sys.modules["__main__"]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{sock.getsockname()[1]}"
    _ready(where)
    _join_torch("server", 0, clients, where)
    threading.Event().wait()


def _ray_server(clients: int) -> None:
    import ray

    class Actor:
        def __init__(self) -> None:
            self.table = _table()

        def pid(self) -> int:
            return os.getpid()

        def get(self, rows: np.ndarray) -> np.ndarray:
            return self.table.take(rows)

        def push(self, rows: np.ndarray, gradient: np.ndarray) -> None:
            self.table.apply(rows, gradient)

    path = str(Path(__file__).resolve().parent.parent)
    context = ray.init(
        num_cpus=4,
        include_dashboard=False,
        namespace="sparse",
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        object_store_memory=200 << 20,
    )
    actor: Any = ray.remote(Actor).options(name="server").remote()
    _ready(context.address_info["gcs_address"], ray.get(actor.pid.remote()))
    threading.Event().wait()


_SERVERS: dict[str, Callable[[int], None]] = {
    "rpc-asyncio": _rpc_asyncio_server,
    "rpc-blocking": _rpc_blocking_server,
    "torch-rpc": _torch_server,
    "ray-actor": _ray_server,
}
_CLIENTS: dict[str, Callable[[str, int, int], None]] = {
    "ours": _ours_client,
    "ours-compressed": _compressed_client,
    "rpc-asyncio": _rpc_asyncio_client,
    "rpc-blocking": _rpc_blocking_client,
    "torch-rpc": _torch_client,
    "ray-actor": _ray_client,
}

if __name__ == "__main__":
    main()
