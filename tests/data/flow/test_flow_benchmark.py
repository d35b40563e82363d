"""What holds a trainer up, found and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from flows import Numbers, flow

from ephemeron.cli.main import main
from ephemeron.data.flow import Flow
from ephemeron.data.flow.benchmark import benchmark_flow

CODE = """
from ephemeron.data.flow import Flow


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i, i


def busy(data):
    for _ in range(200_000):
        pass
    return data


def broken(data):
    if data == 3:
        raise ValueError("three")
    return data


def train():
    return Flow("test/doctored").dataset(Numbers()).map_data("busy", busy).map_data("broken", broken)


flow = train()


def nothing():
    return 3


def pairs(samples):
    return tuple(zip(*samples))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "flows_of_doctor.py").write_text(CODE)
    return tmp_path


def doctor(code: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["data", "benchmark", "--code", str(code), *arguments])
    return result.exit_code, result.output


def test_the_slow_step_is_named(code):
    status, said = doctor(code, "flows_of_doctor:train", "--batch-size", "8", "--workers", "2", "--json")
    assert status == 0
    told = json.loads(said)
    assert told["bound_by"] == "busy"
    assert (told["batches"], told["samples"], told["skipped"]) == (8, 63, 1)
    assert told["samples_per_s"] > 0
    assert set(told["stages_s"]) == {"read", "busy", "broken", "network", "collate"}


def test_people_get_a_table_and_advice(code):
    status, said = doctor(code, "flows_of_doctor:train", "--batch-size", "8", "--workers", "0")
    assert status == 0
    assert "busy" in said
    assert "1 sample failed" in said
    assert "add loaders" in said


def test_a_flow_may_be_named_as_a_value(code):
    status, said = doctor(code, "flows_of_doctor:flow", "--batch-size", "8", "--workers", "0", "--json")
    assert status == 0
    assert json.loads(said)["samples"] == 63


@pytest.mark.parametrize(
    ("target", "options", "match"),
    [
        ("flows_of_doctor:nothing", (), "returned int"),
        ("flows_of_doctor:absent", (), "absent"),
        ("flows_of_doctor:train", ("--on-error", "fail"), "three"),
        ("flows_of_doctor:train", ("--on-error", "ignore"), "ignore"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(code, target, options, match):
    status, said = doctor(code, target, *options)
    assert status in (1, 2)
    assert match in said
    assert "Traceback" not in said


def test_a_job_says_what_the_options_do_not(code):
    job = code / "job.toml"
    job.write_text("""
model = "m:build"
[data]
flow = "flows_of_doctor:train"
on_error = "skip"
collate = "flows_of_doctor:pairs"
loaders = 1
[run]
batch_size = 4
""")
    status, said = doctor(code, str(job), "--batches", "5", "--json")
    told = json.loads(said)
    assert status == 0
    assert (told["batch_size"], told["workers"], told["batches"], told["bound_by"]) == (4, 1, 5, "busy")
    status, said = doctor(code, str(job), "--batch-size", "16", "--workers", "0", "--on-error", "fail")
    assert status in (1, 2)
    assert "three" in said
    job.write_text('model = "m:build"\n')
    status, said = doctor(code, str(job))
    assert (status, "names no flow" in said) == (2, True)


def test_a_trainer_that_is_slower_than_its_loaders_is_not_held_up():
    found = benchmark_flow(flow(64), batch_size=8, batches=6, workers=1, step_s=0.05)
    assert found.counters.batches == 6
    assert found.counters.bound_by() in (None, "noisy", "network", "collate", "read")
    assert 0 <= found.counters.waiting < 0.9


def test_an_empty_flow():
    found = benchmark_flow(Flow("a/b").dataset(Numbers(0)), workers=0)
    assert (found.samples, found.counters.batches, found.samples_per_s) == (0, 0, 0.0)
