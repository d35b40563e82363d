"""Probes that run, probes that are chosen, worlds that are asked, profiles that are refined."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ephemeron.errors import JobError
from ephemeron.events import Ended, Invoked, Progress, RunStarted, Started
from ephemeron.functions.base import Limits
from ephemeron.runs import folders
from ephemeron.runs.header import open_header
from ephemeron.runs.logs import lines
from ephemeron.training.job import DataSpec, Job, JobLimits, Simulation, Target
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload, load_profile
from ephemeron.training.planner.model.rates import Affine, Transfer
from ephemeron.training.profiling import profile_job, refine, store
from ephemeron.training.profiling.probe_design import Measurement, Range, doubtful, enough, fit, next_probe, steps_of, widest

CODE = Path(__file__).parents[2] / "training" / "code"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def job(**overrides: Any) -> Job:
    values: dict[str, Any] = {
        "name": "test",
        "model": Target(target="tiny:mlp"),
        "data": DataSpec(),
        "epochs": 1,
        "code": (CODE,),
        "limits": JobLimits(max_global_batch=64),
    }
    return Job(**{**values, **overrides})


# -- choosing -----------------------------------------------------------------------------------------------

RANGE = Range(batches=(8, 16, 32, 64, 128, 256), quotas=(384, 576, 832, 1216, 1769))


def measured(batch: int, memory: int, *, off: float = 1.0) -> Measurement:
    seconds = 2.0 * (batch + 20) / (memory - 30) * off
    return Measurement(batch=batch, memory_mb=memory, seconds=seconds, spread=0.005, peak_mb=300.0)


def probe(off: dict[tuple[int, int], float], confidence: float) -> list[Measurement]:
    cells: list[Measurement] = []
    while len(cells) < len(RANGE.corners) or not enough(cells, RANGE, confidence):
        wanted = next_probe(cells, RANGE)
        if wanted is None:
            break
        cells.append(measured(*wanted, off=off.get(wanted, 1.0)))
    return cells


def test_the_corners_come_first_and_the_kept_out_never():
    cells = probe({}, 1e-6)
    assert {(c.batch, c.memory_mb) for c in cells[:4]} == {(8, 1769), (256, 1769), (8, 384), (256, 384)}
    assert RANGE.kept_out
    assert not {(c.batch, c.memory_mb) for c in cells} & set(RANGE.kept_out)


def test_quiet_machines_and_modest_wishes_need_few_probes():
    assert len(probe({}, 0.05)) == 5
    noisy = {(b, m): 1 + 0.1 * ((b * 7 + m) % 3 - 1) for b in RANGE.batches for m in RANGE.quotas}
    modest, strict = probe(noisy, 0.5), probe(noisy, 0.1)
    assert len(modest) < len(strict)
    assert widest(fit(modest), RANGE) <= 0.5


def test_probing_ends_even_where_the_wish_cannot_be_met():
    noisy = {(b, m): 1 + 0.3 * ((b * 7 + m) % 3 - 1) for b in RANGE.batches for m in RANGE.quotas}
    assert len(probe(noisy, 1e-3)) == 14


def test_only_what_is_out_of_line_and_slow_is_looked_at_again():
    cells = [measured(b, m) for b in RANGE.batches for m in RANGE.quotas[::2]]
    assert doubtful(cells) is None
    cells[4] = measured(cells[4].batch, cells[4].memory_mb, off=1.4)
    assert doubtful(cells) is cells[4]
    cells[4] = measured(cells[4].batch, cells[4].memory_mb, off=0.6)
    assert doubtful(cells) is None


def test_a_range_of_one_quota_or_one_batch_is_probed_all_the_same():
    flat = Range(batches=(8, 16, 32), quotas=(1769,))
    assert flat.kept_out == []
    assert set(flat.corners) == {(8, 1769), (32, 1769)}


@pytest.mark.parametrize(("low", "high", "steps"), [(8, 256, (8, 16, 32, 64, 128, 256)), (8, 9, (8, 9)), (5, 5, (5,))])
def test_steps_are_in_equal_ratios(low, high, steps):
    assert steps_of(low, high, 6) == steps


# -- simulated ----------------------------------------------------------------------------------------------


def test_a_simulated_world_is_asked_for_its_constants():
    world = Simulation(latency_s=0.01, bandwidth_mb_s=50.0, cold_start_s=2.5, compute={"a": 50.0, "b": 4.0, "m": -7.0})
    profile = profile_job(job(simulation=world), platform="simulated")
    w, p = profile.workload, profile.platform
    assert (w.a, w.b, w.m) == (50.0, 4.0, -7.0)
    assert w.model_mb == pytest.approx((64 * 16 + 16 + 16 * 10 + 10) * 4 / 1e6)
    assert w.samples + w.test_samples == 1797
    assert w.memory_slope_mb > 0
    assert p.transfer[0].up == p.transfer[0].down == Affine(latency_s=0.01, mb_s=50.0)
    assert (p.name, p.cold_start_s, p.poll_s) == ("simulated", 2.5, 0.0)


@pytest.mark.slow
def test_a_world_without_a_compute_model_is_measured_and_scaled_by_the_share():
    profile = profile_job(job(), platform="simulated")
    assert profile.workload.m == 0
    assert profile.workload.a > 0
    assert profile.fit.steps.fixed == ("m",)
    assert profile.fit.steps.kept_out


# -- local --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_is_profiled_by_real_functions_and_the_platform_only_once(home):
    said: list[str] = []
    limits, path = Limits(memory_max_mb=2048, concurrency=4), home.parent / "profile.json"
    first = profile_job(job(), confidence=0.9, limits=limits, within_s=1.0, on_progress=said.append, out=path)
    w, p, fitted = first.workload, first.platform, first.fit
    assert any("transfers" in text for text in said)
    assert w.samples + w.test_samples == 1797
    assert w.compute_s(16, 1769) > 0
    assert w.fold_s_per_mb > 0
    assert w.apply_s > 0
    assert min(r.workers for r in fitted.calibration.runs) == 2
    assert w.lockstep_cpu_s > 0
    assert w.direct_lockstep_cpu_s is not None
    assert [r.direct for r in fitted.calibration.runs].count(True) == 1
    steps = fitted.steps
    assert {c.batch for c in steps.probes} >= {8, 64}
    assert len(steps.kept_out) == 2
    assert steps.stopped in ("confident", "out of time")
    peaks = [(c.batch, c.peak_mb) for c in (*steps.probes, *steps.kept_out)]
    assert all(w.memory_needed_mb(b) >= peak - 0.06 for b, peak in peaks)
    assert p.cold_start_s > p.warm_start_s > 0
    assert p.cold_start_s == pytest.approx(fitted.platform.cold_starts_s[0], abs=1e-3)
    assert p.poll_s > 0
    assert len(p.transfer) == 2
    assert p.price_gb_s > 0
    assert p.links is not None
    assert p.over_links() is not None
    assert not fitted.platform.reused
    assert not (home / "profiling").exists()

    [folder] = folders.all_runs()
    header, result, events = open_header(folder), folder.read("result.json"), list(folders.events_of(folder))
    assert result is not None
    assert (header.kind, header.name, header.platform, header.parent) == ("profile", "test", "local", "")
    assert (result["status"], result["profile"]) == ("finished", str(path))
    assert load_profile(path).workload == load_profile(folder.path / "profile.json").workload == w
    ended = [event for event in events if isinstance(event, Ended)]
    assert result["invocations"] == len(ended)
    calibrated = [e.invocation for e in folders.events_of(folders.RunFolder(folder.path / "calibration")) if isinstance(e, Invoked)]
    assert set() < set(calibrated) < {event.invocation for event in ended}
    assert result["billed"]["gb_seconds"] == pytest.approx(sum(event.gb_seconds for event in ended), abs=1e-3)
    assert [event for event in events if not 0 <= event.t <= result["seconds"] + 1e-3] == []
    assert result["cost_usd"] > 0
    assert not folder.objects.exists()
    assert any("transfers" in line.text for line in lines(folder))
    assert {line.source for line in lines(folder)} >= {"client"}

    known = store.load("local", "folder")
    assert known is not None
    assert known.platform == load_profile(path).platform
    file = store.path_of("local", "folder")
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "machine": "another one"}))
    assert store.load("local", "folder") is None
    file.write_text(json.dumps({**raw, "platform": {k: v for k, v in raw["platform"].items() if k != "links"}}))
    assert store.load("local", "folder") is None, "of a release that measured no links"
    file.write_text("{")
    assert store.load("local", "folder") is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"confidence": 0.0}, "confidence = 0"),
        ({"within_s": 0.0}, "within_s = 0"),
        ({"platform": "mars"}, "platform 'mars'"),
        ({"channel": "memory"}, "channel 'memory'"),
    ],
)
def test_what_cannot_be_profiled_is_refused(options, named):
    with pytest.raises(JobError, match=named):
        profile_job(job(), **({"limits": Limits()} | options))


# -- refining -----------------------------------------------------------------------------------------------

PROFILE = Profile(
    workload=Workload(
        model_mb=1.0, a=2.0, b=10.0, m=0.0, memory_slope_mb=0.1, memory_base_mb=300.0, dataset_mb=1.0, samples=640, vcpus=1.0, apply_s=0.001
    ),
    platform=PlatformProfile(
        name="local",
        price_gb_s=1e-5,
        price_invocation=1e-7,
        cold_start_s=1.0,
        transfer=(Transfer(memory_mb=512, up=Affine(latency_s=0.01, mb_s=70), down=Affine(latency_s=0.01, mb_s=70)),),
    ),
)


def events(*, slower: float, iterations: int = 12, gap_s: float = 0.004, peak_mb: float = 250.0) -> list[Any]:
    """A run of two functions at 512 MB, 16 samples each, whose steps take `slower` times what the profile says."""
    out: list[Any] = [
        RunStarted(t=0, run_id="run", job="test", workers=2, aggregators=1, memory_mb=512, iterations=iterations, epochs=2, samples=640)
    ]
    step = slower * float(PROFILE.workload.compute_s(16, 512))
    for rank in range(2):
        out += [
            Invoked(t=0.0, rank=rank, attempt=0, invocation=f"i{rank}"),
            Started(t=1.8, rank=rank, attempt=0, invocation=f"i{rank}", cold=True),
        ]
        t = 2.0
        for i in range(iterations):
            spans = [("compute", t, t + step), ("upload", t + step, t + step + 0.02)]
            if i % (iterations // 2) == 0:
                spans.insert(0, ("compute", t - 1.0, t - 0.5))  # an evaluation
            end = t + step + 0.02
            spans.append(("compute", end, end + 0.007))
            t = end + 0.007 + gap_s
            out.append(Progress(t=t, rank=rank, attempt=0, iteration=i, epoch=0, samples=16, loss=1.0, version=i, spans=spans))
        out.append(Ended(t=t, rank=rank, attempt=0, invocation=f"i{rank}", status="ok", peak_memory_mb=peak_mb))
    return out


def test_a_run_that_was_slower_makes_steps_slower_and_nothing_else():
    refined = refine(PROFILE, events(slower=1.3))
    assert refined.workload.a == pytest.approx(2.6)
    assert (refined.workload.b, refined.workload.m) == (10.0, 0.0)
    assert refined.workload.apply_s == pytest.approx(0.007 * 512 / 1769)
    note = refined.fit.refined[0]
    assert refined.workload.step_s == pytest.approx(max(0.0, note.unexplained_s), abs=1e-5)
    assert refined.workload.memory_base_mb == 300.0
    assert refined.platform.cold_start_s == pytest.approx(1.8)
    assert refined.platform.transfer == PROFILE.platform.transfer
    assert (note.run, note.a_scaled_by) == ("run", 1.3)


def test_a_cold_start_of_a_profile_is_one_of_the_launch():
    relays = [
        event
        for n in range(1, 6)
        for event in (
            Invoked(t=3.0, rank=0, attempt=n, invocation=f"r{n}", reason="relay"),
            Started(t=3.2, rank=0, attempt=n, invocation=f"r{n}", cold=True),
        )
    ]
    assert refine(PROFILE, [*events(slower=1.3), *relays]).platform.cold_start_s == pytest.approx(1.8)


def test_a_refined_profile_agrees_with_its_own_run():
    once = refine(PROFILE, events(slower=1.3))
    assert refine(once, events(slower=1.3)).workload.a == pytest.approx(once.workload.a)


def test_what_the_model_cannot_explain_is_bookkeeping():
    quick, slow = (refine(PROFILE, events(slower=1.3, gap_s=gap)).workload for gap in (0.1, 0.2))
    assert slow.step_s - quick.step_s == pytest.approx(0.1)


def test_memory_is_raised_to_what_a_function_took_and_never_lowered():
    assert refine(PROFILE, events(slower=1.0, peak_mb=400.0)).workload.memory_needed_mb(16) == pytest.approx(400.0)
    assert refine(PROFILE, events(slower=1.0, peak_mb=100.0)).workload.memory_base_mb == 300.0


def test_a_run_that_is_too_short_says_nothing():
    with pytest.raises(JobError, match="0 iterations"):
        refine(PROFILE, events(slower=1.0, iterations=2))
    with pytest.raises(JobError, match="0 iterations"):
        refine(PROFILE, [])


def test_a_refined_profile_can_be_written(tmp_path):
    refined = refine(PROFILE, events(slower=1.1))
    refined.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == dataclasses.replace(refined)
