"""Several memory sizes on AWS Lambda: one function for each, of one image and one policy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import ROLE, deployed, keys, settings_of
from kit_entry import ENTRIES

from ephemeron.cli.main import main
from ephemeron.errors import InvocationRefused, JobError
from ephemeron.events import Ended
from ephemeron.functions.async_invoke.provider import CapacityRequest, RunHandle
from ephemeron.functions.aws import preflight
from ephemeron.functions.aws.deploy import policy
from ephemeron.functions.aws.provider import AwsLambda
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.base import Call
from ephemeron.testing.lambda_service import LambdaService

SIZES = (384, 256, 512)
NAMES = {256: "sized-256", 384: "sized", 512: "sized-512"}
TOLD = ("AWS_LAMBDA_FUNCTION_NAME", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE")


@pytest.fixture(scope="module")
def settings(service: LambdaService) -> AwsSettings:
    return deployed(service, entries=ENTRIES, folder=Path(__file__).parent, sizes=SIZES, function="sized")


def capacity(memory_mb: int, channel: str) -> CapacityRequest:
    return CapacityRequest(workers=1, memory_mb=memory_mb, lifetime_s=0.0, channel=channel)


@pytest.mark.slow
def test_a_call_runs_in_the_function_of_its_memory_and_so_does_its_successor(settings: AwsSettings, tmp_path: Path) -> None:
    channel, cloud = (tmp_path / "objects").as_uri(), AwsLambda()

    def call(memory_mb: int, entry: str = "whoami", **request: Any) -> Call:
        return Call(
            run="run", rank=memory_mb, attempt=0, memory_mb=memory_mb, lifetime_s=30.0, channel=channel, entry=entry, request=request
        )

    async def main() -> None:
        hold = RunHandle(run="run", run_dir=tmp_path / "run", capacity=capacity(384, channel), channel=channel, since=0.0, starting=True)
        platform = await cloud.open(hold, settings)
        try:
            assert platform.limits.sizes_mb == SIZES
            for size, name in NAMES.items():
                outcome = await (await platform.invoke(call(size, variables=TOLD))).wait()
                assert outcome.value["env"] == dict(zip(TOLD, (name, str(size)), strict=True)), outcome.error
                assert outcome.gb_seconds == pytest.approx(size / 1024 * outcome.billed_s)
            with pytest.raises(InvocationRefused, match="--memory-mb 384,256,512,300"):
                await platform.invoke(call(300))
            await platform.invoke(call(256, "call_next", next="echo", next_memory_mb=512))
            async for event in platform.events("run"):
                if isinstance(event, Ended) and (event.rank, event.attempt) == (256, 1):
                    assert (event.status, event.memory_mb) == ("ok", 512)
                    break
        finally:
            await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.slow
def test_a_run_has_the_first_size_or_one_that_is_deployed(settings: AwsSettings, tmp_path: Path) -> None:
    cloud, channel = AwsLambda(), (tmp_path / "objects").as_uri()
    assert cloud.admit(capacity(0, channel), settings, {})[0].memory_mb == 384
    admitted, limits = cloud.admit(capacity(512, channel), settings, {})
    assert admitted.memory_mb == 512
    assert cloud.recorded(settings, limits).sizes_mb == SIZES
    with pytest.raises(
        JobError, match=r"has 384, 256, 512 MB, the run wants 1024 MB.*ephemeron cloud deploy aws --memory-mb 384,256,512,1024"
    ):
        cloud.admit(capacity(1024, channel), settings, {})


def test_the_check_lists_the_sizes(settings: AwsSettings) -> None:
    assert any("384, 256, 512 MB" in line for line in AwsLambda().inspect(settings, "", {}))


@pytest.mark.slow
def test_deploying_again_removes_what_is_not_wanted_and_clean_removes_all(tmp_path: Path) -> None:
    with keys(), LambdaService() as service:

        def cli(*arguments: str) -> str:
            done = CliRunner().invoke(main, [*arguments, "--endpoint", service.url], catch_exceptions=False)
            assert done.exit_code == 0, done.output
            return done.output

        def deploy(sizes: str) -> str:
            return cli(
                "cloud",
                "deploy",
                "aws",
                "--channel",
                "s3://bucket/runs",
                "--out",
                str(tmp_path),
                "--role",
                ROLE,
                "--image",
                "1.dkr.ecr.us-east-1.amazonaws.com/e:1",
                "--memory-mb",
                sizes,
            )

        def sizes() -> dict[str, int]:
            return {f.name: f.memory_mb for f in service.functions}

        assert "created function ephemeron-3008" in deploy("1769,1024,3008")
        assert sizes() == {"ephemeron": 1769, "ephemeron-1024": 1024, "ephemeron-3008": 3008}
        assert {f.image for f in service.functions} == {"1.dkr.ecr.us-east-1.amazonaws.com/e:1"}
        assert {f.log_group for f in service.functions} == {"/aws/lambda/ephemeron"}
        resources = [s["Resource"] for s in json.loads((tmp_path / "client-policy.json").read_text())["Statement"]]
        assert len(resources[0]) == 3, "the policy names each function"
        assert "deleted function ephemeron-3008" in deploy("1024,1769")
        assert sizes() == {"ephemeron": 1024, "ephemeron-1769": 1769}
        assert preflight.inspect(settings_of(service)).sizes_mb == (1024, 1769)
        service.functions.delete("ephemeron-1769")
        with pytest.raises(JobError, match="'ephemeron-1769' in us-east-1 does not exist"):
            preflight.inspect(settings_of(service))
        deploy("1024,1769")
        client(settings_of(service), "lambda").update_function_configuration(FunctionName="ephemeron-1769", MemorySize=512)
        with pytest.raises(JobError, match="not of one deployment; run: ephemeron cloud deploy aws --memory-mb 1024,1769"):
            preflight.inspect(settings_of(service))
        assert "deleted function ephemeron-1769" in cli("cloud", "remove", "aws", "--yes")
        assert sizes() == {}


def test_policies_name_the_functions_of_all_sizes_and_no_others() -> None:
    place = policy.place_of(AwsSettings(region="eu-west-1"), account="1", channel="s3://b/r", vpc=False, sizes_mb=(1769, 3008))
    arns = tuple(f"arn:aws:lambda:eu-west-1:1:function:{name}" for name in ("ephemeron", "ephemeron-3008"))
    assert place.functions == arns
    assert policy.function_policy(place)["Statement"][0]["Resource"] == list(arns)  # type: ignore[index]
    inside = policy.template(place)["Resources"]["FunctionRole"]["Properties"]["Policies"][0]  # type: ignore[index]
    assert [r["Fn::Sub"].rpartition(":")[2] for r in inside["PolicyDocument"]["Statement"][0]["Resource"]] == [
        "ephemeron",
        "ephemeron-3008",
    ]


@pytest.mark.parametrize(("sizes", "text"), [("1024,big", "'big' is no number"), ("64", "outside 128"), ("512,512", "given twice")])
def test_sizes_that_cannot_be_deployed_are_refused(tmp_path: Path, sizes: str, text: str) -> None:
    with keys():
        done = CliRunner().invoke(main, ["cloud", "deploy", "aws", "--channel", "s3://b/r", "--out", str(tmp_path), "--memory-mb", sizes])
    assert done.exit_code == 2
    assert text in done.output
