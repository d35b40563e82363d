"""`ephemeron serve dashboard` as its user runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from dashboard_worlds import TOKEN, troubled_run, write_run

from ephemeron.cli.main import main
from ephemeron.errors import MissingExtra

COMMAND = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "serve", "dashboard"]


@contextmanager
def dashboard(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A dashboard in a process of its own, and its address."""
    pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")
    pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
    command = [*COMMAND, str(root), "--port", "0", "--token", TOKEN, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["address"].partition("/?")[0]
        finally:
            process.kill()


def runs_of(address: str) -> list[str]:
    request = urllib.request.Request(f"{address}/api/runs", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return [run["run_id"] for run in json.load(response)["runs"]]


@pytest.mark.slow
def test_a_killed_dashboard_shows_everything_when_it_is_started_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", troubled_run())
    before = {p: p.read_bytes() for p in folder.iterdir()}
    with dashboard(tmp_path) as (process, address):
        assert runs_of(address) == ["r"]
        process.kill()
    with dashboard(tmp_path) as (_, address):
        assert runs_of(address) == ["r"]
    assert {p: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.slow
def test_a_signal_ends_it_while_a_page_follows_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "r", troubled_run()[:-1])
    with dashboard(tmp_path) as (process, address):
        url = f"{address}/api/stream?topic=run&key=0/r"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"retry")
            process.send_signal(signal.SIGTERM)
            stream.read()
        assert process.wait(180) == 0


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["serve", "dashboard", *arguments])
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_an_occupied_port_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")
    pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(str(tmp_path), "--port", str(port))
    assert line == (f"error: cannot listen at 127.0.0.1:{port}: Address already in use; give another --port, or 0 for a free one")


def test_a_host_of_the_network_needs_a_word(tmp_path: Path) -> None:
    line = refused(str(tmp_path), "--host", "0.0.0.0")
    assert line == "error: 0.0.0.0 can be reached from other machines; add --allow-remote if that is meant"


@pytest.mark.parametrize("token", ["short", "", "with a line\nbreak in it"])
def test_a_token_that_can_be_guessed_or_sent_wrongly_is_refused(tmp_path: Path, token: str) -> None:
    assert "characters; give 16 or more printable ones" in refused(str(tmp_path), "--token", token)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "none")) == f"error: there is no folder {tmp_path / 'none'}"


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "msgspec"])
def test_a_missing_extra_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    from ephemeron.dashboard.server import serve

    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[dashboard\]'"):
        serve([tmp_path], host="127.0.0.1", port=0, token=TOKEN, allow_remote=False, on_ready=print)
