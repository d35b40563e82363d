"""The command line end to end: contract of `--json`, exit codes, one-line errors, lists and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main

JOB = Path(__file__).parents[2] / "examples" / "digits" / "job.toml"
CONTRACT = {
    "run_id",
    "status",
    "seconds",
    "cost_usd",
    "workers",
    "aggregators",
    "memory_mb",
    "batch_size_aggregator",
    "batch_size_nonaggregator",
    "pattern",
    "sync",
    "channel",
    "exchange",
    "compression",
    "iterations",
    "invocations",
    "metrics",
    "traffic",
    "billed",
    "weights_sha256",
    "phases_s",
}


def run(*arguments: str):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def trained(home, pictures, tmp_path):
    result = run("train", JOB, "--platform", "simulated", "--epochs", "1", "--sync", "hap", "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1]), result


def test_json_is_the_last_line_and_has_the_contract_s_keys(trained, tmp_path):
    value, _ = trained
    assert set(value) >= CONTRACT
    assert set(value["metrics"]) == {"loss", "accuracy"}
    assert set(value["traffic"]) == {
        "puts",
        "gets",
        "polls",
        "deletes",
        "lists",
        "bytes_up",
        "bytes_down",
        "store_requests",
        "direct_bytes_sent",
        "direct_bytes_received",
    }
    assert set(value["billed"]) == {"gb_seconds", "requests", "storage_usd"}
    assert set(value["phases_s"]) == {"load", "compute", "upload", "aggregate", "download", "wait"}
    assert value["iterations"] == 23
    assert len(value["weights_sha256"]) == 64
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"result.json", "weights.safetensors", "report.html", "report.png"}


@pytest.mark.slow
def test_plain_lines_when_the_output_is_no_terminal(trained):
    _, result = trained
    assert "epoch 1/1" in result.stderr
    assert "finished after simulated" in result.stderr
    assert "\x1b[" not in result.stderr
    assert "\r" not in result.stderr


def test_runs_and_report(trained, tmp_path):
    value, _ = trained
    listed = json.loads(run("runs", "--json").stdout)
    assert listed["run_id"] == value["run_id"]
    assert listed["status"] == "finished"
    assert value["run_id"] in run("runs").stdout
    again = run("report", "last", "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again" / "report.html").stat().st_size > 10_000


def test_no_runs(home):
    assert "no runs" in run("runs").stdout


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("does not exist", ["train", "/no/such/job.toml"]),
        ("workers = 0 should be at least 1", ["train", JOB, "--workers", "0"]),
        ("more than workers", ["train", JOB, "--aggregators", "9"]),
        ("use bsp, hap, hsp, asp or ssp:N", ["train", JOB, "--sync", "sometimes"]),
        ("binding limit: max_global_batch", ["train", JOB, "--batch-size", "500"]),
        ("binding limit: lifetime", ["train", JOB, "--function-timeout-s", "5000"]),
        ("there is no rank 9", ["train", JOB, "--fault", "kill:rank=9,iteration=1"]),
        ("unknown kind 'kil'", ["train", JOB, "--fault", "kil:rank=1"]),
        ("is of no known kind", ["train", JOB, "--channel", "ftp://here"]),
        ("cannot be simulated", ["train", JOB, "--platform", "simulated", "--channel", "s3://b/p"]),
        ("is not in", ["attach", "nothing"]),
        ("is not in", ["resume", "nothing"]),
        ("is not in", ["stop", "nothing"]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words, arguments, home):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len([line for line in result.stderr.splitlines() if not line.startswith("checking ")]) == 1
    assert not list(home.glob("runs/*"))


@pytest.mark.slow
def test_simulated_runs_cannot_be_resumed(trained):
    value, _ = trained
    result = run("resume", value["run_id"])
    assert result.exit_code == 2
    assert "was simulated" in result.stderr


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached_exits_1(home, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    result = run("train", JOB, "--channel", "s3://bucket/runs")
    assert result.exit_code == 1
    assert "s3://bucket/runs" in result.stderr
    assert not list(home.glob("runs/*"))


def test_help_is_quick_to_import():
    """`--help` must not load PyTorch or NumPy."""
    code = "import sys\nfrom ephemeron.cli.main import main\nsys.exit(','.join(m for m in ('torch', 'numpy', 'obstore') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
