"""Control functions on this machine, on the local Lambda service and behind the local OpenFaaS gateway, each killed once by SIGKILL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from control_entries import ENTRIES
from test_geo_plan import text

from ephemeron.communication.channels import open_channel
from ephemeron.communication.signing import SigningKey
from ephemeron.functions.base import Call, Limits, Platform
from ephemeron.functions.local import LocalPlatform
from ephemeron.regions.control.addressing import AddressRequest
from ephemeron.regions.control.client import ControlClient
from ephemeron.regions.control.function import ControlRequest
from ephemeron.regions.control.scheduling import ScheduleRequest
from ephemeron.regions.region_files import parse_regions

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FUNCTIONS = HERE.parent / "functions"


async def both_survive(platform: Platform, address: str, key: str) -> None:
    """Both functions die in their first attempt, at the worst moment, and their clients get answers all the same."""
    call = Call(run="run", rank=0, attempt=0, memory_mb=256, lifetime_s=60, channel=address, key=key)
    async with open_channel(address) as channel:
        client = ControlClient(channel, call, platform.invoke, owner="test", request=ControlRequest(idle_s=2.0), answer_s=4.0)
        regions = parse_regions(text("cascade-lake", "skylake", 1))
        registered, planned = await asyncio.gather(
            client.address(AddressRequest(action="register", identity="sh", holder="h", endpoint="a:1")),
            client.schedule(ScheduleRequest(action="plan", regions=regions)),
        )
        assert registered.rows[0].id == 1
        assert planned.plan is not None
        assert planned.plan.cores == {"shanghai": 12, "chongqing": 8}
        [row] = (await client.address(AddressRequest(action="lookup"))).rows
        assert (row.id, row.endpoint, row.changes) == (1, "a:1", 0), "registered once"
        assert client.started >= 4, "each was started again"
        await platform.cancel_all("run")


def test_on_this_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        env = {"EPHEMERON_PRELOAD": "", "EPHEMERON_ENTRIES": ENTRIES, "PYTHONPATH": str(HERE)}
        platform = await LocalPlatform.start(tmp_path / "run", limits=Limits(), env=env)
        try:
            await both_survive(platform, (tmp_path / "objects").as_uri(), SigningKey.new().text)
        finally:
            await platform.shutdown()

    asyncio.run(scenario())


def test_behind_the_openfaas_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUNCTIONS / "openfaas"))
    from openfaas_world import PASSWORD, deployed, opened

    from ephemeron.testing.openfaas_gateway import OpenFaasGateway

    async def scenario(gateway: OpenFaasGateway) -> None:
        settings = deployed(gateway, tmp_path / "image", entries=ENTRIES, replicas=4, python_path=HERE)
        async with opened(settings, tmp_path / "run") as platform:
            await both_survive(platform, (tmp_path / "run" / "objects").as_uri(), SigningKey.new().text)

    with OpenFaasGateway(password=PASSWORD) as gateway:
        asyncio.run(scenario(gateway))


def test_on_the_lambda_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
    pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")
    monkeypatch.syspath_prepend(str(FUNCTIONS / "aws"))
    from aws_world import KEYS, deployed, opened

    from ephemeron.testing.lambda_service import LambdaService

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)

    async def scenario(service: Any) -> None:
        settings = deployed(service, entries=ENTRIES, folder=HERE)
        async with opened(settings, tmp_path / "run") as platform:
            await both_survive(platform, (tmp_path / "run" / "objects").as_uri(), SigningKey.new().text)

    with LambdaService(concurrency=4) as service:
        asyncio.run(scenario(service))
