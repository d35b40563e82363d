"""Mutation check of the guarantees: `make test-nightly`, or `python tests/mutation.py [NAME ...]`.

`mutants.toml` lists small changes of the code that each break one guarantee, and the tests that have to notice. Each change is made in
a copy of `src`, and its tests are run against that copy: they must fail. Before, they run once against the copy as it is, and must
pass. `test_mutants.py` keeps the list from going stale: what a mutant replaces must occur exactly once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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
        sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "-o", "addopts=--timeout=300",
        *(f"tests/{test}" for test in tests),
    ]  # fmt: skip
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


def main(names: Sequence[str]) -> int:
    """Checks the mutants of these names, or all; the exit status is 1 if one survives."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in chosen}:
        print(f"no mutant is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, said in zip(chosen, pool.map(check, chosen), strict=True):
            print(f"{'WRONG  ' if said else 'noticed'} {mutant.name}: {mutant.guarantee}", flush=True)
            if said:
                wrong += 1
                print("    " + said.replace("\n", "\n    "), flush=True)
    print(f"{len(chosen) - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
