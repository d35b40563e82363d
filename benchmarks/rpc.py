"""Echo of five objects of 500 KB between two processes on loopback: ours against gRPC and a loop in C.

What DPFlow measures in section 5.4.1 (table 5-4: CRPC 2.44 ms, gRPC 4.54 ms, 1.86 times), with its payload. gRPC is
grpcio with generic handlers and pickle; its message is one blob, which each side copies several times. All ways take
turns, a few calls each, because other work on the machine comes and goes; ratios are medians over turns. `views` end
in `memoryview`s and arrays on pooled memory, `copies` in real `bytes` and arrays of their own, on both sides. Real
objects are measured a second time in processes that called `keep_freed` (gRPC's as well): without it, the C library
fetches the memory of every message anew.

    pip install grpcio                   # for the comparison only; skipped, saying so, where it is missing
    python -m benchmarks.rpc --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, SEED, condensed, environment, write
from benchmarks.rpc_servers import GRPC_OPTIONS, KEPT_BYTES, TOKEN, build_echo, python_server, serving
from ephemeron.rpc import BlockingClient, Client, Receive, keep_freed

OBJECTS, NBYTES = 5, 500_000
GOALS = {"views": 6.0, "copies": 4.0, "floor": 2.0}
Way = Callable[[int], list[float]]
"""So many echoes; the seconds of each."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rpc", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print everything, not only the table")
    parser.add_argument("--turns", type=int, default=25, help="turns of each way (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=4, help="calls per turn (default: %(default)s)")
    parser.add_argument("--pass", dest="only", choices=("plain", "kept"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        write(measure(args.turns, args.calls, kept=args.only == "kept"))
        return
    result = {**environment(), "payload": f"{OBJECTS} x {NBYTES} bytes", "goals": GOALS, "grpcio": _version("grpcio")}
    for name in ("plain", "kept"):
        command = [sys.executable, "-m", "benchmarks.rpc", "--pass", name]
        command += ["--turns", str(args.turns), "--calls", str(args.calls)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        result[name] = json.loads(done.stdout)
    if args.json:
        write(result)
    else:
        _print(result)


def measure(turns: int, calls: int, *, kept: bool) -> dict[str, Any]:
    """All ways in turn: milliseconds per echo, and how many times as fast as gRPC."""
    if kept:
        keep_freed(KEPT_BYTES)
    rng = np.random.default_rng(SEED)
    blobs = [rng.bytes(NBYTES) for _ in range(OBJECTS)]
    arrays = [np.frombuffer(blob, np.float32).copy() for blob in blobs]
    skipped: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ephemeron-")))
        ways = dict(_ours(stack, folder, blobs, arrays, kept=kept))
        ways.update(_grpc(stack, blobs, arrays, skipped, kept=kept))
        ways.update(_floor(stack, folder, skipped))
        for way in ways.values():
            way(3)  # connections, pools, branch predictors
        for _ in range(turns):
            for name, way in ways.items():
                times.setdefault(name, []).append(1e3 * statistics.median(way(calls)))
    rows = {}
    for name, values in times.items():
        rows[name] = {"ms": condensed(values), "load_after": round(os.getloadavg()[0], 2)}
        payload = name.split()[0]
        for key, other in (("times_grpc", f"{payload} grpc"), ("times_c", f"c {name.split()[1]}")):
            if other in times and other != name:
                mine, theirs = (values, times[other]) if key == "times_c" else (times[other], values)
                rows[name][key] = condensed([a / b for a, b in zip(mine, theirs, strict=True)])
    return {"rows": rows, "skipped": skipped}


def _ours(
    stack: ExitStack, folder: Path, blobs: list[bytes], arrays: list[np.ndarray], *, kept: bool
) -> Iterator[tuple[str, Way]]:
    for receive in Receive:
        path = folder / receive.value
        port = stack.enter_context(serving(*python_server(receive.value, path, kept=kept)))
        for transport, connect in (
            ("tcp", lambda port=port: BlockingClient.connect_tcp("127.0.0.1", port, token=TOKEN)),
            ("unix", lambda path=path: BlockingClient.connect_unix(path, token=TOKEN)),
            ("shared", lambda path=path: BlockingClient.connect_shared(path, token=TOKEN)),
        ):
            client = stack.enter_context(connect())
            assert client.transport == transport
            for payload, value in (("bytes", blobs), ("arrays", arrays)):

                def echo(client=client, value=value, receive=receive) -> Any:
                    return client.call_object("echo", value, receive=receive)

                _check(echo(), value, receive)
                yield f"{payload} {transport} {receive.value}", _timed(echo)
    path = folder / "asyncio"
    port = stack.enter_context(serving(*python_server("asyncio", path, kept=kept)))
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    aclient = loop.run_until_complete(Client.connect_tcp("127.0.0.1", port, token=TOKEN))
    stack.callback(lambda: loop.run_until_complete(aclient.close()))
    for payload, value in (("bytes", blobs), ("arrays", arrays)):

        def way(calls: int, value=value) -> list[float]:
            async def turn() -> list[float]:
                seconds = []
                for _ in range(calls):
                    begun = time.perf_counter()
                    await aclient.call_object("echo", value, receive=Receive.VIEWS)
                    seconds.append(time.perf_counter() - begun)
                return seconds

            return loop.run_until_complete(turn())

        yield f"{payload} tcp views-asyncio", way


def _grpc(
    stack: ExitStack, blobs: list[bytes], arrays: list[np.ndarray], skipped: dict[str, str], *, kept: bool
) -> Iterator[tuple[str, Way]]:
    try:
        import grpc
    except ImportError:
        skipped["grpc"] = "grpcio is not installed: pip install grpcio"
        return
    port = stack.enter_context(serving(*python_server("grpc", Path("-"), kept=kept)))
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS))
    call = channel.unary_unary(
        "/Echo/echo",
        request_serializer=lambda value: pickle.dumps(value, protocol=5),
        response_deserializer=pickle.loads,
    )
    for payload, value in (("bytes", blobs), ("arrays", arrays)):
        _check(call(value), value, Receive.COPIES)
        yield f"{payload} grpc", _timed(lambda value=value: call(value))


def _floor(stack: ExitStack, folder: Path, skipped: dict[str, str]) -> Iterator[tuple[str, Way]]:
    try:
        program = str(build_echo(folder))
    except (OSError, subprocess.CalledProcessError) as e:
        skipped["c"] = f"no C compiler that works: {e}"
        return
    for transport, path in (("tcp", "0"), ("unix", str(folder / "c"))):
        port = stack.enter_context(serving(program, "server", str(OBJECTS * NBYTES), path))
        where = path if transport == "unix" else str(port)
        yield f"c {transport}", stack.enter_context(_c_client(program, where))


@contextmanager
def _c_client(program: str, where: str) -> Iterator[Way]:
    command = [program, "client", str(OBJECTS * NBYTES), where]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def way(calls: int) -> list[float]:
        print(calls, file=process.stdin, flush=True)
        return [float(word) for word in process.stdout.readline().split()]

    try:
        yield way
    finally:
        process.kill()
        process.wait()


def _timed(echo: Callable[[], Any]) -> Way:
    def way(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            begun = time.perf_counter()
            echo()
            seconds.append(time.perf_counter() - begun)
        return seconds

    return way


def _check(back: list[Any], sent: list[Any], receive: Receive) -> None:
    kind = memoryview if receive is Receive.VIEWS and isinstance(sent[0], bytes) else type(sent[0])
    assert all(type(a) is kind and bytes(a) == bytes(b) for a, b in zip(back, sent, strict=True))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(result: dict[str, Any]) -> None:
    for name in ("plain", "kept"):
        print(f"{name}: {result[name]['skipped'] or ''}")
        for row, found in result[name]["rows"].items():
            ratios = [f"{found[key]['median']:5.2f} {key}" for key in ("times_grpc", "times_c") if key in found]
            print(f"  {row:28} {found['ms']['median']:7.2f} ms  {'  '.join(ratios)}")


if __name__ == "__main__":
    main()
