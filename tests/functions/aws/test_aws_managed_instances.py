"""Functions on Lambda Managed Instances, as far as the local service has them: several calls in an environment, 90 minutes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import ROLE, keys, opened, settings_of
from kit_entry import ENTRIES

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.aws import preflight
from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy
from ephemeron.functions.aws.deploy.package import build_zip
from ephemeron.functions.aws.logs import parse_json
from ephemeron.functions.aws.managed_instances import ManagedInstances
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.base import Call, Limits, Platform
from ephemeron.functions.source_bundle import digest
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.testing.platform_contract import PlatformConnectionContract, PlatformContract

CALLS = 4


@pytest.fixture(scope="module")
def settings(service: LambdaService) -> AwsSettings:
    located = settings_of(service, function="managed")
    variables = {"EPHEMERON_ENTRIES": ENTRIES, "EPHEMERON_PRELOAD": "", "PYTHONPATH": str(Path(__file__).parent)}
    wanted = LambdaSpec(
        role=ROLE,
        memory_mb=256,
        timeout_s=5_400,
        zipped=build_zip(),
        variables=variables,
        digest=digest(),
        managed=ManagedInstances(provider="pool", calls=CALLS, gib_per_vcpu=2.0),
    )
    deploy(client(located, "lambda"), located, wanted)
    return preflight.located_sizes(located, preflight.inspect(located))


@pytest.mark.slow
class TestManagedInstancesContract(PlatformConnectionContract):
    """And what is read from logs in JSON, and what calls that share an environment must not share."""

    test_a_function_dies_at_its_lifetime = PlatformContract.test_a_function_dies_at_its_lifetime
    test_a_function_that_is_killed_from_outside_is_lost = PlatformContract.test_a_function_that_is_killed_from_outside_is_lost
    test_the_bill_is_exact_and_rounded_up = PlatformContract.test_the_bill_is_exact_and_rounded_up
    test_invocations_share_nothing_but_the_channel = PlatformContract.test_invocations_share_nothing_but_the_channel

    @pytest.fixture(autouse=True)
    def _world(self, service: LambdaService, settings: AwsSettings, tmp_path: Path) -> None:
        self.service, self.settings, self.folder = service, settings, tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        async with opened(self.settings, self.folder, limits=limits) as platform:
            yield platform


@pytest.mark.slow
def test_calls_share_an_environment_and_not_a_process(settings: AwsSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(settings, tmp_path) as platform:
            channel = (tmp_path / "objects").as_uri()
            calls = [
                Call(run="run", rank=rank, attempt=0, memory_mb=256, lifetime_s=300.0, channel=channel, entry="forever")
                for rank in range(CALLS + 1)
            ]
            running = [await platform.invoke(call) for call in calls]
            begun: dict[str, str] = {}
            while len(begun) < len(running):
                await asyncio.sleep(0.1)
                lines = (tmp_path / "calls.jsonl").read_text().splitlines()
                begun = {r["id"]: r["stream"] for r in map(json.loads, lines) if r["record"] == "begun"}
            shared = sorted(list(begun.values()).count(stream) for stream in set(begun.values()))
            assert shared == [1, CALLS], "as many as fit in one environment, and one more in another"
            await platform.cancel_all("run")
            assert [(await r.wait()).status for r in running] == ["cancelled"] * len(running)

    asyncio.run(scenario())


def test_what_is_deployed(service: LambdaService, settings: AwsSettings) -> None:
    found = preflight.inspect(settings)
    assert (found.memory_mb, found.timeout_s, found.limits.mb_per_vcpu) == (256, 5_400, 2048.0)
    assert found.managed is not None
    assert (found.managed.provider, found.managed.calls) == ("pool", CALLS)
    assert settings.qualifier == "$LATEST.PUBLISHED"
    configuration = client(settings, "lambda").get_function_configuration(FunctionName="managed")
    assert configuration["MemorySize"] == CALLS * 256
    assert configuration["Environment"]["Variables"]["EPHEMERON_VCPUS"] == "0.125"
    on_lambda = LambdaSpec(role=ROLE, memory_mb=256, zipped=build_zip(), digest=digest())
    with pytest.raises(JobError, match="cannot be moved to managed instances or away from them"):
        deploy(client(settings, "lambda"), settings, on_lambda)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.mark.slow
def test_the_command_writes_the_provider_and_deploys_to_it(service: LambdaService, tmp_path: Path) -> None:
    given = (
        "cloud",
        "deploy",
        "aws",
        "--function",
        "own",
        "--channel",
        "s3://bucket/runs",
        "--out",
        str(tmp_path),
        "--endpoint",
        service.url,
        "--managed-instances",
        "own-pool",
        "--calls-per-environment",
        "4",
        "--memory-mb",
        "2048",
        "--gib-per-vcpu",
        "4",
        "--instance-type",
        "c7i.4xlarge",
        "--max-vcpus",
        "64",
        "--function-timeout-s",
        "5400",
    )
    network = ("--subnet", "subnet-1", "--security-group", "sg-1")
    assert "instances need a network" in cli(*given).output
    assert cli(*given, *network).exit_code == 0
    resources = json.loads((tmp_path / "template.json").read_text())["Resources"]
    properties = resources["CapacityProvider"]["Properties"]
    assert properties["VpcConfig"] == {"SubnetIds": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert properties["InstanceRequirements"]["AllowedInstanceTypes"] == ["c7i.4xlarge"]
    assert properties["CapacityProviderScalingConfig"]["MaxVCpuCount"] == 64
    policy = json.loads((tmp_path / "client-policy.json").read_text())["Statement"][0]
    assert policy["Resource"][1].endswith(":function:own:$LATEST.PUBLISHED")
    assert not any("ec2:" in str(s) for s in json.loads((tmp_path / "function-policy.json").read_text())["Statement"])
    done = cli(*given, *network, "--role", ROLE, "--zip", "--no-dependencies")
    assert "created function own" in done.output, done.output
    assert "billed also while nothing runs" in done.output
    said = cli("cloud", "check", "aws", "--aws-endpoint", service.url, "--aws-function", "own", "--no-call").output
    assert "on managed instances of own-pool: 4 calls in an environment, 4 GiB per vCPU" in said


@pytest.mark.parametrize(
    ("wrong", "text"), [({"calls": 0}, "0 calls"), ({"gib_per_vcpu": 1.0}, "1 GiB per vCPU"), ({"max_vcpus": 1}, "1 vCPUs")]
)
def test_what_instances_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        ManagedInstances(provider="pool", **wrong)


def test_limits_of_environments_are_checked_before_an_upload() -> None:
    managed = ManagedInstances(provider="pool", calls=16)
    with pytest.raises(JobError, match="16 calls of 4096 MB are 65536 MB"):
        LambdaSpec(role=ROLE, memory_mb=4096, image="i", managed=managed)
    with pytest.raises(JobError, match="1 to 5400 s"):
        LambdaSpec(role=ROLE, memory_mb=1024, timeout_s=5_401, image="i", managed=managed)
    with pytest.raises(JobError, match="1 to 900 s; managed instances have 5400 s"):
        LambdaSpec(role=ROLE, memory_mb=1024, timeout_s=901, image="i")


def test_reports_in_json_are_read() -> None:
    def line(**record: Any) -> str:
        return json.dumps({"time": "2026-11-01T00:00:00Z", "type": "platform.report", "record": record})

    (good,) = parse_json(line(requestId="r", metrics={"durationMs": 12.3401}, status="success"), "s")
    assert isinstance(good, LogReport)
    assert (good.request, good.billed_s, good.failed) == ("r", 0.013, False)
    for status, timed_out in (("timeout", True), ("error", False)):
        record = {"requestId": "r", "metrics": {"durationMs": 5.0}, "status": status, "errorType": "Runtime.ExitError"}
        report, death = parse_json(line(**record), "s")
        assert isinstance(report, LogReport)
        assert (report.billed_s, report.failed) == (0.005, True)
        assert isinstance(death, Death)
        assert death.timed_out == timed_out
    assert parse_json('{"type": "platform.report", "record": {}}', "s") == []
    assert parse_json('{"message": "\\"platform.report\\" is a word"}', "s") == []


@pytest.mark.slow
def test_reduced_quotas_of_new_accounts_are_named(tmp_path: Path) -> None:
    with keys(), LambdaService(concurrency=10, memory_quota_mb=3_008) as service:
        given = (
            "cloud",
            "deploy",
            "aws",
            "--channel",
            "s3://bucket/runs",
            "--out",
            str(tmp_path),
            "--endpoint",
            service.url,
            "--role",
            ROLE,
            "--zip",
            "--no-dependencies",
        )
        assert "new accounts begin with 3,008 MB" in cli(*given, "--memory-mb", "4096").output
        assert cli(*given, "--memory-mb", "1769").exit_code == 0
        said = cli("cloud", "check", "aws", "--aws-endpoint", service.url, "--no-call").output
        assert "reduced quota: 10 functions at once (usually 1,000)" in said
    with keys(), LambdaService() as service:
        assert cli(*given[:8], service.url, *given[9:]).exit_code == 0
        assert "reduced quota" not in cli("cloud", "check", "aws", "--aws-endpoint", service.url, "--no-call").output
