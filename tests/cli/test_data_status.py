"""`ephemeron data status` asks the service that readers would use."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.data.service.messages import StatusReply
from ephemeron.data.service.protocol import LIST_FLOWS, CallDispatcher
from ephemeron.data.service.settings import TOKEN_VARIABLE, Endpoint


def test_the_service_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    calls = CallDispatcher("coordinator")
    calls.add(LIST_FLOWS, lambda *_: (asked.append(1), (StatusReply(flows=(), routers={}), ()))[1])
    endpoint = Endpoint(calls, token="a token of this test")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    monkeypatch.setenv("EPHEMERON_DATA_SERVICE", str(endpoint.address))
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of this test")
    try:
        result = CliRunner().invoke(main, ["data", "status"], catch_exceptions=False)
        assert (result.exit_code, result.stdout.strip(), len(asked)) == (0, "no flows are registered", 1)
        # A folder that is named is this machine's own, as for readers.
        result = CliRunner().invoke(main, ["data", "status", "--folder", str(tmp_path / "own")])
        assert result.exit_code != 0
        assert f"no data service runs with folder {tmp_path / 'own'}" in result.stderr
        assert len(asked) == 1
    finally:
        endpoint.close()
