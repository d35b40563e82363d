"""Predicted time and requests of runs over direct links against the simulator, whose network is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from ephemeron.functions.world import Simulation
from ephemeron.training.driver import api
from ephemeron.training.job import DataSpec, Job, Target
from ephemeron.training.planner.model.exchange import ExecutionOptions, exchange
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.profiling import profile_job

CODE = Path(__file__).parents[3] / "training" / "code"


@pytest.mark.parametrize(("workers", "hidden"), [(2, 16), (4, 200)])
def test_a_simulated_run_takes_the_predicted_time_and_requests(tmp_path, monkeypatch, workers, hidden):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    world = Simulation(latency_s=0.01, bandwidth_mb_s=2.0, cold_start_s=2.5, compute={"a": 50.0, "b": 4.0, "m": -7.0})
    job = Job(
        name="t", model=Target(target="tiny:mlp", options={"hidden": hidden}), data=DataSpec(), epochs=1, code=(CODE,), simulation=world
    )
    profile = profile_job(job, platform="simulated")
    platform = profile.platform.over_links()
    assert platform is not None
    asked = api.configure(job, platform="simulated", channel="direct", workers=workers, batch_size=32, memory_mb=1769)
    run = api.train(job, asked).summary
    assert run.aggregators == workers, "all ranks own a part by default"
    p = predict(
        profile.workload,
        platform,
        ExecutionOptions(pattern="k-reduce", epochs=1),
        workers=workers,
        memory_mb=1769,
        aggregators=workers,
        batch=32,
        other_batch=32,
    )
    assert run.iterations == p.iterations
    assert run.seconds == pytest.approx(float(p.seconds), rel=0.02)
    assert run.cost_usd == pytest.approx(float(p.cost_usd), rel=0.02)
    assert run.traffic.puts == pytest.approx(float(p.puts), abs=1)
    assert run.traffic.gets == pytest.approx(float(p.gets), abs=2)
    e = exchange(profile.workload, platform, ExecutionOptions(), workers=workers, aggregators=workers, memory_mb=1769)
    # Heads of messages, and what replacements would need beside it; nothing twice.
    assert 1 < run.traffic.direct_bytes_sent / (run.iterations * float(e.direct_mb) * 1e6) < 1.2
