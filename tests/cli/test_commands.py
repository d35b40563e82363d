"""The groups of commands: sections of the help, short forms, and names that have changed."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import RENAMED, SECTIONS, main
from ephemeron.cli.runs.commands import runs
from ephemeron.errors import PlatformError

VERBS = ("attach", "logs", "stop", "resume", "suspend", "resize", "report", "evaluate", "export")
OLD = {
    "clean": "cloud remove",
    "clean aws --yes": "cloud remove aws",
    "clean aws-microvm": "cloud remove aws-microvm",
    "clean openfaas": "cloud remove openfaas",
    "dashboard --port 0": "serve dashboard",
    "data serve --port 7070": "serve data",
    "deploy": "cloud deploy",
    "deploy aws --channel s3://bucket/prefix": "cloud deploy aws",
    "deploy aws-microvm": "cloud deploy aws-microvm",
    "deploy openfaas --help": "cloud deploy openfaas",
    "doctor --platform aws": "cloud check [PLATFORM]",
    "geo": "regions",
    "geo join last far": "regions join",
    "geo leave last far": "regions leave",
    "geo plan regions.toml": "regions plan",
    "geo probe regions.toml": "regions probe",
    "geo replan last": "regions replan",
    "platforms --json": "cloud list",
    "rendezvous": "serve rendezvous",
    "sparse-store --shards 2": "serve sparse",
    "workflow deploy x.json": "cloud workflow deploy",
}


@pytest.mark.parametrize("given", OLD)
def test_an_old_name_is_refused_with_the_new_one_in_one_line(given):
    done = CliRunner().invoke(main, given.split())
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"error: `ephemeron ([a-z -]+)` is now `ephemeron (.+)`", line)[2] == OLD[given]
    command: click.Command = main
    for word in OLD[given].split():
        if word != "[PLATFORM]":
            command = command.commands[word]
    assert done.stdout == ""


def test_all_old_names_are_tested_and_none_of_them_is_a_command():
    assert {old for given in OLD for old in RENAMED if given == old or given.startswith(f"{old} ")} == set(RENAMED)
    for old in RENAMED:
        *group, name = old.split()
        assert name not in (main.commands[group[0]] if group else main).commands


def test_an_old_name_ends_the_process_with_status_2_and_without_a_traceback():
    command = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "deploy", "aws"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: `ephemeron deploy aws` is now `ephemeron cloud deploy aws`\n")


def test_every_command_is_in_one_section_of_the_help_with_a_whole_line():
    listed = [command.name for commands in SECTIONS.values() for command in commands]
    assert sorted(listed) == sorted(main.commands)
    text = CliRunner().invoke(main, ["--help"]).stdout
    for section, commands in SECTIONS.items():
        rows = text.split(f"\n{section}:\n")[1].split("\n\n")[0].splitlines()
        assert [row.split()[0] for row in rows] == [command.name for command in commands]
        assert [row for row in rows if row.endswith("...")] == []


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_runs_work_with_and_without_the_group(verb):
    long, short = (CliRunner().invoke(main, [*words, "no-such-run"]) for words in (["runs", verb], [verb]))
    assert (long.exit_code, long.output) == (short.exit_code, short.output)
    assert long.exit_code == 2
    usage = CliRunner().invoke(main, ["runs", verb, "--help"]).stdout
    assert usage.startswith(f"Usage: main runs {verb} [OPTIONS]")
    assert usage.count("--log-level") == 1


def test_the_group_of_runs_has_these_verbs_and_lists_runs(monkeypatch, tmp_path):
    assert set(runs.commands) == {*VERBS, "list", "clean"}
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "digits-1128-101010-abcd"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")  # a damaged record: the run is listed all the same
    alone, listed = (CliRunner().invoke(main, ["runs", *words]) for words in ([], ["list"]))
    assert "digits-1128-101010-abcd" in alone.stdout
    assert alone.stdout == listed.stdout
    as_json = [CliRunner().invoke(main, words).stdout for words in (["runs", "--json"], ["runs", "list", "--json"])]
    assert as_json[0] == as_json[1]
    assert '"run_id": "digits-1128-101010-abcd"' in as_json[0]


POOLS = ("map", "predict", "prepare", "tune", *(f"linalg {name}" for name in main.commands["linalg"].commands if name != "clean"))


def command_of(name):
    command = main
    for word in name.split():
        command = command.commands[word]
    return command


@pytest.mark.parametrize("name", POOLS)
def test_options_of_functions_are_spelt_alike_in_every_command(name):
    options = {option: each for each in command_of(name).params for option in each.opts}
    same = {option: each for each in command_of("map").params for option in each.opts}
    for option in (
        "--platform",
        "--channel",
        "--max-workers",
        "--budget-usd",
        "--aws-function",
        "--aws-region",
        "--ray-address",
        "--label",
    ):
        assert options[option].name == same[option].name
        assert options[option].type.name == same[option].type.name
    assert options["--workers"].hidden


@pytest.mark.parametrize("given", [(name, "--workers", "--max-workers") for name in POOLS] + [("train", "--max-workers", "--workers")])
def test_an_option_of_another_command_is_refused_with_the_right_one(given):
    name, wrong, right = given
    done = CliRunner().invoke(main, [*name.split(), wrong, "4", *["x"] * 3])
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, line.startswith(f"error: there is no {wrong}; use {right}")) == (2, True)


@pytest.mark.parametrize("command", ["map", "tune", "linalg", "prepare", "train"])
def test_a_disk_that_cannot_be_written_is_told_in_one_line(command, monkeypatch):
    def fails(context):
        raise OSError(errno.ENOSPC, "No space left on device", "/home/runs/a/events.jsonl")

    monkeypatch.setattr(main.commands[command], "invoke", fails)
    done = CliRunner().invoke(main, [command, *COMPLETE[command]])
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 1
    assert line.startswith("error: /home/runs/a/events.jsonl cannot be written: No space left on device; make room, or set EPHEMERON_HOME")


COMPLETE = {"map": ("m:f", "--items", "x"), "tune": ("s.toml",), "linalg": ("qr", "A.npy"), "prepare": ("r.toml",), "train": ("job.toml",)}


def test_where_functions_end_by_a_full_disk_it_is_named(monkeypatch, tmp_path):
    def fails(context):
        raise PlatformError("a function that runs tasks ended: lost")

    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(main.commands["prepare"], "invoke", fails)
    assert CliRunner().invoke(main, ["prepare", "r.toml"]).stderr == "error: a function that runs tasks ended: lost\n"
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=4096))
    assert f"lost; the disk of {tmp_path} is full: make room" in CliRunner().invoke(main, ["prepare", "r.toml"]).stderr
