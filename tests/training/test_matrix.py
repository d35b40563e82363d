"""The sampled kill matrix in virtual time and on this machine; other platforms have it in rooms of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ephemeron.testing import TrainingMatrix, TrainingWorld
from ephemeron.training.job import Simulation
from tiny_job import JOB


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


@pytest.mark.slow
class TestSimulated(TrainingMatrix):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
        quick = Simulation(compute={"a": 5.0, "b": 4.0, "m": 0.0}, cold_start_s=0.05)
        return TrainingWorld(
            platform="simulated",
            job=dataclasses.replace(JOB, simulation=quick),
            memory_mb=1769,
            folder=tmp_path_factory.mktemp("simulated"),
        )


@pytest.mark.slow
class TestLocal(TrainingMatrix):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
        return TrainingWorld(platform="local", job=JOB, memory_mb=704, folder=tmp_path_factory.mktemp("local"))
