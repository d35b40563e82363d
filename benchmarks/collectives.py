"""Seconds, requests and bytes of a K-REDUCE round: `python -m benchmarks.collectives`.

First over an S3 server, in turns with bare `obstore` transfers of the same bytes, and with public implementations if
`--peers FOLDER` contains their checkouts (`benchmarks.side_by_side`). Then over every channel, alone.

Every case is run as fast as the machine allows, and again with each worker behind a link of 70 MB/s and 10 ms, where
the round can be compared with its lower bound. Cases come in order of interest, and the time is bounded: cases for which no
time is left are listed as skipped. All workers, and the store, share this machine's cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.collective_peers import find
from benchmarks.common import environment, write
from benchmarks.rounds import BANDWIDTH_MB_S, LATENCY_S, POLLED_WARM_UP, WARM_UP, Case, CaseFailed, measure
from benchmarks.side_by_side import LARGE_MB, Comparison, compare, request_cost
from benchmarks.stores import CHANNELS, Unavailable, store
from ephemeron.training.collectives.chunking import RequestCost, best_chunk_bytes
from ephemeron.units import MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--quick", action="store_true", help="W = 4, two K, two sizes, fewer rounds: four minutes")
    parser.add_argument("--workers", type=int, nargs="+", metavar="W")
    parser.add_argument("--sizes", type=float, nargs="+", metavar="MB", help="of 1e6 bytes")
    parser.add_argument("--channels", nargs="+", choices=CHANNELS, default=list(CHANNELS))
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="with checkouts of LambdaML and FasDL, run in turns")
    parser.add_argument("--parts", nargs="+", choices=("sides", "channels"), default=["sides", "channels"])
    parser.add_argument("--minutes", type=float, help="minutes after which no case is started (default: 40, quick: 4)")
    arguments = parser.parse_args()
    result = {**environment(), "benchmark": "collectives", **Measurement(arguments).run()}
    if arguments.json:
        write(result)
    else:
        show(result, Console(width=130))


class Measurement:
    """Runs all cases, in order of interest, within the time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.quick = bool(arguments.quick)
        self.workers = arguments.workers or ([4] if self.quick else [4, 2, 8])
        self.sizes = arguments.sizes or ([1.0, 47.0] if self.quick else [47.0, 1.0, 5.0])
        self.channels = arguments.channels
        self.ends = time.monotonic() + 60 * (arguments.minutes or (4 if self.quick else 40))
        self.budget_s = 0.5 if self.quick else 1.0
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.probes: dict[str, Any] = {}
        self.parts = arguments.parts
        self.peers = find(arguments.peers) if arguments.peers else []
        self.sides: list[dict[str, Any]] = []
        self.requests: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        if "sides" in self.parts:
            self._side_by_side()
        for at, channel in enumerate(self.channels if "channels" in self.parts else []):
            # Each channel gets its share of the remaining time, so that not only the last one is shortened.
            part = (self.ends - time.monotonic()) / (len(self.channels) - at)
            try:
                with store(channel) as address:
                    self._channel(channel, address, time.monotonic() + part)
            except (Unavailable, CaseFailed) as e:
                self._skip({"channel": channel}, str(e))
        return {
            "link": {"bandwidth_mb_s": BANDWIDTH_MB_S, "latency_s": LATENCY_S},
            "warm_up_rounds": {"polled": POLLED_WARM_UP, "others": WARM_UP},
            "minutes": round((time.monotonic() - began) / 60, 2),
            "processes": {"rule": "the faster of one and two processes in a probe: W=K=4, plain, unthrottled", "probes": self.probes},
            "side_by_side": {"channel": "s3", "requests": self.requests, "rows": self.sides},
            "rounds": self.rows,
            "skipped": self.skipped,
        }

    def _side_by_side(self) -> None:
        try:
            with store("s3") as address:
                cost = request_cost(address)
                self.requests = dataclasses.asdict(cost)
                for size in sorted(self.sizes):
                    for w in sorted(self.workers):
                        for k in self._aggregators(w):
                            self._compare(address, w, k, size, cost)
        except Unavailable as e:
            self._skip({"part": "sides"}, str(e))

    def _compare(self, address: str, w: int, k: int, size_mb: float, cost: RequestCost) -> None:
        name = {"part": "sides", "workers": w, "aggregators": k, "size_mb": size_mb}
        reason = "no time left" if time.monotonic() > self.ends else None
        if size_mb >= LARGE_MB and w >= 8:
            reason = "the store is one Python process, and a round of eight workers moves a gigabyte through it"
        if reason:
            self._skip(name, reason)
            return
        comparison = Comparison(
            workers=w,
            aggregators=k,
            size_mb=size_mb,
            forms=("plain", "pipelined"),
            peers=tuple((p, checkout) for p, checkout in self.peers if k in p.aggregators(w)),
            chunk_bytes=best_chunk_bytes(w, k, model_bytes=int(size_mb * MB), cost=cost),
        )
        try:
            self.sides.append(compare(comparison, f"{address}/{w}.{k}.{size_mb:g}", turns=3 if self.quick else 5))
            print(_side_line(self.sides[-1]), file=sys.stderr)
        except CaseFailed as e:
            self._skip(name, f"failed: {e}")

    def _channel(self, channel: str, address: str, ends: float) -> None:
        processes = 1 if channel == "memory" else self._probe(channel, address)
        for case in self.cases(channel):
            reason = too_much(case) or (None if time.monotonic() < ends else "no time left")
            if reason:
                self._skip(_name(case), reason)
                continue
            try:
                self.rows.append(measure(case, address, processes=processes, budget_s=self.budget_s))
                print(_line(self.rows[-1]), file=sys.stderr)
            except CaseFailed as e:
                self._skip(_name(case), f"failed: {e}")

    def _probe(self, channel: str, address: str) -> int:
        case = Case(channel=channel, workers=4, aggregators=4, size_mb=max(self.sizes), form="plain", throttled=False)
        medians = {}
        for processes in (1, 2):
            row = measure(case, address, processes=processes, budget_s=self.budget_s)
            medians[processes] = row["seconds"]["median"]
        best = min(medians, key=lambda p: medians[p])
        self.probes[channel] = {"size_mb": case.size_mb, "seconds_by_processes": medians, "chosen": best}
        return best

    def cases(self, channel: str) -> list[Case]:
        """Cases in order of interest: large vectors and four workers, then short cases, then the rest."""
        chosen = [
            Case(channel=channel, workers=w, aggregators=k, size_mb=size, form=form, throttled=throttled)
            for size in self.sizes
            for w in self.workers
            for k in self._aggregators(w)
            for throttled in (True, False)
            for form in ("plain", "pipelined")
        ]
        if self.quick:
            return sorted(chosen, key=lambda c: c.size_mb)
        return sorted(chosen, key=lambda c: 0 if c.size_mb >= LARGE_MB and c.workers == 4 else 1 + c.size_mb)

    def _aggregators(self, workers: int) -> list[int]:
        if self.quick:
            return sorted({max(1, workers // 2), workers})
        if workers <= 4:
            return list(range(1, workers + 1))
        return sorted({1, 2, workers // 2, workers})

    def _skip(self, what: dict[str, Any], reason: str) -> None:
        self.skipped.append({**what, "reason": reason})


def too_much(case: Case) -> str | None:
    """Reason why this machine cannot run a case (the round would measure the machine and not the code); None if it can."""
    if case.size_mb < LARGE_MB:
        return None
    if case.channel == "s3" and case.workers >= 8:
        return "moto is one Python process and moves about 250 MB/s in all; eight links of 70 MB/s are more"
    if case.channel == "s3" and case.form == "pipelined" and case.aggregators < case.workers:
        return "moto answers about 100 requests per second; 470 of them hide the network; see K = W"
    if case.aggregators == 1 and case.workers >= 8:
        return "seven vectors on one link take minutes; W = 4, K = 1 shows the same"
    return None


def _name(case: Case) -> dict[str, Any]:
    return {
        "channel": case.channel,
        "workers": case.workers,
        "aggregators": case.aggregators,
        "size_mb": case.size_mb,
        "form": case.form,
        "throttled": case.throttled,
    }


def _line(row: dict[str, Any]) -> str:
    ratio = f" = {row['ratio_to_bound']:.3f} of the bound" if row["throttled"] else ""
    return (
        f"{row['channel']} W={row['workers']} K={row['aggregators']} {row['size_mb']:g} MB {row['form']}:"
        f" {row['seconds']['median']:.4f} s{ratio}, polls/gets {row['polls_per_get']}"
    )


def _side_line(row: dict[str, Any]) -> str:
    sides = ", ".join(f"{name} {side['median']:.4f} s ({side['ratio_to_bare']:.2f})" for name, side in row["sides"].items())
    return f"W={row['workers']} K={row['aggregators']} {row['size_mb']:g} MB: {sides}"


# -- tables ---------------------------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    sides = Table(title="Over an S3 server, in turns: seconds per round (median), and ratio to bare transfers of the same bytes")
    for name in ("MB", "W", "K", "chunk", "side", "seconds", "× bare", "× ours plain"):
        sides.add_column(name, justify="left" if name == "side" else "right")
    for row in result["side_by_side"]["rows"]:
        for name, side in row["sides"].items():
            chunk = f"{row['chunk_bytes'] / MB:g} MB" if row["chunk_bytes"] else "plain"
            sides.add_row(
                f"{row['size_mb']:g}",
                str(row["workers"]),
                str(row["aggregators"]),
                chunk if "pipelined" in name else "",
                name,
                f"{side['median']:.4f}",
                f"{side['ratio_to_bare']:.2f}",
                f"{side.get('ratio_to_ours', '')}",
            )
    console.print(sides)
    table = Table(title="K-REDUCE, seconds per round (median)")
    for name in ("channel", "MB", "W", "K", "form", "free", "70 MB/s, 10 ms", "bound", "ratio", "puts", "gets", "polls/gets", "MB up"):
        table.add_column(name, justify="left" if name in ("channel", "form") else "right")
    free = {_key(row): row for row in result["rounds"] if not row["throttled"]}
    slow = {_key(row): row for row in result["rounds"] if row["throttled"]}
    for key in dict.fromkeys([*slow, *free]):
        table.add_row(*_cells(key, free.get(key), slow.get(key)))
    console.print(table)
    console.print(f"skipped: {len(result['skipped'])}; took {result['minutes']} minutes")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["channel"], row["size_mb"], row["workers"], row["aggregators"], row["form"]


def _cells(key: tuple[Any, ...], free: dict[str, Any] | None, slow: dict[str, Any] | None) -> list[str]:
    any_row = slow or free
    assert any_row is not None
    channel, size, workers, aggregators, form = key
    polls = any_row["polls_per_get"]
    per_round = any_row["per_round"]
    return [
        channel,
        f"{size:g}",
        str(workers),
        str(aggregators),
        form,
        f"{free['seconds']['median']:.4f}" if free else "–",
        f"{slow['seconds']['median']:.4f}" if slow else "–",
        f"{slow['bound_s']:.4f}" if slow else "–",
        f"{slow['ratio_to_bound']:.3f}" if slow else "–",
        f"{per_round['puts']:g}",
        f"{per_round['gets']:g}",
        f"{polls:.1%}" if polls is not None else "–",
        f"{per_round['bytes_up'] / 1e6:.1f}",
    ]


if __name__ == "__main__":
    main()
