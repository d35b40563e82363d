"""Training on AWS Lambda as the local service has it: the same weights whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import KEYS, deployed  # noqa: E402

from ephemeron.errors import UserError  # noqa: E402
from ephemeron.events import Ended, Event, FaultFired, Invoked, Note, Progress  # noqa: E402
from ephemeron.job import DataSpec, Job, Simulation, Target, parse_fault  # noqa: E402
from ephemeron.platforms.aws.settings import AwsSettings  # noqa: E402
from ephemeron.testing.lambda_service import LambdaService  # noqa: E402
from ephemeron.training import configure, home, resume, train  # noqa: E402

CODE = Path(__file__).parents[2] / "training" / "code"
MEMORY_MB = 704
JOB = Job(
    name="aws", model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1, code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}), simulation=Simulation(),
)  # fmt: skip
HOW = {"platform": "aws", "workers": 3, "aggregators": 2, "batch_size": 24, "memory_mb": MEMORY_MB, "checkpoint_every": 4}


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
        result = train(job, c, faults=[parse_fault(f) for f in faults], on_event=see, aws=self.settings)
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
