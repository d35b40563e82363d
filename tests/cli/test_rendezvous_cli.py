"""`ephemeron serve rendezvous` as its operator runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.communication.direct.connection import Connection
from ephemeron.communication.direct.punching import rendezvous_transports
from ephemeron.errors import JobError


def test_members_meet_at_a_service_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("a secret\n")
    command = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "serve", "rendezvous", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--token-file", str(token), "--json"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            monkeypatch.setenv("EPHEMERON_RENDEZVOUS", json.loads(process.stdout.readline())["address"])
            monkeypatch.setenv("EPHEMERON_RENDEZVOUS_TOKEN", "a secret")

            async def pair() -> list[str]:
                accepted: asyncio.Queue[Connection] = asyncio.Queue()
                ours, theirs = rendezvous_transports(), rendezvous_transports()
                found = []
                for here, there in zip(ours, theirs, strict=True):
                    address = await there.listen("the run's token", accepted.put_nowait)
                    await here.listen("the run's token", accepted.put_nowait)
                    assert address is not None
                    dialled = await here.dial(address, "the run's token", timeout_s=20)
                    found.append((await asyncio.wait_for(accepted.get(), 20)).transport)
                    assert dialled.transport == found[-1]
                for transport in (*ours, *theirs):
                    await transport.close()
                return found

            assert asyncio.run(pair()) == ["punched", "relay"]
        finally:
            process.send_signal(signal.SIGTERM)
        last = json.loads(process.stdout.readline())
        assert process.wait(20) == 0
    assert last["meetings"] == 2
    assert last["relayed_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--listen", "7071"], "give HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "--allow-remote"),
        ([], "--token-file"),
        (["--tls-certificate", __file__], "--tls-key"),
        (["--tls-certificate", __file__, "--tls-key", __file__], "PEM"),
    ],
)
def test_what_is_refused(options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPHEMERON_RENDEZVOUS_TOKEN", raising=False)
    token = ["--token-file", __file__] if "--tls-certificate" in options else []
    ran = CliRunner().invoke(main, ["serve", "rendezvous", *options, *token])
    assert ran.exit_code == 2
    assert problem in ran.output


def test_an_address_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_RENDEZVOUS", "127.0.0.1:7071")
    monkeypatch.delenv("EPHEMERON_RENDEZVOUS_TOKEN", raising=False)
    with pytest.raises(JobError, match="EPHEMERON_RENDEZVOUS_TOKEN"):
        rendezvous_transports()
    monkeypatch.delenv("EPHEMERON_RENDEZVOUS")
    assert rendezvous_transports() == []
