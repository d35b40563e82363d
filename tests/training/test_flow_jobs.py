"""Jobs that name a data flow: functions read their samples themselves, and nothing else changes."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_local_runs import no_function_left
from training_runs import CODE, WORLD, configuration, make_job, real, simulate

from ephemeron.communication.keys import Keys
from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.flow.batch_source import FlowBatchSource, decode_indices
from ephemeron.errors import DatasetNotFound, JobError
from ephemeron.events import Ended, FaultFired, Invoked, Note, Progress
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.launching.prepare import Prepared, prepare
from ephemeron.training.job import DataSpec, Target, load_job, parse_fault
from ephemeron.training.profiling import profile_job
from ephemeron.training.worker.spec import RunSpec

SAMPLES = 150
BAD = (100, 120)
"""Samples that `tiny_flows:picky` cannot stand."""


def publish(folder: Path, *, seed: int = 0, samples: int = SAMPLES, variant: str = "train") -> None:
    """A version of `test/digits`: 8 × 8 images whose brightest row is their class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, samples)
    images = rng.integers(0, 6, (samples, 8, 8)).astype(np.uint8)
    images[np.arange(samples), labels] += 10
    images[[i for i in BAD if i < samples], 0, 0] = 50
    source = folder.parent / f"{folder.name}-{variant}-{seed}.npz"
    np.savez(source, x=images, y=labels)
    import_dataset("npz", str(source), "test/digits", DatasetStore.open(str(folder)), variant=variant)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flows") / "store"
    publish(folder)
    publish(folder, seed=1, samples=40, variant="val")
    return folder


def flow_job(store: Path, flow: str = "shaken", **data: Any) -> Any:
    spec = DataSpec(**{"flow": f"tiny_flows:{flow}", "path": store, **data})
    return make_job(data=spec, epochs=2, optimizer=Target(target="SGD", options={"lr": 0.3, "momentum": 0.9}))


def prepared(job: Any, **how: Any) -> Prepared:
    return prepare(job, configuration(**how), run_id="run", limits=Limits(), prices=load_prices("objects"))


# -- the same as before -------------------------------------------------------------------------------------


def test_a_flow_gives_the_weights_that_its_samples_as_arrays_give(store):
    of_flow = real(flow_job(store, "plain"), batch_size=8, nonaggregator_batch_size=13)
    as_arrays = make_job(
        data=DataSpec(source="tiny_flows:arrays", path=store, sampling="global"),
        epochs=2,
        optimizer=Target(target="SGD", options={"lr": 0.3, "momentum": 0.9}),
    )
    of_arrays = real(as_arrays, batch_size=8, nonaggregator_batch_size=13)
    assert of_flow.sha == of_arrays.sha
    assert of_flow.ending.final.metrics == pytest.approx(of_arrays.ending.final.metrics)
    assert of_flow.ending.final.metrics["accuracy"] > 0.7


def test_no_sample_goes_through_the_channel(store):
    ready = prepared(flow_job(store, sampling="shares"), batch_size=8, nonaggregator_batch_size=13)
    keys, split = Keys("run"), ready.spec.split
    shares = [decode_indices(b"".join(ready.objects[keys.data(rank)])) for rank in range(4)]
    assert [len(share) for share in shares] == list(split.counts)
    assert len(set(split.counts)) > 1  # unequal, as FasDL's equations 4-3 and 4-4 want it
    tests = [decode_indices(b"".join(ready.objects[keys.test(rank)])) for rank in range(4)]
    assert sorted(np.concatenate([*shares, *tests])) == list(range(SAMPLES))
    assert ready.test_samples == sum(map(len, tests)) == 30
    assert ready.spec.flow.sample_nbytes == 8 * 8 * 4 + 8
    assert RunSpec.from_bytes(ready.spec.to_bytes()) == ready.spec


def delivered(ready: Prepared, *, own_process: bool = False, first: int = 0) -> dict[tuple[int, int], bytes]:
    """Every sample that the functions of a run train on, by epoch and index."""
    spec, keys, found = ready.spec, Keys("run"), {}
    for rank in range(spec.configuration.workers):
        part = 0 if spec.samples_globally else rank
        indices = decode_indices(b"".join(ready.objects[keys.data(part)]))
        sampler = spec.sampler(rank)
        feed = FlowBatchSource(
            spec.flow,
            train_indices=indices,
            test_indices=indices[:0],
            seed=spec.seed,
            iterations=spec.iterations,
            timeline=spec.timeline,
            code=[CODE],
            own_process=own_process,
        )
        for iteration in range(first, spec.iterations):
            batch = feed.batch(sampler, iteration)
            for index, image in zip(indices[sampler.batch(iteration)], batch.data[0] if batch.samples else (), strict=True):
                key = (iteration // spec.split.iterations, int(index))
                assert key not in found
                found[key] = np.asarray(image).tobytes()
        feed.close()
    return found


@pytest.mark.slow
def test_random_steps_depend_on_seed_epoch_and_index_only(store):
    job = flow_job(store)
    one = delivered(prepared(job, workers=1, aggregators=1, batch_size=16))
    four = delivered(prepared(job, batch_size=8, nonaggregator_batch_size=13))
    loaders = delivered(prepared(job, workers=2, batch_size=16), own_process=True)
    assert one == four == loaders
    assert len(one) == 2 * 120
    by_index = defaultdict(set)
    for (_, index), data in one.items():
        by_index[index].add(data)
    assert all(len(versions) == 2 for versions in by_index.values())  # every epoch draws anew
    late = delivered(prepared(job, workers=1, aggregators=1, batch_size=16), own_process=True, first=5)
    assert late.items() <= one.items()
    assert delivered(prepared(dataclasses.replace(job, seed=1), workers=1, aggregators=1)).values() != one.values()


@pytest.mark.slow
def test_a_random_dataset_and_collate_function_depend_on_them_too():
    """Whoever reads them: other functions, a replacement that begins in the middle, loader processes."""
    data = DataSpec(flow="tiny_flows:cropped", collate="tiny_flows:mixed_up")
    job = make_job(data=data, epochs=2)
    one = delivered(prepared(job, workers=1, aggregators=1, batch_size=16))
    assert len(set(one.values())) == 2 * 120, "no draw comes twice"
    assert delivered(prepared(job, workers=1, aggregators=1, batch_size=16), own_process=True) == one
    late = delivered(prepared(job, workers=1, aggregators=1, batch_size=16), own_process=True, first=5)
    assert late.items() <= one.items()
    plain = dataclasses.replace(job, data=dataclasses.replace(data, collate=None))
    four = delivered(prepared(plain, batch_size=8, nonaggregator_batch_size=13))
    assert four == delivered(prepared(plain, workers=1, aggregators=1, batch_size=16))


def test_draws_that_nobody_can_seed_are_said_before_the_start():
    with pytest.warns(UserWarning, match="flow test/cropped: 'salt' gives other results under the same seed"):
        prepared(make_job(data=DataSpec(flow="tiny_flows:of_the_system"), epochs=2))


# -- nothing kills a run ------------------------------------------------------------------------------------

HOW: dict[str, Any] = {"batch_size": 8, "checkpoint_every": 3}


@pytest.fixture(scope="module")
def undisturbed(store):
    known: dict[str, str] = {}

    def sha(sync: str) -> str:
        if sync not in known:
            known[sync] = real(flow_job(store), sync=sync, **HOW).sha
        return known[sync]

    return sha


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "compute", "upload", "aggregate", "download"])
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_a_function_is_killed(store, sync, phase, undisturbed):
    for rank, iteration in ((0, 4), (1, 7)):
        fault = parse_fault(f"kill:rank={rank},iteration={iteration},phase={phase}")
        run = real(flow_job(store), sync=sync, faults=[fault], **HOW)
        assert len(run.of(FaultFired)) == 1
        assert run.sha == undisturbed(sync)
        assert run.left == {"run/spec", "run/result"}


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", pytest.param("hap", marks=pytest.mark.slow)])
def test_relays(store, sync, undisturbed):
    slow = dataclasses.replace(WORLD, cold_start_s=0.05, compute={"a": 500.0, "b": 4.0, "m": 0.0})
    job = dataclasses.replace(flow_job(store), simulation=slow)
    run = real(job, sync=sync, function_timeout_s=12.0, **HOW)
    assert max(e.attempt for e in run.of(Invoked)) >= 2
    assert run.sha == undisturbed(sync)


def test_a_version_that_is_imported_meanwhile_changes_nothing(store, undisturbed, tmp_path):
    copy = tmp_path / "store"
    publish(copy)
    job = flow_job(copy)
    ready = prepared(job, **HOW)
    publish(copy, seed=5, samples=90)
    assert simulate(ready).sha == undisturbed("bsp")
    assert prepared(job, **HOW).spec.flow.train.version == "2"


@pytest.mark.slow
def test_functions_of_this_machine_die_and_hand_over(store, undisturbed, home):
    """Real processes, with loaders of their own: the weights are those of the undisturbed simulation."""
    job, events = flow_job(store), []
    # Iterations take longer than a lifetime, however fast the machine is; a later kill may be a successor's, where it is slow.
    faults = [parse_fault("kill:rank=1,iteration=0,phase=upload"), parse_fault("delay:rank=0,factor=1,seconds=1")]
    how = {"platform": "local", "workers": 2, "memory_mb": 704, "function_timeout_s": 10.0, **HOW}
    expected = real(job, workers=2, **HOW).sha
    result = train(job, configure(job, **how), faults=faults, on_event=events.append)
    assert result.finished, result.causes
    assert result.summary.weights_sha256 == expected
    ended = [e for e in events if isinstance(e, Ended)]
    assert "lost" in [e.status for e in ended]
    assert "relayed" in [e.outcome for e in ended]
    assert no_function_left()  # loaders are forked, and are called as functions are


@pytest.mark.slow
def test_functions_of_this_machine_read_a_bucket(store, s3, home):
    """Fetched in a thread, since an object store's client does not survive a fork."""
    address = f"{s3}/flows"
    import_dataset("npz", str(store.parent / "store-train-0.npz"), "test/digits", DatasetStore.open(address), variant="train", copy=True)
    job = dataclasses.replace(flow_job(store, "in_bucket", path=None, options={"url": address}), epochs=1)
    expected = real(dataclasses.replace(flow_job(store), epochs=1), workers=2, **HOW).sha
    result = train(job, configure(job, platform="local", workers=2, memory_mb=704, **HOW))
    assert result.finished, result.causes
    assert result.summary.weights_sha256 == expected
    assert no_function_left()


# -- what fails ---------------------------------------------------------------------------------------------


def test_samples_that_fail_are_passed_over_and_weighed_out(store):
    job = flow_job(store, "picky", on_error="skip", test_fraction=0.0)
    run = real(job, **HOW)
    assert run.ending.status == "finished"
    assert sum(e.samples for e in run.of(Progress)) == 2 * (SAMPLES - len(BAD))
    notes = [e.text for e in run.of(Note)]
    assert any("step 'check'" in text and "test/digits" in text and "passed over" in text for text in notes)
    assert real(job, faults=[parse_fault("kill:rank=1,iteration=5,phase=compute")], **HOW).sha == run.sha


def test_a_sample_that_fails_in_a_function_ends_the_run_and_is_named(store):
    job = flow_job(store, "picky", test_fraction=0.0)
    run = real(job, **HOW)
    assert run.ending.status == "failed"
    (cause,) = run.ending.causes
    for part in (
        "SampleFailed",
        "flow test/picky@1",
        "dataset test/digits@",
        "sample ",
        "step 'check'",
        "store-train-0.npz",
        "a pixel of 50",
    ):
        assert part in cause


@pytest.mark.parametrize(
    ("flow", "more", "kind", "match"),
    [
        ("no_such", {}, JobError, "has no name 'no_such'"),
        ("three", {"path": None}, JobError, "returned int; return an ephemeron.data.Flow"),
        ("empty", {"path": None}, JobError, "is empty"),
        ("without_dataset", {"path": None}, JobError, "has no dataset"),
        ("absent", {}, DatasetNotFound, "test/no-such"),
        ("ragged", {"path": None}, JobError, r"cannot be put together.*data\.collate"),
        ("plain", {"collate": "tiny_flows:triples"}, JobError, r"\(inputs, targets\)"),
        ("plain", {"collate": "tiny_flows:no_such"}, JobError, "no_such"),
        ("plain", {"test_flow": "tiny_flows:three"}, JobError, "tiny_flows:three"),
        ("picky", {"options": {"above": 0}}, JobError, "step 'check'"),
        ("plain", {"on_error": "ignore"}, JobError, "on_error"),
        ("plain", {"loaders": -1}, JobError, "loaders"),
        ("plain", {"prefetch_mb": 0.0}, JobError, "prefetch_mb"),
        ("plain", {"source": "digits2"}, JobError, "exclude each other"),
        ("plain", {"options": {"width": 3}}, JobError, "width"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(store, flow, more, kind, match):
    job = flow_job(store)
    with pytest.raises(kind, match=match):
        prepared(dataclasses.replace(job, data=dataclasses.replace(job.data, flow=f"tiny_flows:{flow}", **more)))


def test_a_model_that_does_not_fit_the_flow_is_refused(store):
    job = dataclasses.replace(flow_job(store), model=Target(target="tiny:wide_input"))
    with pytest.raises(JobError, match=r"flow tiny_flows:shaken with inputs float32\[2, 8, 8\] and targets int64\[2\]"):
        prepared(job)


# -- testing ------------------------------------------------------------------------------------------------


def test_a_test_flow_of_another_variant_is_read_whole(store):
    ready = prepared(flow_job(store, test_flow="tiny_flows:held_out"))
    assert (ready.spec.samples, ready.test_samples) == (SAMPLES, 40)
    run = simulate(ready)
    assert run.ending.final.metrics["accuracy"] > 0.7


def test_a_test_flow_of_the_same_samples_reads_what_is_held_out(store):
    ready = prepared(flow_job(store, test_flow="tiny_flows:plain"))
    assert (ready.spec.samples, ready.test_samples) == (120, 30)
    assert ready.spec.flow.test.target == "tiny_flows:plain"


# -- other ways in ------------------------------------------------------------------------------------------


def test_from_toml(store, tmp_path):
    file = tmp_path / "job.toml"
    text = f"""
model = "tiny:mlp"
code = [{json.dumps(str(CODE))}]
[data]
flow = "tiny_flows:shaken"
test_flow = "tiny_flows:held_out"
path = {json.dumps(str(store))}
on_error = "retry:2"
loaders = 2
prefetch_mb = 8
"""
    file.write_text(text)
    data = load_job(file).data
    assert (data.flow, data.test_flow, data.on_error) == ("tiny_flows:shaken", "tiny_flows:held_out", "retry:2")
    assert (data.loaders, data.prefetch_mb, data.path) == (2, 8.0, store)
    for right, wrong, match in (
        ("loaders = 2", 'source = "digits"', "exclude each other"),
        ("retry:2", "never", "on_error"),
        ("loaders = 2", "loaders = 1.5", "whole number"),
        ("flow =", "flows =", "did you mean flow"),
    ):
        file.write_text(text.replace(right, wrong, 1))
        with pytest.raises(JobError, match=match):
            load_job(file)
    file.write_text('model = "tiny:mlp"\n[data]\nloaders = 2\n')
    with pytest.raises(JobError, match="is for flows"):
        load_job(file)


@pytest.mark.slow
def test_a_simulated_profile_counts_samples_and_what_travels(store):
    world = dataclasses.replace(WORLD, compute=None)
    profile = profile_job(dataclasses.replace(flow_job(store), simulation=world), platform="simulated")
    w = profile.workload
    assert (w.samples, w.test_samples) == (120, 30)
    assert w.dataset_mb == pytest.approx(120 * 8 / 1e6)
    assert w.a > 0


def test_a_dataset_that_shrank_is_refused_where_it_is_read(store):
    ready = prepared(flow_job(store))
    part = dataclasses.replace(ready.spec.flow.train, samples=7)
    spec = dataclasses.replace(ready.spec, flow=dataclasses.replace(ready.spec.flow, train=part))
    ready.objects[Keys("run").spec] = [spec.to_bytes()]
    run = simulate(dataclasses.replace(ready, spec=spec))
    assert run.ending.status == "failed"
    assert "has 150 samples here, and had 7" in run.ending.causes[0]
