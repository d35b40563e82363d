"""Random schedules of faults, on real processes and in virtual time: `python -m benchmarks.chaos --minutes 10 --json`.

Live schedules (`benchmarks.chaos_live`): functions killed and frozen, clients and daemons that die, a proxy in front of the store
that resets, cuts short, throttles, delays and pauses, caches that restart, clocks that step. Simulated schedules
(`benchmarks.chaos_simulated`): thousands of schedules whose every step is repeatable. Both again with one object damaged, truncated,
replaced or lost (`benchmarks.chaos_damage`): they end, right or with an error that names the key. A failure is printed with its seed:

    python -m benchmarks.chaos --only live --seed 17 --schedules 1
"""

from __future__ import annotations

import argparse
import contextlib
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

INTENDED = {"simulated": 10_000, "damaged": 3_000, "live": 100, "damaged-live": 80}
"""Number of schedules of each kind."""
BATCH = 50
"""Simulated schedules per task of a process."""

Found = dict[int, tuple[list[str], dict[str, int]]]
"""By seed: the failures, and how often each fault happened."""


def _live(seeds: Sequence[int], *, s3_port: int) -> Found:
    return {seed: chaos_live.run(seed, s3_port=s3_port) for seed in seeds}


def _simulated(seeds: Sequence[int]) -> Found:
    from benchmarks import chaos_simulated

    return {seed: (chaos_simulated.run(seed), {}) for seed in seeds}


def _damaged(seeds: Sequence[int]) -> Found:
    from benchmarks import chaos_damage

    return {seed: chaos_damage.run(seed) for seed in seeds}


def _damaged_live(seeds: Sequence[int], *, s3_port: int) -> Found:
    from benchmarks import chaos_damage

    return {seed: chaos_damage.run_live(seed, s3_port=s3_port) for seed in seeds}


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
        "schedules": done,
        "failures": len(failed),
        "first_seed": first,
        "seconds": took,
        "happened": dict(sorted(happened.items())),
        "failed": failed,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the result; the exit code is 1 if any schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default: %(default)s)")
    parser.add_argument("--only", choices=list(INTENDED), help="one kind")
    parser.add_argument("--schedules", type=int, help=f"of each kind (default: {INTENDED})")
    parser.add_argument("--jobs", type=int, default=2, help="schedules at once (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="schedules and failures of each kind, in one line")
    parser.add_argument("--details", type=Path, help="file for machine, versions, commit and failures")
    args = parser.parse_args(argv)
    logging.getLogger("ephemeron").setLevel(logging.ERROR)  # every fault is a warning
    said = environment()
    kinds = [args.only] if args.only else list(INTENDED)
    share = 60 * args.minutes / len(kinds)
    found: dict[str, dict[str, Any]] = {}
    works: dict[str, Callable[..., Found]] = {"simulated": _simulated, "damaged": _damaged, "live": _live, "damaged-live": _damaged_live}
    with chaos_live.s3_server() if "live" in kinds else contextlib.nullcontext(0) as port:
        for kind in kinds:
            live = kind.endswith("live")
            found[kind] = explore(
                partial(works[kind], s3_port=port) if live else works[kind],
                kind=kind,
                first=args.seed,
                count=args.schedules or INTENDED[kind],
                size=1 if live else BATCH,
                seconds=share,
                jobs=args.jobs,
            )
    counts = {kind: {n: each[n] for n in ("schedules", "failures")} for kind, each in found.items()}
    for kind, each in found.items():
        if kind.startswith("damaged"):
            wrong = [text for texts in each["failed"].values() for text in texts]
            counts[kind] |= {how: sum(text.startswith(how) for text in wrong) for how in ("endless", "silent", "unnamed")}
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
