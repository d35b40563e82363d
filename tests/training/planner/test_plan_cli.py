"""`ephemeron plan` as people type it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main

PROFILE = {
    "workload": {
        "model_mb": 97.49,
        "a": 37.19,
        "b": 12.48,
        "m": -111.46,
        "memory_slope_mb": 6,
        "memory_base_mb": 700,
        "dataset_mb": 180,
        "samples": 50000,
    },
    "platform": {
        "name": "lambda",
        "memory_mb": {"min": 128, "max": 10240, "step": 128},
        "lifetime_s": 900,
        "cold_start_s": 3,
        "price_gb_s": 1.66667e-5,
        "price_invocation": 2e-7,
        "price_put": 5e-6,
        "price_get": 4e-7,
        "poll_s": 0.02,
        "transfer": [{"memory_mb": 1024, "up": {"p_mb_s": 73, "t_per_mb": 0.11}, "down": {"p_mb_s": 82, "t_per_mb": 0.35}}],
    },
}


def run(*args, profile=PROFILE, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    return CliRunner().invoke(main, ["plan", "--profile", str(path), *args])


def test_the_last_line_is_the_contract(tmp_path):
    done = run("--epochs", "2", "--max-global-batch", "256", "--json", "--out", str(tmp_path / "out"), tmp_path=tmp_path)
    assert done.exit_code == 0, done.output
    value = json.loads(done.output.splitlines()[-1])
    assert value["search"] == {**value["search"], "method": "exact", "optimal": True, "gap": 0.0}
    assert value["predicted"]["iterations"] > 0
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"plan.json", "plan.html"}
    assert "proven optimal" in done.output
    assert "bounded by" in done.output


@pytest.mark.parametrize("search", ["two-stage", "brute-force"])
def test_other_searches_never_do_better(search, tmp_path):
    args = ("--max-global-batch", "48", "--pattern", "k-reduce", "--memory-step-mb", "2048", "--json")
    best = json.loads(run(*args, tmp_path=tmp_path).output.splitlines()[-1])
    other = json.loads(run(*args, "--search", search, tmp_path=tmp_path).output.splitlines()[-1])
    assert other["search"]["method"] == search
    assert other["predicted"]["cost_usd"] >= best["predicted"]["cost_usd"] * (1 - 1e-12)


def broken(table, key, value):
    changed = json.loads(json.dumps(PROFILE))
    changed[table][key] = value
    return changed


@pytest.mark.parametrize(
    ("profile", "args", "words"),
    [
        (broken("workload", "a", -1), (), "workload.a = -1.0"),
        (broken("workload", "samples", 10.5), (), "samples"),
        (broken("workload", "speed", 1), (), "unknown key speed"),
        (broken("platform", "lifetime_s", 0), (), "lifetime_s"),
        (broken("platform", "transfer", []), (), "transfer"),
        ({"workload": PROFILE["workload"]}, (), "missing key platform"),
        (PROFILE, ("--deadline-s", "-5"), "--deadline-s"),
        (PROFILE, ("--platform", "moon"), "moon"),
        (PROFILE, ("--deadline-s", "3"), "binding limit: deadline"),
        (broken("workload", "memory_base_mb", 99999), (), "do not fit one function"),
        (PROFILE, ("--prices", "absent.toml"), "absent.toml"),
        (PROFILE, ("--sync", "asp"), "cannot be predicted"),
    ],
)
def test_mistakes_are_one_clear_line(profile, args, words, tmp_path):
    done = run(*args, profile=profile, tmp_path=tmp_path)
    assert done.exit_code == 2
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_nothing_to_plan():
    done = CliRunner().invoke(main, ["plan"])
    assert done.exit_code == 2
    assert "give a JOB.toml" in done.output


def test_local_steps_are_given_and_not_searched(tmp_path):
    """A quarter of the exchanges, each after four batches; the plan is of one configuration to run."""
    from ephemeron.training.planner import load_plan, overrides

    args = ("--epochs", "2", "--max-global-batch", "256", "--deadline-s", "3000", "--json")
    plain, local = (
        json.loads(run(*args, *more, tmp_path=tmp_path).output.splitlines()[-1])
        for more in ((), ("--local-steps", "4", "--out", str(tmp_path / "out")))
    )
    assert (plain["local_steps"], local["local_steps"]) == (1, 4)
    assert local["predicted"]["cost_usd"] < plain["predicted"]["cost_usd"]
    per_exchange = 4 * (
        local["batch_size_aggregator"] * local["aggregators"]
        + local["batch_size_nonaggregator"] * (local["workers"] - local["aggregators"])
    )
    assert local["predicted"]["iterations"] == local["epochs"] * -(-PROFILE["workload"]["samples"] // per_exchange)
    assert overrides(load_plan(tmp_path / "out" / "plan.json").choice)["exchange"]["local_steps"] == 4
