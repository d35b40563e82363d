"""Echo of five objects of 500 KB between two processes on loopback: ours compared with gRPC and a loop in C.

The measurement follows DPFlow, section 5.4.1 (table 5-4: CRPC 2.44 ms, gRPC 4.54 ms, 1.86 times), with its payload. gRPC is
grpcio with generic handlers and pickle. `views` end in `memoryview`s and arrays on pooled memory, `copies` in real
`bytes` and arrays of their own, at both ends. Every variant has processes of its own, and they take turns of a few echoes
each, because other work on the machine comes and goes. A ratio is the median over turns of ratios within a turn.

All variants are measured twice: in `plain` processes, and in processes that called `keep_freed` (gRPC's as well), because much of
gRPC's time is spent by the C library, which returns the memory of every message and requests it anew.

    pip install grpcio                   # for the comparison only; skipped with a message where it is missing
    python -m benchmarks.rpc --json
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, condensed, environment, write
from benchmarks.rpc_peers import NBYTES, OBJECTS, build_echo

GOALS = {"views_times_grpc": 6.0, "copies_times_grpc": 4.0, "times_c": 2.0}
WARM_UP = 3
"""Echoes not counted: connections are made, and pools filled."""
PAYLOADS = ("bytes", "arrays")
Way = Callable[[int], list[float]]
"""Seconds of each of `n` echoes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rpc", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--turns", type=int, default=12, help="turns of each way (default: %(default)s)")
    parser.add_argument("--echoes", type=int, default=30, help="echoes per turn (default: %(default)s)")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        **environment(),
        "benchmark": "rpc",
        "grpcio": _version("grpcio"),
        "payload": f"{OBJECTS} objects of {NBYTES} bytes, there and back",
        "goals": GOALS,
        "turns": arguments.turns,
        "echoes_per_turn": arguments.echoes,
    }
    for memory in ("plain", "kept"):
        result[memory] = measure(memory, arguments.turns, arguments.echoes)
    if arguments.json:
        write(result)
    else:
        _print(result)


def measure(memory: str, turns: int, echoes: int) -> dict[str, Any]:
    """Milliseconds per echo of every variant, its speed relative to gRPC, and its time relative to the loop in C."""
    skipped: dict[str, str] = {}
    times_ms: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ephemeron-")))
        ways = {**dict(_ours(stack, folder, memory)), **dict(_grpc(stack, memory, skipped)), **dict(_in_c(stack, folder, skipped))}
        for way in ways.values():
            way(WARM_UP)
        for _ in range(turns):
            for name, way in ways.items():
                times_ms.setdefault(name, []).append(1e3 * statistics.median(way(echoes)))
    rows = {}
    for name, mine in times_ms.items():
        row: dict[str, Any] = {"ms": condensed(mine)}
        payload, transport, *_ = name.split()
        if f"{payload} grpc" in times_ms and transport != "grpc":
            row["times_grpc"] = condensed([b / a for a, b in zip(mine, times_ms[f"{payload} grpc"], strict=True)])
        if f"c {transport}" in times_ms and payload != "c":
            row["times_c"] = condensed([a / b for a, b in zip(mine, times_ms[f"c {transport}"], strict=True)])
        rows[name] = row
    return {"rows": rows, "skipped": skipped, "load_after": [round(load, 2) for load in os.getloadavg()]}


def _ours(stack: ExitStack, folder: Path, memory: str) -> Iterator[tuple[str, Way]]:
    for way, transports in (("views", ("tcp", "unix", "shared")), ("copies", ("tcp", "unix", "shared")), ("asyncio", ("tcp",))):
        port = stack.enter_context(_served(*_python("server", way, str(folder / way), memory)))
        for transport in transports:
            where = port if transport == "tcp" else str(folder / way)
            for payload in PAYLOADS:
                client = _python("client", way, transport, payload, where, memory)
                yield f"{payload} {transport} {way}", stack.enter_context(_client(*client))


def _grpc(stack: ExitStack, memory: str, skipped: dict[str, str]) -> Iterator[tuple[str, Way]]:
    if _version("grpcio") is None:
        skipped["grpc"] = "grpcio is not installed: pip install grpcio"
        return
    port = stack.enter_context(_served(*_python("server", "grpc", "-", memory)))
    for payload in PAYLOADS:
        client = _python("client", "grpc", "tcp", payload, port, memory)
        yield f"{payload} grpc", stack.enter_context(_client(*client))


def _in_c(stack: ExitStack, folder: Path, skipped: dict[str, str]) -> Iterator[tuple[str, Way]]:
    try:
        program = str(build_echo(folder))
    except (OSError, subprocess.CalledProcessError) as e:
        skipped["c"] = f"no working C compiler: {e}"
        return
    nbytes = str(OBJECTS * NBYTES)
    for transport, path in (("tcp", "0"), ("unix", str(folder / "c"))):
        port = stack.enter_context(_served(program, "server", nbytes, path))
        where = path if transport == "unix" else port
        yield f"c {transport}", stack.enter_context(_client(program, "client", nbytes, where))


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.rpc_peers", *words)


@contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _served(*command: str) -> Iterator[str]:
    """Runs a server for the block; gives its port."""
    with _process(*command) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@contextmanager
def _client(*command: str) -> Iterator[Way]:
    with _process(*command) as process:

        def way(echoes: int) -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            print(echoes, file=process.stdin, flush=True)
            return [float(word) for word in process.stdout.readline().split()]

        yield way


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(result: dict[str, Any]) -> None:
    for memory in ("plain", "kept"):
        print(memory, result[memory]["skipped"] or "")
        for name, row in result[memory]["rows"].items():
            ratios = [f"{row[key]['median']:6.2f} {key}" for key in ("times_grpc", "times_c") if key in row]
            print(f"  {name:22} {row['ms']['median']:7.2f} ms {' '.join(ratios)}")


if __name__ == "__main__":
    main()
