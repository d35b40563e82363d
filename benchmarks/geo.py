"""Training across regions, the paper's figures beside ours: `python -m benchmarks.geo`.

    python -m benchmarks.geo --json --parts communication traffic --into benchmarks/results/geo.json

A part is a module with `measure(quick, say)`, which returns the plain values of the part; `--into` puts each under its name into a file, which
keeps the other parts. What was simulated says so by `"simulated": true`. The specification is Cloudless-Training (section 4).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import environment, write

PARTS = {
    "accuracy": "benchmarks.geo_accuracy",
    "waiting": "benchmarks.geo_waiting",
    "plans": "benchmarks.geo_plans",
    "pace": "benchmarks.geo_pace",
    "communication": "benchmarks.geo_communication",
    "traffic": "benchmarks.geo_traffic",
    "counters": "benchmarks.geo_counters",
    "faults": "benchmarks.geo_faults",
    "peers": "benchmarks.geo_peers",
}
"""By the name of a part, its module: `measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]`."""
MODELS = ("lenet", "resnet", "deepfm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document; lines go to standard error")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of the part accuracy; others keep their rows")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and cases, to see that all works")
    parser.add_argument("--into", type=Path, help="JSON file that takes the parts, each in the place of the former one")
    arguments = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    result: dict[str, Any] = {"benchmark": "geo"}
    for name in arguments.parts:
        say(f"-- {name}")
        before = environment()
        options = {"models": arguments.models} if name == "accuracy" else {}
        found = importlib.import_module(PARTS[name]).measure(quick=arguments.quick, say=say, **options)
        result[name] = {**found, "run": before}
        if arguments.into is not None:
            merge(arguments.into, {"benchmark": "geo", name: result[name]})
    if arguments.json:
        write(result)


def merge(path: Path, found: dict[str, Any]) -> None:
    """Puts values into a JSON file, in the place of those of the same names; of a part with models, in the place of those of the same models."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for part in found.keys() & known.keys():
        if "models" in known[part] and "models" in found[part]:
            found[part]["models"] = known[part]["models"] | found[part]["models"]
    path.write_text(json.dumps(known | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
