"""The table of kinds, and runs whose kind this release does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.header import RunHeader, open_header, write_header
from ephemeron.runs.kinds import RunKind, find_kind


@pytest.mark.parametrize("name", ["training", "regions", "sparse", "tasks", "service", "profile"])
def test_a_kind_is_found_by_its_name(name):
    assert isinstance(find_kind(name), RunKind)


@pytest.mark.parametrize("verb", ["attach", "resume", "stop"])
def test_a_run_of_an_unknown_kind_is_listed_and_its_verbs_are_refused_in_a_line(verb: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    folder = folders.create("later-1")
    write_header(folder, RunHeader(run_id="later-1", kind="weather", platform="local", prices=load_prices("objects")))
    said = CliRunner().invoke(main, [verb, "later-1"])
    assert said.exit_code == 2
    assert "there is no kind of runs 'weather'" in said.output
    assert "known kinds: profile, regions, service, sparse, study, tasks, training" in said.output
    [row] = CliRunner().invoke(main, ["runs", "--json"]).output.splitlines()
    assert json.loads(row)["status"] == "interrupted"


def test_a_header_is_read_as_it_was_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    folder = folders.create("a-run")
    header = RunHeader(
        run_id="a-run",
        kind="training",
        platform="local",
        prices=load_prices("objects"),
        labels={"team": "x"},
        parent="a-study",
        functions=3,
    )
    write_header(folder, header)
    assert open_header(folder) == header
    folder.write("run.json", {"run_id": "a-run", "kind": "training", "platform": "local", "color": 1})
    with pytest.raises(JobError, match=r"run.json of a-run.*color"):
        open_header(folder)
