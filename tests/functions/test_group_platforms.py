"""One run with a group of functions on AWS Lambda (the local service) and one on a Ray cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")
pytest.importorskip("ray", reason="no Ray; pip install 'ephemeron[ray]'")

from ephemeron.communication.channels import open_channel
from ephemeron.events import Ended, Event, Invoked, Progress
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.runs.header import read_header
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.job import RunRegion, parse_fault
from tiny_job import JOB

pytestmark = pytest.mark.slow
MEMORY_MB = 704


def test_a_group_on_lambda_and_one_on_ray_train_one_model_though_functions_are_killed(
    s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("aws", "ray"):
        monkeypatch.syspath_prepend(Path(__file__).parent / name)
    from aws_world import KEYS, deployed
    from ray_world import two_nodes

    s3 = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
    for name, value in {**KEYS, **s3, "EPHEMERON_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)  # the nodes of the cluster, started below, have them, too
    lambdas = RunRegion(name="lambda", platform="aws", workers=2, channel=s3_server.address, memory_mb=MEMORY_MB)
    cluster = RunRegion(name="cluster", platform="ray", workers=1, channel=(tmp_path / "objects").as_uri(), memory_mb=MEMORY_MB)
    common = {"checkpoint_every": 3, "batch_size": 48}
    killed: list[int] = []

    with LambdaService(concurrency=10, environment=s3) as service, two_nodes(cpus=2, memory_mb=2048) as ray:

        def kill(event: Event) -> None:
            """SIGKILL from outside for the first rank of the group on Lambda."""
            if not killed and isinstance(event, Progress) and event.rank == 0 and event.iteration >= 5:
                for each in service.environments():
                    if each.request_id and json.loads(each.payload).get("rank") == 0:
                        killed.append(each.pid)
                        os.kill(each.pid, signal.SIGKILL)

        clouds = [deployed(service, memory_mb=MEMORY_MB, timeout_s=600, preload="torch,ephemeron.training.worker.loop"), ray.settings()]
        result = train(
            JOB,
            configure(JOB, regions={"region": (lambdas, cluster), "store": f"{s3_server.address}/common", "exchange_every": 4}, **common),
            cloud=clouds,
            peer_timeout_s=120.0,
            on_event=kill,
            faults=[parse_fault("delay:rank=1,factor=1,seconds=0.2")],
        )
    assert result.summary.platform == "aws+ray"
    assert [(group.name, group.platform, group.workers) for group in result.summary.regions] == [
        ("lambda", "aws", 2),
        ("cluster", "ray", 1),
    ]
    assert len(killed) == 1
    events = list(events_of(result.folder))
    assert [e.rank for e in events if isinstance(e, Ended) and e.status == "lost"] == [0]
    assert {e.rank for e in events if isinstance(e, Invoked)} == {0, 1, 2}
    assert [read_header(place).platform for place in members_of(result.folder)] == ["aws", "ray"]  # type: ignore[union-attr]
    shas = {read_result(place).weights_sha256 for place in members_of(result.folder)}  # type: ignore[union-attr]
    assert shas == {result.summary.weights_sha256}

    simulated = [RunRegion(name=group.name, workers=group.workers, memory_mb=MEMORY_MB) for group in (lambdas, cluster)]
    alone = train(JOB, configure(JOB, platform="simulated", regions={"region": simulated, "exchange_every": 4}, **common))
    assert alone.summary.weights_sha256 == result.summary.weights_sha256

    async def left() -> list[str]:
        async with open_channel(f"{s3_server.address}/common") as store:
            return await store.list(result.summary.run_id)

    assert asyncio.run(left()) == []
