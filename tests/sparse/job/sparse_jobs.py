"""A small sparse job for tests: prepared data and a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ephemeron.config.toml import toml_text
from sparse_data import prepared


def sparse_job(folder: Path, *, rows: int = 3000, test: bool = True, name: str = "job.toml", **changes: Any) -> Path:
    """Writes data, if there is none yet, and a job; `changes` replace tables of the job."""
    if not (folder / "data").exists():
        prepared(folder / "data" / "train", rows=rows)
        if test:
            prepared(folder / "data" / "test", rows=600, partitions=1, seed=1)
    document = {
        "epochs": 2,
        "sparse": {"model": "logistic", "optimizer": {"target": "adagrad", "options": {"learning_rate": 0.1}}, "shards": 2},
        "data": {"source": "prepared", "path": "data"},
        "run": {"workers": 2, "batch_size": 20, "memory_mb": 1024},
        **changes,
    }
    path = folder / name
    path.write_text(toml_text(document))
    return path
