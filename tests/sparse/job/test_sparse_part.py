"""The entry `sparse-part`: what one function does, says and returns."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.data.catalog.open_files import FolderFiles
from ephemeron.data.tables import TableDataset
from ephemeron.events import Loaded, Progress
from ephemeron.functions.base import Call
from ephemeron.functions.context import Context
from ephemeron.sparse.job.function import SparsePartRequest, run_sparse_part
from ephemeron.sparse.job.programs import model_of, optimizer_of
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.store.functions import token_of
from ephemeron.sparse.training.part import PartReport, progress_key
from ephemeron.sparse.training.run import create_tables, served
from ephemeron.training.job.sparse_spec import SparseProgram, SparseSpec
from sparse_data import FEATURES, prepared

pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")


def context(key, *, attempt=0, left_s=600.0, emitted=None):
    loop = asyncio.get_running_loop()
    call = Call(run="r", rank=0, attempt=attempt, memory_mb=1024, lifetime_s=600, channel="memory", key=key)
    return Context(
        call=call,
        invocation="i",
        channel=None,
        emit=(emitted if emitted is not None else []).append,
        invoke=None,
        compute=None,
        origin=loop.time(),
        deadline=loop.time() + left_s,
        die=None,
    )


def request(dataset, addresses, **changes):
    spec = SparseSpec(model={"target": "logistic", "options": {"features": FEATURES}})
    program = SparseProgram(spec=spec, dataset=dataset.url, rows=tuple(p.rows for p in dataset.partitions))
    return SparsePartRequest(**{"program": program, "batch_size": 10, "epochs": 2, "workers": 1, "addresses": addresses, **changes})


async def with_store(work):
    """Runs `work(key, addresses)` beside one shard that has the tables."""
    key = SigningKey.new().text
    async with served(1, (), channel=None, name="r/store", token=token_of(key)) as at:
        spec = SparseSpec(model={"target": "logistic", "options": {"features": FEATURES}})
        async with await SparseStore.connect(at.addresses, at.token) as store:
            await create_tables(store, model_of(spec), optimizer_of(spec), 0)
        return await work(key, at.addresses)


def test_a_function_hands_over_where_its_time_is_up_and_the_next_one_goes_on(tmp_path):
    dataset, events = prepared(tmp_path / "data", rows=1500), []

    async def work(key, addresses):
        asked = request(dataset, addresses)
        first = await run_sparse_part(context(key, left_s=0.0, emitted=events), asked)
        rest = await run_sparse_part(context(key, attempt=1, emitted=events), asked)
        fenced = await run_sparse_part(context(key, attempt=0), asked)
        return first, rest, fenced

    first, rest, fenced = asyncio.run(with_store(work))
    assert [part.outcome for part in (first, rest, fenced)] == ["relayed", "finished", "fenced"]
    reports = [build(PartReport, plain(part.report), where="report") for part in (first, rest)]
    assert reports[0].steps < reports[1].steps == 2 * 150
    assert (reports[1].samples, reports[1].repeated) == (3000, 0)
    assert [samples for _, samples in reports[1].epochs] == [1500, 1500]
    progress = [event for event in events if isinstance(event, Progress)]
    assert sum(event.samples for event in progress) == 3000
    assert progress[-1].iteration == 299
    assert [event.iteration for event in events if isinstance(event, Loaded)] == [0, reports[0].steps]
    for event in progress:
        spent = {phase: end - start for phase, start, end in event.spans}
        assert set(spent) == {"load", "download", "compute", "upload", "wait"}
        assert all(seconds >= 0 for seconds in spent.values())
    assert rest.traffic["direct_bytes_sent"] > 0
    assert rest.traffic["gets"] == 0  # a folder is read without requests


class _Elsewhere(FolderFiles):
    """Files of a folder that are read by requests."""

    local = False


def test_requests_for_partitions_of_an_object_store_are_metered(tmp_path, monkeypatch):
    dataset, events = prepared(tmp_path / "data", rows=600), []
    there = TableDataset.open(dataset.url)
    elsewhere = TableDataset(_Elsewhere(there._files.root), there.manifest)
    monkeypatch.setattr(TableDataset, "open", classmethod(lambda cls, url: elsewhere))

    async def work(key, addresses):
        return await run_sparse_part(context(key, emitted=events), request(dataset, addresses))

    done = asyncio.run(with_store(work))
    assert done.outcome == "finished"
    assert done.traffic["gets"] == elsewhere.requests >= len(there.partitions) > 0
    assert done.traffic["bytes_down"] >= sum(part.nbytes for part in there.partitions)
    assert [event for event in events if isinstance(event, Progress)][-1].traffic.gets > 0


def test_a_function_that_is_killed_between_its_last_push_and_its_report_is_replaced(tmp_path):
    """The store then has more steps than were reported, and the replacement reports before it comes to a new one."""
    dataset = prepared(tmp_path / "data", rows=1500)

    async def work(key, addresses):
        asked = request(dataset, addresses)
        first = await run_sparse_part(context(key), asked)
        async with await SparseStore.connect(addresses, token_of(key)) as store:
            weights = await store.read("weights")
            late = PartReport(rank=0, steps=100, samples=1000, epochs=[(600.0, 1000)])
            await store.set(progress_key("r", 0), json.dumps(plain(late)).encode())
            async with asyncio.timeout(30):
                second = await run_sparse_part(context(key, attempt=1), asked)
            return first, second, weights, await store.read("weights")

    first, second, before, after = asyncio.run(with_store(work))
    assert (first.outcome, second.outcome) == ("finished", "finished")
    report = build(PartReport, plain(second.report), where="report")
    assert (report.steps, report.samples, report.repeated) == (300, 3000, 200)
    np.testing.assert_array_equal(before, after)


def test_a_label_that_the_model_does_not_take_is_the_user_s_mistake(tmp_path):
    dataset = prepared(tmp_path / "data", rows=100, positive=2)
    refused = asyncio.run(with_store(lambda key, addresses: run_sparse_part(context(key), request(dataset, addresses))))
    assert refused.outcome == "refused"
    assert "not binary" in refused.problem
