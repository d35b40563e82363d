"""Cost of one RPC engine for both interfaces: blocking calls by the blocking engine, and by the asyncio engine on a thread.

    python -m benchmarks.rpc_engines

Both call the same server, another process, over a Unix socket, in turns. Prints per size of the buffer the quickest turn in
wall-clock time and the mean CPU time of the calling process, both in microseconds per call. Decision 0027 rests on it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from ephemeron.communication.rpc import BlockingClient, BlockingServer, Client

TOKEN = "a token of this benchmark"
TURNS = 9
SIZES = {0: 200, 2_500_000: 12}
"""Bytes of the buffer, and calls per turn."""


def serve(path: str) -> None:
    """Echoes until standard input ends."""
    server = BlockingServer(lambda method, params, buffers: (params, buffers), token=TOKEN)
    server.listen_unix(path)
    print("ready", flush=True)
    sys.stdin.read()


def measure(ways: dict[str, Callable[[], object]], calls: int) -> dict[str, tuple[float, float]]:
    """Per way, microseconds of the quickest turn, and CPU microseconds of all, per call."""
    quickest = dict.fromkeys(ways, float("inf"))
    cpu = dict.fromkeys(ways, 0.0)
    for _ in range(TURNS):
        for name, call in ways.items():
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(calls):
                call()
            quickest[name] = min(quickest[name], (time.perf_counter() - began) / calls * 1e6)
            cpu[name] += (time.process_time() - busy) / calls / TURNS * 1e6
    return {name: (quickest[name], cpu[name]) for name in ways}


def main() -> None:
    if len(sys.argv) > 1:
        serve(sys.argv[1])
        return
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        command = [sys.executable, "-m", "benchmarks.rpc_engines", path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            blocking = BlockingClient.connect_unix(path, token=TOKEN)
            later = asyncio.run_coroutine_threadsafe(Client.connect_unix(path, token=TOKEN), loop).result()
            for size, calls in SIZES.items():
                data = [bytes(size)]
                ways: dict[str, Callable[[], object]] = {
                    "blocking engine": lambda data=data: blocking.call("echo", {}, data),  # type: ignore[misc]
                    "asyncio engine on a thread": lambda data=data: asyncio.run_coroutine_threadsafe(  # type: ignore[misc]
                        later.call("echo", {}, data), loop
                    ).result(),
                }
                for name, (wall, cpu) in measure(ways, calls).items():
                    print(f"{size:>9} bytes  {name:<27} {wall:7.0f} us  {cpu:7.0f} us CPU")
            blocking.close()
            process.kill()


if __name__ == "__main__":
    main()
