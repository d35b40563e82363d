"""Seconds, requests and bytes of a K-REDUCE round: `python -m benchmarks.collectives`.

Every case is run as fast as the machine allows, and again with each worker behind a link of 70 MB/s and 10 ms, where
the round can be held against its lower bound. Cases come in order of interest, and the time is bounded: what no
longer fits is listed as skipped. All workers, and the store, share this machine's cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import environment, write
from benchmarks.rounds import BANDWIDTH_MB_S, LATENCY_S, POLLED_WARM_UP, WARM_UP, Case, CaseFailed, measure
from benchmarks.stores import CHANNELS, Unavailable, store

PEERS = (
    # system, MB, seconds a round with four workers over the same kind of S3 server on the same kind of machine, K
    ("LambdaML ScatterReduce", 46.8, 8.6, 4),
    ("LambdaML AllReduce", 46.8, 9.7, 1),
    ("LambdaML ScatterReduce", 1.05, 0.87, 4),
    ("LambdaML AllReduce", 1.05, 0.62, 1),
    ("FasDL k_reduce", 1.05, 0.55, 1),
    ("FasDL k_reduce", 1.05, 0.78, 2),
    ("FasDL k_reduce", 1.05, 1.34, 4),
)
LARGE_MB = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--quick", action="store_true", help="W = 4, two K, two sizes, fewer rounds: two minutes")
    parser.add_argument("--workers", type=int, nargs="+", metavar="W")
    parser.add_argument("--sizes", type=float, nargs="+", metavar="MB", help="of 1e6 bytes")
    parser.add_argument("--channels", nargs="+", choices=CHANNELS, default=list(CHANNELS))
    parser.add_argument("--minutes", type=float, help="stop starting cases after so long (default: 20, quick: 1.8)")
    arguments = parser.parse_args()
    result = {**environment(), "benchmark": "collectives", **Measurement(arguments).run()}
    if arguments.json:
        write(result)
    else:
        show(result, Console(width=130))


class Measurement:
    """All cases, in order of interest, within the time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.quick = bool(arguments.quick)
        self.workers = arguments.workers or ([4] if self.quick else [4, 2, 8])
        self.sizes = arguments.sizes or ([1.0, 47.0] if self.quick else [47.0, 1.0, 5.0])
        self.channels = arguments.channels
        self.ends = time.monotonic() + 60 * (arguments.minutes or (1.8 if self.quick else 20))
        self.budget_s = 0.5 if self.quick else 1.0
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.probes: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        for at, channel in enumerate(self.channels):
            # Each channel gets its part of what is left, so that the last one is not the one that is cut.
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
            "processes": {"rule": "the faster of one and two, by the probe: W=K=4, plain, unthrottled", "probes": self.probes},
            "rounds": self.rows, "peers": self._peers(), "skipped": self.skipped,
        }  # fmt: skip

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
        """The most interesting first: large vectors and four workers, then what is quick, then the rest."""
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

    def _peers(self) -> list[dict[str, Any]]:
        """Earlier public implementations over an S3 server of the same kind on such a machine, four workers."""
        out = []
        for system, size_mb, seconds, k in PEERS:
            for row in self.rows:
                here = (row["channel"], row["workers"], row["throttled"], row["form"]) == ("s3", 4, False, "plain")
                if here and row["aggregators"] == k and abs(row["size_mb"] - size_mb) < 0.5:
                    ours = row["seconds"]["median"]
                    out.append(
                        {
                            "system": system,
                            "workers": 4,
                            "aggregators": k,
                            "size_mb": size_mb,
                            "seconds": seconds,
                            "ours_size_mb": row["size_mb"],
                            "ours_seconds": ours,
                            "times_faster": round(seconds / ours, 1),
                        }
                    )
        return out


def too_much(case: Case) -> str | None:
    """Why this machine cannot carry a case, if so: the round would measure the machine and not the code."""
    if case.size_mb < LARGE_MB:
        return None
    if case.channel == "s3" and case.workers >= 8:
        return "moto is one Python process: it moves about 250 MB/s in all, and eight links of 70 MB/s are more"
    if case.channel == "s3" and case.form == "pipelined" and case.aggregators < case.workers:
        return "moto answers about 100 requests a second: 470 of them hide the network; K = W shows it"
    if case.aggregators == 1 and case.workers >= 8:
        return "seven vectors on one link: minutes for a figure that W = 4, K = 1 shows as well"
    return None


def _name(case: Case) -> dict[str, Any]:
    return {
        "channel": case.channel, "workers": case.workers, "aggregators": case.aggregators, "size_mb": case.size_mb,
        "form": case.form, "throttled": case.throttled,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    ratio = f" = {row['ratio_to_bound']:.3f} of the bound" if row["throttled"] else ""
    return (
        f"{row['channel']} W={row['workers']} K={row['aggregators']} {row['size_mb']:g} MB {row['form']}:"
        f" {row['seconds']['median']:.4f} s{ratio}, polls/gets {row['polls_per_get']}"
    )


# -- tables ---------------------------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    """Tables for people."""
    table = Table(title="K-REDUCE, seconds per round (median)")
    for name in (
        "channel",
        "MB",
        "W",
        "K",
        "form",
        "free",
        "70 MB/s, 10 ms",
        "bound",
        "ratio",
        "puts",
        "gets",
        "polls/gets",
        "MB up",
    ):
        table.add_column(name, justify="left" if name in ("channel", "form") else "right")
    free = {_key(row): row for row in result["rounds"] if not row["throttled"]}
    slow = {_key(row): row for row in result["rounds"] if row["throttled"]}
    for key in dict.fromkeys([*slow, *free]):
        table.add_row(*_cells(key, free.get(key), slow.get(key)))
    console.print(table)
    for peer in result["peers"]:
        console.print(
            f"{peer['system']} K={peer['aggregators']} {peer['size_mb']:g} MB: {peer['seconds']:g} s; "
            f"ours {peer['ours_seconds']:.3f} s at {peer['ours_size_mb']:g} MB: {peer['times_faster']} times as fast"
        )
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
        channel, f"{size:g}", str(workers), str(aggregators), form,
        f"{free['seconds']['median']:.4f}" if free else "–",
        f"{slow['seconds']['median']:.4f}" if slow else "–",
        f"{slow['bound_s']:.4f}" if slow else "–",
        f"{slow['ratio_to_bound']:.3f}" if slow else "–",
        f"{per_round['puts']:g}", f"{per_round['gets']:g}", f"{polls:.1%}" if polls is not None else "–",
        f"{per_round['bytes_up'] / 1e6:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
