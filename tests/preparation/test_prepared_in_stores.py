"""Preparation from and into an object store, with statistics through a cache."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.preparation import FeatureHasher, InProcess, Pipeline, StandardScaler, load_csv, load_parquet

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def put(url, name, data):
    assert run(open_files(url).create(name, data))


def text(rows, first=0):
    return ("click,age,site\n" + "".join(f"{n % 2},{n / 7:.6f},s{n % 13}\n" for n in range(first, first + rows))).encode()


def test_files_of_a_bucket_become_a_dataset_in_it(s3, tmp_path):
    url = f"{s3}/{tmp_path.name}"
    for n in range(3):
        put(url, f"in/{n}.csv", text(100, 100 * n))
    put(url, "in/readme.md", b"x")
    dataset = load_csv(f"{url}/in/*.csv", out=f"{url}/out", label="click", partition_mb=0.003, pool=InProcess())
    assert [row["age"] for row in pa.concat_tables(dataset.tables()).to_pylist()] == [round(n / 7, 6) for n in range(300)]
    assert len(dataset.partitions) >= 3
    assert TableDataset.open(f"{url}/out").version == dataset.version
    assert load_csv(f"{url}/in", out=f"{url}/out2", label="click", pool=InProcess()).manifest.source[0].identity.startswith("etag:")
    with pytest.raises(JobError, match=r"none/\*\.csv names no file"):
        load_csv(f"{url}/none/*.csv", out=f"{url}/out3", pool=InProcess())


def test_parquet_of_a_bucket(s3, tmp_path):
    from pyarrow import parquet

    url, sink = f"{s3}/{tmp_path.name}", pa.BufferOutputStream()
    parquet.write_table(pa.table({"x": [float(n) for n in range(50)], "t": ["a"] * 50}), sink, row_group_size=20)
    put(url, "a.parquet", sink.getvalue().to_pybytes())
    dataset = load_parquet(f"{url}/a.parquet", out=f"{url}/out", partition_mb=0.0005, pool=InProcess())
    assert np.concatenate([t.column("x").to_numpy() for t in dataset.tables()]).tolist() == list(range(50))


@pytest.mark.slow
def test_functions_prepare_in_a_bucket_with_statistics_through_a_cache(s3, valkey_server, tmp_path):
    url = f"{s3}/{tmp_path.name}"
    for n in range(3):
        put(url, f"in/{n}.csv", text(300, 300 * n))
    channels = {"cache": valkey_server.address, "objects": f"{url}/channel"}
    versions = set()
    for name, channel in channels.items():
        with FunctionExecutor(max_workers=2, channel=channel, preload=("pyarrow",)) as pool:
            raw = load_csv(f"{url}/in/*.csv", out=f"{url}/{name}/raw", label="click", partition_mb=0.01, pool=pool)
            pipeline = Pipeline([StandardScaler(), FeatureHasher(n_features=64)]).fit(raw, pool=pool, state=f"{url}/{name}")
            made = pipeline.transform(raw, out=f"{url}/{name}/data", partition_mb=0.01, pool=pool)
        ages = [n / 7 for n in range(900)]
        np.testing.assert_allclose(pipeline.steps[0].mean_, [np.mean(np.round(ages, 6))], rtol=1e-12)
        assert len(made) == 900
        versions.add(made.version)
    assert len(versions) == 1
