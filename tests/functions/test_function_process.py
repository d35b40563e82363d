"""Variables with which a function's process is started, wherever it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.async_invoke.process_supervisor import OneShotSupervisor
from ephemeron.functions.openfaas.replica import Resident

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class OneShot(OneShotSupervisor):
    """As on Ray and Lithops."""

    def sender(self, callback: str, **sender: Any) -> RecordedSender:
        raise NotImplementedError


@pytest.mark.parametrize(("vcpus", "threads"), [(0.3, "1"), (1.0, "1"), (3.7, "3")])
def test_libraries_have_a_thread_for_each_whole_vcpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vcpus: float, threads: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    one_shot = OneShot(tmp_path / "one", memory_mb=512, vcpus=vcpus, variables={"MKL_NUM_THREADS": "64"}).make(1)
    resident = Resident(1, memory_mb=512, vcpus=vcpus, folder=tmp_path)
    for process in (one_shot, resident):
        assert {name: process._env[name] for name in NAMES} == dict.fromkeys(NAMES, threads)
