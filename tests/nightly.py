"""What takes too long for each landing, within an hour: `make test-nightly`, or `python tests/nightly.py [--minutes 60] [--only PART ...]`.

| part | what | share of the time |
|---|---|---|
| schedules | 10,000 random schedules of faults in virtual time, of every kind, a part of them with a damaged object | 18/60 |
| matrix | the tests of which the lanes run a part, with EPHEMERON_FULL_MATRIX=1 | 14/60 |
| mutants | small changes that each break a guarantee: the tests notice every one | 8/60 |
| benchmarks | the smallest run of each benchmark for which the lanes are too short | 8/60 |
| soak | whether something grows as long as it is used | 4/60 |
| quarantine | each test that may be tried a second time, 20 times | 5/60 |

A part begins nothing after its share, is interrupted a little later, and says what it did not reach. Seeds, and which mutants and tests come
first, follow from the date, which `--date` repeats. A failure is printed with the command that repeats it alone; all are printed again at
the end. Failures of tests in quarantine are counted and fail nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import benchmark_runs
import repeating
from mutation import mutants
from quarantine import quarantined

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 20.0
"""Between an interrupt and SIGKILL."""
PROCESSES = 2
TIMES = 20
"""That each test in quarantine is run."""

SCHEDULES = {
    "of functions and stores": ("simulated", 0),
    "with merged evaluations": ("simulated", 3_000_000),
    "with barriers": ("simulated", 4_000_000),
    "with local steps": ("simulated", 5_000_000),
    "with resizes": ("simulated", 6_000_000),
    "with partitions": ("simulated", 7_000_000),
    "with a damaged object": ("damaged", 0),
}
"""Kinds of `benchmarks.chaos`, and the first of their million seeds (`benchmarks.chaos_schedules`)."""
EACH = {"simulated": 1_500, "damaged": 1_000}
"""Schedules of one kind and night; 10,000 together."""
COSTS = {"simulated": 1, "damaged": 8}
"""Of one schedule, in proportion: a damaged object is tried with several runs."""
FULL_MATRIX = {
    "tests/functions/lithops/test_lithops_training.py": "lifetimes",
    "tests/functions/ray/test_ray_training.py": "lifetimes",
    "tests/functions/tasks/test_task_schedules.py": "",
    "tests/partition/runtime/test_pipeline_equality.py": "stages_train",
    "tests/partition/test_place.py": "bound or baseline",
    "tests/partition/test_tracing_models.py": "stages",
    "tests/runs/test_driver_function.py": "whoever_dies",
    "tests/training/planner/model/test_lives.py": "evaluations or feasible or predicted",
    "tests/training/planner/test_search.py": "",
    "tests/training/test_direct_recovery.py": "",
    "tests/training/test_evaluation_hand_offs.py": "",
    "tests/training/test_exactly_once.py": "stragglers or kills",
    "tests/training/test_groups.py": "",
    "tests/training/test_region_damage.py": "",
}
"""Tests of which EPHEMERON_FULL_MATRIX=1 runs more, and words in the names of those of them that it changes (pytest -k)."""


@dataclass
class Found:
    """What a part has done."""

    done: str
    """In one line."""
    failures: list[str] = field(default_factory=list)
    """Each with the command that repeats it."""
    missed: list[str] = field(default_factory=list)
    """What the time was too short for."""


def call(command: Sequence[str], limit_s: float, **environ: str) -> tuple[int | None, list[str]]:
    """Runs a command and shows what it prints; at the limit it is interrupted, and killed if it does not end.

    Returns:
        Its exit status (None: it was interrupted) and its lines.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []

    def show() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(f"    {line}", end="", flush=True)

    reader = threading.Thread(target=show)
    reader.start()
    status: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        if status is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it leaves keeps the pipe open
        process.wait()
        reader.join()
    return status, lines


def turned(names: Sequence[str], day: int) -> list[str]:
    """Begins with another one each day, so that a short night leaves out others than the one before."""
    at = day * 7 % len(names) if names else 0
    return [*names[at:], *names[:at]]


def schedules(day: int, seconds: float) -> Found:
    """Random schedules of faults in virtual time."""
    found, end, ran = Found(""), time.monotonic() + seconds, 0
    whole = sum(EACH[kind] for kind, _ in SCHEDULES.values())
    todo = sum(EACH[kind] * COSTS[kind] for kind, _ in SCHEDULES.values())
    for name in turned(list(SCHEDULES), day):
        kind, first = SCHEDULES[name]
        count = EACH[kind]
        first += day % (1_000_000 // count) * count
        cost = count * COSTS[kind]
        share = (end - time.monotonic()) * cost / todo
        todo -= cost
        command = ["-m", "benchmarks.chaos", "--only", kind, "--seed", str(first), "--schedules", str(count)]
        command += ["--minutes", f"{share / 60:.3f}", "--jobs", str(PROCESSES)]
        print(f"{name}: python {shlex.join(command)}", flush=True)
        status, lines = call([sys.executable, *command], share + 60) if share > 1 else (None, [])
        [did] = [int(n) for line in lines for n in re.findall(rf"^{kind}: (\d+) schedules", line)] or [0]
        ran += did
        again = [text for line in lines for text in re.findall(r"schedule failed: (--only \S+ --seed \d+ --schedules 1: .*)", line)]
        found.failures += [f"python -m benchmarks.chaos {text}" for text in again]
        if status not in (0, None) and not again:
            found.failures.append(f"python {shlex.join(command)}: exit {status}")
        if did < count:
            found.missed.append(f"{count - did} of {count} schedules {name}")
    found.done = f"{ran} of {whole} schedules"
    return found


def run_all(commands: Sequence[tuple[list[str], dict[str, str]]], seconds: float) -> Iterator[tuple[int | None, list[str]]]:
    """Runs commands, two at once: the exit status of each (None: it did not come to its end) and its lines."""
    end = time.monotonic() + seconds

    def run(asked: tuple[list[str], dict[str, str]]) -> tuple[int | None, list[str]]:
        left = end - time.monotonic()
        return (None, ["not begun"]) if left < 5 else call(asked[0], left, **asked[1])

    with ThreadPoolExecutor(PROCESSES) as pool:
        yield from pool.map(run, commands)


def last(lines: Sequence[str]) -> str:
    """What a run of pytest says at its end."""
    return (lines or ["nothing"])[-1].strip("= ")


def matrix(day: int, seconds: float) -> Found:
    """The tests of which the lanes run a part."""
    names, found = turned(list(FULL_MATRIX), day), Found("")
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:rerunfailures", "-p", "no:cacheprovider"]
    words += [*repeating.LANES, "-rfE", "-o", "addopts=--timeout=900", "-o", "tmp_path_retention_policy=failed"]
    commands = [([*words, name, "-k", FULL_MATRIX[name]], {"EPHEMERON_FULL_MATRIX": "1"}) for name in names]
    for name, (status, lines) in zip(names, run_all(commands, seconds), strict=True):
        failed = [text for line in lines for text in re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", line)]
        if status not in (0, None) and not failed:
            failed = [name]
        found.failures += [f"EPHEMERON_FULL_MATRIX=1 python -m pytest -n 0 {shlex.quote(each)}" for each in failed]
        found.missed += [f"{name} ({last(lines)})"] if status is None else []
    found.done = f"{len(names) - len(found.missed)} of {len(names)} modules whole"
    return found


def all_mutants(day: int, seconds: float) -> Found:
    """Small changes that each break a guarantee."""
    names = turned([mutant.name for mutant in mutants()], day)
    command = ["tests/mutation.py", "--limit-s", f"{0.9 * seconds:.0f}"]
    status, lines = call([sys.executable, *command, *names], seconds)
    how = {name: line.split()[0] for line in lines for name in names if re.search(rf"^\w[\w ]* +{re.escape(name)}:", line)}
    found = Found(f"{list(how.values()).count('noticed')} of {len(names)} mutants noticed")
    found.failures = [f"python tests/mutation.py {name}" for name, said in how.items() if said == "WRONG"]
    found.missed = [name for name in names if how.get(name, "not") == "not"]
    if status not in (0, None) and not found.failures:
        found.failures.append(f"python {shlex.join(command)}: exit {status}")
    return found


def benchmarks(day: int, seconds: float) -> Found:
    """The smallest run of each benchmark for which the lanes are too short."""
    names, found = turned(list(benchmark_runs.LONG), day), Found("")
    commands = [([sys.executable, "tests/benchmark_runs.py", name], {}) for name in names]
    for name, (status, _) in zip(names, run_all(commands, seconds), strict=True):
        found.missed += [name] if status is None else []
        found.failures += [f"python tests/benchmark_runs.py {name}"] if status else []
    found.done = f"{len(names) - len(found.missed)} of {len(names)} benchmarks"
    return found


def soak(day: int, seconds: float) -> Found:
    """Whether something grows."""
    said, found = [], Found("")
    for kind, share in (("simulated", 0.3), ("session", 0.7)):
        command = ["tests/soak.py", kind, "--seconds", f"{0.8 * share * seconds:.0f}"]
        status, lines = call([sys.executable, *command], share * seconds)
        said += [line for line in lines if line.startswith(f"{kind}: ")]
        if status is None:
            found.missed.append(kind)
        elif status:
            found.failures.append(f"python {shlex.join(command)}: {'; '.join(lines[-4:])}")
    found.done = "; ".join(said) or "nothing was looked at"
    return found


def quarantine(day: int, seconds: float) -> Found:
    """Tests that may be tried a second time."""
    names = turned(list(quarantined()), day)
    ran = dict(zip(names, run_all([repeating.command(name, TIMES, 1) for name in names], seconds), strict=True))
    return Found(
        "; ".join(f"{name}: {last(lines)}" for name, (_, lines) in ran.items()) or "no test is in quarantine",
        missed=[name for name, (status, _) in ran.items() if status is None],
    )


PARTS: dict[str, tuple[Callable[[int, float], Found], float]] = {
    "schedules": (schedules, 18.0),
    "matrix": (matrix, 14.0),
    "mutants": (all_mutants, 8.0),
    "benchmarks": (benchmarks, 8.0),
    "soak": (soak, 4.0),
    "quarantine": (quarantine, 5.0),
}
"""What runs, and its minutes of an hour; the rest is for what is interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts and says what they found; the exit status is 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python tests/nightly.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="that a whole night takes (default: %(default)g)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--date", type=datetime.date.fromisoformat, default=datetime.date.today(), help="to repeat a night")
    arguments = parser.parse_args(argv)
    said: list[str] = []
    failures: list[str] = []
    for name in arguments.only:
        work, minutes = PARTS[name]
        seconds, began = minutes * arguments.minutes, time.monotonic()  # minutes of 60, so seconds of a minute
        print(f"\n== {name}: at most {seconds / 60:.1f} minutes", flush=True)
        found = work(arguments.date.toordinal(), seconds)
        said.append(
            f"{name}: {found.done}, {len(found.failures)} failed, in {(time.monotonic() - began) / 60:.1f} of {seconds / 60:.1f} minutes"
        )
        if found.missed:
            more = f" and {len(found.missed) - 8} more" if len(found.missed) > 8 else ""
            said.append("    not reached: " + ", ".join(found.missed[:8]) + more)
        said += [f"    FAILED {failure}" for failure in found.failures]
        failures += found.failures
    print(f"\n== night of {arguments.date}: {f'{len(failures)} failed' if failures else 'nothing failed'}", *said, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
