"""`FunctionExecutor` on the local Lambda service, through an object store."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import KEYS, deployed

import ephemeron
from ephemeron.errors import TaskFailed
from ephemeron.testing.lambda_service import LambdaService

pytestmark = pytest.mark.slow


def test_tasks_on_lambda(s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))

    def fatal_once(x: int, marks: str) -> int:
        """Kills its execution environment in its first try, for one item."""
        if x == 5:
            try:
                Path(marks).touch(exist_ok=False)
            except FileExistsError:
                return x
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    s3 = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
    for name, value in {**KEYS, **s3}.items():
        monkeypatch.setenv(name, value)
    with LambdaService(concurrency=4, environment=s3) as service:
        settings = deployed(service, memory_mb=512, timeout_s=120)
        with ephemeron.FunctionExecutor(platform="aws", settings=settings, channel=s3_server.address, max_workers=2, retries=2) as pool:
            assert pool.folder.exists()
            k = 3
            assert list(pool.map(lambda x: k * x, range(40))) == [3 * x for x in range(40)]
            assert pool.map_reduce(len, ["a", "bb", "ccc"], lambda a, b: a + b, chunksize=1, fan_in=2).result() == 6
            with pytest.raises(TaskFailed, match="ZeroDivisionError") as failed:
                pool.submit(divmod, 1, 0).result()
            assert failed.value.tries == 3
            marks = str(tmp_path / "killed")
            futures = pool.map_futures(fatal_once, range(10), [marks] * 10)
            assert [f.result(timeout=200) for f in futures] == list(range(10))
            assert Path(marks).exists()
            key = (pool.folder / "signing.key").read_text().strip().encode()
        bill = pool.bill()
    assert bill.tasks == 51 + 1
    assert bill.gb_seconds > 0
    for path in pool.folder.rglob("*"):
        if path.is_file() and path.name != "signing.key":
            assert key not in path.read_bytes(), path
