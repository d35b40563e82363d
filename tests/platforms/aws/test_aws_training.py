"""Training on AWS Lambda as the local service has it: the same weights whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import KEYS, deployed

from ephemeron.errors import UserError
from ephemeron.events import Ended, Event, FaultFired, Invoked, Note, Progress
from ephemeron.job import DataSpec, Job, Simulation, Target, parse_fault
from ephemeron.platforms.aws.settings import AwsSettings
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.training import configure, home, resume, train

CODE = Path(__file__).parents[2] / "training" / "code"
MEMORY_MB = 704
JOB = Job(
    name="aws", model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1, code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}), simulation=Simulation(),
)  # fmt: skip
HOW = {
    "platform": "aws",
    "workers": 3,
    "aggregators": 2,
    "batch_size": 24,
    "memory_mb": MEMORY_MB,
    "checkpoint_every": 4,
}


class World:
    """One service, one function, the cache and the object store that it reaches."""

    def __init__(self, service: LambdaService, settings: AwsSettings, channels: dict[str, str]) -> None:
        self.service, self.settings, self.channels = service, settings, channels

    def go(
        self, *, faults: tuple[str, ...] = (), on_event: Callable[[Event], None] = lambda event: None,
        channel: str = "cache", job: Job = JOB, **how: Any,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        events: list[Any] = []

        def see(event: Event) -> None:
            events.append(event)
            on_event(event)

        c = configure(job, **{**HOW, "channel": self.channels[channel], **how})
        result = train(job, c, faults=[parse_fault(f) for f in faults], on_event=see, cloud=self.settings)
        return result, events

    def kill(self, rank: int) -> bool:
        """SIGKILL from outside for whatever runs this rank now. Whether there was anything."""
        for environment in self.service.environments():
            if environment.request_id and json.loads(environment.payload).get("rank") == rank:
                os.kill(environment.pid, signal.SIGKILL)
                return True
        return False


@pytest.fixture(scope="module")
def world(valkey_server: Any, s3_server: Any) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}.items():
            patch.setenv(name, value)
        s3 = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
        with LambdaService(concurrency=10, environment=s3) as service:
            settings = deployed(
                service, entry="ephemeron.worker.loop:run_worker", memory_mb=MEMORY_MB, timeout_s=120,
                preload="torch,torch._dynamo,ephemeron.worker.loop,ephemeron.worker.torch_trainer",
            )  # fmt: skip
            yield World(service, settings, {"cache": valkey_server.address, "objects": s3_server.address})


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


def of(events: list[Any], kind: type) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(tmp_path_factory.mktemp("home")))
        return world.go()


def test_a_run(undisturbed: tuple[Any, list[Any]], world: World) -> None:
    result, events = undisturbed
    summary = result.summary
    assert (summary["status"], summary["iterations"], summary["platform"]) == ("finished", 20, "aws")
    assert len(of(events, Progress)) == 60
    assert len(of(events, Invoked)) == summary["invocations"] == 3
    assert [e.outcome for e in of(events, Ended)] == ["finished"] * 3
    billed = sum(e.billed_s for e in of(events, Ended))
    assert summary["billed"]["gb_seconds"] == pytest.approx(billed * MEMORY_MB / 1024, rel=1e-6)
    assert not world.service.environments()[0].request_id, "nothing runs on"
    calls = [json.loads(line) for line in (result.folder.path / "calls.jsonl").read_text().splitlines()]
    assert {r["billed_by"] for r in calls if r["record"] == "final"} == {"report"}
    text = (result.folder.path / "run.json").read_text() + (result.folder.path / "calls.jsonl").read_text()
    assert "SECRET" not in text.upper()


def same(result: Any, undisturbed: tuple[Any, list[Any]]) -> None:
    assert result.summary["status"] == "finished", result.causes
    assert result.summary["weights_sha256"] == undisturbed[0].summary["weights_sha256"]


def test_through_an_object_store_and_with_every_call_delivered_twice(world: World, undisturbed: Any) -> None:
    world.service.deliver_twice(3)
    result, events = world.go(channel="objects")
    same(result, undisturbed)
    twice = {e.invocation for e in of(events, Invoked) if e.reason == "duplicate"}
    assert 1 <= len(twice) <= 3, "the last one may begin when everything is over"
    # Which of the two is called the first is up to the store; one of them steps aside.
    assert [e.outcome for e in of(events, Ended)].count("duplicate") == len(twice)
    assert [e.outcome for e in of(events, Ended)].count("finished") == 3
    # nothing is left in the store but what the run keeps
    from ephemeron.channels import open_channel

    async def left() -> list[str]:
        async with open_channel(world.channels["objects"]) as channel:
            return await channel.list(result.summary["run_id"])

    import asyncio

    run = result.summary["run_id"]
    assert asyncio.run(left()) == [f"{run}.calls/cancel", f"{run}/result", f"{run}/spec"]


@pytest.mark.parametrize(("rank", "iteration"), [(0, 2), (2, 11)])
def test_an_environment_is_killed_from_outside(world: World, undisturbed: Any, rank: int, iteration: int) -> None:
    killed = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == rank and event.iteration >= iteration and not killed:
            killed.append(world.kill(rank))

    result, events = world.go(on_event=watch, faults=("delay:rank=1,factor=100",))
    same(result, undisturbed)
    assert killed == [True]
    lost = [e for e in of(events, Ended) if e.status == "lost"]
    assert [e.rank for e in lost] == [rank]
    assert "signal: killed" in lost[0].error
    assert lost[0].billed_s > 0, "Lambda bills what it kills"
    assert [e.reason for e in of(events, Invoked)].count("replacement") == 1


def test_deaths_within_phases(world: World, undisturbed: Any) -> None:
    result, events = world.go(
        faults=("kill:rank=0,iteration=7,phase=aggregate", "kill:rank=2,iteration=12,phase=upload", "duplicate:rank=1")
    )
    same(result, undisturbed)
    assert len(of(events, FaultFired)) == 2
    assert [e.status for e in of(events, Ended)].count("lost") == 2
    assert [e.outcome for e in of(events, Ended)].count("duplicate") == 1


def test_past_short_lifetimes_functions_invoke_their_successors(world: World, undisturbed: Any) -> None:
    result, events = world.go(lifetime_s=12.0, faults=("delay:rank=1,factor=300",))
    same(result, undisturbed)
    assert [e.reason for e in of(events, Invoked)].count("relay") >= 3


def test_a_throttled_launch_is_tried_again(world: World) -> None:
    world.service.throttle(5)
    job = Job(name="short", model=JOB.model, data=JOB.data, epochs=1, code=(CODE,))
    result, _ = world.go(job=job, workers=1, aggregators=1, batch_size=720)
    assert result.summary["status"] == "finished"
    assert world.service.invoker.mischief.throttle == 0


FAILING = """
import os
import torch

class Model(torch.nn.Linear):
    def forward(self, x):
        if "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
            print("about to fail", flush=True)
            raise ValueError("seven is not a colour")
        return super().forward(x.flatten(1))

def build():
    return Model(64, 10)
"""


def test_what_the_code_raises_fails_the_run_and_its_log_is_kept(world: World, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "failing.py").write_text(FAILING)
    job = Job(name="bad", model=Target(target="failing:build"), data=JOB.data, epochs=1, code=(tmp_path / "code",))
    result, events = world.go(job=job, workers=2, aggregators=1, batch_size=48)
    assert result.summary["status"] == "failed"
    assert "ValueError: seven is not a colour" in result.causes[0]
    failed = next(e for e in of(events, Ended) if e.status == "error")
    kept = (result.folder.path / "logs" / f"{failed.invocation}.txt").read_text()
    assert kept.startswith("START RequestId: ")
    assert "about to fail" in kept
    assert {e.status for e in of(events, Ended)} <= {"error", "cancelled"}


CLIENT = """
import json, os, sys
from ephemeron.job import DataSpec, Job, Simulation, Target
from ephemeron.platforms.aws.settings import AwsSettings
from ephemeron.training import configure, train
from pathlib import Path
how, settings, code = json.loads(sys.argv[1])
job = Job(name="aws", model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1,
          optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}), code=(Path(code),))
train(job, configure(job, **how), on_event=lambda e: print(e.kind, flush=True), cloud=AwsSettings(**settings))
"""


def test_the_client_is_killed_and_another_one_brings_the_run_home(world: World, undisturbed: Any) -> None:
    import dataclasses

    from ephemeron.training import attach

    how = {**HOW, "channel": world.channels["cache"]}
    program = [sys.executable, "-c", CLIENT, json.dumps([how, dataclasses.asdict(world.settings), str(CODE)])]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line.strip() == "progress":
                client.kill()
                break
    (folder,) = home.all_runs()
    result = attach(folder.run_id)
    same(result, undisturbed)
    assert result.summary["invocations"] == 3


def test_a_run_is_stopped_and_resumed(world: World, undisturbed: Any) -> None:
    from ephemeron.training import api

    asked = threading.Event()
    stopper = threading.Thread(target=lambda: asked.wait() and api.stop("last"), daemon=True)
    stopper.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    stopped, _ = world.go(on_event=watch, faults=("delay:rank=1,factor=100",))
    stopper.join()
    assert stopped.summary["status"] == "stopped"
    with pytest.raises(UserError, match="is not running"):
        api.stop("last")
    events: list[Any] = []
    result = resume("last", on_event=events.append)
    same(result, undisturbed)
    assert [e.reason for e in of(events, Invoked)].count("resume") == 3
    assert not [e.text for e in of(events, Note) if e.level == "error"]
