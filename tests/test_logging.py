"""Records of the library: level, format and the fields of their context."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from click.testing import CliRunner

from ephemeron import logs
from ephemeron.cli.main import main
from ephemeron.errors import JobError

LOGGER = logging.getLogger("ephemeron.tests")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The library's logger as a new process has it."""
    logger = logging.getLogger("ephemeron")
    before = logger.handlers[:], logger.level
    logger.handlers[:] = []
    monkeypatch.delenv(logs.LEVEL_VARIABLE, raising=False)
    monkeypatch.delenv(logs.FORMAT_VARIABLE, raising=False)
    yield
    logger.handlers[:], logger.level = before


def test_fields_of_the_context_follow_a_message(capsys):
    logs.configure("info")
    logs.configure("info")  # adds no second handler
    with logs.context(run="r", rank=1), logs.context(attempt=2):
        LOGGER.info("replaced %s", "rank 0")
    LOGGER.debug("unseen")
    LOGGER.info("outside")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO ephemeron.tests: replaced rank 0 [run=r rank=1 attempt=2]")
    assert second.endswith("INFO ephemeron.tests: outside")


def test_records_as_json(monkeypatch, capsys):
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "debug")
    logs.configure()
    with logs.context(run="r", rank=3):
        LOGGER.debug("iteration %d", 5)
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"], line["run"], line["rank"]) == ("debug", "iteration 5", "r", 3)


def test_simulated_functions_have_fields_of_their_own(capsys):
    logs.configure("info")

    async def function(rank):
        with logs.context(rank=rank):
            await asyncio.sleep(0)
            LOGGER.info("works")

    async def all_of_them():
        await asyncio.gather(function(0), function(1))

    asyncio.run(all_of_them())
    assert [line.rpartition("works ")[2] for line in capsys.readouterr().err.splitlines()] == ["[rank=0]", "[rank=1]"]


@pytest.mark.parametrize("variable", [logs.LEVEL_VARIABLE, logs.FORMAT_VARIABLE])
def test_an_unknown_level_or_format_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(JobError, match="loud is not known"):
        logs.configure()


@pytest.mark.parametrize(
    ("arguments", "level"),
    [(["runs"], "WARNING"), (["-v", "runs"], "INFO"), (["runs", "-vv"], "DEBUG"), (["runs", "--log-level", "error"], "ERROR")],
)
def test_every_command_sets_the_level(monkeypatch, tmp_path, arguments, level):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "")
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert logging.getLevelName(logging.getLogger("ephemeron").level) == level


def test_a_wrong_level_is_one_line(monkeypatch):
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "loud")
    told = CliRunner().invoke(main, ["runs"])
    assert told.exit_code == 2
    assert "log level loud is not known; use one of debug, info, warning, error" in told.output
