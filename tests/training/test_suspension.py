"""Suspension of runs: which platforms can, and what the others say. What suspended functions do is tested with MicroVMs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.training.driver import lifecycle, run_dir
from ephemeron.training.driver.records import RunRecord


@pytest.mark.parametrize("platform", ["local", "aws", "openfaas"])
def test_a_platform_that_cannot_suspend_names_what_to_do_instead(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    folder, run = run_dir.create("some-run"), RunRecord(run_id="some-run", platform=platform)
    with pytest.raises(JobError, match=f"platform {platform} cannot be suspended; .*: ephemeron stop some-run"):
        asyncio.run(lifecycle.suspend(folder, run))
    assert asyncio.run(lifecycle.wake(folder, run)) == 0


def test_the_platforms_that_can_are_these() -> None:
    assert [name for name in CLOUDS if cloud(name).suspendable] == ["aws-microvm"]
