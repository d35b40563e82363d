"""Trials that share a data service: the loading part of `benchmarks.tuning`."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ephemeron.config.toml import toml_text
from ephemeron.data.service import ServiceSettings
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.tuning import Study

FLOW = Path(__file__).parent / "tuning_flow"
RATES = [0.003, 0.03]
SAMPLES, EPOCHS = 600, 4
DECODE_MS = 3


def sides(say: Any) -> list[dict[str, Any]]:
    """Two trials at a time: each decodes where it runs, or all through one service with two loaders."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows.append({"side": "each trial for itself", **_searched(folder, "")})
        say(rows[-1])
        with _service(folder) as address:
            rows.append({"side": "one data service", **_searched(folder, address)})
        say(rows[-1])
    equal = rows[0]["values"] == rows[1]["values"]
    decoded = SAMPLES * EPOCHS * len(RATES)
    return [{**row, "equal_values": equal, "samples_read": decoded, "decode_ms": DECODE_MS} for row in rows]


def _searched(folder: Path, address: str) -> dict[str, Any]:
    arguments = ["--epochs", str(EPOCHS), "--samples", str(SAMPLES), "--service", address]
    job = {
        "name": "flow", "code": [str(FLOW)], "script": {"file": "train.py", "arguments": arguments}, "data": {},
        "run": {"platform": "local", "workers": 1, "memory_mb": 1769, "pattern": "standalone"},
    }  # fmt: skip
    job.pop("data")
    (folder / "job.toml").write_text(toml_text(job))
    study = {
        "job": "job.toml",
        "metric": "loss",
        "sampler": "grid",
        "concurrency": 2,
        "space": {"script.arguments.lr": RATES},
    }
    (folder / "study.toml").write_text(toml_text({**study, "predict": False}))
    began = time.perf_counter()
    result = Study.open(folder / "study.toml", out=folder / f"out-{secrets.token_hex(2)}").run()
    trials = sorted(result.status.trials, key=lambda t: t.number)
    document = result.to_json()
    return {
        "seconds": round(time.perf_counter() - began, 3), "cost_usd": document["cost_usd"], "trials": document["trials"],
        "values": [t.value for t in trials], "trial_s": [t.seconds for t in trials],
    }  # fmt: skip


@contextmanager
def _service(folder: Path) -> Iterator[str]:
    token = os.environ["EPHEMERON_DATA_TOKEN"] = secrets.token_hex(16)
    settings = ServiceSettings(loaders=2)
    service = ManagedProcess("coordinator", folder / "service", token)
    try:
        yield str(service.ensure(settings))
    finally:
        service.kill(gently=True, wait_s=30)
