"""`ephemeron cloud check` where nothing but this machine is needed. The clouds' questions are in their own rooms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from checking import ask, left, refusal, texts
from ephemeron.cli.main import main
from ephemeron.training.driver.launching.diagnostics import diagnose

if TYPE_CHECKING:
    from servers import ServerProcess


@pytest.mark.slow
def test_this_machine_is_well_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    where = (tmp_path / "objects").as_uri()
    said = texts("--channel", where)
    assert list(said) == ["installed", "channel", "function"]
    assert "a key is given away once; lists; deletes" in said["channel"]
    assert "one of 512 MB began " in said["function"]
    assert "put an object in " in said["function"]
    assert left(where) == []
    assert not (tmp_path / "home").exists(), "it is no run"


def test_people_get_the_same_lines_with_a_mark(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["cloud", "check", "--no-call", "--channel", (tmp_path / "o").as_uri()])
    assert ran.exit_code == 0, ran.output
    assert [line[:4] for line in ran.stdout.splitlines()] == ["ok  ", "ok  "]
    ran = CliRunner().invoke(main, ["cloud", "check", "--no-call", "--channel", "ftp://x"])
    assert ran.exit_code == 2
    assert ran.stdout.splitlines()[-1].startswith("FAIL  channel    channel 'ftp://x' is of no known kind; use one of")


def test_without_a_call_no_function_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a function was started")

    monkeypatch.setattr("ephemeron.functions.local.LocalPlatform.start", started)
    assert list(texts("--no-call")) == ["installed", "channel"]
    with pytest.raises(AssertionError, match="a function was started"):
        list(diagnose("local"))


@pytest.mark.parametrize(("module", "platform"), [("ray", "ray"), ("lithops", "lithops"), ("boto3", "aws"), ("torch", "local")])
def test_an_extra_that_is_absent_is_named(module: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = {"boto3": "aws"}.get(module, module)
    said = refusal(platform, "--no-call")
    assert said == f"installed: {module} is not installed; run: pip install 'ephemeron[{extra}]'"


def test_a_channel_whose_client_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    said = refusal("--channel", "redis://127.0.0.1:9/0", "--no-call")
    assert said == "channel: redis is not installed; run: pip install 'ephemeron[cache]'"


def test_a_channel_that_is_not_there_and_one_that_wants_a_password(locked_valkey: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal("--channel", "redis://127.0.0.1:9/0")
    assert "channel: redis://127.0.0.1:9/0: cannot connect" in said
    assert "check that the server runs" in said
    assert "set EPHEMERON_CHANNEL_PASSWORD to its password" in refusal("--channel", locked_valkey.address)
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", locked_valkey.env["EPHEMERON_CHANNEL_PASSWORD"])
    assert locked_valkey.address in texts("--channel", locked_valkey.address, "--no-call")["channel"]
    assert left(locked_valkey.address) == []


def test_a_password_in_the_address_is_used_and_not_shown(locked_valkey: ServerProcess) -> None:
    full = locked_valkey.address.replace("redis://", "redis://:pw-of-the-tests%2F7f3a@")
    _, found = ask("--channel", full, "--no-call")
    assert "7f3a" not in str(found)


def test_a_store_that_gives_a_taken_key_away_is_no_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some servers do that only resemble S3: two functions would believe to be the same rank."""
    from ephemeron.communication.channels.object_store import ObjectsChannel

    put: Callable[..., object] = ObjectsChannel.put

    async def careless(self: ObjectsChannel, key: str, buffers: object, *, create: bool = False) -> None:
        await put(self, key, buffers)  # type: ignore[misc]

    monkeypatch.setattr(ObjectsChannel, "put", careless)
    where = (tmp_path / "objects").as_uri()
    assert "a key that is taken was given away again, on which fencing relies" in refusal("--channel", where)
    assert left(where) == []


def test_options_of_another_platform_and_what_cannot_be_asked() -> None:
    ran = CliRunner().invoke(main, ["cloud", "check", "--aws-function", "x"])
    assert (ran.exit_code, "platform local takes no --aws-function" in ran.output) == (2, True)
    simulated = CliRunner().invoke(main, ["cloud", "check", "simulated"])
    assert (simulated.exit_code, "in virtual time: nothing to check" in simulated.output) == (0, True)


LITHOPS = ("lithops", "--no-call")


def test_lithops_asks_what_it_can_without_starting_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lithops", reason="no Lithops; pip install 'ephemeron[lithops]'")
    monkeypatch.setenv("LITHOPS_CONFIG", "{}")  # none of the machine's own
    where = (tmp_path / "objects").as_uri()
    said = texts(*LITHOPS, "--channel", where)
    assert "backend localhost" in said["platform"]
    assert "1 function of 1769 MB can run at once" in said["platform"]
    assert "no object was tried" in texts(*LITHOPS)["channel"]
    there = (*LITHOPS, "--lithops-backend", "aws_lambda", "--channel", where)
    assert "is on this machine, where functions of aws_lambda cannot reach it; use s3://" in refusal(*there)
    assert "64 functions may run at once; use fewer workers" in refusal(*LITHOPS, "--channel", where, "--workers", "64")
    secret = refusal(*LITHOPS, "--channel", "redis://:hush@127.0.0.1:9/0")
    assert "set EPHEMERON_CHANNEL_PASSWORD in the runtime" in secret
    assert "hush" not in secret
