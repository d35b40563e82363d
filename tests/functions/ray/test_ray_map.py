"""`FunctionExecutor` on a Ray cluster of two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray; pip install 'ephemeron[ray]'")

from ray_world import World

import ephemeron

pytestmark = pytest.mark.slow


def test_tasks_on_ray(cluster: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    with ephemeron.FunctionExecutor(
        platform="ray", settings=cluster.settings(), channel=(tmp_path / "objects").as_uri(), max_workers=2, memory_mb=512
    ) as pool:
        k = 3
        assert list(pool.map(lambda x: k * x, range(40))) == [3 * x for x in range(40)]
        assert pool.submit("math:sqrt", 9.0).result() == 3.0
        assert pool.bill().invocations >= 1
