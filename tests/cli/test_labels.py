"""Labels of runs, from the commands to lists, logs, calls and clouds."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.functions.base import Call
from ephemeron.runs import folders, services
from ephemeron.runs.header import read_header
from ephemeron.runs.labels import check_labels, has_labels, parse_labels
from tiny_job import CODE

MODULE = """
import logging

def warned(x):
    logging.getLogger("ephemeron").warning("item %d", x)
    return x
"""
JOB = """
name = "labelled"
model = "tiny:mlp"
optimizer = { target = "SGD", options = { lr = 0.1 } }
epochs = 1
code = ["CODE"]
[run]
platform = "simulated"
workers = 2
aggregators = 1
batch_size = 48
"""
REGIONS = 'workers = 3\nregions.region = [{ name = "a", workers = 2, aggregators = 1 }, { name = "b", workers = 1, aggregators = 1 }]\n'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labelled_items.py").write_text(MODULE)
    (tmp_path / "items.jsonl").write_text("1\n2\n")
    (tmp_path / "job.toml").write_text(JOB.replace("CODE", str(CODE)))
    yield tmp_path
    sys.modules.pop("labelled_items", None)


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done


def listed(*arguments):
    return [json.loads(line) for line in run("runs", *arguments, "--json").stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("team", "label 'team' has no value"),
        ("Team=x", "label 'Team' is no name of a label"),
        ("com.openfaas.scale=1", "is no name of a label"),
        ("team=", "label team: '' is no value"),
        ("team=a b", "label team: 'a b' is no value"),
        (f"team={'x' * 64}", "is no value"),
    ],
)
def test_what_is_no_label_is_refused_before_anything_starts(text, says):
    done = run("map", "labelled_items:warned", "--items", "items.jsonl", "--out", "o.jsonl", "--label", text, code=2)
    assert says in done.stderr
    assert not folders.all_runs()


def test_rules_of_labels():
    assert parse_labels(["team=x", "cost-centre=A.1_b-2"]) == {"team": "x", "cost-centre": "A.1_b-2"}
    assert check_labels(None) == {}
    for wrong in ({"a": 1}, {1: "a"}, {"a_": "x"}, {"a": ".x"}, {f"l{n}": "x" for n in range(11)}):
        with pytest.raises(JobError):
            check_labels(wrong)
    with pytest.raises(JobError, match="given twice"):
        parse_labels(["a=1", "a=2"])
    assert has_labels({"a": "1", "b": "2"}, {"a": "1"})
    assert not has_labels({"a": "1"}, {"a": "2"})
    call = Call(run="r", rank=1, attempt=0, memory_mb=128, lifetime_s=1.0, channel="folder", labels={"a": "1", "b": "2"})
    assert call.log_fields == {"run": "r", "rank": 1, "attempt": 0, "labels": "a=1,b=2"}
    assert Call.from_payload(call.to_payload()) == call
    assert "labels" not in Call(run="r", rank=1, attempt=0, memory_mb=128, lifetime_s=1.0, channel="folder").log_fields


def test_runs_are_found_by_their_labels(here):
    asked = ["map", "labelled_items:warned", "--items", "items.jsonl", "--out", "o.jsonl", "--max-workers", "1"]
    run(*asked, "--platform", "simulated", "--label", "team=x", "--label", "env=test")
    run(*asked, "--platform", "simulated", "--results", "others")
    assert len(listed()) == 2
    (row,) = listed("--label", "team=x", "--label", "env=test")
    assert row["labels"] == {"team": "x", "env": "test"}
    assert not listed("--label", "team=y")
    table = run("runs", "--label", "team=x").stdout
    assert "team=x env=test" in table
    assert table.splitlines()[-1].startswith("1 run, $")
    assert "labels" not in run("runs", "list", "--label", "env=other").stdout.splitlines()[0]
    assert "labels" in run("runs").stdout.splitlines()[0]


def test_what_a_function_logs_has_its_labels():
    run("map", "labelled_items:warned", "--items", "items.jsonl", "--out", "o.jsonl", "--max-workers", "1", "--label", "team=x")
    (name,) = [folder.run_id for folder in folders.all_runs()]
    said = run("logs", name).stdout
    assert "item 1 [" in said
    assert " labels=team=x]" in said


@pytest.mark.slow
def test_parts_of_a_run_have_its_labels(here):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    run("train", "job.toml", "--label", "team=x")
    assert [row["labels"] for row in listed()] == [{"team": "x"}]
    (here / "apart.toml").write_text((here / "job.toml").read_text().replace("workers = 2\naggregators = 1\n", "") + REGIONS.split("\n")[1])
    run("train", "apart.toml", "--label", "team=y")
    (whole,) = listed("--label", "team=y")
    parts = folders.find(whole["run_id"]).groups
    assert [header.labels for part in parts if (header := read_header(part))] == [{"team": "y"}] * 2


@pytest.mark.slow
def test_a_study_gives_its_labels_to_its_trials(here):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    pytest.importorskip("optuna", reason="no Optuna; pip install 'ephemeron[tuning]'")
    (here / "study.toml").write_text(
        'name = "sweep"\njob = "job.toml"\nmetric = "loss"\nmode = "min"\ntrials = 2\nsampler = "grid"\npruner = "none"\n'
        'predict = false\n[space]\n"optimizer.options.lr" = [0.1, 0.2]\n'
    )
    run("tune", "study.toml", "--label", "team=x")
    rows = listed("--label", "team=x")
    assert sorted(row["kind"] for row in rows) == ["study", "training", "training"]
    total = run("runs", "--label", "team=x").stdout.splitlines()[-1]
    assert total.startswith("1 run, $")  # its trials are in its cost
    refused = run("tune", "study.toml", "--resume", "--label", "team=y", code=2)
    assert "one that goes on keeps those that it has" in refused.stderr


def test_a_service_has_labels(monkeypatch):
    found = {}
    monkeypatch.setattr(services, "start", lambda *given, labels, **more: found.update(labels) or services.Said("over", {}))
    monkeypatch.setenv("EPHEMERON_RENDEZVOUS_TOKEN", "t")
    run("serve", "rendezvous", "--label", "team=x")
    assert found == {"team": "x"}


def test_labels_become_tags_of_functions(tmp_path):
    from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy
    from ephemeron.functions.aws.settings import AwsSettings
    from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, specs_of
    from ephemeron.functions.openfaas.settings import OpenFaasSettings

    asked = []

    class Client:
        """Records requests; the function is there from the first one on."""

        def __getattr__(self, name):
            def request(**given):
                asked.append((name, given))
                if name == "get_function_configuration":
                    return {"FunctionArn": "arn:f", "Environment": {}}
                return self

            return request

        def get_waiter(self, name):
            return self

    spec = LambdaSpec(role="arn:aws:iam::1:role/r", memory_mb=128, image="i", tags={"team": "x"})
    assert deploy(Client(), AwsSettings(region="r"), spec) == "updated"
    assert ("tag_resource", {"Resource": "arn:f", "Tags": {"team": "x"}}) in asked
    (one,) = specs_of(DeploymentSpec(image="i", memory_mb=128, labels={"team": "x"}), OpenFaasSettings(), (128,))
    assert one.labels["team"] == "x"
    assert one.labels["com.openfaas.scale.type"] == "capacity"
