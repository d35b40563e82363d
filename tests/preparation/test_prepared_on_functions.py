"""Preparation on processes of this machine that are killed: every row once, whatever dies."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ephemeron.data.tables import TableDataset
from ephemeron.executor import FunctionExecutor
from ephemeron.preparation import FeatureHasher, InProcess, Pipeline, QuantileBinner, StandardScaler, load_csv

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


ROWS = 4000


@pytest.fixture
def source(tmp_path):
    rng = random.Random(0)
    text = "click,age,note\n" + "".join(f'{n % 2},{rng.gauss(0, 1):.6f},"n{n % 97}\n{n}"\n' for n in range(ROWS))
    (tmp_path / "in.csv").write_text(text)
    return tmp_path / "in.csv"


def test_relative_paths_are_those_of_the_client(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = load_csv("in.csv", out="prepared/raw", label="click", partition_mb=0.05)
    assert len(raw.partitions) > 1
    assert sum(table.num_rows for table in raw.tables()) == ROWS


KILLS = {"load_text": "after", "observe_partition": "before", "merge_statistics": "after", "apply_to_range": "after"}
"""When the process of a function is killed once: after it has stored everything, or before it begins."""


def killed(fn, marks, *items):
    """Calls a function in a process that is killed at its partition 2, or at a merge."""
    fatal = fn.__name__ == "merge_statistics" or items[0]["index"] == 2
    mark, when = Path(marks, fn.__name__), KILLS[fn.__name__]
    if when == "after":
        result = fn(*items)
    if fatal:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return result if when == "after" else fn(*items)


class Killing:
    """An executor whose mappers and reducers are killed."""

    def __init__(self, pool, marks):
        self.pool, self.marks = pool, str(marks)

    def map(self, fn, *iterables):
        return self.pool.map(functools.partial(killed, fn, self.marks), *iterables)

    def map_reduce(self, fn, items, combine, **options):
        mapper = functools.partial(killed, fn, self.marks)
        reducer = functools.partial(killed, combine, self.marks)
        return self.pool.map_reduce(mapper, items, reducer, **options)


def prepared(source, out, pool):
    raw = load_csv(str(source), out=str(out / "raw"), label="click", partition_mb=0.015, pool=pool)
    pipeline = Pipeline([StandardScaler(), QuantileBinner(["age"], n_bins=5), FeatureHasher(n_features=256)])
    pipeline.fit(raw, pool=pool, state=str(out))
    return raw, pipeline, pipeline.transform(raw, out=str(out / "data"), partition_mb=0.02, pool=pool)


def test_mappers_and_reducers_that_are_killed(source, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    here = prepared(source, tmp_path / "here", InProcess())
    with FunctionExecutor(max_workers=2, retries=8, preload=("pyarrow",)) as pool:
        there = prepared(source, tmp_path / "there", Killing(pool, marks))
        assert pool.bill().cost_usd > 0
    assert {p.name for p in marks.iterdir()} == KILLS.keys()
    assert there[0].version == here[0].version
    assert there[1].version_ == here[1].version_
    assert there[2].version == here[2].version
    assert len(there[0]) == len(there[2]) == ROWS
    assert len(there[0].partitions) >= 5


CLIENT = """
import functools, os, sys, time
from pathlib import Path
from ephemeron.executor import FunctionExecutor
from ephemeron.preparation import FeatureHasher, Pipeline, StandardScaler, fitting, load_csv

fitting.GROUP = 2
source, out, most = sys.argv[1], sys.argv[2], int(sys.argv[3])

def held(fn, out, most, client, *items):  # while so much is stored; 0: not at all
    kept = ("loaded", "0", "done")
    while most and sum(p.parent.name in kept for p in Path(out).rglob("*.json")) >= most:
        if not Path(f"/proc/{client}").exists():
            os._exit(1)
        time.sleep(0.02)
    return fn(*items)

class Held:
    def map(self, fn, *iterables):
        return pool.map(functools.partial(held, fn, out, most, os.getpid()), *iterables)

    def map_reduce(self, fn, items, combine, **options):
        return pool.map_reduce(functools.partial(held, fn, out, most, os.getpid()), items, combine, **options)

with FunctionExecutor(max_workers=2, preload=("pyarrow",)) as pool:
    raw = load_csv(source, out=out + "/raw", label="click", partition_mb=0.015, pool=Held())
    pipeline = Pipeline([StandardScaler(), FeatureHasher(n_features=256)]).fit(raw, pool=Held(), state=out)
    print(pipeline.transform(raw, out=out + "/data", partition_mb=0.02, pool=Held()).version)
"""


def stored(out):
    return {p for p in out.rglob("*.json") if p.parent.name in ("loaded", "0", "done")}


def test_a_client_that_is_killed_again_and_again_goes_on(source, tmp_path):
    from servers import wait_until  # functions have this module, and not that one

    out = tmp_path / "out"
    command = [sys.executable, "-c", CLIENT, str(source), str(out)]
    for _ in range(3):
        most = len(stored(out)) + 3
        client = subprocess.Popen([*command, str(most)], stdout=subprocess.DEVNULL)
        wait_until(lambda most=most: len(stored(out)) >= most, client, "the client")
        client.kill()
        client.wait()
    kept = {p: p.stat().st_mtime_ns for p in stored(out)}
    ran = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {p: p.stat().st_mtime_ns for p in kept} == kept, "what was stored is not made again"
    raw, whole = (
        TableDataset.open(str(out / "raw")),
        load_csv(str(source), out=str(tmp_path / "whole"), label="click", partition_mb=0.015, pool=InProcess()),
    )
    assert raw.version == whole.version
    data = TableDataset.open(str(out / "data"))
    assert data.version == ran.stdout.strip()
    assert len(data) == len(raw) == ROWS
    values = np.concatenate([table.column("age").to_numpy() for table in raw.tables()])
    np.testing.assert_allclose(Pipeline.load(data).steps[0].mean_, values.mean(), rtol=1e-12, atol=1e-15)


def test_ctrl_c_leaves_a_state_from_which_the_command_goes_on(source, tmp_path):
    from gates import holding_results
    from servers import wait_until

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'source = "{source}"\nout = "out"\npartition_mb = 0.004\n[label]\ncolumn = "click"\n[run]\nmax_workers = 1\n')
    command = [str(Path(sys.executable).with_name("ephemeron")), "prepare", str(recipe)]
    client = subprocess.Popen(holding_results("prepare", str(recipe)), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: bool(stored(tmp_path / "out")), client, "the command")
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=100)
    assert client.returncode == 130, said
    assert "parts are stored; the same command goes on from them" in said
    assert "Traceback" not in said
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"raw   {ROWS} rows" in ran.stdout
