"""Preparation: rows and MB per second of load, fit and transform, beside pandas and scikit-learn, and beside reading alone.

    python -m benchmarks.preparation [--json] [--rows 200000] [--turns 3] [--workers 2]

All sides take the same generated files of Criteo's shape (examples/clicks) through the same stages: CSV to binary files; statistics of 13 numbers;
scaled numbers and hashed categories as sparse rows in files. Sides alternate. `in process` is ephemeron in one process, `functions` on
functions of this machine that are up (cold starts: `first_task_s`), `pandas + scikit-learn` one process with `read_csv`, `to_feather`,
`StandardScaler`, `FeatureHasher` and `scipy.sparse.save_npz`. `read` reads the input files of a stage and nothing else: the bound.
MB are those of the CSV files, for every stage. CPU seconds are of the client process, where one process does all.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import ROOT, condensed, environment, write
from ephemeron.executor import FunctionExecutor
from ephemeron.preparation import FeatureHasher, InProcess, Pipeline, StandardScaler, TableDataset, load_csv

STAGES = ("load", "fit", "transform")
Stages = dict[str, Callable[[], Any]]


def ephemeron_stages(source: Path, out: Path, pool: Any) -> Stages:
    """Stages by ephemeron."""
    pipeline = Pipeline([StandardScaler(), FeatureHasher()])

    def load() -> None:
        load_csv(str(source), out=str(out / "raw"), label="click", pool=pool)

    def fit() -> None:
        pipeline.fit(TableDataset.open(str(out / "raw")), pool=pool)

    def transform() -> None:
        pipeline.transform(TableDataset.open(str(out / "raw")), out=str(out / "data"), pool=pool)

    return {"load": load, "fit": fit, "transform": transform}


def peer_stages(source: Path, out: Path) -> Stages:
    """Stages by pandas and scikit-learn."""
    import pandas
    import scipy.sparse
    from sklearn.feature_extraction import FeatureHasher as PeerHasher
    from sklearn.preprocessing import StandardScaler as PeerScaler

    out.mkdir()
    scaler = PeerScaler()
    files = sorted(source.glob("*.csv"))
    numeric = [f"I{n}" for n in range(1, 14)]
    categorical = [f"C{n}" for n in range(1, 27)]

    def load() -> None:
        frame = pandas.concat([pandas.read_csv(file, dtype=dict.fromkeys(categorical, "str")) for file in files], ignore_index=True)
        frame.to_feather(out / "raw.feather", compression="uncompressed")

    def fit() -> None:
        scaler.fit(pandas.read_feather(out / "raw.feather", columns=numeric))

    def transform() -> None:
        frame = pandas.read_feather(out / "raw.feather")
        numbers = np.nan_to_num(scaler.transform(frame[numeric]))
        texts = [(f"{name}=" + frame[name].fillna("").astype(object)).tolist() for name in categorical]
        hashed = PeerHasher(n_features=1 << 20, input_type="string", alternate_sign=False, dtype=np.float32).transform(
            zip(*texts, strict=True)
        )
        scipy.sparse.save_npz(out / "data.npz", scipy.sparse.hstack([numbers, hashed]).tocsr(), compressed=False)

    return {"load": load, "fit": fit, "transform": transform}


def read_stages(source: Path, raw: Path) -> Stages:
    """Reading of the files that each stage reads."""

    def read(folder: Path, ending: str) -> None:
        for file in sorted(folder.glob(f"*{ending}")):
            file.read_bytes()

    return {"load": lambda: read(source, ".csv"), "fit": lambda: read(raw, ".arrow"), "transform": lambda: read(raw, ".arrow")}


def generate(folder: Path, rows: int) -> None:
    """The files of examples/clicks."""
    spec = importlib.util.spec_from_file_location("clicks_generate", ROOT / "examples/clicks/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(folder, rows, 0)


def measure(rows: int, turns: int, workers: int, folder: Path) -> dict[str, Any]:
    """Figures of each side and stage."""
    source = folder / "csv"
    generate(source, rows)
    megabytes = sum(file.stat().st_size for file in source.iterdir()) / 1e6
    seconds: dict[str, dict[str, list[float]]] = {}
    cpu: dict[str, dict[str, list[float]]] = {}
    began = time.perf_counter()
    with FunctionExecutor(max_workers=workers, preload=("pyarrow.csv", "ephemeron.preparation.load_part"), progress=False) as pool:
        pool.submit(abs, 1).result()
        first_task_s = time.perf_counter() - began
        list(pool.map(time.sleep, [1.0] * 2 * workers))  # so that all of them are up
        for turn in range(turns):
            here = folder / f"here-{turn}"
            sides = {
                "in process": ephemeron_stages(source, here, InProcess()),
                "functions": ephemeron_stages(source, folder / f"there-{turn}", pool),
                "pandas + scikit-learn": peer_stages(source, folder / f"peer-{turn}"),
                "read": read_stages(source, here / "raw"),
            }
            for side, stages in sides.items():
                for stage in STAGES:
                    wall, used = time.perf_counter(), time.process_time()
                    stages[stage]()
                    wall, used = time.perf_counter() - wall, time.process_time() - used
                    seconds.setdefault(side, {}).setdefault(stage, []).append(wall)
                    cpu.setdefault(side, {}).setdefault(stage, []).append(used)
                    print(f"{side}, {stage}: {wall:.2f} s, {used:.2f} s CPU", file=sys.stderr)
            if turn < turns - 1:
                for part in ("here", "there", "peer"):
                    shutil.rmtree(folder / f"{part}-{turn}")
        cost = pool.bill().cost_usd
    last = TableDataset.open(str(folder / f"here-{turns - 1}/raw"))
    sizes = [part.nbytes for part in last.partitions]
    return {
        "rows": rows,
        "megabytes": round(megabytes, 1),
        "workers": workers,
        "first_task_s": round(first_task_s, 3),
        "cost_usd": cost,
        "partitions": {"number": len(sizes), "least_mb": min(sizes) / 1e6, "most_mb": max(sizes) / 1e6},
        "sides": [
            {
                "side": side,
                "stage": stage,
                "seconds": condensed(times),
                "rows_per_s": round(rows / float(np.median(times))),
                "mb_per_s": round(megabytes / float(np.median(times)), 1),
                "cpu_s": None if side == "functions" else condensed(cpu[side][stage]),
            }
            for side, stages in seconds.items()
            for stage, times in stages.items()
        ],
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--rows", default=200_000)
@click.option("--turns", default=3)
@click.option("--workers", default=2)
def main(as_json: bool, rows: int, turns: int, workers: int) -> None:
    """Measures preparation."""
    result: dict[str, Any] = environment()
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        result["preparation"] = measure(rows, turns, workers, Path(folder))
    if as_json:
        write(result)
        return
    for row in result["preparation"]["sides"]:
        print(f"{row['side']:24}{row['stage']:12}{row['rows_per_s']:>10} rows/s {row['mb_per_s']:>8} MB/s")


if __name__ == "__main__":
    main()
