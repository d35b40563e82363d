"""Samples of a region: its own functions read them, and no byte of any crosses to another region or into what the regions share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import combined, make_job

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError
from ephemeron.events import RunStarted
from ephemeron.regions.driver.launch import matched_every, prepared_groups
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.testing._emulation.service import free_port
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.launching.launch import LaunchRequest
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Configuration, RegionOptions, RunRegion, load_job

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
    groups = tuple(RunRegion(name=name, workers=2, batch_size=6, data=data) for name, (data, _) in found.items())
    job = make_job(epochs=3)
    configuration = configure(job, **combined({"platform": "simulated", "regions": {"region": groups, "exchange_every": 3}}, overrides))
    return train(job, configuration), {name: markers for name, (_, markers) in found.items()}


@pytest.mark.parametrize(("sync", "compression"), [pytest.param(*p, marks=[pytest.mark.slow] if p[0] != "sma" else []) for p in POLICIES])
def test_no_byte_of_a_sample_leaves_its_region(sync: str, compression: str, tmp_path: Path, stores: list[tuple[str, bytes]]) -> None:
    result, samples = regions_with_samples(tmp_path, regions={"sync": sync, "compression": compression})
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


class RecordingProxy:
    """Passes connections on to a port of this machine, and keeps every byte of both directions."""

    def __init__(self) -> None:
        self.behind = free_port()
        self.port, self._loop = 0, asyncio.new_event_loop()
        self.seen = bytearray()
        self._listening, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        assert self._listening.wait(30)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        async def listen() -> None:
            server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
            self.port = int(server.sockets[0].getsockname()[1])
            self._listening.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to = await asyncio.open_connection("127.0.0.1", self.behind)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, to), self._pass(there, writer))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                self.seen += data
                target.write(data)
                await target.drain()
        target.close()


@pytest.mark.slow
def test_no_byte_of_a_sample_crosses_a_connection_between_regions(tmp_path: Path) -> None:
    found = {name: own_samples(tmp_path, name, seed=i) for i, name in enumerate(("near", "far"))}
    with RecordingProxy() as proxy:
        listens = {"near": {"listen": f"127.0.0.1:{proxy.behind}", "endpoint": f"127.0.0.1:{proxy.port}"}, "far": {}}
        groups = tuple(RunRegion(name=name, workers=1, batch_size=6, data=data, **listens[name]) for name, (data, _) in found.items())
        job = make_job(epochs=3)
        values = {"region": groups, "sync": "diloco", "communicator": "tcp", "exchange_every": 3}
        result = train(job, configure(job, platform="local", regions=values))
        assert result.finished
        near, far = result.summary.regions
        parameters = 4 * sum(tensor.numel() for tensor in result.state_dict().values())
        assert len(proxy.seen) > 4 * parameters, "both send, in several rounds"
        assert min(near.wan_bytes_sent, far.wan_bytes_sent) > parameters
        crossed = bytes(proxy.seen)
    for _, markers in found.values():
        assert not [m for m in markers for start in (0, 64, 128, 240) if m[start : start + 16] in crossed]


def test_regions_with_samples_of_their_own_train_one_model(tmp_path: Path) -> None:
    result, _ = regions_with_samples(tmp_path)
    hashes = {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
    started = next(e for e in events_of(result.folder) if isinstance(e, RunStarted))
    assert [group.samples for group in started.groups] == [38, 38], "a fifth of each file is held out"


def test_a_region_without_samples_of_its_own_shares_those_of_the_job(tmp_path: Path) -> None:
    data, _ = own_samples(tmp_path, "near", seed=0)
    groups = (RunRegion(name="near", workers=1, batch_size=6, data=data), RunRegion(name="far", workers=1, batch_size=24))
    job = make_job(epochs=1)
    result = train(job, configure(job, regions={"region": groups, "exchange_every": 3}, platform="simulated"))
    started = next(e for e in events_of(result.folder) if isinstance(e, RunStarted))
    near, far = started.groups
    assert near.samples == 38
    assert far.samples > 200, "all of the job's"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (DataSpec(source="npz", path=Path("/no/such.npz")), "region near: "),
        (DataSpec(collate="a:b"), "region near: data.collate = 'a:b' is for flows"),
    ],
)
def test_samples_that_cannot_be_read_are_refused_with_the_name_of_the_region(data: DataSpec, match: str) -> None:
    groups = (RunRegion(name="near", workers=1, data=data), RunRegion(name="far", workers=1))
    job = make_job(epochs=1)
    with pytest.raises(JobError, match=match):
        train(job, configure(job, regions={"region": groups, "exchange_every": 3}, platform="simulated"))


def test_regions_with_more_iterations_exchange_after_more_of_them() -> None:
    groups = (RunRegion(name="slow", workers=1), RunRegion(name="fast", workers=1), RunRegion(name="own", workers=1, exchange_every=7))
    c = Configuration(regions=RegionOptions(region=groups, exchange_every=10))
    assert matched_every(c, [100, 400, 200]) == [10, 40, 7]
    assert matched_every(dataclasses.replace(c, regions=dataclasses.replace(c.regions, sync="asgd")), [100, 400, 200]) == [1, 1, 1]


def test_a_region_gets_the_credentials_that_it_names_and_no_other_region_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEAR_AWS_ACCESS_KEY_ID", "key of near")
    groups = (RunRegion(name="near", workers=1, credentials="NEAR"), RunRegion(name="far", workers=1))
    job = make_job(epochs=1)
    ready = prepared_groups(LaunchRequest(job=job, configuration=configure(job, regions={"region": groups}, platform="local")))
    assert [member.secrets for member in ready.members] == [{"AWS_ACCESS_KEY_ID": "key of near"}, {}]
    assert b"key of near" not in ready.spec.to_bytes()
    monkeypatch.delenv("NEAR_AWS_ACCESS_KEY_ID")
    with pytest.raises(JobError, match="region near: no environment variable begins with NEAR_"):
        prepared_groups(LaunchRequest(job=job, configuration=configure(job, regions={"region": groups}, platform="local")))


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
