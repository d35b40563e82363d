"""Random schedules of faults, on real processes and in virtual time: `python -m benchmarks.chaos --minutes 10 --json`.

Live schedules (`benchmarks.chaos_live`): functions killed and frozen, clients and daemons that die, a proxy in front of the store
that resets, cuts short, throttles, delays and pauses, caches that restart, clocks that step. Simulated schedules
(`benchmarks.chaos_simulated`): thousands of schedules whose every step is repeatable. A failure is printed with its seed:

    python -m benchmarks.chaos --only live --seed 17 --schedules 1
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import chaos_live
from benchmarks.common import environment

LIVE, SIMULATED = 100, 10_000
"""Intended number of schedules."""
BATCH = 50
"""Simulated schedules per task of a process."""

Found = dict[int, tuple[list[str], dict[str, int]]]
"""By seed: the failures, and how often each fault happened."""


def _live(seeds: Sequence[int], *, s3_port: int) -> Found:
    return {seed: chaos_live.run(seed, s3_port=s3_port) for seed in seeds}


def _simulated(seeds: Sequence[int]) -> Found:
    from benchmarks import chaos_simulated

    return {seed: (chaos_simulated.run(seed), {}) for seed in seeds}


def _batches(first: int, count: int, size: int) -> Iterator[range]:
    for start in range(first, first + count, size):
        yield range(start, min(start + size, first + count))


def explore(
    work: Callable[[Sequence[int]], Found], *, kind: str, first: int, count: int, size: int, seconds: float, jobs: int
) -> dict[str, Any]:
    """Runs schedules until there are enough, or the time is over.

    Returns:
        `schedules`, `failures`, how often each fault happened, and `failed`: the failures by seed.
    """
    began, done, failed = time.monotonic(), 0, {}
    happened: Counter[str] = Counter()
    todo = _batches(first, count, size)
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[Found]] = set()
        while True:
            while len(running) < jobs and time.monotonic() - began < seconds and (batch := next(todo, None)):
                running.add(pool.submit(work, batch))
            if not running:
                break
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                for seed, (wrong, what) in future.result().items():
                    done += 1
                    happened.update(what)
                    if wrong:
                        failed[str(seed)] = wrong
                        text = f"{kind} schedule failed: --only {kind} --seed {seed} --schedules 1: {'; '.join(wrong)}"
                        print(text[:1000], file=sys.stderr, flush=True)
    took = round(time.monotonic() - began, 1)
    return {
        "schedules": done, "failures": len(failed), "first_seed": first, "seconds": took, "happened": dict(sorted(happened.items())),
        "failed": failed,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the result; the exit code is 1 if any schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for both kinds together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default: %(default)s)")
    parser.add_argument("--only", choices=("live", "simulated"), help="one kind")
    parser.add_argument("--schedules", type=int, help=f"of each kind (default: {LIVE} live, {SIMULATED} simulated)")
    parser.add_argument("--jobs", type=int, default=2, help="schedules at once (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="schedules and failures of each kind, in one line")
    parser.add_argument("--details", type=Path, help="file for machine, versions, commit and failures")
    args = parser.parse_args(argv)
    logging.getLogger("ephemeron").setLevel(logging.ERROR)  # every fault is a warning
    said = environment()
    share = 60 * args.minutes / (1 if args.only else 2)
    found: dict[str, dict[str, Any]] = {}
    if args.only != "live":
        found["simulated"] = explore(
            _simulated, kind="simulated", first=args.seed, count=args.schedules or SIMULATED, size=BATCH, seconds=share,
            jobs=args.jobs,
        )  # fmt: skip
    if args.only != "simulated":
        with chaos_live.s3_server() as port:
            found["live"] = explore(
                partial(_live, s3_port=port), kind="live", first=args.seed, count=args.schedules or LIVE, size=1,
                seconds=share, jobs=args.jobs,
            )  # fmt: skip
    counts = {
        kind: {n: found[kind][n] for n in ("schedules", "failures")} for kind in ("live", "simulated") if kind in found
    }
    if args.details is not None:
        details = {**said, "minutes": args.minutes, "jobs": args.jobs, "explored": found, **counts}
        args.details.write_text(json.dumps(details, indent=1) + "\n")
    if args.json:
        print(json.dumps(counts))
    else:
        for kind, count in counts.items():
            print(f"{kind}: {count['schedules']} schedules, {count['failures']} failed")
    return 1 if any(count["failures"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
