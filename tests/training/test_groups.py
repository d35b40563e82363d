"""Runs of several groups of functions: one average every H iterations, one bill, one event stream, one of each command."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from training_runs import WORLD, combined, configuration, make_job

from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.keys import Keys
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import plain
from ephemeron.errors import JobError, UserError
from ephemeron.events import Ended, FaultFired, Invoked, Loaded, Note, Progress, RunEnded, RunStarted
from ephemeron.functions import simulation
from ephemeron.functions.base import Limits
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.regions.driver.launch import divide
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import all_runs, events_of
from ephemeron.runs.logs import lines
from ephemeron.runs.status import status_of
from ephemeron.runs.verbs import attach, resume, stop
from ephemeron.training.driver import configure, resize, train
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import Fault, RunRegion, Target
from ephemeron.training.worker.spec import GroupMembership, RunSpec
from gates import Gate
from random_schedules import seeds

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


PAIR = (RunRegion(name="near", workers=2, batch_size=24, share=2), RunRegion(name="far", workers=1, batch_size=12, memory_mb=1024, share=1))


def _plain(group: RunRegion) -> dict[str, Any]:
    return {name: value for name, value in plain(group).items() if value is not None}


def grouped(*, faults: Any = (), **overrides: Any) -> Result:
    job = make_job(epochs=3)
    values = {"platform": "simulated", "regions": {"region": PAIR, "exchange_every": 5}, "checkpoint_every": 4}
    return train(job, configure(job, **combined(values, overrides)), faults=faults)


@cache
def undisturbed() -> str | None:
    """Weights of two groups to which nothing happens."""
    return grouped().summary.weights_sha256


@pytest.mark.slow
def test_two_simulated_groups_train_one_model() -> None:
    result = grouped()
    assert result.finished
    assert result.summary.workers == 3
    assert [group.name for group in result.summary.regions] == ["near", "far"]
    assert sum(group.cost_usd for group in result.summary.regions) == pytest.approx(result.summary.cost_usd, abs=1e-8)
    summaries = [read_result(place) for place in members_of(result.folder)]
    assert {each.weights_sha256 for each in summaries} == {result.summary.weights_sha256}
    events = list(events_of(result.folder))
    assert {event.rank for event in events if isinstance(event, Progress)} == {0, 1, 2}
    assert [type(e) for e in (events[0], events[-1])] == [RunStarted, RunEnded]
    assert sum(isinstance(e, RunStarted) for e in events) == 1
    assert result.summary.metrics["accuracy"] > 0.3


PHASES = ("load", "compute", "upload", "aggregate", "download", "wait")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_weights_are_the_same_whichever_functions_are_killed(seed: int) -> None:
    rng = random.Random(seed)
    faults = [Fault(kind="kill", rank=rng.randrange(3), iteration=rng.randrange(1, 40), phase=rng.choice(PHASES[1:])) for _ in range(4)]
    disturbed = grouped(faults=faults)
    assert any(isinstance(event, FaultFired) for event in events_of(disturbed.folder))
    assert disturbed.summary.weights_sha256 == undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_functions_killed_in_the_exchange_of_groups_repeat_it(rank: int) -> None:
    faults = [Fault(kind="kill", rank=rank, iteration=i, phase="wait", attempt=a) for a, i in enumerate((4, 9))]
    assert grouped(faults=faults).summary.weights_sha256 == undisturbed()


@pytest.mark.slow
def test_a_killed_function_takes_its_state_from_others_of_its_group() -> None:
    groups = tuple(
        RunRegion(**{**_plain(group), "channel": "direct", "workers": workers}) for group, workers in zip(PAIR, (3, 2), strict=True)
    )
    weights = grouped(regions={"region": groups}, checkpoint_every=50).summary.weights_sha256
    before_exchanges = [Fault(kind="kill", rank=0, iteration=i, phase="wait", attempt=a) for a, i in enumerate((4, 9))]
    for faults in (before_exchanges, [Fault(kind="kill", rank=r, iteration=7, phase="upload") for r in (1, 3)]):
        disturbed = grouped(regions={"region": groups}, checkpoint_every=50, faults=faults)
        assert disturbed.summary.weights_sha256 == weights
        events = list(events_of(disturbed.folder))
        assert sum(isinstance(event, FaultFired) for event in events) == 2
        assert min(e.iteration for e in events if isinstance(e, Loaded) and e.attempt) >= 5, "no checkpoint was stored"


@pytest.mark.slow
def test_hand_offs_change_nothing() -> None:
    groups = [RunRegion(**{**_plain(group), "function_timeout_s": 12.0}) for group in PAIR]
    relayed = grouped(regions={"region": groups})
    assert [e for e in events_of(relayed.folder) if isinstance(e, Invoked) and e.reason == "relay"]
    assert relayed.summary.weights_sha256 == undisturbed()


@pytest.mark.slow
def test_rounds_that_no_function_repeats_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    from ephemeron.communication.channels import parameter_server

    stores = []

    class Counted(parameter_server.MemoryParameterServer):
        def __init__(self) -> None:
            super().__init__()
            self.most = 0
            stores.append(self)

        def publish(self, key: str, data: bytes) -> None:
            super().publish(key, data)
            self.most = max(self.most, len(self.objects))

    monkeypatch.setattr(parameter_server, "MemoryParameterServer", Counted)
    assert grouped(regions={"exchange_every": 1}, checkpoint_every=2).finished
    (shared,) = (store for store in stores if any("/groups/" in key for key in store.objects))
    assert 4 < shared.most < 20


@pytest.mark.slow
def test_the_average_is_taken_when_the_options_say() -> None:
    shas = {undisturbed(), *(grouped(regions={"exchange_every": every}).summary.weights_sha256 for every in (7, 1000))}
    assert len(shas) == 3
    assert grouped(regions={"region": PAIR[::-1]}).summary.workers == 3


def test_samples_are_divided_once_and_in_proportion() -> None:
    parts = divide(100, [2, 1, 1], seed=3)
    assert [len(part) for part in parts] == [50, 25, 25]
    assert sorted(position for part in parts for position in part) == list(range(100))
    assert parts == divide(100, [2, 1, 1], seed=3) != divide(100, [2, 1, 1], seed=4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sync": "hap"}, "sync 'hap' is not for a run in several regions"),
        ({"pattern": "parameter-server"}, "pattern 'parameter-server' is not for a run in several regions"),
        ({"stages": {"count": 2}}, "stages is not for a run in several regions"),
        ({"regions": {"region": PAIR[:1]}}, "run.regions.region has one region"),
        ({"regions": {"region": (PAIR[0], PAIR[0])}}, "two regions of the name 'near'"),
        ({"regions": {"region": (PAIR[0], RunRegion(name="real", workers=1, platform="local"))}}, "cannot train together"),
        ({"regions": {"region": (PAIR[0], RunRegion(name="b", workers=1, channel="ps://h:1"))}}, "region b: channel 'ps://h:1'"),
        ({"regions": {"store": "s3://bucket/x"}}, "regions.store is not for simulated regions"),
        ({"platform": "local", "regions": {"region": (PAIR[0], RunRegion(name="b", workers=1, platform="ray"))}}, "give regions.store"),
        ({"platform": "local", "regions": {"store": "redis://u:p@h:1"}}, "credentials do not belong in regions.store"),
    ],
)
def test_what_does_not_work_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        grouped(**changes)
    assert not all_runs()


LOCAL = {
    "platform": "local",
    "regions": {"region": tuple(RunRegion(**{**_plain(group), "memory_mb": 512}) for group in PAIR), "exchange_every": 5},
}


@pytest.mark.slow
def test_local_groups_train_as_simulated_ones_and_are_stopped_and_resumed_together(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")

    def interrupt(event: Any) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration == 7:
            os.kill(os.getpid(), signal.SIGINT)
            gate.open(0.5)  # a rank stops between two iterations

    job = make_job(epochs=3, model=gate.model(12))
    how = configure(job, checkpoint_every=4, **LOCAL)
    stopped = train(job, how, on_event=interrupt, quiet_interrupt=True)
    gate.open()
    assert stopped.summary.status == "stopped"
    assert {read_result(place).status for place in members_of(stopped.folder)} == {"stopped"}
    result = resume(stopped.summary.run_id)
    assert result.summary.weights_sha256 == undisturbed()
    events = list(events_of(result.folder))
    assert [type(e) for e in events if isinstance(e, (RunStarted, RunEnded))] == [RunStarted, RunEnded] * 2
    invocations = [e.invocation for e in events if isinstance(e, Invoked)]
    assert (
        len(set(invocations))
        == len(invocations)
        == sum(isinstance(e, Invoked) for place in members_of(result.folder) for e in events_of(place))
    )
    list(lines(result.folder))
    assert not list((result.folder.path / "objects").rglob("*.0"))


@pytest.mark.slow
def test_another_client_stops_all_groups(tmp_path: Path) -> None:
    asked: list[threading.Thread] = []
    gate = Gate(tmp_path / "gate")

    def on_event(event: Any) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration == 6 and not asked:
            asked.append(threading.Thread(target=stop, args=("last",), daemon=True))
            asked[0].start()
            gate.open(0.5)

    job = make_job(epochs=40, model=gate.model(12))  # it is stopped long before
    stopped = train(job, configure(job, checkpoint_every=4, **LOCAL), on_event=on_event)
    asked[0].join()
    assert stopped.summary.status == "stopped"
    with pytest.raises(UserError, match="has several regions and cannot be resized"):
        resize(stopped.summary.run_id, workers=4)


CLIENT = """
import sys
from pathlib import Path
from ephemeron.events import Progress
from ephemeron.training.driver import configure, train
from gates import Gate
from test_groups import LOCAL, make_job

def on_event(event):
    if isinstance(event, Progress) and event.rank == 0 and event.iteration == 3:
        print("begun", flush=True)

job = make_job(epochs=3, model=Gate(Path(sys.argv[1])).model(8))
train(job, configure(job, checkpoint_every=4, **LOCAL), on_event=on_event)
"""


@pytest.mark.slow
def test_groups_outlive_their_client_and_another_one_attaches(tmp_path: Path) -> None:
    here, gate = Path(__file__).parent, Gate(tmp_path / "gate")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}
    command = [sys.executable, "-c", CLIENT, str(gate.file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "begun\n"
        client.kill()
    (folder,) = all_runs()
    assert status_of(folder) == "running"
    gate.open()
    result = attach(folder.run_id)
    assert result.summary.weights_sha256 == undisturbed()
    progress = [(e.rank, e.iteration) for e in events_of(folder) if isinstance(e, Progress)]
    assert len(set(progress)) == len(progress) == sum(isinstance(e, Progress) for place in members_of(folder) for e in events_of(place))
    assert [e.text for e in events_of(folder) if isinstance(e, Note) and e.text == "[far] finished"]
    told = folder.events.read_bytes()
    again = attach(folder.run_id)
    assert (again.summary, folder.events.read_bytes()) == (result.summary, told), "it has ended: nothing is added to its log"


def synthetic(rng: random.Random | None, *, lifetime_s: float = 900.0, one_key: bool = True) -> tuple[list[str], int]:
    """Two groups without a model, of three and two functions; with `rng`, faults at random.

    Returns:
        The weights of the groups, and the number of functions that were killed.
    """

    async def go() -> tuple[list[str], int]:
        shared, loop, key = MemoryParameterServer(), asyncio.get_running_loop(), SigningKey.new()
        drivers, lost = [], 0
        for index, workers in enumerate((3, 2)):
            faults = [] if rng is None else [str(_fault(rng, workers)) for _ in range(rng.randrange(4))]
            spec = RunSpec(
                run_id=f"run-{index}",
                model=Target(target="none"),
                loss=Target(target="none"),
                optimizer=Target(target="none"),
                epochs=2,
                seed=index,
                dtype="float32",
                samples=360 + 120 * index,
                configuration=configuration(workers=workers, batch_size=8, checkpoint_every=3, function_timeout_s=lifetime_s),
                prices=load_prices("objects"),
                faults=tuple(faults),
                trainer="synthetic",
                cold_start_s=WORLD.cold_start_s,
                group=GroupMembership(run="run", store="", index=index, names=("a", "b"), every=4, rounds=7),
            )
            platform = SimulatedPlatform(WORLD, seed=index, limits=Limits(), shared=shared)
            driver = RunDriver(
                platform, platform.store, spec, channel_address="memory", clock=loop.time, signing=key if one_key else SigningKey.new()
            )
            objects = {Keys(spec.run_id).spec: [spec.to_bytes()]}
            await driver.launch(Prepared(job=make_job(), spec=spec, objects=objects, model_bytes=0))
            drivers.append(driver)
        endings = await asyncio.gather(*(driver.watch() for driver in drivers))
        for driver, ending in zip(drivers, endings, strict=True):
            assert ending.status == "finished", ending.causes
            lost += sum(isinstance(e, Ended) and e.status == "lost" for e in driver.platform._events)  # type: ignore[attr-defined]
            assert set(driver.platform.store.objects) == {driver.keys.spec, driver.keys.result}  # type: ignore[attr-defined]
        kept = [key for key in shared.objects if key.startswith("run/groups/") and "/members/" not in key]
        assert len(kept) <= 12  # of 16 and two that say who left
        return [ending.final.weights_sha256 for ending in endings if ending.final is not None], lost

    return simulation.run(go())


def _fault(rng: random.Random, workers: int) -> Fault:
    rank, iteration = rng.randrange(workers), rng.randrange(30)
    if rng.random() < 0.2:
        return Fault(kind="drop-put", rank=rank, iteration=iteration)
    return Fault(kind="kill", rank=rank, iteration=iteration, phase=rng.choice(PHASES[1:]), attempt=rng.randrange(2))


def test_groups_without_a_model_agree_at_the_end() -> None:
    (a, b), lost = synthetic(None)
    assert (a, lost) == (b, 0)


def test_parameters_that_are_not_signed_with_the_key_of_the_run_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"SignatureRefused: .*run/groups/members/[ab].0000001"):
        synthetic(None, one_key=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_random_faults_change_no_weights(part: int) -> None:
    wanted, _ = synthetic(None)
    killed = 0
    taken = seeds(range(40 * part, 40 * part + 40), 3)
    for seed in taken:
        rng = random.Random(seed)
        found, lost = synthetic(rng, lifetime_s=rng.choice([900.0, 40.0, 20.0]))
        killed += lost
        assert found == wanted, f"seed {seed}"
    assert killed > len(taken) // 2
