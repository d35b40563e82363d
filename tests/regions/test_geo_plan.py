"""Plans of regions, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.regions.planning import PlanRequest, plan_regions, with_functions
from ephemeron.regions.region_files import Regions, groups_of, load_regions, parse_regions
from ephemeron.regions.scheduling.replanning import MeasuredIterations
from ephemeron.training.driver.api import configure, configured


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


JOB = Path(__file__).parents[2] / "examples" / "digits" / "job.toml"
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
    assert "match: straggler shanghai" in shown
    assert f"{cores} {second}" in shown


@pytest.mark.parametrize(("first", "second", "share", "cores"), CASES)
def test_a_run_starts_what_its_plan_says(tmp_path: Path, first: str, second: str, share: int, cores: int) -> None:
    """It started 12 and 12 functions, whatever the plan."""
    path = tmp_path / "regions.toml"
    path.write_text(text(first, second, share))
    c = configured({"regions": {"file": str(path)}})
    assert [(g.name, g.workers) for g in c.regions.region] == [("shanghai", 12), ("chongqing", cores)]
    assert c.workers == 12 + cores


def started(path: Path, **options: object) -> list[tuple[str, int, int]]:
    """Functions and memory of each region of a run."""
    return [
        (group.name, group.workers, group.memory_mb) for group in configured({"regions": {"file": str(path), **options}}).regions.region
    ]


@pytest.mark.parametrize(("method", "cores"), [("match", 8), ("cheapest", 8), ("fastest", 9), ("all", 12)])
def test_the_plan_of_a_run_is_that_of_its_option_before_that_of_its_file(tmp_path: Path, method: str, cores: int) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(f'plan = "{method}"\n{text("cascade-lake", "skylake", 1)}')
    assert started(path) == [("shanghai", 12, 0), ("chongqing", cores, 0)]
    path.write_text(f'plan = "{"match" if method == "all" else "all"}"\n{text("cascade-lake", "skylake", 1)}')
    assert started(path, plan=method) == [("shanghai", 12, 0), ("chongqing", cores, 0)]
    assert configured({"regions": {"file": str(path), "plan": method}}).regions.plan == method, "what reports and records say"


def test_a_region_with_workers_keeps_them_and_others_match_them(tmp_path: Path) -> None:
    """Others were given what matches all of its devices."""
    path = tmp_path / "regions.toml"
    path.write_text(text("cascade-lake", "skylake", 1).replace("cores = 12 }]", "cores = 12 }]\nworkers = 6", 1))
    assert started(path) == [("shanghai", 6, 0), ("chongqing", 4, 0)]
    assert started(path, plan="all") == [("shanghai", 6, 0), ("chongqing", 12, 0)]
    path.write_text(path.read_text().replace("workers = 6", "workers = 6\nmemory_mb = 3538"))
    assert started(path) == [("shanghai", 6, 3538), ("chongqing", 8, 0)], "two cores each"


def test_regions_without_devices_have_all_of_their_workers(tmp_path: Path) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(text("own", "skylake", 1).replace('devices = [{ kind = "own", cores = 12 }]', "workers = 2"))
    assert started(path) == [("shanghai", 2, 0), ("chongqing", 12, 0)]
    with pytest.raises(JobError, match="region shanghai has no devices to plan with"):
        started(path, plan="match")


def test_a_plan_with_nothing_to_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(text("cascade-lake", "skylake", 1, "workers = 2"))
    assert started(path) == [("shanghai", 2, 0), ("chongqing", 2, 0)]
    with pytest.raises(JobError, match=r"regions\.plan = 'match' has nothing to plan: all regions have workers; leave"):
        started(path, plan="match")
    path.write_text(f'plan = "match"\n{path.read_text()}')
    with pytest.raises(JobError, match="plan = 'match' has nothing to plan: all regions have workers; leave"):
        started(path)
    with pytest.raises(JobError, match=r"regions\.plan = 'all' is for a file of regions, and there is none"):
        configured({"regions": {"plan": "all"}})
    with pytest.raises(JobError, match=r"regions\.plan = 'most' is not known; use one of match, cheapest, fastest, all"):
        configure(str(JOB), regions={"plan": "most"})


SIZES = "sizes = [{ cores = 1, memory_mb = 1769, usd_per_hour = 1.0 }, { cores = 3, memory_mb = 5307, usd_per_hour = %s }]"


def test_functions_have_the_size_that_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "regions.toml"
    sized = text("own", "own", 1).replace("cores = 12 }", f"cores = 12, power = 1.0, {SIZES} }}")
    path.write_text(sized % ("2.0", "2.0"))
    assert started(path, plan="cheapest") == [("shanghai", 4, 5307), ("chongqing", 4, 5307)]
    assert started(path) == [("shanghai", 12, 1769), ("chongqing", 12, 1769)], "algorithm 1 knows no sizes: the smallest"
    path.write_text(sized.replace("cores = 12, ", "cores = 11, ") % ("2.0", "2.0"))
    with pytest.raises(JobError, match=r"region shanghai: the plan has functions of several sizes \(2 of 1769 MB, 3 of 5307 MB\)"):
        started(path, plan="cheapest")


def written(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["regions", "plan", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_written_plan_starts_what_it_says_and_keeps_all_else(tmp_path: Path) -> None:
    """Relative paths name the same files from another folder."""
    more = 'prices = { file = "prices.toml", usd_per_core_hour = 0.05 }\ncertificate = "own.pem"\ncertificate_key = "/keys/own.key"'
    path, out = tmp_path / "regions.toml", tmp_path / "planned" / "regions.toml"
    out.parent.mkdir()
    link = '[[link]]\nsource = "shanghai"\ntarget = "chongqing"\nbandwidth_mbit_s = 100\n'
    path.write_text(
        f'# mine\nplan = "cheapest"\nstore = "s3://b/x"\nauthority = "ca.pem"\n{text("cascade-lake", "skylake", 1, more)}\n{link}'
    )
    assert f"{out}: shanghai 12 functions, chongqing 8 functions" in written(path, "--write", out)
    assert started(out) == started(path) == [("shanghai", 12, 0), ("chongqing", 8, 0)]
    before, after = load_regions(path), load_regions(out)
    assert after.plan is None
    assert (after.store, after.link, after.power) == (before.store, before.link, before.power)
    assert [r.devices for r in after.region] == [r.devices for r in before.region]
    for old, new in zip(before.region, after.region, strict=True):
        assert new.certificate is not None
        assert new.prices.file is not None
        assert new.certificate.resolve() == (tmp_path / "own.pem").resolve()
        assert new.prices.file.resolve() == (tmp_path / "prices.toml").resolve()
        assert (new.certificate_key, new.prices.usd_per_core_hour) == (old.certificate_key, 0.05)
    assert after.authority is not None
    assert after.authority.resolve() == (tmp_path / "ca.pem").resolve()
    assert "# mine" in path.read_text(), "the file itself is as it was"


def test_a_plan_is_written_into_its_own_file_or_another_file_of_regions_and_nothing_else(tmp_path: Path) -> None:
    path, job = tmp_path / "regions.toml", tmp_path / "job.toml"
    path.write_text(text("cascade-lake", "skylake", 1))
    written(path, "--method", "all", "--write")
    assert started(path) == [("shanghai", 12, 0), ("chongqing", 12, 0)]
    found = json.loads(written(path, "--write", tmp_path / "other.toml", "--json"))
    assert [r["cores"] for r in found["regions"]] == [12, 8], "of the devices, whatever workers there are"
    written(path, "--method", "all", "--write", tmp_path / "other.toml")
    assert started(tmp_path / "other.toml")[1] == ("chongqing", 12, 0)
    job.write_text('model = "m:f"\n')
    for target, said in (
        (job, "exists and is no file of regions"),
        (tmp_path, "exists and is no"),
        (tmp_path / "no" / "x.toml", "cannot be written"),
    ):
        done = CliRunner().invoke(main, ["regions", "plan", str(path), "--write", str(target)])
        assert done.exit_code == 2, done.output
        assert said in done.output
    assert job.read_text() == 'model = "m:f"\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.toml", "other.toml", "regions.toml"], "and nothing half written"


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
    published = plan_regions(priced, PlanRequest(method="match", **known))  # type: ignore[arg-type]
    ours = plan_regions(priced, PlanRequest(method="cheapest", **known))  # type: ignore[arg-type]
    assert published.cost_usd is not None
    assert ours.cost_usd is not None
    assert ours.cost_usd <= published.cost_usd
    assert ours.seconds <= published.seconds
    greedy = plan_regions(priced, PlanRequest(method="all", **known))  # type: ignore[arg-type]
    assert greedy.cost_usd is not None
    assert published.cost_usd == pytest.approx(greedy.cost_usd * (1 - published.saved_cost_share))
    assert [r.cores for r in greedy.regions] == [12, 12]
    assert published.saved_waiting_share > 0.46
    assert groups_of(with_functions(priced, published))[1].workers == cores


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
