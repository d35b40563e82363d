"""Samples of a region: its own functions read them, and no byte of any crosses to another region or into what the regions share."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import make_job

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError
from ephemeron.events import RunStarted
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.group_launch import matched_every, prepared_groups
from ephemeron.training.driver.group_runs import members_of
from ephemeron.training.driver.launch import LaunchRequest
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result, events_of
from ephemeron.training.job import Configuration, RunGroup, load_job

pytestmark = pytest.mark.usefixtures("home")

EXAMPLE = Path(__file__).parents[2] / "examples" / "regions" / "job.toml"
SAMPLES = 48
POLICIES = (("sma", "none"), ("diloco", "int4"), ("asgd-ga", "topk:0.2"), ("ama", "none"))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """Every object that any store of a simulated run has been given, with its key."""
    given: list[tuple[str, bytes]] = []
    put = MemoryParameterServer.put

    async def recorded(self: Any, key: str, buffers: Iterable[Buffer], **options: Any) -> Any:
        whole = [bytes(each) for each in buffers]
        given.append((key, b"".join(whole)))
        return await put(self, key, whole, **options)

    monkeypatch.setattr(MemoryParameterServer, "put", recorded)
    return given


def own_samples(folder: Path, name: str, *, seed: int) -> tuple[DataSpec, list[bytes]]:
    """A file of samples, and the bytes of each image."""
    random = np.random.default_rng(seed)
    labels = np.arange(SAMPLES) % 10
    images = (random.random((SAMPLES, 1, 8, 8)) + labels[:, None, None, None] / 10).astype(np.float32)
    np.savez(folder / f"{name}.npz", x=images, y=labels.astype(np.int64))
    return DataSpec(source="npz", path=folder / f"{name}.npz"), [image.tobytes() for image in images]


def regions_with_samples(folder: Path, **overrides: Any) -> tuple[Result, dict[str, list[bytes]]]:
    found = {name: own_samples(folder, name, seed=i) for i, name in enumerate(("near", "far"))}
    groups = tuple(RunGroup(name=name, workers=2, batch_size=6, data=data) for name, (data, _) in found.items())
    job = make_job(epochs=3)
    configuration = configure(job, groups=groups, **{"platform": "simulated", "exchange_every": 3, **overrides})
    return train(job, configuration), {name: markers for name, (_, markers) in found.items()}


@pytest.mark.parametrize(
    ("sync", "compression"), [pytest.param(*p, marks=[pytest.mark.slow] if p[0] != "sma" else []) for p in POLICIES]
)
def test_no_byte_of_a_sample_leaves_its_region(
    sync: str, compression: str, tmp_path: Path, stores: list[tuple[str, bytes]]
) -> None:
    result, samples = regions_with_samples(tmp_path, region_sync=sync, region_compression=compression)
    assert result.finished
    run = result.summary.run_id
    shared = [data for key, data in stores if key.startswith(f"{run}/")]
    assert sum(map(len, shared)) > 1000, "the regions exchange"
    other = {"near": "far", "far": "near"}
    for name, markers in samples.items():
        own = b"".join(data for key, data in stores if key.startswith(f"{run}-{name}/"))
        assert sum(marker in own for marker in markers) == SAMPLES, "the search finds samples where they belong"
        foreign = b"".join([*shared, *(data for key, data in stores if key.startswith(f"{run}-{other[name]}/"))])
        parts = [marker[start : start + 16] for marker in markers for start in (0, 64, 128, 240)]
        assert not [part for part in parts if part in foreign]


def test_regions_with_samples_of_their_own_train_one_model(tmp_path: Path) -> None:
    result, _ = regions_with_samples(tmp_path)
    hashes = {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
    started = next(e for e in events_of(result.folder) if isinstance(e, RunStarted))
    assert [group.samples for group in started.groups] == [38, 38], "a fifth of each file is held out"


def test_a_region_without_samples_of_its_own_shares_those_of_the_job(tmp_path: Path) -> None:
    data, _ = own_samples(tmp_path, "near", seed=0)
    groups = (RunGroup(name="near", workers=1, batch_size=6, data=data), RunGroup(name="far", workers=1, batch_size=24))
    job = make_job(epochs=1)
    result = train(job, configure(job, groups=groups, platform="simulated", exchange_every=3))
    started = next(e for e in events_of(result.folder) if isinstance(e, RunStarted))
    near, far = started.groups
    assert near.samples == 38
    assert far.samples > 200, "all of the job's"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (DataSpec(source="npz", path=Path("/no/such.npz")), "group near: "),
        (DataSpec(collate="a:b"), "group near: data.collate = 'a:b' is for flows"),
    ],
)
def test_samples_that_cannot_be_read_are_refused_with_the_name_of_the_region(data: DataSpec, match: str) -> None:
    groups = (RunGroup(name="near", workers=1, data=data), RunGroup(name="far", workers=1))
    job = make_job(epochs=1)
    with pytest.raises(JobError, match=match):
        train(job, configure(job, groups=groups, platform="simulated", exchange_every=3))


def test_regions_with_more_iterations_exchange_after_more_of_them() -> None:
    groups = (
        RunGroup(name="slow", workers=1),
        RunGroup(name="fast", workers=1),
        RunGroup(name="own", workers=1, exchange_every=7),
    )
    c = Configuration(groups=groups, exchange_every=10)
    assert matched_every(c, [100, 400, 200]) == [10, 40, 7]
    assert matched_every(dataclasses.replace(c, region_sync="asgd"), [100, 400, 200]) == [1, 1, 1]


def test_a_region_gets_the_credentials_that_it_names_and_no_other_region_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEAR_AWS_ACCESS_KEY_ID", "key of near")
    groups = (RunGroup(name="near", workers=1, credentials="NEAR"), RunGroup(name="far", workers=1))
    job = make_job(epochs=1)
    ready = prepared_groups(LaunchRequest(job=job, configuration=configure(job, groups=groups, platform="local")))
    assert [member.secrets for member in ready.members] == [{"AWS_ACCESS_KEY_ID": "key of near"}, {}]
    assert b"key of near" not in ready.spec.to_bytes()
    monkeypatch.delenv("NEAR_AWS_ACCESS_KEY_ID")
    with pytest.raises(JobError, match="group near: no environment variable begins with NEAR_"):
        prepared_groups(LaunchRequest(job=job, configuration=configure(job, groups=groups, platform="local")))


@pytest.mark.slow
def test_the_example_trains_two_regions_on_this_machine() -> None:
    pytest.importorskip("sklearn", reason="no sklearn, whose digits the example uses")
    job = dataclasses.replace(load_job(EXAMPLE), epochs=4)
    result = train(job)
    assert result.finished
    shanghai, chongqing = result.summary.regions
    assert (shanghai.name, chongqing.name) == ("shanghai", "chongqing")
    assert min(shanghai.wan_bytes_sent, chongqing.wan_bytes_sent) > 0
    assert result.summary.metrics["accuracy"] > 0.6
