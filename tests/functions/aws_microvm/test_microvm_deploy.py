"""Deploying images of MicroVMs: what is written for review, what is refused, and what the image is then like."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("boto3", "1.44", reason="no AWS client that knows MicroVMs; pip install 'ephemeron[aws]'")

from microvm_world import ROLE, artifact, deployed, keys, settings_of

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.aws_microvm.deploy import image, policy
from ephemeron.functions.aws_microvm.deploy.image import check_sizes
from ephemeron.functions.aws_microvm.platform import LIMITS
from ephemeron.functions.aws_microvm.preflight import check_channel, check_code, check_fit, inspect
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client
from ephemeron.testing.microvm_service import MicrovmService

CHANNEL, CODE = "s3://bucket/some/runs", "s3://code-bucket/ephemeron/image.zip"


@pytest.fixture(autouse=True)
def _keys() -> Iterator[None]:
    with keys():
        yield


@pytest.fixture
def service() -> Iterator[MicrovmService]:
    with MicrovmService(fetch=artifact) as service:
        yield service


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_without_a_role_everything_is_written_and_nothing_is_sent(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = cli("cloud", "deploy", "aws-microvm", "--channel", CHANNEL, "--artifact", CODE, "--out", str(out), "--region", "us-east-1")
    assert done.exit_code == 0, done.output
    assert "nothing was sent to AWS" in done.output
    next_command = done.output.splitlines()[-1]
    for given in ("--region us-east-1", f"--out {out}", "--memory-mb 2048", f"--artifact {CODE}", f"--channel {CHANNEL}"):
        assert given in next_command
    assert {p.name for p in out.iterdir()} == {
        "build-policy.json",
        "microvm-policy.json",
        "client-policy.json",
        "deployer-policy.json",
        "template.json",
        "image.zip",
    }
    names = zipfile.ZipFile(out / "image.zip").namelist()
    assert {"Dockerfile", "requirements.txt", "ephemeron/functions/aws_microvm/handler.py"} <= set(names)
    assert not any("/testing/" in name or "/dashboard/" in name or "__pycache__" in name for name in names)


@pytest.mark.slow
def test_the_archive_s_code_imports_by_itself(tmp_path: Path) -> None:
    """In a Python that finds this package nowhere else: what a MicroVM imports is all in the archive."""
    zipfile.ZipFile(io.BytesIO(image.build_artifact())).extractall(tmp_path)
    program = "import ephemeron.functions.aws_microvm.handler as h, ephemeron.training.worker.loop; print(h.__file__)"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert image.build_artifact() == image.build_artifact(), "the same code makes the same archive"


def place(channel: str = CHANNEL) -> policy.MicrovmPlace:
    return policy.place_of(AwsMicrovmSettings(region="us-east-1"), account="123456789012", channel=channel, artifact=CODE)


def test_policies_give_nothing_beyond_their_purpose() -> None:
    here = place()
    for statements in (policy.build_statements, policy.run_statements, policy.client_statements, policy.deployer_statements):
        for statement in statements(here):
            assert not [a for a in statement.actions if "*" in a]
            if statement.resource == "*":
                assert set(statement.actions) <= {"lambda:ListMicrovms", "lambda:ListMicrovmImages", "servicequotas:GetServiceQuota"}
            else:
                assert any(name in statement.resource for name in ("ephemeron", "bucket", "network-connector"))
    made = {action for statement in policy.run_statements(here) for action in statement.actions}
    assert not made & {"lambda:SuspendMicrovm", "lambda:CreateMicrovmAuthToken", "lambda:CreateMicrovmShellAuthToken"}
    direct = policy.run_statements(dataclasses.replace(here, direct=True))
    more = {action for statement in direct for action in statement.actions} - made
    assert more == {"lambda:GetMicrovm", "lambda:CreateMicrovmAuthToken"}
    assert not [s for s in direct if "NO_INGRESS" in s.resource]
    cache = {a for s in policy.run_statements(place("rediss://cache:6379")) for a in s.actions}
    assert not [a for a in cache if a.startswith("s3:")]
    with pytest.raises(JobError, match="nothing that MicroVMs share"):
        place("folder")


def test_the_template_is_valid_cloudformation() -> None:
    lint = pytest.importorskip("cfnlint.api", reason="no CloudFormation linter; pip install cfn-lint")
    text = json.dumps(policy.template(place()))
    assert [str(m) for m in lint.lint_all(text) if not m.rule.id.startswith("I")] == []


@pytest.mark.slow
def test_deploy_creates_then_updates_and_clean_removes(s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    where = s3_server.env["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", where)
    bucket = s3_server.address.split("/")[2]
    monkeypatch.setenv("EPHEMERON_PRELOAD", "")
    with MicrovmService(environment={"EPHEMERON_PRELOAD": ""}) as service:
        here = ("--endpoint", service.url, "--region", "us-east-1")
        wanted = ("--channel", f"s3://{bucket}/runs", "--artifact", f"s3://{bucket}/image.zip", "--out", str(tmp_path), "--role", ROLE)
        done = cli("cloud", "deploy", "aws-microvm", *here, *wanted, "--memory-mb", "1024")
        assert done.exit_code == 0, done.output
        assert "created image ephemeron in us-east-1: baseline 1024 MB" in done.output
        stored = boto3.client("s3", endpoint_url=where).get_object(Bucket=bucket, Key="image.zip")["Body"].read()
        assert stored == image.build_artifact()
        found = inspect(settings_of(service).located())
        assert (found.sizes_mb, found.launch.versions, found.launch.role) == ((1024,), ("1.0",), ROLE)
        done = cli("cloud", "deploy", "aws-microvm", *here, *wanted, "--memory-mb", "2048,512")
        assert "updated image ephemeron" in done.output, done.output
        found = inspect(settings_of(service).located())
        assert (found.sizes_mb, found.launch.versions) == ((2048, 512), ("2.0", "1.0"))
        assert [arn.rpartition(":")[2] for arn in found.launch.image_arns] == ["ephemeron", "ephemeron-512"]
        api = client(settings_of(service))
        made, small = service.images.by_arn.values()
        for version in (*made.versions, *small.versions):
            assert not any("PASSWORD" in name for name in version.request["environmentVariables"])
        started = api.run_microvm(imageIdentifier=made.arn, executionRoleArn=ROLE)
        done = cli("cloud", "remove", "aws-microvm", *here, "--yes")
        # Without a call it ends by itself, maybe before it is terminated.
        state = api.get_microvm(microvmIdentifier=started["microvmId"])["state"]
        assert state in ("TERMINATING", "TERMINATED"), done.output
        assert "deleted image ephemeron-512" in done.output
        assert "there is no log /aws/lambda-microvms/ephemeron" in done.output
        assert not service.images.by_arn
        assert "there is no image ephemeron" in cli("cloud", "remove", "aws-microvm", *here, "--yes").output


def test_what_would_not_fit_is_refused_in_one_line(service: MicrovmService) -> None:
    settings = settings_of(service).located()
    with pytest.raises(JobError, match="does not exist"):
        inspect(settings)
    with pytest.raises(JobError, match="memory of 1769 MB is no baseline of MicroVMs"):
        check_sizes((1024, 1769))
    deployed(service, entries="")
    found = inspect(settings)
    check_fit(found, settings, workers=4, memory_mb=512, lifetime_s=LIMITS.lifetime_s)
    with pytest.raises(JobError, match="deploy aws-microvm --memory-mb 512,1024"):
        check_fit(found, settings, workers=4, memory_mb=1024, lifetime_s=60.0)
    with pytest.raises(JobError, match="eight hours"):
        check_fit(found, settings, workers=4, memory_mb=512, lifetime_s=28_800.0)
    with pytest.raises(JobError, match="run `ephemeron cloud deploy aws-microvm` again"):
        check_code(found, settings, "another")
    elsewhere = AwsMicrovmSettings(region="us-east-1")
    with pytest.raises(JobError, match="where MicroVMs cannot reach it"):
        check_channel("redis://127.0.0.1:6379", elsewhere)
    with pytest.raises(JobError, match="has no address"):
        check_channel("folder", elsewhere)


@pytest.mark.slow
def test_reduced_quotas_of_new_accounts_are_named() -> None:
    with MicrovmService(fetch=artifact, memory_gb=8.0, launches_s=1.0) as service:
        settings = deployed(service, entries="").located()
        found = inspect(settings)
        assert found.concurrency(512) == 16
        assert "8 GB of memory of all MicroVMs (usually 400) and 1 starts a second (usually 5)" in found.quotas.reduced
        assert "new accounts begin with reduced quotas" in found.quotas.reduced
        with pytest.raises(PlanInfeasible, match="the quota of MicroVM memory in us-east-1 is 8 GB, enough for 16"):
            check_fit(found, settings, workers=17, memory_mb=512, lifetime_s=60.0)
        said = cli("cloud", "check", "aws-microvm", "--aws-microvm-endpoint", service.url, "--no-call").output
        assert "reduced quota: 8 GB" in said
        service.guard.expired = {"test"}
        said = cli("cloud", "check", "aws-microvm", "--aws-microvm-endpoint", service.url, "--no-call").output
        assert "the AWS credentials have expired; get new ones" in said


def test_a_usual_account_has_no_reduced_quota(service: MicrovmService) -> None:
    settings = deployed(service, entries="").located()
    assert inspect(settings).quotas.reduced == ""
    assert inspect(settings).concurrency(512) == 800
