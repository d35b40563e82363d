"""Trials that share a data service: the loading part of `benchmarks.tuning`."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ephemeron.config.toml import toml_text
from ephemeron.tuning import Study

FLOW = Path(__file__).parent / "tuning_flow"
RATES = [0.003, 0.03]
SAMPLES, EPOCHS = 400, 4
DECODE_MS = 3
SIDES = {"each trial for itself": 0, "one data service": 2}
TURNS = 3


def sides(say: Any) -> list[dict[str, Any]]:
    """Two trials at a time: each decodes where it runs, or all through the service of the study with two loaders; in turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(TURNS):
            for name in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append({"side": name, **_searched(Path(place), SIDES[name])})
                say(found[name][-1])
    rows = []
    for name, turns in found.items():
        middle = {key: round(statistics.median(t[key] for t in turns), 9) for key in ("seconds", "cost_usd")}
        rows.append(
            {
                "side": name,
                **middle,
                "turns": turns,
                "equal_values": len({tuple(t["values"]) for r in found.values() for t in r}) == 1,
                "samples_read": SAMPLES * EPOCHS * len(RATES),
                "decode_ms": DECODE_MS,
            }
        )
    return rows


def _searched(folder: Path, loaders: int) -> dict[str, Any]:
    job = {
        "name": "flow",
        "code": [str(FLOW)],
        "script": {"file": "train.py", "arguments": ["--epochs", str(EPOCHS), "--samples", str(SAMPLES)]},
        "run": {"platform": "local", "workers": 1, "memory_mb": 1769, "pattern": "standalone"},
    }
    (folder / "job.toml").write_text(toml_text(job))
    study = {
        "job": "job.toml",
        "metric": "loss",
        "sampler": "grid",
        "concurrency": 2,
        "predict": False,
        "data_service": loaders,
        "space": {"script.arguments.lr": RATES},
    }
    (folder / "study.toml").write_text(toml_text(study))
    began = time.perf_counter()
    result = Study.open(folder / "study.toml", out=folder / f"out-{secrets.token_hex(2)}").run()
    trials = sorted(result.status.trials, key=lambda t: t.number)
    document = result.to_json()
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "cost_usd": document["cost_usd"],
        "trials": document["trials"],
        "values": [t.value for t in trials],
        "trial_s": [t.seconds for t in trials],
    }
