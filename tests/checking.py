"""Checks a platform as people do, and looks what that leaves behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.communication.channels import open_channel


def ask(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings, each of them one line that says something."""
    ran = CliRunner().invoke(main, ["cloud", "check", "--json", *arguments], catch_exceptions=False)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    for row in found:
        assert set(row) == {"step", "ok", "text"}
        assert row["text"].strip()
        assert "\n" not in row["text"]
    assert [row["ok"] for row in found] == [True] * (len(found) - 1) + [ran.exit_code == 0]
    assert ran.exit_code in (0, 2)
    return ran.exit_code, found


def refusal(*arguments: str) -> str:
    """The line of the question that failed, after its step."""
    code, found = ask(*arguments)
    assert code == 2, found
    return f"{found[-1]['step']}: {found[-1]['text']}"


def texts(*arguments: str) -> dict[str, str]:
    """All lines where nothing failed, those of a step joined."""
    code, found = ask(*arguments)
    assert code == 0, found
    out: dict[str, str] = {}
    for row in found:
        out[row["step"]] = "\n".join(filter(None, (out.get(row["step"]), row["text"])))
    return out


def left(address: str | None, prefix: str = "check") -> list[str]:
    """Keys that are still there: the check's, or those of a run."""
    assert address is not None

    async def main() -> list[str]:
        async with open_channel(address) as channel:
            return await channel.list(prefix)

    return asyncio.run(main())
