"""Deploying: what is written for review, what is refused before an upload, and what the function is then like."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")

from aws_world import ROLE, keys, settings_of

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.aws.deploy import package, policy
from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy
from ephemeron.functions.aws.preflight import check_channel, check_code, check_fit, inspect
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.shipped_code import python_version
from ephemeron.functions.source_bundle import FunctionEnvironment, check_release, digest
from ephemeron.runs import folders
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.units import MIB

CHANNEL = "s3://bucket/some/runs"


@pytest.fixture(scope="module", autouse=True)
def _keys() -> Iterator[None]:
    with keys():
        yield


@pytest.fixture
def service() -> Iterator[LambdaService]:
    with LambdaService(concurrency=10) as service:
        yield service


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def deployed(service: LambdaService, out: Path, *more: str) -> Result:
    return cli(
        "cloud",
        "deploy",
        "aws",
        "--channel",
        CHANNEL,
        "--out",
        str(out),
        "--endpoint",
        service.url,
        "--role",
        ROLE,
        "--zip",
        "--no-dependencies",
        *more,
    )


# -- what is written ------------------------------------------------------------------------------------------


def test_without_a_role_everything_is_written_and_nothing_is_sent(tmp_path: Path):
    done = cli("cloud", "deploy", "aws", "--channel", CHANNEL, "--out", str(tmp_path / "aws"), "--endpoint", "http://127.0.0.1:1")
    assert done.exit_code == 0, done.output
    assert "nothing was sent to AWS" in done.output
    names = {str(p.relative_to(tmp_path / "aws")) for p in (tmp_path / "aws").rglob("*") if p.is_file()}
    assert names >= {
        "template.json",
        "function-policy.json",
        "client-policy.json",
        "deployer-policy.json",
        "trust.json",
        "image/Dockerfile",
        "image/build.sh",
        "image/requirements.txt",
        "image/ephemeron/functions/aws/handler.py",
    }
    assert not any("testing/" in name or "dashboard/" in name or "__pycache__" in name for name in names)
    installed = (tmp_path / "aws/image/requirements.txt").read_text()
    assert all(name in installed for name in ("torch", "boto3", "pillow", "pyarrow"))
    assert package.HANDLER in (tmp_path / "aws/image/Dockerfile").read_text()


@pytest.mark.slow
def test_the_recipe_s_code_imports_by_itself(tmp_path: Path):
    """In a Python that finds this package nowhere else: what a function imports is all in the context."""
    import sys

    package.write_image_recipe(tmp_path)
    program = (
        "import ephemeron.functions.aws.handler as h, ephemeron.training.worker.loop, ephemeron.functions.function_main, "
        "ephemeron.functions.aws.invoker, ephemeron.training.worker.trainers.torch_trainer; print(h.__file__)"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_functions_have_the_client_s_python_and_the_packages_that_are_named(tmp_path: Path):
    out = tmp_path / "aws"
    (tmp_path / "mine.txt").write_text("# of the model\nsomething-rare==1.2  # pinned\nPillow==11.0\n")
    where = ["cloud", "deploy", "aws", "--channel", CHANNEL, "--out", str(out), "--region", "eu-central-1"]
    done = cli(*where, "--extra", "sparse", "--requirements", str(tmp_path / "mine.txt"), "--tag", "team=x-y")
    assert done.exit_code == 0, done.output
    assert f"FROM public.ecr.aws/lambda/python:{python_version()}\n" in (out / "image" / "Dockerfile").read_text()
    lines = (out / "image" / "requirements.txt").read_text().splitlines()
    assert {"something-rare==1.2", "Pillow==11.0", "scipy>=1.11", "pyarrow>=16"} <= set(lines), "sparse needs what preparation needs"
    assert not [line for line in lines if line.startswith("pillow>=")], "the user's line takes the place of ephemeron's"
    assert f"torch=={importlib.metadata.version('torch').partition('+')[0]}" in lines
    again = done.output.splitlines()[-2]
    for given in ("--region eu-central-1", f"--out {out}", "--memory-mb 1769", f"--channel {CHANNEL}", "--tag team=x-y"):
        assert given in again
    template = json.loads((out / "template.json").read_text())["Resources"]
    assert template["Repository"]["Properties"]["Tags"] == [{"Key": "team", "Value": "x-y"}]
    assert template["Repository"]["Properties"]["RepositoryPolicyText"]["Statement"][0]["Principal"] == {"Service": "lambda.amazonaws.com"}
    actions = [a for s in json.loads((out / "deployer-policy.json").read_text())["Statement"] for a in s["Action"]]
    assert {"ecr:GetAuthorizationToken", "ecr:PutImage", "ecr:SetRepositoryPolicy"} <= set(actions)

    done = cli(*where, "--python", "3.13")
    assert done.exit_code == 0, done.output
    assert "python:3.13" in (out / "image" / "Dockerfile").read_text()
    assert "something-rare==1.2" in (out / "image" / "requirements.txt").read_text(), "packages are kept"
    assert "functions have Python 3.13 and something-rare==1.2, Pillow==11.0" in done.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--extra", "linalgg"), "there is no extra 'linalgg'; did you mean linalg"),
        (("--python", "2.7"), "functions cannot have Python 2.7; give --python 3.11 or 3.12 or 3.13"),
        (("--requirements", "absent.txt"), "absent.txt cannot be read: No such file or directory"),
        (("--requirements", "local.txt"), "local.txt, line 2: '-e .' names a file, which the build does not have"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local.txt").write_text("numpy\n-e .\n")
    done = cli("cloud", "deploy", "aws", "--channel", CHANNEL, "--out", "aws", "--region", "eu-west-1", *given)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "aws").exists()


def test_a_package_that_functions_lack_is_named_before_anything_is_started(
    service: LambdaService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_scipy.py").write_text("import scipy.stats\n\ndef count(n):\n    return n\n")
    (tmp_path / "items.jsonl").write_text("1\n")
    where = ["--platform", "aws", "--channel", (tmp_path / "objects").as_uri()]
    asked = ["map", "needs_scipy:count", "--items", "items.jsonl", "--out", "out.jsonl", *where]
    asked += ["--aws-endpoint", service.url, "--aws-region", "us-east-1"]
    assert deployed(service, tmp_path / "aws").exit_code == 0
    done = cli(*asked)
    assert done.exit_code == 2
    assert "needs_scipy imports scipy, which functions on aws do not have" in " ".join(done.output.split())
    assert service.environments() == []
    assert folders.all_runs() == []
    assert deployed(service, tmp_path / "aws", "--extra", "linalg").exit_code == 0
    found = inspect(settings_of(service))
    assert found.limits.packages == {"scipy"}
    check_code(found, settings_of(service), digest())


@pytest.mark.parametrize("platform", ["aws", "aws-microvm", "openfaas"])
def test_a_function_with_another_python_is_refused_before_anything_is_started(platform: str):
    what, deploying = "function 'ephemeron'", f"ephemeron cloud deploy {platform}"
    mine = f"{digest()}.py{python_version()}"
    for found in ("", digest(), mine):
        check_release(found, digest(), what=what, deploying=deploying)
    with pytest.raises(JobError, match=r"has Python 3\.9, and this is Python .*--python"):
        check_release(f"{digest()}.py3.9", digest(), what=what, deploying=deploying)
    with pytest.raises(JobError, match="runs code other, this is"):
        check_release("other.py3.9", digest(), what=what, deploying=deploying)


def test_policies_give_nothing_beyond_their_purpose():
    place = policy.place_of(AwsSettings(region="eu-west-1"), account="123456789012", channel=CHANNEL, vpc=False)
    for document in (policy.function_policy(place), policy.client_policy(place), policy.deployer_policy(place)):
        for statement in document["Statement"]:
            assert not [a for a in statement["Action"] if "*" in a]
            if statement["Resource"] == "*":
                assert statement["Action"][0] in ("lambda:GetAccountSettings", "ecr:GetAuthorizationToken"), (
                    "has no resources by AWS's design"
                )
                assert len(statement["Action"]) == 1
            else:
                assert "ephemeron" in statement["Resource"] or "bucket" in statement["Resource"]
    (objects, listing) = policy.function_policy(place)["Statement"][-2:]
    assert objects["Resource"] == "arn:aws:s3:::bucket/some/runs/*"
    assert listing["Condition"] == {"StringLike": {"s3:prefix": "some/runs/*"}}
    with_cache = policy.place_of(AwsSettings(region="eu-west-1"), account="1", channel="redis://c:6379", vpc=True)
    actions = [a for s in policy.function_policy(with_cache)["Statement"] for a in s["Action"]]
    assert not [a for a in actions if a.startswith("s3:")]
    assert "ec2:CreateNetworkInterface" in actions
    with pytest.raises(JobError, match="nothing that Lambda functions share"):
        policy.place_of(AwsSettings(region="eu-west-1"), account="1", channel="folder", vpc=False)


@pytest.mark.parametrize("channel", [CHANNEL, "s3://bucket", "redis://cache:6379/0"])
def test_the_template_is_valid_cloudformation(tmp_path: Path, channel: str):
    lint = pytest.importorskip("cfnlint.api", reason="no CloudFormation linter; pip install cfn-lint")
    place = policy.place_of(AwsSettings(region="us-east-1"), account="A", channel=channel, vpc=channel != CHANNEL)
    template = json.dumps(policy.template(place))

    def mistakes(text: str) -> list[str]:
        return [str(m) for m in lint.lint_all(text) if not m.rule.id.startswith("I")]  # advice is no mistake

    assert mistakes(template) == []
    if channel == CHANNEL:
        assert mistakes(template.replace("AWS::IAM::Role", "AWS::IAM::Roll")) != [], "the linter sees mistakes"


# -- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mb", "limit"), [(package.UNZIPPED_MB, "250 MB"), (package.ZIPPED_MB, "50 MB")])
def test_what_lambda_would_refuse_is_refused_before_the_upload(mb: int, limit: str):
    package.check_size(mb * MIB, limit_mb=mb, what="it")
    with pytest.raises(JobError, match=rf"it has {mb} MB, AWS Lambda takes {limit}.*deploy an image"):
        package.check_size(mb * MIB + 1, limit_mb=mb, what="it")


def test_a_zip_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(package, "UNZIPPED_MB", 0)
    with pytest.raises(JobError, match="the code, unzipped, has"):
        package.build_zip()
    monkeypatch.undo()
    monkeypatch.setattr(package, "ZIPPED_MB", 0)
    with pytest.raises(JobError, match="the ZIP has"):
        package.build_zip()


@pytest.mark.parametrize(("nbytes", "code"), [(10 * 1024 * MIB, 0), (10 * 1024 * MIB + 1, 2)])
def test_an_image_that_does_not_fit_is_not_pushed(tmp_path: Path, nbytes: int, code: int):
    """build.sh with stand-ins for docker and aws that write down what they are asked."""
    package.write_image_recipe(tmp_path / "image")
    for name, body in (("docker", f'case "$1" in image) echo {nbytes};; esac'), ("aws", "echo secret")):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n{body}\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    uri = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/ephemeron:1"
    done = subprocess.run(
        [tmp_path / "image" / "build.sh", uri],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    asked = (tmp_path / "asked").read_text()
    assert done.returncode == code, done.stderr
    assert (f"docker push {uri}" in asked) == (code == 0)
    if code:
        assert "error: the image has 10240 MB, Lambda takes 10240 MB" in done.stderr
    else:
        assert "--region eu-west-1" in asked


def test_the_same_code_makes_the_same_zip():
    first, second = package.build_zip(), package.build_zip()
    assert first == second
    names = zipfile.ZipFile(io.BytesIO(first)).namelist()
    assert "ephemeron/functions/aws/handler.py" in names
    assert len(digest()) == 16


# -- the function ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_deploy_creates_then_updates_and_sets_what_a_run_needs(service: LambdaService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "hush")
    monkeypatch.setenv("EPHEMERON_SPARSE_TOKEN", "of the store")
    monkeypatch.delenv("EPHEMERON_ENTRIES", raising=False)
    done = deployed(service, tmp_path / "aws", "--memory-mb", "512")
    assert done.exit_code == 0, done.output
    assert "created function ephemeron in us-east-1: 512 MB, 900 s, no retries" in done.output
    assert "it costs nothing while it does not run" in done.output
    again = deployed(service, tmp_path / "aws", "--memory-mb", "1024", "--function-timeout-s", "60")
    assert "updated function ephemeron" in again.output
    api = client(settings_of(service), "lambda")
    function = api.get_function_configuration(FunctionName="ephemeron")
    assert (function["MemorySize"], function["Timeout"], function["Role"]) == (1024, 60, ROLE)
    assert function["Environment"]["Variables"] == {
        "EPHEMERON_CHANNEL_PASSWORD": "hush",
        "EPHEMERON_SPARSE_TOKEN": "of the store",
        "EPHEMERON_CODE": FunctionEnvironment().release,
    }
    events = api.get_function_event_invoke_config(FunctionName="ephemeron")
    assert (events["MaximumRetryAttempts"], events["MaximumEventAgeInSeconds"]) == (0, 60)
    assert api.get_function_recursion_config(FunctionName="ephemeron")["RecursiveLoop"] == "Allow"
    written = "".join(p.read_text() for p in (tmp_path / "aws").rglob("*") if p.suffix in (".json", ".txt", ".sh", ".py"))
    assert "hush" not in written + done.output + again.output


def test_a_cache_s_authority_is_given_to_the_function_as_text(service: LambdaService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("cryptography", reason="no maker of certificates; pip install cryptography")
    from tls_world import Authority

    own = Authority(tmp_path)
    monkeypatch.setenv("EPHEMERON_CHANNEL_CA", str(own.file))
    assert deployed(service, tmp_path / "aws").exit_code == 0
    function = client(settings_of(service), "lambda").get_function_configuration(FunctionName="ephemeron")
    assert function["Environment"]["Variables"]["EPHEMERON_CHANNEL_CA"] == own.pem
    (tmp_path / "many.pem").write_text(own.pem * 10)
    monkeypatch.setenv("EPHEMERON_CHANNEL_CA", str(tmp_path / "many.pem"))
    refused = deployed(service, tmp_path / "aws")
    assert (refused.exit_code, "AWS Lambda takes 4096" in refused.output) == (2, True)


def test_an_image_is_deployed_by_its_address(service: LambdaService, tmp_path: Path):
    uri = "123456789012.dkr.ecr.us-east-1.amazonaws.com/ephemeron:1"
    done = cli(
        "cloud", "deploy", "aws", "--channel", CHANNEL, "--out", str(tmp_path), "--endpoint", service.url, "--role", ROLE, "--image", uri
    )
    assert done.exit_code == 0, done.output
    found = client(settings_of(service), "lambda").get_function(FunctionName="ephemeron")
    assert (found["Configuration"]["PackageType"], found["Code"]["ImageUri"]) == ("Image", uri)


def test_clean_removes_function_and_log_and_is_content_with_nothing(service: LambdaService, tmp_path: Path):
    deployed(service, tmp_path)
    service.logs.write("/aws/lambda/ephemeron", "s", "said")
    done = cli("cloud", "remove", "aws", "--endpoint", service.url, "--yes")
    assert "deleted function ephemeron\ndeleted log /aws/lambda/ephemeron" in done.output
    again = cli("cloud", "remove", "aws", "--endpoint", service.url, "--yes")
    assert (again.exit_code, "there is no function ephemeron" in again.output) == (0, True)
    kept = cli("cloud", "remove", "aws", "--endpoint", service.url)  # nobody answers the question
    assert kept.exit_code == 1
    nobody = cli("cloud", "remove", "aws", "--endpoint", "http://127.0.0.1:9", "--yes")
    assert (nobody.exit_code, "does not answer: Could not connect" in nobody.stderr) == (2, True)


def test_wishes_that_contradict_each_other():
    for wrong in ({"image": "i", "zipped": b"z"}, {}, {"image": "i", "memory_mb": 100}, {"image": "i", "timeout_s": 901}):
        with pytest.raises(JobError):
            LambdaSpec(**{"role": ROLE, "memory_mb": 512, **wrong})  # type: ignore[arg-type]


# -- refused before anything runs -----------------------------------------------------------------------------


def refusal(call: Any) -> str:
    with pytest.raises((JobError, PlanInfeasible)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_each_mistake_is_one_clear_line(service: LambdaService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = settings_of(service)
    assert "function 'ephemeron' in us-east-1 does not exist; run: ephemeron cloud deploy aws" in refusal(lambda: inspect(settings))
    deployed(service, tmp_path, "--memory-mb", "512", "--function-timeout-s", "60")
    found = inspect(settings)
    assert (found.memory_mb, found.timeout_s, found.concurrency) == (512, 60, 10)

    assert "did you mean eu-central-1?" in refusal(lambda: AwsSettings(region="eu-centrall-1").located())
    elsewhere = settings_of(service, region="eu-west-1")
    assert "region eu-west-1 is not the one that answers" in refusal(lambda: inspect(elsewhere))
    service.guard.expired = {"test"}
    assert "the AWS credentials have expired" in refusal(lambda: inspect(settings))
    service.guard.expired, service.guard.unknown = set(), {"test"}
    assert "AWS does not know these credentials" in refusal(lambda: inspect(settings))
    service.guard.unknown, service.guard.denied = set(), {"test": {"lambda:InvokeFunction"}}
    assert "these credentials may not lambda:InvokeFunction for function 'ephemeron'" in refusal(lambda: inspect(settings))
    service.guard.denied = {}

    fits = {"workers": 10, "memory_mb": 512, "lifetime_s": 60.0}
    check_fit(found, settings, **fits)  # type: ignore[arg-type]
    too_many = refusal(lambda: check_fit(found, settings, **{**fits, "workers": 16}))
    assert "16 workers are wanted, the quota of concurrent functions in us-east-1 is 10" in too_many
    assert "has 512 MB, the run wants 1024 MB" in refusal(lambda: check_fit(found, settings, **{**fits, "memory_mb": 1024}))
    assert "ends after 60 s, the run wants 90 s" in refusal(lambda: check_fit(found, settings, **{**fits, "lifetime_s": 90.0}))
    assert "runs code" in refusal(lambda: check_code(found, settings, "0123456789abcdef"))
    check_code(found, settings, digest())

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no AWS credentials were found" in refusal(lambda: inspect(settings))
    monkeypatch.delenv("AWS_REGION")
    assert "no AWS region is set" in refusal(lambda: AwsSettings().located())


def test_a_function_that_would_break_runs_is_refused(service: LambdaService, tmp_path: Path):
    settings = settings_of(service)
    deployed(service, tmp_path)
    api = client(settings, "lambda")
    api.put_function_event_invoke_config(FunctionName="ephemeron", MaximumRetryAttempts=2, MaximumEventAgeInSeconds=60)
    assert "retries failed calls 2 times" in refusal(lambda: inspect(settings))
    api.put_function_recursion_config(FunctionName="ephemeron", RecursiveLoop="Terminate")
    assert "ends chains of functions after 16 links" in refusal(lambda: inspect(settings))
    deployed(service, tmp_path)  # mends both
    inspect(settings)
    api.put_function_concurrency(FunctionName="ephemeron", ReservedConcurrentExecutions=3)
    assert inspect(settings).limits.concurrency == 3


def test_channels_that_functions_cannot_reach(service: LambdaService):
    there = AwsSettings(region="us-east-1")
    for channel in ("folder", "file:///tmp/x", "redis://127.0.0.1:6379", "parameter_server", "ps://localhost:1"):
        assert "where AWS Lambda cannot reach it" in refusal(lambda: check_channel(channel, there, {}))  # noqa: B023
    check_channel("s3://bucket/prefix", there, {})
    here = settings_of(service)
    check_channel("redis://127.0.0.1:6379", here, {})
    assert "no address that functions could be told" in refusal(lambda: check_channel("folder", here, {}))
    secret = refusal(lambda: check_channel("s3://bucket/prefix", there, {"AWS_SECRET_ACCESS_KEY": "hush"}))
    assert "hush" not in secret


def test_a_deployment_that_aws_refuses_is_one_line(service: LambdaService):
    service.guard.denied = {"*": {"lambda:CreateFunction"}}
    settings = settings_of(service)
    wanted = LambdaSpec(role=ROLE, memory_mb=512, zipped=package.build_zip(), digest="")
    text = refusal(lambda: deploy(client(settings, "lambda"), settings, wanted))
    assert "may not lambda:CreateFunction" in text


def test_train_refuses_in_one_line_and_leaves_no_run(service: LambdaService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    job = Path(__file__).parents[3] / "examples" / "digits" / "job.toml"
    common = ["train", str(job), "--platform", "aws", "--aws-endpoint", service.url]
    for arguments, said in (
        (["--channel", CHANNEL, "--workers", "2"], "does not exist; run: ephemeron cloud deploy aws"),
        (["--workers", "2"], "no address that functions could be told"),
        (["--channel", CHANNEL, "--workers", "2", "--aws-region", "mars-1"], "AWS region 'mars-1' has no Lambda"),
    ):
        done = CliRunner().invoke(main, [*common, *arguments])
        assert done.exit_code == 2, done.output
        assert said in done.output
    deployed(service, tmp_path / "aws")
    done = CliRunner().invoke(main, [*common, "--channel", CHANNEL, "--workers", "16"])
    assert (done.exit_code, "16 workers are wanted, the quota" in done.output) == (2, True)
    wrong = CliRunner().invoke(main, ["train", str(job), "--workers", "2", "--aws-function", "x"])
    assert (wrong.exit_code, "platform local takes no" in wrong.output) == (2, True)
    assert not list((tmp_path / "home").rglob("run.json"))
