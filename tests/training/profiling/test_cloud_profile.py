"""Profiles measured on clouds: what they may cost, in which sizes, and what a plan makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.functions.base import Limits, Outcome
from ephemeron.prices import load_prices
from ephemeron.training.planner.model.profile import load_profile
from ephemeron.training.profiling import cloud
from ephemeron.training.profiling.cloud import SIZES, sizes_to_probe
from ephemeron.training.profiling.probe_bill import BudgetSpent, ProbeBill, ProbeCosts, vcpus_of

CODE = Path(__file__).parents[2] / "training" / "code"
PRICES = load_prices("objects")
COSTS = ProbeCosts(sizes_mb=(1024, 3072), first_mb=1024, call_s=60.0, requests_usd=0.001, prices=PRICES)
JOB = """
name = "measured"
epochs = 1
code = ["{code}"]

[model]
target = "tiny:mlp"

[data]
source = "digits"

[limits]
max_global_batch = 64
"""


# -- the budget ---------------------------------------------------------------------------------------------


def test_the_largest_cost_is_that_of_all_calls_until_their_time_limit() -> None:
    gb_seconds = 60.0 * (1 + 2 * (1 + 3))
    assert COSTS.calls == 5
    assert COSTS.most_usd == pytest.approx(PRICES.functions_usd(gb_seconds, 5) + 0.001)
    COSTS.check(COSTS.most_usd)
    with pytest.raises(JobError, match="--budget-usd"):
        COSTS.check(COSTS.most_usd * 0.99)


def test_no_call_is_made_that_could_exceed_the_budget() -> None:
    budget_usd = 3 * COSTS.call_usd(3072) + 1.5 * COSTS.call_usd(1024) + COSTS.requests_usd
    bill = ProbeBill(COSTS, budget_usd)
    for _ in range(3):
        bill.admit(3072)
        bill.add(Outcome(status="timed_out", gb_seconds=180.0))
    with pytest.raises(BudgetSpent, match="another call of 3072 MB"):
        bill.admit(3072)
    bill.admit(1024)
    assert bill.spent_usd < budget_usd


@pytest.mark.parametrize(
    ("seconds", "vcpus"),
    [
        ([(0.5, 2.0)], 1.0),
        ([(0.5, 2.0), (1.0, 1.0), (2.0, 1.0)], 1.0),
        ([(1.0, 1.0), (2.0, 0.5), (4.0, 0.5)], 2.0),
        ([(1.0, 1.0), (1.7, 0.6)], 1 / 0.6),
        ([(0.5, 2.0), (4.0, 1.0)], 1.0),
        ([(2.0, 1.0), (4.0, 0.5)], 4.0),
    ],
    ids=["one size", "one thread", "two threads", "part of a second", "from half a vCPU", "large sizes alone"],
)
def test_the_share_of_the_cpu_that_a_step_uses(seconds: list[tuple[float, float]], vcpus: float) -> None:
    assert vcpus_of(seconds, worth=1.15) == pytest.approx(vcpus)


def test_the_sizes_are_those_that_are_deployed_or_any() -> None:
    deployed = Limits(sizes_mb=(1769, 512, 3008), deploy="ephemeron cloud deploy aws")
    assert sizes_to_probe(deployed, (), "aws") == (512, 1769, 3008)
    assert sizes_to_probe(deployed, (3008, 512), "aws") == (512, 3008)
    with pytest.raises(JobError, match="ephemeron cloud deploy aws --memory-mb 1769,512,3008,1024"):
        sizes_to_probe(deployed, (1024,), "aws")
    assert sizes_to_probe(Limits(memory_max_mb=2000), (), "ray") == (512, 1024, 1769, 2000)
    assert sizes_to_probe(Limits(), (), "ray") == SIZES
    with pytest.raises(JobError, match="does not fit ray"):
        sizes_to_probe(Limits(memory_max_mb=2000), (3008,), "ray")


# -- measured -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cold_start  # it measures starts and memory
def test_a_profile_of_lambda_and_the_plan_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
    pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")
    from ephemeron.testing.lambda_service import LambdaService

    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cloud, "MORE", 1)  # further calls, which only narrow an interval
    job, out, objects = tmp_path / "job.toml", tmp_path / "profile.json", tmp_path / "objects"
    job.write_text(JOB.format(code=CODE))
    with LambdaService(concurrency=4) as service:

        def cli(*arguments: str, code: int = 0) -> str:
            done = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
            assert done.exit_code == code, done.output
            return done.output

        def profiled(budget: str, *, code: int = 0) -> str:
            return cli(
                "profile",
                str(job),
                "--platform",
                "aws",
                "--aws-endpoint",
                service.url,
                "--channel",
                objects.as_uri(),
                "--out",
                str(out),
                "--budget-usd",
                budget,
                code=code,
            )

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
            "--zip",
            "--no-dependencies",
            "--out",
            str(tmp_path / "aws"),
            "--memory-mb",
            "1769,704",
        )
        assert "may cost $" in profiled("0.001", code=2)
        assert not service.environments(), "the budget is checked before a function is started"
        said = " ".join(profiled("0.2").split())  # the terminal's lines are narrow
        assert "5 calls of functions of 704, 1,769 MB" in said
        assert said.index("at most $") < said.index("billed $")
        profile = load_profile(out)
        measured = profile.fit.platform
        assert measured.sizes_mb == (704, 1769)
        assert 0 < measured.billed_usd <= 0.2
        assert len(measured.cold_starts_s) == 2, "one environment of each size"
        assert {t.memory_mb for t in profile.platform.transfer} == {704, 1769}
        assert {p.memory_mb for p in profile.fit.steps.probes} == {704, 1769}
        assert profile.platform.memory_mb.sizes == (1769, 704)
        assert profile.platform.price_gb_s == PRICES.gb_second_usd
        assert [p for p in objects.rglob("*") if p.is_file()] == [], "nothing is left in the channel"
        planned = cli("plan", str(job), "--platform", "aws", "--aws-endpoint", service.url, "--json")
        assert "figures of aws: measured on aws by its functions of 704, 1769 MB" in " ".join(planned.split())
        assert json.loads(planned.splitlines()[-1])["memory_mb"] in (704, 1769)
    again = replace(profile, workload=replace(profile.workload, name="again"))
    again.save(out)
    assert load_profile(out) == again
