"""Plans for the memory sizes that are deployed, from what was measured there before what is published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_plan_cli import PROFILE

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.functions.aws.settings import AwsSettings
from ephemeron.training import planning_workflow
from ephemeron.training.job import DataSpec, Job, Target
from ephemeron.training.planner import PlanRequest, make_plan
from ephemeron.training.planner.model.builtin import BUILTIN
from ephemeron.training.planner.model.profile import Profile, parse_platform, parse_profile

CODE = Path(__file__).parents[1] / "code"
JOB = Job(name="sized", model=Target(target="tiny:mlp"), data=DataSpec(), epochs=1, code=(CODE,))
MEASURED = parse_profile(PROFILE)


def on(name: str, source: str = "measured there") -> Profile:
    return replace(MEASURED, platform=replace(MEASURED.platform, name=name, source=source))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


def test_a_plan_has_a_size_that_is_deployed() -> None:
    platform = MEASURED.platform.of_sizes((3008, 1769))
    assert list(platform.quotas()) == list(platform.quotas(64)) == [1769, 3008]
    free, sized = (make_plan(MEASURED, PlanRequest(), platforms=(p,)) for p in (MEASURED.platform, platform))
    assert free.choice.memory_mb not in (1769, 3008), "or this shows nothing"
    assert sized.choice.memory_mb in (1769, 3008)
    assert sized.choice.predicted.cost_usd >= free.choice.predicted.cost_usd


def test_sizes_survive_the_file() -> None:
    raw = {**PROFILE["platform"], "memory_mb": {"min": 1769, "max": 3008, "sizes": [1769, 3008]}}  # type: ignore[dict-item]
    assert parse_platform(raw, where="x").memory_mb.sizes == (1769, 3008)


def test_what_was_measured_on_a_cloud_counts_before_what_is_published() -> None:
    assert planning_workflow.measured_on(JOB, "aws") is None
    planning_workflow.keep(JOB, on("aws"), platform="aws", channel="s3://bucket/runs")
    assert planning_workflow.profile_for(JOB, "aws").platform.source == "measured there"
    assert planning_workflow.measured_on(JOB, "aws", "redis://cache:6379") is None, "another channel"
    (platform,) = planning_workflow.platforms_for("aws", on("aws").platform, (1769,))
    assert (platform.name, platform.memory_mb.sizes) == ("aws", (1769,))
    published = planning_workflow.platforms_for("aws", on("local").platform, (1769,))
    assert {p.name for p in published} == set(BUILTIN)
    assert {p.memory_mb.sizes for p in published} == {(1769,)}


def test_a_cloud_without_published_figures_has_to_be_measured() -> None:
    with pytest.raises(JobError, match="ephemeron profile JOB --platform openfaas"):
        planning_workflow.profile_for(JOB, "openfaas")


def test_a_deployment_that_cannot_be_asked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
    sizes, why = planning_workflow.deployed_sizes("aws", AwsSettings(region="nowhere-1"))
    assert sizes == ()
    assert "has no Lambda" in why
    assert planning_workflow.deployed_sizes("local") == ((), "")


def test_plan_asks_the_deployment_and_says_which_figures_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
    from ephemeron.testing.lambda_service import LambdaService

    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    with LambdaService() as service:

        def cli(*arguments: str) -> str:
            done = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
            assert done.exit_code == 0, done.output
            return done.output

        def planned(*more: str) -> tuple[int, str]:
            said = cli("plan", "--profile", str(path), "--platform", "aws", "--aws-endpoint", service.url, "--json", *more)
            return json.loads(said.splitlines()[-1])["memory_mb"], said

        assert "any memory size is planned for" in planned()[1]
        cli(
            "cloud",
            "deploy",
            "aws",
            "--channel",
            "s3://b/r",
            "--endpoint",
            service.url,
            "--role",
            "arn:aws:iam::123456789012:role/e",
            "--image",
            "i",
            "--out",
            str(tmp_path),
            "--memory-mb",
            "1769,3008",
        )
        memory_mb, said = planned()
        assert memory_mb in (1769, 3008)
        assert "figures of aws-lambda-s3: published; transfer" in said
        memory_mb, said = planned("--any-size")
        assert memory_mb not in (1769, 3008)
        assert f"run: ephemeron cloud deploy aws --memory-mb 1769,3008,{memory_mb}" in said


def test_microvms_are_planned_at_their_own_prices_and_in_their_own_sizes() -> None:
    objects, cache, direct = planning_workflow.platforms_for("aws-microvm", MEASURED.platform)
    assert (objects.name, cache.name, direct.name) == ("aws-microvm-s3", "aws-microvm-cache", "aws-microvm-direct")
    assert list(objects.quotas(64)) == [512, 1024, 2048, 4096, 8192]
    # By hand: 2 GB and 1 vCPU for a second.
    assert objects.price_gb_s * 2 == pytest.approx(2 * 0.0000036667 + 0.0000276944)
    assert objects.price_invocation == 0.0
    plan = make_plan(planning_workflow.scaled(MEASURED, (objects, cache)), PlanRequest(), platforms=(objects, cache))
    assert plan.choice.memory_mb in (512, 1024, 2048, 4096, 8192)
    (sized,) = {p.memory_mb.sizes for p in planning_workflow.platforms_for("aws-microvm", MEASURED.platform, (2048,))}
    assert sized == (2048,)


def test_a_vcpu_computes_as_much_wherever_it_comes_from() -> None:
    (platform, *_) = planning_workflow.platforms_for("aws-microvm", MEASURED.platform)
    here = MEASURED.workload.compute_s(8, MEASURED.platform.mb_per_vcpu)
    there = planning_workflow.scaled(MEASURED, (platform,)).workload.compute_s(8, platform.mb_per_vcpu)
    assert float(there) == pytest.approx(float(here))
