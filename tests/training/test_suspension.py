"""Suspension of runs: which platforms can, and what the others say. What suspended functions do is tested with MicroVMs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.prices import load_prices
from ephemeron.runs import folders, run_platform
from ephemeron.runs.header import RunHeader


@pytest.mark.parametrize("platform", ["local", "aws", "openfaas"])
def test_a_platform_that_cannot_suspend_names_what_to_do_instead(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    folder, run = (
        folders.create("some-run"),
        RunHeader(run_id="some-run", kind="training", platform=platform, prices=load_prices("objects")),
    )
    with pytest.raises(JobError, match=f"platform {platform} cannot be suspended; .*: ephemeron stop some-run"):
        asyncio.run(run_platform.suspend(folder, run))
    assert asyncio.run(run_platform.wake(folder, run)) == 0


def test_the_platforms_that_can_are_these() -> None:
    assert [name for name in CLOUDS if cloud(name).suspendable] == ["aws-microvm"]
