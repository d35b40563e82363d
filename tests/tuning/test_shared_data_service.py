"""Studies whose trials read through one data service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tuning_worlds import MakeStudy

from ephemeron.communication.channels import credentials
from ephemeron.data.flow_spec import SERVICE_VARIABLE
from ephemeron.data.service.client import own_token
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.settings import ServiceAddress
from ephemeron.errors import JobError, ServiceUnreachable
from ephemeron.tuning import data_service
from ephemeron.tuning.data_service import shared_service

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

SAMPLES, EPOCHS = 200, 3
COUNTED = f"""
import os
from functools import partial
import numpy as np
from ephemeron.data.flow import Flow

class Stored:
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        return np.full((8, 8), index % 8, dtype=np.float32), index % 8

def decode(log, image):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b".")
    os.close(file)
    return image / 16

def flow(log):
    return Flow("test/counted").dataset(Stored()).map_data("decode", partial(decode, log), cache_control="can-cache")
"""


@pytest.mark.slow
def test_trials_that_share_a_service_decode_each_sample_once(make_study: MakeStudy, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "counted.py").write_text(COUNTED)
    found: dict[int, tuple[list[float | None], int]] = {}
    for loaders in (0, 1):
        log = tmp_path / f"decoded-{loaders}"
        job: dict[str, Any] = {
            "model": "tiny:mlp",
            "code": [str(code), str(Path(__file__).parents[1] / "training" / "code")],
            "epochs": EPOCHS,
            "data": {"flow": "counted:flow", "options": {"log": str(log)}},
            "run": {"platform": "local", "workers": 1, "batch_size": 40, "memory_mb": 1769},
        }
        study = make_study(
            f"loaders-{loaders}",
            job=job,
            sampler="grid",
            space={"optimizer.options.lr": [0.01, 0.1]},
            concurrency=1,
            **({"data_service": loaders} if loaders else {}),
        )
        result = study.run()
        assert result.count("finished") == 2, [t.reason for t in result.status.trials]
        found[loaders] = [t.value for t in result.status.trials], log.stat().st_size
        if loaders:
            process = ManagedProcess("coordinator", study.folder.data_service, own_token(study.folder.data_service))
            assert not process.alive
    (alone, by_trials), (shared, by_service) = found[0], found[1]
    assert shared == alone
    train = SAMPLES * 4 // 5
    assert by_trials >= 2 * EPOCHS * train
    assert by_service < by_trials - train  # test samples and first tries are decoded in both


@pytest.mark.slow
def test_a_service_that_is_killed_is_started_again_at_its_address(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "service"

    async def main() -> list[str]:
        seen = []
        for _ in range(2):  # the second as by a client that resumes the study
            async with shared_service(folder, 1):
                seen.append(credentials.given()[SERVICE_VARIABLE])
                killed = int((folder / "lock").read_text())
                os.kill(killed, signal.SIGKILL)
                seen.append(await asyncio.to_thread(_address, folder, killed))
        return seen

    assert len(set(asyncio.run(main()))) == 1
    assert not ManagedProcess("coordinator", folder, own_token(folder)).alive


def test_a_service_is_ended_after_its_last_start_is_over(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    entered, gate = threading.Event(), threading.Event()

    def ensure(self: ManagedProcess, settings: object) -> ServiceAddress:
        if told:
            entered.set()
            gate.wait(60)
        told.append("started")
        return ServiceAddress(unix="", host="127.0.0.1", port=1)

    monkeypatch.setattr(ManagedProcess, "ensure", ensure)
    monkeypatch.setattr(ManagedProcess, "kill", lambda self, **how: told.append("killed"))
    monkeypatch.setattr(data_service, "LOOK_EVERY_S", 0.0)

    async def main() -> None:
        async with shared_service(tmp_path, 1):
            await asyncio.to_thread(entered.wait, 60)
            asyncio.get_running_loop().call_later(0.1, gate.set)

    asyncio.run(main())
    assert told == ["started", "started", "killed"]


def _address(folder: Path, killed: int) -> str:
    """Address of the process after the one that was killed."""
    process, end = ManagedProcess("coordinator", folder, own_token(folder)), time.monotonic() + 180
    while True:
        assert time.monotonic() < end
        with contextlib.suppress(ServiceUnreachable):
            address = process.address()
            if int((folder / "lock").read_text()) != killed:
                return str(address)
        time.sleep(0.05)


def test_a_service_that_no_trial_would_read_through_is_refused(make_study: MakeStudy) -> None:
    with pytest.raises(JobError, match="functions of platform simulated do not reach"):
        make_study(data_service=1).run()
    local = {"run": {"platform": "local", "workers": 1, "batch_size": 480, "memory_mb": 1769}}
    with pytest.raises(JobError, match=r"the job has data\.source digits"):
        make_study("b", data_service=1, job=local).run()
