"""Plans of regions, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.regions.planning import PlanRequest, plan_regions
from ephemeron.regions.region_files import Regions, groups_of, parse_regions
from ephemeron.regions.scheduling.replanning import MeasuredIterations
from ephemeron.training.driver.api import configured


def regions(first: str, second: str, share: float, more: str = "") -> Regions:
    """Two regions of twelve cores."""
    return parse_regions(text(first, second, share, more))


def text(first: str, second: str, share: float, more: str = "") -> str:
    return f"""
[[region]]
name = "shanghai"
platform = "local"
data_share = {share}
devices = [{{ kind = "{first}", cores = 12 }}]
{more}

[[region]]
name = "chongqing"
platform = "local"
data_share = 1
devices = [{{ kind = "{second}", cores = 12 }}]
{more}
"""


CASES = [("cascade-lake", "skylake", 1, 8), ("cascade-lake", "cascade-lake", 2, 6), ("cascade-lake", "skylake", 2, 4)]


@pytest.mark.parametrize(("first", "second", "share", "cores"), CASES)
def test_the_command_prints_table_5(tmp_path: Path, first: str, second: str, share: int, cores: int) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(text(first, second, share))
    done = CliRunner().invoke(main, ["regions", "plan", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(r["name"], r["cores"]) for r in found["regions"]] == [("shanghai", 12), ("chongqing", cores)]
    assert [r["load_power"] for r in found["regions"]] == [
        pytest.approx(12 * 0.666 / share),
        pytest.approx(cores * {"skylake": 0.973, "cascade-lake": 0.666}[second]),
    ]
    assert found["straggler"] == "shanghai"
    assert found["cost_usd"] is None, "no prices and no times"
    assert found["saved_cost_share"] > 0.09
    shown = CliRunner().invoke(main, ["regions", "plan", str(path)]).stdout
    assert "match-straggler: straggler shanghai" in shown
    assert f"{cores} {second}" in shown


@pytest.mark.parametrize(("first", "second", "share", "cores"), CASES)
def test_a_run_starts_what_its_plan_says(tmp_path: Path, first: str, second: str, share: int, cores: int) -> None:
    """It started 12 and 12 functions, whatever the plan."""
    path = tmp_path / "regions.toml"
    path.write_text(text(first, second, share))
    c = configured({"regions": str(path)})
    assert [(g.name, g.workers) for g in c.groups] == [("shanghai", 12), ("chongqing", cores)]
    assert c.workers == 12 + cores


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(text("cascade-lake", "unheard-of", 1))
    done = CliRunner().invoke(main, ["regions", "plan", str(path)])
    assert done.exit_code == 2
    assert "device kind 'unheard-of' has no power" in done.output


@pytest.mark.parametrize(("first", "second", "share", "cores"), CASES)
def test_cheapest_keeps_the_pace_of_algorithm_1_and_costs_no_more(first: str, second: str, share: int, cores: int) -> None:
    priced = regions(first, second, share, "prices = { usd_per_core_hour = 0.05 }")
    known = {"samples": 30_000, "sample_s": 0.01}
    published = plan_regions(priced, PlanRequest(method="match-straggler", **known))  # type: ignore[arg-type]
    ours = plan_regions(priced, PlanRequest(method="cheapest", **known))  # type: ignore[arg-type]
    assert published.cost_usd is not None
    assert ours.cost_usd is not None
    assert ours.cost_usd <= published.cost_usd
    assert ours.seconds <= published.seconds
    greedy = plan_regions(priced, PlanRequest(method="greedy", **known))  # type: ignore[arg-type]
    assert greedy.cost_usd is not None
    assert published.cost_usd == pytest.approx(greedy.cost_usd * (1 - published.saved_cost_share))
    assert [r.cores for r in greedy.regions] == [12, 12]
    assert published.saved_waiting_share > 0.46
    assert groups_of(priced, published.cores)[1].workers == cores


def test_a_deadline_and_a_budget() -> None:
    priced = regions("icelake", "icelake", 1, "prices = { usd_per_core_hour = 3600 }")
    known = {"samples": 24, "sample_s": 1.0}
    slow = plan_regions(priced, PlanRequest(method="cheapest", deadline_s=6.0, **known))  # type: ignore[arg-type]
    assert slow.cost_usd == pytest.approx(24.0), "as much as with fewer cores for longer"
    assert [r.cores for r in slow.regions] == [12, 12], "the fastest of equally cheap plans"
    fast = plan_regions(priced, PlanRequest(method="fastest", budget_usd=24.0, **known))  # type: ignore[arg-type]
    assert [r.cores for r in fast.regions] == [12, 12]
    assert fast.cost_usd == pytest.approx(24.0)
    with pytest.raises(PlanInfeasible, match=r"region shanghai needs 1 s .* and 0\.5 s"):
        plan_regions(priced, PlanRequest(method="cheapest", deadline_s=0.5, **known))  # type: ignore[arg-type]
    with pytest.raises(JobError, match="a deadline or a budget needs the time of a pass"):
        plan_regions(priced, PlanRequest(method="cheapest", deadline_s=0.5))
    with pytest.raises(JobError, match="a budget is not for method 'cheapest'"):
        plan_regions(priced, PlanRequest(method="cheapest", budget_usd=0.5, **known))  # type: ignore[arg-type]


def test_measured_times_precede_built_in_factors() -> None:
    equal = regions("skylake", "skylake", 1)
    measured = {
        "shanghai": [MeasuredIterations(power=12 * 0.973, samples=64, iteration_s=0.64)],
        "chongqing": [MeasuredIterations(power=12 * 0.973, samples=64, iteration_s=0.32)],
    }
    found = plan_regions(equal, PlanRequest(method="cheapest", samples=1000, measured=measured))
    assert [r.cores for r in found.regions] == [12, 6], "twice as fast as its kind says"
    assert found.seconds == pytest.approx(5.0)


def test_sizes_of_functions() -> None:
    sized = parse_regions(
        text("own", "own", 1).replace(
            "cores = 12 }",
            "cores = 12, power = 1.0, sizes = [{ cores = 1, memory_mb = 1769, usd_per_hour = 1.0 }, { cores = 3, memory_mb = 5307, usd_per_hour = 2.0 }] }",
        )
    )
    found = plan_regions(sized, PlanRequest(method="cheapest", memory_mb=3000))
    assert [(r.cores, r.usd_per_hour) for r in found.regions] == [(12, 8.0), (12, 8.0)]
    with pytest.raises(JobError, match="no function of region shanghai fits into its cores and has 9000 MB"):
        plan_regions(sized, PlanRequest(memory_mb=9000))


def test_regions_without_devices_have_no_plan() -> None:
    fixed = parse_regions(text("own", "own", 1).replace('devices = [{ kind = "own", cores = 12 }]', "workers = 2"))
    with pytest.raises(JobError, match="region shanghai has no devices to plan with"):
        plan_regions(fixed)
