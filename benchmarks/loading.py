"""JPEG decoding and augmentation: flows, alone and as a service, beside PyTorch's DataLoader and other maintained loaders.

    python -m benchmarks.loading [--json] [--images 1536] [--workers 2] [--rounds 5]

Photos of 256 × 256 (generated, about 20 kB each) are decoded, cropped, flipped and normalised to 224 × 224 × 3 float32. All
sides run the same functions on the same files with batches of 64. Each side is a process of its own, and sides take turns. The
first epoch of each (starts of processes, imports) is left out, and medians of ratios within a round count. Machine and files are
shared, so decoding bounds one host.

- alone: one job, as many workers as loaders. Goal: never slower than DataLoader by more than 5 %.
- two jobs at once: the sum of both. A service does the work of both once if their seeds are equal, and the work
  before the random steps once in any case. Goal: 1.8 × DataLoader (DPFlow, section 5.4.2: 1.49 ×).
- a store of 20 ms latency (simulated: each read waits), 8 workers, a trainer that takes a sixth longer than decoding alone
  would: the time that it waits. Goal: 83 % less than with DataLoader.
- peers: Grain and SPDL (pip install grain spdl; left out with a message where they are missing).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.common import ROOT, condensed, environment, write
from benchmarks.loading_sides import BATCH, photos

GOALS = {"alone": 0.95, "two_jobs": 1.8, "waiting_saved": 0.83}
LATENCY_MS = 20.0
LATENCY_WORKERS = 8
PEERS = ("grain", "spdl")


class Side:
    """Process of one side, which iterates on request."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loading_sides", name, str(folder), *options],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def begin(self, epochs: int = 1, step_s: float = 0.0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"epochs": epochs, "step_s": step_s}) + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def together(sides: Sequence[Side], *, epochs: int, step_s: float = 0.0) -> dict[str, float]:
    """Runs all at once: the sum of their samples per second, and the longest wait."""
    for side in sides:
        side.begin(epochs, step_s)
    ends = [side.end() for side in sides]
    return {
        "samples_per_s": sum(e["samples"] / e["seconds"] for e in ends),
        "waited_s": max(e["waited_s"] for e in ends),
        "seconds": max(e["seconds"] for e in ends),
        "samples": sum(e["samples"] for e in ends),
    }


def compare(groups: dict[str, list[Side]], *, rounds: int, epochs: int, step_s: float = 0.0) -> dict[str, Any]:
    """Runs the groups in turns; the first turn of each is a warm-up. A group whose process ends is left out."""
    out: dict[str, list[dict[str, float]]] = {name: [] for name in groups}
    gone: dict[str, str] = {}
    for number in range(rounds + 1):
        for name, sides in groups.items():
            if name in gone:
                continue
            try:
                found = together(sides, epochs=epochs, step_s=step_s)
            except (RuntimeError, BrokenPipeError) as e:
                gone[name] = str(e)
                continue
            if number:
                out[name].append(found)
    return {"rounds": {name: rows for name, rows in out.items() if rows}, "left_out": gone}


def ratios(found: dict[str, Any], name: str, base: str, key: str) -> list[float]:
    """Ratios of rounds to the base in the same round."""
    rows = found["rounds"]
    return [a[key] / b[key] for a, b in zip(rows[name], rows[base], strict=True)] if name in rows else []


@click.command()
@click.option("--images", default=1536, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--epochs", default=1, show_default=True, help="In each turn.")
@click.option("--json", "as_json", is_flag=True)
def main(images: int, workers: int, rounds: int, epochs: int, as_json: bool) -> None:
    """Measures the rate of samples, and how long a trainer waits for them."""
    from ephemeron.data.catalog import DatasetStore
    from ephemeron.data.catalog.importers import import_dataset
    from ephemeron.data.service.daemon import ManagedProcess

    peers = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    out: dict[str, Any] = {
        **environment(),
        "benchmark": "loading",
        "images": images,
        "workers": workers,
        "batch_size": BATCH,
        "rounds": rounds,
        "epochs_per_turn": epochs,
        "goals": GOALS,
        "peers": {name: version(name) if name in peers else "not installed" for name in PEERS},
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        folder = Path(home)
        photos(folder / "photos", images)
        import_dataset("images", str(folder / "photos"), "bench/photos", DatasetStore.open(str(folder / "store")))
        count = ("--workers", str(workers))

        def service(number: int, cache_mb: float) -> tuple[str, ...]:
            return (*count, "--service", str(folder / f"service-{number}"), "--cache-mb", str(cache_mb))

        with ExitStack() as stack:

            def made(name: str, *options: str) -> Side:
                side = Side(name, folder, *options)
                stack.callback(side.close)
                return side

            sides = {name: [made(name, *count)] for name in ("dataloader", "flow", *peers)}
            sides["service"] = [made("service", *service(0, 0))]
            alone = compare(sides, rounds=rounds, epochs=epochs)
        out["alone"] = _shown(alone, "dataloader", "samples_per_s")
        with ExitStack() as stack:
            sides = {
                "dataloader": [made("dataloader", *count) for _ in range(2)],
                "service, same seed": [made("service", *service(1, 512)) for _ in range(2)],
                "service, two seeds": [made("service", *service(2, 512), "--seed", str(s)) for s in range(2)],
            }
            two = compare(sides, rounds=rounds, epochs=epochs)
        out["two_jobs"] = _shown(two, "dataloader", "samples_per_s")
        slow = ("--workers", str(LATENCY_WORKERS), "--latency-ms", str(LATENCY_MS))
        step_s = 1.17 * BATCH / median(row["samples_per_s"] for row in alone["rounds"]["dataloader"])
        with ExitStack() as stack:
            sides = {name: [made(name, *slow)] for name in ("dataloader", "dataloader-many", "flow")}
            sides["service"] = [made("service", *slow, "--service", str(folder / "service-3"))]
            waits = compare(sides, rounds=max(2, rounds // 2), epochs=1, step_s=step_s)
        out["store_latency"] = {
            "latency_ms": LATENCY_MS,
            "workers": LATENCY_WORKERS,
            "step_s": round(step_s, 4),
            **_shown(waits, "dataloader", "waited_s"),
        }
        for place in folder.glob("service-*"):
            ManagedProcess("coordinator", place, "").kill(gently=True)
    if as_json:
        write(out)
    else:
        _print(out)


def _shown(found: dict[str, Any], base: str, key: str) -> dict[str, Any]:
    return {
        key: {name: condensed([row[key] for row in rows]) for name, rows in found["rounds"].items()},
        f"{key}_to_{base}": {name: condensed(ratios(found, name, base, key)) for name in found["rounds"] if name != base},
        "left_out": found["left_out"],
    }


def _print(out: dict[str, Any]) -> None:
    for part, key in (("alone", "samples_per_s"), ("two_jobs", "samples_per_s"), ("store_latency", "waited_s")):
        click.echo(part.replace("_", " "))
        for name, value in out[part][key].items():
            ratio = out[part][f"{key}_to_dataloader"].get(name, {}).get("median", 1.0)
            click.echo(f"  {name:20} {value['median']:9.2f} {key:14} {ratio:6.3f} of DataLoader's")


if __name__ == "__main__":
    main()
