"""Secrets of channels: each task has its own, and the environment of the process has none."""

from __future__ import annotations

import asyncio
import os

import pytest

from ephemeron.communication.channels.credentials import environment, given, variable

NAME = "EPHEMERON_CHANNEL_PASSWORD"


def test_tasks_that_run_at_once_see_their_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "of the process")
    met = asyncio.Barrier(3)

    async def child() -> str | None:
        return variable(NAME)

    async def run(secrets: dict[str, str]) -> tuple[str | None, str | None]:
        with environment(secrets):
            await met.wait()  # all are inside
            seen = await asyncio.create_task(child()), await asyncio.to_thread(variable, NAME)
            assert os.environ[NAME] == "of the process"
            await met.wait()
        return seen

    async def main() -> list[tuple[str | None, str | None]]:
        return await asyncio.gather(run({NAME: "a"}), run({NAME: "b"}), run({}))

    assert asyncio.run(main()) == [("a", "a"), ("b", "b"), ("of the process", "of the process")]
    assert given() == {}


def test_variables_of_an_inner_block_are_added() -> None:
    with environment({"A": "1", "B": "1"}), environment({"B": "2"}):
        assert given() == {"A": "1", "B": "2"}
    assert given() == {}
