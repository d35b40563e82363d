"""Whether something grows as long as it is used: `python tests/soak.py simulated|session --seconds 60`, a part of `make test-nightly`.

`simulated` trains in virtual time for many iterations: the store never has more objects than in a tenth of them, and none is left.
`session` trains one small job after another on this machine, within one session: processes, open descriptors, memory, and files outside
the folders of the runs are, at the end, what they were after the first runs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ephemeron.training.driver import Session, configure
from ephemeron.training.job import Simulation
from tiny_job import SHORT

FIRST = 5
"""Runs that are not looked at: imports, caches and warm functions come with them."""
LOOKS = 5
"""Runs at the beginning that are compared with as many at the end: the most of those with the least of these."""
QUICK = Simulation(compute={"a": 10.0, "b": 4.0, "m": 0.0}, latency_s=0.001)


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process and all others with the same folder for temporary files have."""

    processes: int
    descriptors: int
    memory_mb: float
    files: int


SPARE = Held(processes=0, descriptors=8, memory_mb=48, files=0)
"""How much more may be there at the end: sockets that are just being closed, and memory that an allocator keeps in pieces."""


def look(folders: Sequence[Path], apart: Path) -> Held:
    """Looks at the processes, and at the files in folders, without those below `apart`."""
    alive = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get("TMPDIR", "").startswith(os.environ["TMPDIR"]):
                alive.append((process.num_fds(), process.memory_full_info().uss))
        except psutil.Error:
            continue  # it has just ended, or is another user's
    files = (path for folder in folders for path in folder.rglob("*"))
    return Held(
        processes=len(alive),
        descriptors=sum(fds for fds, _ in alive),
        memory_mb=sum(uss for _, uss in alive) / 2**20,
        files=sum(not path.is_relative_to(apart) for path in files),
    )


def grown(looks: Sequence[Held]) -> list[str]:
    """What is more at the end than at the beginning."""
    early, late = looks[:LOOKS], looks[-LOOKS:]
    found = []
    for name, spare in dataclasses.asdict(SPARE).items():
        before, after = max(getattr(each, name) for each in early), min(getattr(each, name) for each in late)
        if after > before + spare:
            found.append(f"{name}: {before:.0f} after {FIRST + LOOKS} runs, {after:.0f} after {FIRST + len(looks)}")
    return found


async def session(seconds: float) -> tuple[str, list[str]]:
    """What was done, and what has grown."""
    end, looks = time.monotonic() + seconds, []
    home = Path(os.environ["EPHEMERON_HOME"])
    folders = [home, Path(tempfile.gettempdir()), Path("/dev/shm")]
    folders = [each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)]
    async with Session() as session:
        for n in range(10_000):
            if time.monotonic() > end and n >= FIRST + 2 * LOOKS:
                break
            configuration = configure(SHORT, platform="local", workers=2, aggregators=1, batch_size=720)
            result = await session.train(SHORT, configuration, report=False)
            shutil.rmtree(result.folder.path)
            if n >= FIRST:
                looks.append(look(folders, home / "runs"))
    last = ", ".join(f"{name} {value:.0f}" for name, value in dataclasses.asdict(looks[-1]).items())
    return f"{FIRST + len(looks)} runs; {last}", grown(looks)


def simulated(seconds: float) -> tuple[str, list[str]]:
    """What was done, and what has grown."""
    sys.path.append(str(Path(__file__).parent / "training"))
    from training_runs import synthetic

    began, epochs = time.monotonic(), 1
    few = run = synthetic(samples=6400, epochs=epochs, world=QUICK, workers=4, aggregators=2, batch_size=16)
    wrong = []
    while not wrong:
        if run.most_objects > 1.1 * few.most_objects:
            wrong.append(f"objects: {few.most_objects} in 100 iterations, {run.most_objects} in {100 * epochs}")
        if run.left != {"run/spec", "run/result"}:
            wrong.append(f"left in the store: {sorted(run.left)[:5]}")
        took = time.monotonic() - began
        if took * 4 > seconds:  # the next one would take three times as long as all so far
            break
        epochs *= 3
        run = synthetic(samples=6400, epochs=epochs, world=QUICK, workers=4, aggregators=2, batch_size=16)
    return f"{100 * epochs} iterations in virtual time, at most {run.most_objects} objects", wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was done; the exit status is 1 if something has grown."""
    parser = argparse.ArgumentParser(prog="python tests/soak.py", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("simulated", "session"))
    parser.add_argument("--seconds", type=float, default=60.0, help="about (default: %(default)g)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["EPHEMERON_HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = folder  # nobody else's files are counted
        if arguments.kind == "session":
            done, wrong = asyncio.run(session(arguments.seconds))
        else:
            done, wrong = simulated(arguments.seconds)
        tempfile.tempdir = None
    print(f"{arguments.kind}: {done}", *wrong, sep="\n    has grown: ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
