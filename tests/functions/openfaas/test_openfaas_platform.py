"""The platform beyond its contract: warm processes, secrets, the queue, large calls, and what a gateway refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faas_entry import ENTRIES
from openfaas_world import IMAGE, PASSWORD, client, deployed, opened, settings_of

from ephemeron.errors import InvocationRefused
from ephemeron.events import Ended, Note
from ephemeron.functions.base import Call
from ephemeron.functions.entries import VARIABLE
from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, spec_of
from ephemeron.functions.openfaas.settings import OpenFaasSettings
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from running import until, until_async

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def gateway() -> Iterator[OpenFaasGateway]:
    with pytest.MonkeyPatch.context() as patch, OpenFaasGateway(password=PASSWORD) as gateway:
        patch.setenv(VARIABLE, ENTRIES)
        yield gateway


@pytest.fixture(scope="module")
def settings(gateway: OpenFaasGateway, tmp_path_factory: pytest.TempPathFactory) -> OpenFaasSettings:
    recipe = tmp_path_factory.mktemp("image")
    return deployed(gateway, recipe, entries=ENTRIES, python_path=HERE, replicas=1)


def call(entry: str, folder: Path, **more: Any) -> Call:
    attempt = more.pop("attempt", 0)
    return Call(
        run="run", rank=0, attempt=attempt, memory_mb=256, lifetime_s=30.0, channel=(folder / "objects").as_uri(), entry=entry, request=more
    )


def test_a_process_serves_one_call_after_the_other_until_it_dies(settings: OpenFaasSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(settings, tmp_path) as platform:
            first = (await (await platform.invoke(call("whoami", tmp_path))).wait()).value
            second = (await (await platform.invoke(call("whoami", tmp_path, attempt=1))).wait()).value
            assert first["pid"] == second["pid"]
            assert not second["cold"]
            lost = await (await platform.invoke(call("killed", tmp_path, attempt=2))).wait()
            assert (lost.status, lost.error) == ("lost", "killed by SIGKILL")
            third = (await (await platform.invoke(call("whoami", tmp_path, attempt=3))).wait()).value
            assert third["pid"] != first["pid"]
            assert third["cold"]

    asyncio.run(main())


def test_a_call_waits_in_the_queue_while_the_only_replica_is_busy(settings: OpenFaasSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(settings, tmp_path) as platform:
            busy = await platform.invoke(call("forever", tmp_path))
            await until_async(lambda: any("alive" in line for line in lines(tmp_path)))
            waiting = await platform.invoke(call("echo", tmp_path, attempt=1, say="my turn"))
            await busy.cancel()
            assert (await waiting.wait()).value["said"] == "my turn"

    asyncio.run(main())


def lines(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_call_too_large_for_the_queue_goes_through_the_store(settings: OpenFaasSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(settings, tmp_path) as platform:
            outcome = await (await platform.invoke(call("echo", tmp_path, say="x" * 3_000_000))).wait()
            assert len(outcome.value["said"]) == 3_000_000

    asyncio.run(main())
    left = [p.name for p in (tmp_path / "objects").rglob("*") if p.is_file()]
    assert left == ["cancel"], "what was recorded is cleared away"


def test_the_death_of_the_whole_replica_is_told_by_the_call_back(
    gateway: OpenFaasGateway, settings: OpenFaasSettings, tmp_path: Path
) -> None:
    async def main() -> None:
        async with opened(settings, tmp_path) as platform:
            invocation = await platform.invoke(call("forever", tmp_path))
            await until_async(lambda: any("alive" in line for line in lines(tmp_path)))
            (replica,) = gateway.replicas()
            assert json.loads(replica.body)["id"] == invocation.id
            os.kill(replica.pid, signal.SIGKILL)
            outcome = await invocation.wait()
            assert outcome.status == "lost"
            assert "502" in outcome.error
            assert outcome.billed_s > 0
            events = [e async for e in first_events(platform, 3)]
            assert [type(e) for e in events[1:]] == [Note, Ended]

    asyncio.run(main())
    until(lambda: [r for r in gateway.replicas() if r.ready])


async def first_events(platform: Any, count: int) -> Any:
    async for event in platform.events("run"):
        yield event
        count -= 1
        if not count:
            return


def test_a_function_that_is_gone_refuses(gateway: OpenFaasGateway, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(settings_of(gateway, function="gone"), tmp_path) as platform:
            with pytest.raises(InvocationRefused, match=r"function 'gone' at .* is not deployed; run: ephemeron cloud deploy"):
                await platform.invoke(call("echo", tmp_path))

    asyncio.run(main())


def test_output_of_the_code_is_in_the_functions_log(gateway: OpenFaasGateway, settings: OpenFaasSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(settings, tmp_path) as platform:
            await (await platform.invoke(call("say_aloud", tmp_path))).wait()

    asyncio.run(main())
    until(lambda: "what the user printed" in gateway.log("ephemeron"))
    assert any(line.startswith("ephemeron: run run, rank 0, attempt 0: ") for line in gateway.log("ephemeron"))


def test_secrets_reach_the_code_as_variables_and_nothing_else_shows_them(
    gateway: OpenFaasGateway, settings: OpenFaasSettings, tmp_path: Path
) -> None:
    secretly = settings_of(gateway, function="secretly")
    api = client(secretly)
    api.set_secret("ephemeron-channel-password", "of the cache")
    wanted = DeploymentSpec(
        image=IMAGE,
        memory_mb=256,
        lifetime_s=60.0,
        replicas=1,
        cpus=1.0,
        inside=gateway.url,
        secrets=("ephemeron-channel-password",),
        variables={"EPHEMERON_ENTRIES": ENTRIES, "EPHEMERON_PRELOAD": "", "PYTHONPATH": f"{HERE}:{HERE.parents[2] / 'src'}"},
    )
    api.deploy(spec_of(wanted, secretly))
    until(lambda: api.function().available)

    async def main() -> None:
        async with opened(secretly, tmp_path) as platform:
            names = ["EPHEMERON_CHANNEL_PASSWORD", "EPHEMERON_OPENFAAS_PASSWORD"]
            outcome = await (await platform.invoke(call("whoami", tmp_path, variables=names))).wait()
            assert outcome.value["env"] == {"EPHEMERON_CHANNEL_PASSWORD": "of the cache", "EPHEMERON_OPENFAAS_PASSWORD": None}

    asyncio.run(main())
    assert not any("of the cache" in line for line in gateway.log("secretly"))
    api.delete()
