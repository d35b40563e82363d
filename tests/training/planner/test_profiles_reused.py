"""A profile that was just measured is what a plan starts from."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ephemeron.cli.main import main

JOB = """
name = "reused"
epochs = 1
code = ["{code}"]

[model]
target = "tiny:mlp"

[data]
source = "digits"

[simulation]
compute = {{ a = 60.0, b = 4.0, m = 0.0 }}
"""


def test_plan_uses_what_profile_has_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(code=Path(__file__).parents[2] / "training" / "code"))
    profiled = CliRunner().invoke(main, ["profile", str(job), "--platform", "simulated", "--out", str(tmp_path / "profile.json")])
    assert profiled.exit_code == 0, profiled.output
    planned = CliRunner().invoke(main, ["plan", str(job), "--platform", "simulated"])
    assert planned.exit_code == 0, planned.output
    assert "using the profile of this job" in planned.output
