"""Training across regions: same weights whatever dies, one payload per region and round, decisions that replacements read again."""

from __future__ import annotations

import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from training_runs import WORLD, combined, make_job

from ephemeron.cli.main import main
from ephemeron.cli.progress import Display
from ephemeron.errors import JobError
from ephemeron.events import FaultFired, GroupStarted, Invoked, RegionExchanged, RunStarted
from ephemeron.regions.driver.launch import prepared_groups
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.launching.launch import LaunchRequest
from ephemeron.training.driver.records import ResultSummary, read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Fault, Job, RunRegion
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload
from ephemeron.training.planner.model.rates import Affine, Transfer
from ephemeron.training.planning_workflow import keep

pytestmark = pytest.mark.usefixtures("home")

PAIR = (RunRegion(name="near", workers=2, batch_size=24, share=2), RunRegion(name="far", workers=1, batch_size=12, memory_mb=1024, share=1))
REGION_KEYS = {
    "name",
    "platform",
    "workers",
    "memory_mb",
    "samples",
    "invocations",
    "gb_seconds",
    "prices",
    "released_s",
    "iterations",
    "waiting_share",
    "wan_bytes_sent",
    "wan_bytes_received",
    "cost_usd",
    "wan_kernel_bytes_sent",
    "wan_kernel_bytes_received",
}
JOB = Path(__file__).parents[2] / "examples" / "digits" / "job.toml"
POLICIES = (
    ("sma", "none"),
    ("asgd", "int8"),
    ("asgd-ga:staleness=2", "topk:0.1"),
    ("ama", "none"),
    ("diloco", "int4"),
    ("diloco:fragments=3,delay=2", "topk2:0.1"),
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(*, faults: Any = (), groups: Any = PAIR, **overrides: Any) -> Result:
    job = make_job(epochs=3)
    values = {"platform": "simulated", "regions": {"region": groups, "exchange_every": 5}, "checkpoint_every": 4}
    return train(job, configure(job, **combined(values, overrides)), faults=faults)


@cache
def undisturbed(sync: str, compression: str) -> ResultSummary:
    """Of a run to which nothing happens, whose regions agree in the end."""
    result = trained(regions={"sync": sync, "compression": compression})
    assert result.finished
    hashes = {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
    exchanges = [e for e in events_of(result.folder) if isinstance(e, RegionExchanged)]
    assert {event.rank for event in exchanges} == {0, 2}, "the first rank of a region exchanges for all"
    return result.summary


def exchanged(result: Result, rank: int) -> list[RegionExchanged]:
    return [e for e in events_of(result.folder) if isinstance(e, RegionExchanged) and e.rank == rank]


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "compression"), [pytest.param(*p, marks=[pytest.mark.slow] if p[1] != "int4" else []) for p in POLICIES])
def test_regions_train_one_model(sync: str, compression: str) -> None:
    summary = undisturbed(sync, compression)
    assert summary.metrics["accuracy"] > 0.3
    near, far = summary.regions
    assert (near.name, far.name) == ("near", "far")
    assert min(near.wan_bytes_sent, near.wan_bytes_received, far.wan_bytes_sent, far.wan_bytes_received) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "compression"), [p for p in POLICIES if p[0].startswith(("sma", "diloco"))])
def test_weights_of_synchronous_policies_are_the_same_whichever_functions_are_killed(sync: str, compression: str) -> None:
    faults = [
        Fault(kind="kill", rank=rank, iteration=4 + 5 * attempt + rank, phase=phase, attempt=attempt)
        for rank in range(3)
        for attempt, phase in enumerate(("wait", "aggregate", "download", "compute", "upload"))
    ]
    disturbed = trained(faults=faults, regions={"sync": sync, "compression": compression})
    fired = [event for event in events_of(disturbed.folder) if isinstance(event, FaultFired)]
    assert len(fired) >= 5, "rank 0 alone is killed in every phase"
    assert disturbed.summary.weights_sha256 == undisturbed(sync, compression).weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["asgd-ga:staleness=2", "ama"])
def test_regions_under_asynchronous_policies_agree_though_functions_are_killed(sync: str) -> None:
    faults = [Fault(kind="kill", rank=rank, iteration=4 + 5 * rank, phase="wait") for rank in range(3)]
    result = trained(faults=faults, regions={"sync": sync})
    assert result.finished
    hashes = {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}
    assert len(hashes) == 1


@pytest.mark.slow
def test_no_region_is_further_ahead_than_its_staleness_limit() -> None:
    slow = [Fault(kind="delay", rank=2, factor=30.0)]
    for limit in (1, 3):
        result = trained(regions={"sync": f"asgd:staleness={limit}", "exchange_every": 1}, faults=slow)
        ahead = [event.staleness for event in exchanged(result, 0)]
        assert max(ahead) == limit


@pytest.mark.slow
def test_fewer_bytes_are_sent_with_compression() -> None:
    plain = trained(regions={"sync": "diloco", "compression": "none"}).summary.regions[0].wan_bytes_sent
    assert undisturbed("diloco", "int4").regions[0].wan_bytes_sent < plain / 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"regions": {"sync": "gossip"}}, "asgd, asgd-ga, ama, sma or diloco"),
        ({"regions": {"sync": "sma:lr=1"}}, "'lr' is no option of sma"),
        ({"regions": {"sync": "sma", "compression": "int4"}}, "is not for sma, which sends parameters"),
        ({"regions": {"sync": "diloco:delay=5"}}, "a delay of 5 is not below 5"),
        ({"regions": {"sync": "diloco", "compression": "topk:2"}}, "'2' is no share"),
    ],
)
def test_options_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        trained(**values)


REGIONS = """
[[region]]
name = "east"
platform = "simulated"
workers = 2
data_share = 2

[[region]]
name = "west"
platform = "simulated"
workers = 1
data_share = 1
"""


@pytest.mark.slow
def test_the_command_line_takes_regions_and_reports_each(tmp_path: Path) -> None:
    (tmp_path / "regions.toml").write_text(REGIONS)
    arguments = ["train", JOB, "--regions", tmp_path / "regions.toml", "--region-sync", "diloco", "--exchange-every", 4]
    result = CliRunner().invoke(main, [*map(str, arguments), "--epochs", "1", "--json"])
    assert result.exit_code == 0, result.output
    regions = json.loads(result.stdout.splitlines()[-1])["regions"]
    assert [region["name"] for region in regions] == ["east", "west"]
    assert all(set(region) == REGION_KEYS for region in regions)


DEVICES = """
[[region]]
name = "shanghai"
platform = "simulated"
devices = [{ kind = "cascade-lake", cores = 12 }]

[[region]]
name = "chongqing"
platform = "simulated"
devices = [{ kind = "skylake", cores = 12 }]
"""


PROFILE = Profile(
    workload=Workload(model_mb=0.1, a=40.0, b=3.0, m=-20.0, memory_slope_mb=1.0, memory_base_mb=300.0, dataset_mb=1.0, samples=1438),
    platform=PlatformProfile(
        name="local",
        price_gb_s=1e-5,
        price_invocation=1e-7,
        cold_start_s=1.0,
        transfer=(Transfer(memory_mb=512, up=Affine(latency_s=0.01, mb_s=70), down=Affine(latency_s=0.01, mb_s=70)),),
    ),
)


def described(tmp_path: Path, job: Job, text: str = DEVICES, **options: Any) -> list[GroupStarted]:
    """The regions of a run, as its first event would have them."""
    (tmp_path / "regions.toml").write_text(text)
    c = configure(job, regions={"file": tmp_path / "regions.toml", **options}, batch_size=4)
    return prepared_groups(LaunchRequest(job=job, configuration=c)).described()


def test_a_launch_predicts_epochs_from_the_model_of_the_simulator(tmp_path: Path) -> None:
    job = make_job(epochs=3)
    shanghai, chongqing = described(tmp_path, job)
    assert [(g.name, g.workers, g.iterations) for g in (shanghai, chongqing)] == [("shanghai", 12, 45), ("chongqing", 8, 69)]
    assert WORLD.compute is not None
    step_s = WORLD.compute.seconds(4, 1769)
    slow_s, fast_s = 15 * step_s / 0.666, 23 * step_s / 0.973
    assert shanghai.predicted_epoch_s == chongqing.predicted_epoch_s == pytest.approx(fast_s), "more iterations of fewer functions"
    assert shanghai.predicted_waiting_share == pytest.approx(1 - slow_s / fast_s)
    assert chongqing.predicted_waiting_share == 0
    assert shanghai.predicted_epoch_usd == pytest.approx(12 * 1769 / 1024 * fast_s * shanghai.prices["gb_second_usd"])
    every = described(tmp_path, job, plan="all")
    assert [g.workers for g in every] == [12, 12]
    assert every[1].predicted_waiting_share == pytest.approx(1 - 0.666 / 0.973), "what its plan saves"


def test_a_launch_predicts_epochs_from_the_profile_of_a_job_or_else_waits_from_powers(tmp_path: Path) -> None:
    job, local = make_job(), DEVICES.replace('"simulated"', '"local"')
    unknown = described(tmp_path, job, local)
    assert [g.predicted_epoch_s for g in unknown] == [0, 0]
    assert [g.predicted_waiting_share for g in unknown] == [pytest.approx(1 - 8 * 0.973 / (12 * 0.666), abs=0.01), 0]
    keep(job, PROFILE, platform="local", channel="folder")
    known = described(tmp_path, job, local)
    step_s = float(PROFILE.workload.compute_s(4, known[0].memory_mb))
    assert known[0].predicted_epoch_s == pytest.approx(23 * step_s), "the profile is of the functions themselves, so their power is in it"


def test_nothing_is_predicted_of_functions_without_devices_and_profile(tmp_path: Path) -> None:
    text = REGIONS.replace('"simulated"', '"local"')
    assert [g.predicted_waiting_share for g in described(tmp_path, make_job(), text)] == [None, None]


@pytest.mark.slow
def test_a_run_of_a_file_of_regions_starts_and_tells_its_plan(tmp_path: Path) -> None:
    """12 functions and 8, as algorithm 1 has it for case 1 of table 5."""
    (tmp_path / "regions.toml").write_text(DEVICES)
    lines = io.StringIO()
    job, display = make_job(), Display(Console(file=lines, width=300))
    c = configure(job, regions={"file": tmp_path / "regions.toml", "exchange_every": 2}, batch_size=24)
    result = train(job, c, on_event=display.on_event).raise_if_failed()
    assert [group.workers for group in result.summary.regions] == [12, 8]
    begun = next(e for e in events_of(result.folder) if isinstance(e, RunStarted))
    assert begun.configuration["regions_plan"] == "match"
    assert len({e.rank for e in events_of(result.folder) if isinstance(e, Invoked)}) == 20
    shanghai, chongqing = begun.groups
    for group in (shanghai, chongqing):
        assert (
            f"{group.name}: {group.workers} functions, 50.0% of the samples, waits {group.predicted_waiting_share:.1%}, about"
            in lines.getvalue()
        )
    report = (result.folder.path / "report.html").read_text()
    assert f"(predicted {shanghai.predicted_waiting_share:.1%})" in report
    assert "regions_plan" in report


@pytest.mark.slow
def test_functions_of_this_machine_are_those_of_a_written_plan(tmp_path: Path) -> None:
    (tmp_path / "regions.toml").write_text(DEVICES.replace("cores = 12", "cores = 3").replace('"simulated"', '"local"'))
    out = tmp_path / "planned.toml"
    done = CliRunner().invoke(main, ["regions", "plan", str(tmp_path / "regions.toml"), "--write", str(out)])
    assert f"{out}: shanghai 3 functions, chongqing 2 functions" in done.output
    arguments = ["train", str(JOB), "--regions", str(out), "--epochs", "1", "--batch-size", "64", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert [(g["name"], g["workers"], g["invocations"]) for g in json.loads(done.stdout.splitlines()[-1])["regions"]] == [
        ("shanghai", 3, 3),
        ("chongqing", 2, 2),
    ]


def test_the_function_train_takes_a_file_of_regions_and_its_plan(tmp_path: Path) -> None:
    (tmp_path / "regions.toml").write_text(DEVICES.replace("cores = 12", "cores = 3"))
    result = train(make_job(), regions={"file": tmp_path / "regions.toml", "plan": "all", "exchange_every": 5}, batch_size=24)
    assert [group.workers for group in result.summary.regions] == [3, 3]


def test_a_plan_that_is_unknown_is_refused_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "regions.toml").write_text(REGIONS)
    arguments = ["train", str(JOB), "--regions", str(tmp_path / "regions.toml"), "--region-plan"]
    done = CliRunner().invoke(main, [*arguments, "most"])
    assert done.exit_code == 2
    assert "'most' is not one of 'match', 'cheapest', 'fastest', 'all'" in done.output
    done = CliRunner().invoke(main, [*arguments, "cheapest"])
    assert done.exit_code == 2
    assert "regions.plan = 'cheapest' has nothing to plan: all regions have workers" in done.output
