"""Several memory sizes on OpenFaaS: one function for each, of one image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from faas_entry import ENTRIES
from openfaas_world import PASSWORD, client, deployed, settings_of

from ephemeron.cli.main import main
from ephemeron.errors import InvocationRefused, JobError
from ephemeron.events import Ended
from ephemeron.functions.async_invoke.provider import CapacityRequest, RunHandle
from ephemeron.functions.base import Call
from ephemeron.functions.entries import VARIABLE
from ephemeron.functions.openfaas import preflight
from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, specs_of
from ephemeron.functions.openfaas.provider import OpenFaas
from ephemeron.functions.openfaas.settings import PASSWORD_ENV, OpenFaasSettings
from ephemeron.testing.openfaas_gateway import OpenFaasGateway

SIZES = (384, 256)
TOLD = ("EPHEMERON_MEMORY_MB",)


@pytest.fixture(scope="module")
def gateway() -> Iterator[OpenFaasGateway]:
    with pytest.MonkeyPatch.context() as patch, OpenFaasGateway(password=PASSWORD) as gateway:
        patch.setenv(VARIABLE, ENTRIES)
        patch.setenv(PASSWORD_ENV, PASSWORD)
        yield gateway


@pytest.fixture(scope="module")
def settings(gateway: OpenFaasGateway, tmp_path_factory: pytest.TempPathFactory) -> OpenFaasSettings:
    recipe = tmp_path_factory.mktemp("image")
    return deployed(gateway, recipe, entries=ENTRIES, python_path=Path(__file__).parent, replicas=1, sizes=SIZES)


def capacity(memory_mb: int, channel: str) -> CapacityRequest:
    return CapacityRequest(workers=1, memory_mb=memory_mb, lifetime_s=60.0, channel=channel)


@pytest.mark.slow
def test_a_call_runs_in_the_function_of_its_memory_and_so_does_its_successor(settings: OpenFaasSettings, tmp_path: Path) -> None:
    channel = (tmp_path / "objects").as_uri()

    def call(memory_mb: int, entry: str = "whoami", **request: Any) -> Call:
        return Call(
            run="run", rank=memory_mb, attempt=0, memory_mb=memory_mb, lifetime_s=30.0, channel=channel, entry=entry, request=request
        )

    async def main() -> None:
        hold = RunHandle(run="run", run_dir=tmp_path / "run", capacity=capacity(256, channel), channel=channel, since=0.0, starting=True)
        platform = await OpenFaas().open(hold, settings)
        try:
            assert platform.limits.sizes_mb == SIZES
            for size in SIZES:
                outcome = await (await platform.invoke(call(size, variables=TOLD))).wait()
                assert outcome.value["env"] == {"EPHEMERON_MEMORY_MB": str(size)}, outcome.error
            with pytest.raises(InvocationRefused, match="--memory-mb 384,256,300"):
                await platform.invoke(call(300))
            await platform.invoke(call(256, "call_next", next="whoami", next_memory_mb=384))
            async for event in platform.events("run"):
                if isinstance(event, Ended) and (event.rank, event.attempt) == (256, 1):
                    assert (event.status, event.memory_mb) == ("ok", 384)
                    break
        finally:
            await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.slow
def test_a_run_has_the_first_size_or_one_that_is_deployed(settings: OpenFaasSettings, tmp_path: Path) -> None:
    cloud, channel = OpenFaas(), (tmp_path / "objects").as_uri()
    assert cloud.admit(capacity(0, channel), settings, {})[0].memory_mb == 384
    assert any("384, 256 MB" in line for line in cloud.inspect(settings, "", {}))
    with pytest.raises(JobError, match=r"has 384, 256 MB, the run wants 512 MB.*ephemeron cloud deploy openfaas --memory-mb 384,256,512"):
        cloud.admit(capacity(512, channel), settings, {})


def test_cpus_are_in_proportion_where_there_are_several_sizes() -> None:
    settings, wanted = OpenFaasSettings(gateway="http://g"), DeploymentSpec(image="i", memory_mb=128)
    small, first = specs_of(wanted, settings, (1769, 1024))
    assert [(s.service, s.memory_mb, s.cpus) for s in (first, small)] == [("ephemeron", 1769, 1.0), ("ephemeron-1024", 1024, 0.579)]
    with pytest.raises(JobError, match="--cpus does not fit several"):
        specs_of(DeploymentSpec(image="i", memory_mb=128, cpus=1.0), settings, (1769, 1024))


@pytest.mark.slow
def test_deploying_again_removes_what_is_not_wanted_and_clean_removes_all(tmp_path: Path, gateway: OpenFaasGateway) -> None:
    mine = settings_of(gateway, function="other")

    def cli(*arguments: str) -> str:
        where = ["--openfaas-gateway", gateway.url, "--function", "other"]
        done = CliRunner().invoke(main, [*arguments, *where], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    def deploy(sizes: str) -> str:
        return cli(
            "cloud",
            "deploy",
            "openfaas",
            "--inside",
            gateway.url,
            "--out",
            str(tmp_path),
            "--image",
            "registry.example/ephemeron:1",
            "--channel",
            (tmp_path / "objects").as_uri(),
            "--memory-mb",
            sizes,
            "--replicas",
            "1",
        )

    def names() -> set[str]:
        return {f.name for f in client(mine).functions() if f.name.startswith("other")}

    deploy("256,300")
    assert names() == {"other", "other-300"}
    assert preflight.inspect(mine).sizes_mb == (256, 300)
    assert "deleted function other-300" in deploy("300,256")
    assert names() == {"other", "other-256"}
    client(settings_of(gateway, function="other-256")).delete()
    with pytest.raises(JobError, match=r"'other-256' at .* is not deployed"):
        preflight.inspect(mine)
    deploy("300,256")
    assert "deleted function other-256" in cli("cloud", "remove", "openfaas", "--yes")
    assert names() == set()
