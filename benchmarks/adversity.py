"""Adversities tried and come through right, by kind: `python -m benchmarks.adversity --json`.

Odd data, damaged objects, exceptions of every class, matrices without full rank, hostile connections: whatever users, stores and
strangers bring. Each module of `benchmarks.adversity_cases` runs in a process of its own, so that a case that hangs or ends its
process is counted for what it is. All of it is bounded to five minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import adversity_cases
from benchmarks.common import environment, write

LIMIT_S = 300.0
"""Wall time of all modules together."""


def modules() -> list[str]:
    """Names of the modules with cases, sorted."""
    folder = Path(adversity_cases.__file__).parent
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def run_module(name: str) -> None:
    """Runs the cases of a module in this process and prints a JSON line per case as it begins and ends."""
    importlib.import_module(f"benchmarks.adversity_cases.{name}")
    stdout, sys.stdout = sys.stdout, sys.stderr  # what a case prints is no result
    for case in adversity_cases.CASES:
        said: dict[str, Any] = {"kind": case.kind, "name": case.name}
        print(json.dumps({**said, "begins": True}), file=stdout, flush=True)
        began = time.monotonic()
        try:
            case.run()
        except BaseException as error:  # noqa: BLE001 - whatever a case ends with is its outcome
            said["wrong"] = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps({**said, "seconds": round(time.monotonic() - began, 2)}), file=stdout, flush=True)


def _outcomes(lines: str, ending: str) -> list[dict[str, Any]]:
    """Outcomes of a module's cases; one that began and did not end is wrong."""
    said = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    ended = {(line["kind"], line["name"]): line for line in said if "begins" not in line}
    begun = [(line["kind"], line["name"]) for line in said if "begins" in line]
    return [ended.get(key) or {"kind": key[0], "name": key[1], "wrong": f"did not end: {ending}", "endless": True} for key in begun]


def explore(names: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Outcomes of the cases of these modules, each module in a process with a home folder of its own."""
    found, until = [], time.monotonic() + limit_s
    for name in names:
        with tempfile.TemporaryDirectory(prefix="adversity-") as home:
            command = [sys.executable, "-m", "benchmarks.adversity", "--module", name]
            environ = {**os.environ, "EPHEMERON_HOME": home, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
            try:
                out, err = process.communicate(timeout=max(1.0, until - time.monotonic()))
                ending = f"exit {process.returncode}: {err.strip()[-300:]}"
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                ending = f"killed after {limit_s:g} s of all modules"
            outcomes = _outcomes(out, ending)
            if process.returncode or not outcomes:
                outcomes.append({"kind": name, "name": "the whole module", "wrong": ending})
            found += [{"module": name, **outcome} for outcome in outcomes]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code is 1 if any case went wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adversity", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="machine, versions, the table and what went wrong")
    parser.add_argument("--only", nargs="*", choices=modules(), help="modules with cases (default: all)")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all modules together (default: %(default)g)")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.module:
        run_module(args.module)
        return 0
    said, began = environment(), time.monotonic()
    found = explore(args.only or modules(), args.limit_s)
    tried = Counter(outcome["kind"] for outcome in found)
    right = Counter(outcome["kind"] for outcome in found if "wrong" not in outcome)
    table = [{"kind": kind, "tried": count, "right": right[kind]} for kind, count in tried.items()]
    wrong = [outcome for outcome in found if "wrong" in outcome]
    if args.json:
        took = round(time.monotonic() - began, 1)
        write({**said, "seconds": took, "tried": len(found), "right": len(found) - len(wrong), "kinds": table, "wrong": wrong})
    else:
        for row in table:
            print(f"{row['right']:4} of {row['tried']:4}  {row['kind']}")
        for outcome in wrong:
            print(f"wrong: {outcome['kind']}: {outcome['name']}: {outcome['wrong']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
