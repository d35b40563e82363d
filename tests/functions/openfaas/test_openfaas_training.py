"""Training on OpenFaaS as the local gateway has it: the same weights whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openfaas_world import CALLBACK, EVERY_S, PASSWORD, client, deployed

from checking import left, refusal, texts
from cloud_profiles import measured
from detached_map import check_detached_map
from ephemeron.cli.main import main
from ephemeron.errors import UserError
from ephemeron.events import Ended, Event, Invoked, Progress
from ephemeron.functions.openfaas.settings import PASSWORD_ENV
from ephemeron.runs import detached, verbs
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.verbs import resume
from ephemeron.testing import TrainingMatrix, TrainingWorld
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from ephemeron.testing.training_world import of
from tiny_job import CODE, JOB, SHORT

pytestmark = pytest.mark.slow

MEMORY_MB = 768


@dataclass(kw_only=True)
class World(TrainingWorld):
    """One gateway, one function, the cache and the object store that it reaches."""

    gateway: OpenFaasGateway

    def kill(self, rank: int) -> bool:
        """SIGKILL for the whole replica that runs this rank now. Whether there was one."""
        for replica in self.gateway.replicas():
            if replica.body and json.loads(replica.body).get("rank") == rank:
                os.kill(replica.pid, signal.SIGKILL)
                return True
        return False


@pytest.fixture(scope="module")
def world(valkey_server: Any, s3_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PASSWORD_ENV, PASSWORD)
        for name, value in s3_server.env.items():
            patch.setenv(name, value)
        with OpenFaasGateway(password=PASSWORD, environment=s3_server.env) as gateway:
            settings = deployed(
                gateway,
                tmp_path_factory.mktemp("image"),
                memory_mb=MEMORY_MB,
                lifetime_s=600,
                replicas=8,
                preload="torch,ephemeron.training.worker.loop,ephemeron.training.worker.trainers.torch_trainer",
            )
            assert (settings.every_s, settings.callback) == (EVERY_S, CALLBACK)
            yield World(
                platform="openfaas",
                job=JOB,
                memory_mb=MEMORY_MB,
                settings=settings,
                gateway=gateway,
                channels={"cache": valkey_server.address, "objects": s3_server.address},
                folder=tmp_path_factory.mktemp("runs"),
            )


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class TestOpenFaasTraining(TrainingMatrix):
    """On Valkey; what goes through S3 is below."""


def test_what_a_run_leaves(world: World) -> None:
    result, _ = world.undisturbed
    calls = [json.loads(line) for line in (result.folder.path / "calls.jsonl").read_text().splitlines()]
    assert {r["billed_by"] for r in calls if r["record"] == "final"} == {"supervisor"}
    written = "".join(path.read_text() for path in result.folder.path.glob("*.json*"))
    assert PASSWORD not in written


def test_through_an_object_store_and_with_every_call_delivered_twice(world: World) -> None:
    world.gateway.deliver_twice(3)
    result, events = world.go(channel="objects")
    world.check_same(result)
    twice = {e.invocation for e in of(events, Invoked) if e.reason == "duplicate"}
    assert len(twice) <= 3, "one that comes when everything is over is not heard of"
    assert [e.outcome for e in of(events, Ended)].count("duplicate") == len(twice)
    assert [e.outcome for e in of(events, Ended)].count("finished") == 3
    run = result.summary.run_id
    assert left(world.channels["objects"], run) == [f"{run}.calls/cancel", f"{run}/result", f"{run}/spec"]


@pytest.mark.cold_start  # the one whose function makes its imports itself, of the code of its image
def test_a_run_on_a_replica_of_its_own(world: World, tmp_path: Path) -> None:
    alone = deployed(world.gateway, tmp_path / "image", function="alone", memory_mb=MEMORY_MB, replicas=1, preload="torch")
    result, events = dataclasses.replace(world, settings=alone).go(job=SHORT, workers=1, aggregators=1, batch_size=720)
    client(alone).delete()
    assert result.summary.status == "finished", result.causes
    assert [e.outcome for e in of(events, Ended)] == ["finished"]


def test_a_whole_replica_is_killed(world: World) -> None:
    killed = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration >= 2 and not killed:
            killed.append(world.kill(0))

    result, events = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    world.check_same(result)
    assert killed == [True]
    lost = [e for e in of(events, Ended) if e.status == "lost"]
    assert [e.rank for e in lost] == [0]
    assert "502" in lost[0].error, "the call-back told of it"
    assert [e.reason for e in of(events, Invoked)].count("replacement") == 1


def test_a_run_is_stopped_and_resumed(world: World) -> None:
    asked = threading.Event()
    stopper = threading.Thread(target=lambda: asked.wait() and verbs.stop("last"), daemon=True)
    stopper.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    stopped, _ = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    stopper.join()
    assert stopped.summary.status == "stopped"
    with pytest.raises(UserError, match="is not running"):
        verbs.stop("last")
    events: list[Any] = []
    result = resume("last", on_event=events.append)
    world.check_same(result)
    assert [e.reason for e in of(events, Invoked)].count("resume") == 3


# -- the check ------------------------------------------------------------------------------------------------


def test_the_check_finds_all_well_and_leaves_nothing(world: World) -> None:
    asked = ("openfaas", "--openfaas-gateway", world.gateway.url, "--channel", str(world.channels["objects"]))
    busy = [r.body for r in world.gateway.replicas()]
    said = texts(*asked, "--no-call")
    assert "function" not in said
    assert [r.body for r in world.gateway.replicas()] == busy, "nothing was invoked"
    assert "its code is of this release" in said["platform"]
    said = texts(*asked)
    assert "one of 768 MB began" in said["function"]
    assert left(world.channels["objects"]) == []


def test_what_the_check_finds_wrong_is_one_line_with_a_remedy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*more: str, channel: str = str(world.channels["cache"]), gateway: str = world.gateway.url) -> str:
        return refusal("openfaas", "--openfaas-gateway", gateway, "--channel", channel, "--no-call", *more)

    assert "does not answer: Connection refused; check --openfaas-gateway" in asks(gateway="http://127.0.0.1:9")
    assert "function 'other' at" in asks("--openfaas-function", "other")
    assert "is not deployed; run: ephemeron cloud deploy openfaas" in asks("--openfaas-function", "other")
    assert "16 workers are wanted, function 'ephemeron' may have 8 replicas" in asks("--workers", "16")
    elsewhere = asks(channel="redis://127.0.0.1:9/0", gateway="http://gateway.example:8080")
    assert "is on this machine, where functions of the cluster cannot reach it; use s3://" in elsewhere
    assert "channel: redis://127.0.0.1:9/0: cannot connect" in asks(channel="redis://127.0.0.1:9/0")
    with monkeypatch.context() as patch:
        patch.setenv(PASSWORD_ENV, "guessed")
        said = asks()
        assert "refuses this user or password; set EPHEMERON_OPENFAAS_PASSWORD" in said
        assert "guessed" not in said
    with monkeypatch.context() as patch:
        patch.setattr("ephemeron.functions.openfaas.provider.digest", lambda: "0123456789abcdef")
        assert "this is 0123456789abcdef; run `ephemeron cloud deploy openfaas` again, with a new image" in asks()


def test_a_profile_is_measured_there(world: World) -> None:
    profile = measured(world, (MEMORY_MB,))
    assert profile.platform.memory_mb.sizes == (MEMORY_MB,)


def test_a_map_is_driven_there_by_functions_that_have_no_password(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "work"
    place.mkdir()
    where = ["--platform", "openfaas", "--openfaas-gateway", world.settings.gateway, "--openfaas-function", world.settings.function]
    check_detached_map([*where, "--channel", str(world.channels["objects"])], place, monkeypatch)


def test_a_study_is_driven_there_by_functions_that_have_no_password(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text((CODE / "tiny.py").read_text())
    (tmp_path / "study.toml").write_text(
        'job = "job.toml"\nname = "rates"\nmetric = "accuracy"\nmode = "max"\nsampler = "grid"\npruner = "none"\npredict = false\n'
        "[space]\noptimizer.options.lr = [0.05, 0.1]\n"
    )
    (tmp_path / "job.toml").write_text(
        'name = "tiny"\nmodel = "tiny:mlp"\noptimizer = { target = "SGD", options = { lr = 0.1 } }\nepochs = 1\n'
        f'[run]\nplatform = "openfaas"\nchannel = "{world.channels["objects"]}"\nworkers = 1\nbatch_size = 144\nmemory_mb = {MEMORY_MB}\n'
    )
    where = ["--openfaas-gateway", world.settings.gateway, "--openfaas-function", world.settings.function]
    said = CliRunner().invoke(main, ["tune", "study.toml", *where, "--detach", "--json"])
    assert said.exit_code == 0, said.output
    run = json.loads(said.output.splitlines()[-1])["run_id"]
    result = verbs.attach(run)
    assert result.summary.status == "finished", result.causes
    assert len(result.folder.trials) == 2
    assert "finished" in {e.outcome for e in of(list(events_of(RunFolder(result.folder.path / detached.FOLDER))), Ended)}
