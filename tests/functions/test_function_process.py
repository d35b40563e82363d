"""Variables with which a function's process is started, wherever it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from ephemeron.functions import function_process
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.async_invoke.process_supervisor import OneShotSupervisor
from ephemeron.functions.openfaas.replica import Resident
from running import until

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "POLARS_MAX_THREADS", "LOKY_MAX_CPU_COUNT")


class OneShot(OneShotSupervisor):
    """As on Ray and Lithops."""

    def sender(self, callback: str, **sender: Any) -> RecordedSender:
        raise NotImplementedError


@pytest.mark.parametrize(("vcpus", "threads"), [(0.3, "1"), (1.0, "1"), (3.7, "3")])
def test_libraries_have_a_thread_for_each_whole_vcpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vcpus: float, threads: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    one_shot = OneShot(tmp_path / "one", memory_mb=512, vcpus=vcpus, variables={"MKL_NUM_THREADS": "64"}).make(1)
    resident = Resident(1, memory_mb=512, vcpus=vcpus, folder=tmp_path)
    for process in (one_shot, resident):
        assert {name: process._env[name] for name in NAMES} == dict.fromkeys(NAMES, threads)


def test_what_a_process_has_started_is_found_without_a_look_at_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is looked at 30 times a second: on a machine of a thousand processes, one look at all takes longer."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60; true"], start_new_session=True) as shell:
        thread = threading.Thread(target=lambda: children.append(subprocess.Popen(["sleep", "60"])))
        children: list[subprocess.Popen[bytes]] = []
        thread.start()
        thread.join()
        try:
            until(lambda: len(psutil.Process(shell.pid).children()) == 2)
            wanted = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
            assert wanted >= {shell.pid, children[0].pid}
            if function_process._LISTS_CHILDREN:
                monkeypatch.setattr(psutil._psplatform, "ppid_map", lambda: pytest.fail("all processes"))  # type: ignore[attr-defined]
            assert {p.pid for p in function_process.family(os.getpid())} == wanted
            monkeypatch.undo()
            monkeypatch.setattr(function_process, "_LISTS_CHILDREN", False)
            assert {p.pid for p in function_process.family(os.getpid())} == wanted
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            children[0].kill()
            children[0].wait()
    with pytest.raises((psutil.Error, OSError)):
        function_process.family(shell.pid)
