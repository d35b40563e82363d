"""Mutation check of the guarantees: a part of `make test-nightly`, or `python tests/mutation.py [--limit-s 600] [NAME ...]`.

`mutants.toml` lists small changes of the code that each break one guarantee, and the tests that have to notice. Each change is made in
a copy of `src`, and its tests are run against that copy: they must fail. Before, they run once against the copy as it is, and must
pass. `test_mutants.py` keeps the list from going stale: what a mutant replaces must occur exactly once.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600
"""Of the tests of one mutant; tests that hang have noticed it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the code that breaks a guarantee."""

    name: str
    guarantee: str
    """That the change breaks."""
    file: str
    """Below `src/ephemeron`."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Below `tests`, as pytest takes them."""

    def mutated(self, text: str) -> str:
        """The file's text with the change.

        Raises:
            ValueError: what it replaces does not occur exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """The list in `mutants.toml`."""
    entries = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def run_tests(source: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Runs tests against a copy of `src`.

    Returns:
        pytest's exit status (None: it did not end in time) and its last lines.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:rerunfailures",
        "--warm-starts",
        "-o",
        "addopts=--timeout=300",
        *(f"tests/{test}" for test in tests),
    ]
    environ = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, "the tests did not end"
    return done.returncode, "\n".join((done.stdout + done.stderr).strip().splitlines()[-6:])


def check(mutant: Mutant) -> str:
    """What is wrong with a mutant: it survives, or its tests fail without it; empty: it is noticed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        status, said = run_tests(source, mutant.tests)
        if status != 0:
            return f"its tests fail without it (exit {status}):\n{said}"
        path = source / "ephemeron" / mutant.file
        path.write_text(mutant.mutated(path.read_text()))
        status, said = run_tests(source, mutant.tests)
        if status not in (1, None):
            return f"it survives (exit {status}):\n{said}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the mutants of these names in this order, or all; the exit status is 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python tests/mutation.py", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a mutant (default: all)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no further one is begun after so many seconds")
    arguments = parser.parse_args(argv)
    known = {mutant.name: mutant for mutant in mutants()}
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in arguments.names or known]
    began, wrong, left = time.monotonic(), 0, 0
    with ThreadPoolExecutor(2) as pool:
        checks = pool.map(lambda mutant: check(mutant) if time.monotonic() < began + arguments.limit_s else None, chosen)
        for mutant, said in zip(chosen, checks, strict=True):
            left += said is None
            wrong += bool(said)
            how = "not reached" if said is None else "WRONG  " if said else "noticed"
            print(f"{how} {mutant.name}: {mutant.guarantee}", flush=True)
            if said:
                print("    " + said.replace("\n", "\n    "), flush=True)
    print(f"{len(chosen) - wrong - left} passed, {wrong} failed" + (f", {left} not reached" if left else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
