"""Two ranks that train together: as many batches for each, and the weights that a DistributedSampler leads to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")

from loader_kinds import KINDS

SIZES = ((21, 4), (22, 4), (24, 4), (9, 4), (17, 8), (5, 1), (1, 4))
"""Samples and batch size; under most of them the last step cannot be shared out evenly."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """What each rank saw and came to, by case. A rank that waits for another one in vain ends with an error."""
    cases = [[kind, *size, shuffle] for kind in KINDS for size in SIZES for shuffle in (False, True)]
    store = tmp_path_factory.mktemp("ddp") / "store"
    paths = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ddp_rank.py"), str(rank), str(store), json.dumps(cases)],
            env={**os.environ, **paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(stderr[-3000:] for _, stderr in ended)
    found = [json.loads(stdout.splitlines()[-1]) for stdout, _ in ended]
    return {tuple(case): [rank[number] for rank in found] for number, case in enumerate(cases)}


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_two_ranks(ranks: Any, size: tuple[int, int], shuffle: bool) -> None:
    samples, _ = size
    by_kind = {kind: ranks[kind, *size, shuffle] for kind in KINDS}
    for kind, (one, other) in by_kind.items():
        assert one["weights"] == other["weights"], kind
        for epoch in range(2):
            sizes = [[len(batch) for batch in rank["seen"][epoch]] for rank in (one, other)]
            assert sizes[0] == sizes[1] == [len(batch) for batch in by_kind["torch"][0]["seen"][0]], kind
            assert one["length"] == other["length"] == len(sizes[0]), kind
            seen = [i for rank in (one, other) for batch in rank["seen"][epoch] for i in batch]
            assert set(seen) == set(range(samples)), f"{kind}: nobody is left out"
            assert len(seen) == samples + samples % 2, f"{kind}: at most one comes twice"
        if not shuffle:
            steps = [[sorted(a + b) for a, b in zip(one["seen"][epoch], other["seen"][epoch], strict=True)] for epoch in range(2)]
            reference = by_kind["torch"]
            assert steps[0] == [sorted(a + b) for a, b in zip(reference[0]["seen"][0], reference[1]["seen"][0], strict=True)], (
                f"{kind}: the same samples in each step of both together"
            )
            assert one["weights"] == pytest.approx(reference[0]["weights"], rel=1e-4), kind
