"""Training through the sparse store on functions of this machine: quality, kills, hand-overs, and what is refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from counting_model import Counting

from ephemeron.data.tables import csr_batch
from ephemeron.errors import JobError, RunFailed, TaskFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.runs.function_set import MOST_LOSSES
from ephemeron.sparse.models import LogisticRegression
from ephemeron.sparse.store import AdaGrad
from ephemeron.sparse.training import fit
from ephemeron.sparse.training.minibatches import Ring, Schedule
from ephemeron.sparse.training.part import Part
from ephemeron.sparse.training.shares import Shares, ShareWatcher
from running import command_of
from sparse_data import FEATURES, prepared

pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")


@pytest.mark.parametrize(("workers", "rows"), [(1, (10, 7)), (3, (10, 7)), (5, (3,)), (2, (0, 40))])
def test_each_row_is_in_one_step_of_each_epoch(workers, rows):
    schedule = Schedule(rows=rows, batch_size=4, epochs=2, workers=workers, seed=3)
    seen = [
        (step.epoch, step.partition, int(row))
        for rank in range(workers)
        for step in schedule.steps(rank)
        for row in schedule.order(step.epoch, step.partition)[step.start : step.stop]
    ]
    assert sorted(seen) == [(e, p, r) for e in range(2) for p, n in enumerate(rows) for r in range(n)]
    for rank in range(workers):
        every = list(schedule.steps(rank))
        assert [s.step for s in every] == list(range(schedule.count(rank)))
        assert list(schedule.steps(rank, after=2)) == every[2:]


@pytest.mark.parametrize("size", [0, 1, 4])
def test_the_ring_gives_the_steps_in_their_order(tmp_path, size):
    dataset = prepared(tmp_path / "data", rows=100, partitions=3)
    schedule = Schedule(rows=tuple(p.rows for p in dataset.partitions), batch_size=16, epochs=2, workers=2)
    model = LogisticRegression(features=FEATURES)
    with Ring(dataset, schedule, 1, model.rows, after=3, size=size) as ring:
        found = list(ring)
    assert [step for step, _, _ in found] == list(schedule.steps(1, after=3))
    for step, batch, needed in found:
        rows = schedule.order(step.epoch, step.partition)[step.start : step.stop]
        want = csr_batch(dataset.read(step.partition), rows)
        assert all(np.array_equal(a, b) for a, b in zip(batch, want, strict=True))
        assert needed["weights"].tolist() == sorted({*want.indices.tolist(), FEATURES})


def test_a_ring_that_is_left_ends_its_thread(tmp_path):
    dataset = prepared(tmp_path / "data", rows=100)
    schedule = Schedule(rows=tuple(p.rows for p in dataset.partitions), batch_size=1, epochs=9, workers=1)
    with Ring(dataset, schedule, 0, lambda batch: {}, size=2) as ring:
        next(iter(ring))
    assert not ring._thread.is_alive()


def test_an_error_of_loading_is_raised_where_the_minibatch_is_asked_for(tmp_path):
    from ephemeron.errors import DatasetDamaged

    dataset = prepared(tmp_path / "data", rows=100, partitions=1)
    (tmp_path / "data" / dataset.partitions[0].file).write_bytes(b"other")
    with (
        Ring(dataset, Schedule(rows=(100,), batch_size=9, epochs=1, workers=1), 0, lambda batch: {}) as ring,
        pytest.raises(DatasetDamaged),
    ):
        list(ring)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"workers": 0}, "workers = 0 is below 1"),
        ({"store": ["127.0.0.1:1"]}, "EPHEMERON_SPARSE_TOKEN is not set"),
        ({"model": LogisticRegression(features=5)}, "the model has features 0 to 4"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(tmp_path, monkeypatch, how, said):
    monkeypatch.delenv("EPHEMERON_SPARSE_TOKEN", raising=False)
    dataset = prepared(tmp_path / "data", rows=100)
    with pytest.raises(JobError, match=re.escape(said)):
        fit(**{"model": LogisticRegression(features=FEATURES), "dataset": dataset, "optimizer": AdaGrad(learning_rate=1), **how})


@pytest.mark.slow
def test_quality_beside_scikit_learn(tmp_path):
    from sklearn.linear_model import LogisticRegression as Reference
    from sklearn.metrics import log_loss

    train, test = prepared(tmp_path / "train", rows=8000), prepared(tmp_path / "test", rows=2000, seed=1)
    progress = []
    found = fit(
        LogisticRegression(features=FEATURES),
        train,
        AdaGrad(learning_rate=0.1),
        test=str(tmp_path / "test"),
        epochs=6,
        batch_size=100,
        workers=2,
        shards=2,
        on_progress=progress.append,
    )
    (x, y), (u, v) = (_dense(d) for d in (train, test))
    reference = log_loss(v, Reference().fit(x, y).predict_proba(u)[:, 1])
    assert found.metrics["loss"] < 1.01 * reference
    assert (found.steps, found.samples) == (6 * 81, 6 * 8000)  # three partitions of 2,667 rows: 27 steps each
    assert progress[-1].steps == progress[-1].of == found.steps
    assert all(seconds > 0 for seconds in found.step_us.values())


@pytest.mark.slow
def test_functions_that_are_killed_lose_and_repeat_nothing(tmp_path):
    """Counts are exact: whatever dies, each sample of each epoch is added once."""
    dataset, marks = prepared(tmp_path / "data", rows=3000), tmp_path / "marks"
    marks.mkdir()
    model = Counting(FEATURES, str(marks), kills=(5, 137))
    with FunctionExecutor("local", max_workers=2, retries=0, progress=False, code=[Path(__file__).parent]) as pool:
        found = fit(model, dataset, AdaGrad(learning_rate=1), epochs=3, batch_size=20, workers=2, shards=2, executor=pool)
    assert len(list(marks.iterdir())) == 2
    x, _ = _dense(dataset)
    assert found.weights["counts"][:, 0].tolist() == (3 * x.sum(axis=0)).tolist()
    assert found.samples == 9000
    assert sum(part.repeated for part in found.parts) > 0


@pytest.mark.slow
def test_shards_that_are_killed_lose_and_repeat_nothing(tmp_path):
    """The shards go on from their log: each sample of each epoch is added once."""
    dataset, killed = prepared(tmp_path / "data", rows=3000), []

    def kill(progress):
        if progress.steps >= 100 * (len(killed) + 1) and len(killed) < 2:
            pid = next(p for p in shard_pids() if p not in killed)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with FunctionExecutor("local", max_workers=2, retries=0, progress=False, code=[Path(__file__).parent]) as pool:
        found = fit(
            Counting(FEATURES),
            dataset,
            AdaGrad(learning_rate=1),
            epochs=6,
            batch_size=20,
            workers=2,
            shards=2,
            executor=pool,
            channel=(tmp_path / "channel").as_uri(),
            on_progress=kill,
        )
    assert len(killed) == 2
    x, _ = _dense(dataset)
    assert found.weights["counts"][:, 0].tolist() == (6 * x.sum(axis=0)).tolist()
    assert found.samples == 18000


def shard_pids():
    """Processes of this process's shards."""
    return [process.pid for process in psutil.Process().children() if "ephemeron.sparse.store.processes" in command_of(process)]


@pytest.mark.slow
def test_a_share_is_handed_over_when_the_time_of_its_function_is_up(tmp_path):
    dataset = prepared(tmp_path / "data", rows=3000)
    with FunctionExecutor("local", max_workers=1, retries=0, progress=False, code=[Path(__file__).parent]) as pool:
        found = fit(
            Counting(FEATURES), dataset, AdaGrad(learning_rate=1), epochs=2, batch_size=10, workers=1, function_s=0.0, executor=pool
        )
    assert found.bill.tasks >= 7  # one for each hundred steps, and one that finds nothing left
    assert found.weights["counts"].sum() == 2 * 3000 * 6


def _dense(dataset):
    batches = [csr_batch(dataset.read(i)) for i in range(len(dataset.partitions))]
    x = np.zeros((sum(len(b.labels) for b in batches), FEATURES))
    at = 0
    for batch in batches:
        for row in range(len(batch.labels)):
            x[at, batch.indices[batch.indptr[row] : batch.indptr[row + 1]]] = 1
            at += 1
    return x, np.concatenate([b.labels for b in batches])


class _Progress:
    """The part of a store's client that `Shares` needs: no progress is stored."""

    async def get(self, key):
        return None


def _shares_that_end_with(error):
    begun = []

    def start(part):
        begun.append(part.attempt)
        task = concurrent.futures.Future()
        task.set_exception(error)
        return task

    part = Part(run="r", rank=0, attempt=0, model=None, dataset=None, schedule=None, addresses=())
    with pytest.raises(RunFailed) as found:
        asyncio.run(Shares(start, _Progress(), [part], ShareWatcher()).trained())
    return begun, str(found.value)


def test_code_that_raises_is_not_tried_on_another_function(monkeypatch):
    monkeypatch.setattr("ephemeron.sparse.training.shares.LOOK_S", 0.0)
    for text in ("ModuleNotFoundError: No module named 'mine'", "CancelledError", "Own: enough", "KeyError: 7"):
        begun, said = _shares_that_end_with(TaskFailed(text, task="t", traceback="Traceback ..."))
        assert (len(begun), said) == (1, f"run r failed: share 0: {text}")


def test_a_function_that_is_lost_is_replaced(monkeypatch):
    monkeypatch.setattr("ephemeron.sparse.training.shares.LOOK_S", 0.0)
    for error in (
        TaskFailed("killed, or out of memory", task="t"),
        TaskFailed("ServiceUnreachable: no answer", task="t", traceback="Traceback ..."),
        TaskFailed("ConnectionResetError: gone", task="t", traceback="Traceback ..."),
    ):
        begun, said = _shares_that_end_with(error)
        assert len(begun) == MOST_LOSSES + 1
        assert f"{MOST_LOSSES + 1} functions in a row have ended without a step" in said
