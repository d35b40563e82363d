"""Accelerate over a flow's loader, beside PyTorch's and torchdata's: prepared, skipped, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ephemeron.errors import JobError
from lazy_modules import lazy_import

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")
accelerate = lazy_import("accelerate", reason="accelerate is not installed: pip install accelerate")

from loader_kinds import BATCH, KINDS, SAMPLES, ids, loader, loss, model, weights  # noqa: E402 - not without torchdata

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class Run:
    """A model, its optimizer and a loader, prepared."""

    def __init__(self, kind: str, **options: Any) -> None:
        stateful = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=kind == "stateful")
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=stateful)
        net = model()
        made = loader(kind, **options)
        self.net, self.optimizer, self.batches = self.accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), made
        )
        if kind == "flow":
            assert self.batches is made, "it deals its samples out to ranks itself"
            self.accelerator.register_for_checkpointing(self.batches)

    def train(self, batches: Any, stop: int | None = None) -> list[list[int]]:
        """Trains on batches, at most so many, and returns which samples were in them."""
        seen = []
        for batch in batches:
            seen.append(ids(batch))
            value = loss(self.net(batch[0]), batch[1])
            self.optimizer.zero_grad()
            self.accelerator.backward(value)
            self.optimizer.step()
            if len(seen) == stop:
                break
        return seen


@pytest.mark.parametrize("stop", [None, 3])
def test_prepared(stop: int | None) -> None:
    runs = [Run(kind) for kind in KINDS]
    seen = [[run.train(run.batches, stop) for _ in range(3)] for run in runs]
    assert [len(epoch) for epoch in seen[0]] == [stop or 6] * 3
    for run, got in zip(runs, seen, strict=True):
        assert got == seen[0]
        assert weights(run.net) == weights(runs[0].net)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batches_skipped(workers: int, shuffle: bool) -> None:
    """The rest of that epoch, and whole epochs after it."""
    seen = []
    for kind in ("torch", "flow"):
        run = Run(kind, shuffle=shuffle, workers=workers)
        skipped = run.accelerator.skip_first_batches(run.batches, 4)
        seen.append([run.train(skipped), run.train(run.batches), run.train(run.batches)])
        if kind == "flow":
            run.batches.close()
    assert [[len(batch) for batch in epoch] for epoch in seen[1]] == [[4, 2], [4] * 5 + [2], [4] * 5 + [2]]
    if not shuffle:
        assert seen[1] == seen[0]
        return
    whole = loader("flow", shuffle=True)
    assert seen[1] == [[ids(batch) for batch in whole][4:], *([ids(batch) for batch in whole] for _ in range(2))]


@pytest.mark.parametrize("count", [2, 5])
def test_saved_and_loaded_in_mid_epoch(tmp_path: Path, count: int) -> None:
    got = []
    for kind in ("stateful", "flow"):
        first = Run(kind)
        before = first.train(first.batches, count)
        first.accelerator.save_state(str(tmp_path / kind))
        second = Run(kind)
        second.accelerator.load_state(str(tmp_path / kind))
        after = [second.train(second.batches), second.train(second.batches)]
        assert [i for batch in (*before, *after[0]) for i in batch] == list(range(SAMPLES))
        got.append((before, after, weights(second.net)))
    assert got[0] == got[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_saved_and_loaded_in_a_random_order(tmp_path: Path, workers: int) -> None:
    whole = Run("flow", shuffle=True)
    order = [whole.train(whole.batches) for _ in range(3)]
    first = Run("flow", shuffle=True, workers=workers)
    assert [first.train(first.batches), first.train(first.batches, 3)] == [order[0], order[1][:3]]
    first.accelerator.save_state(str(tmp_path / "state"))
    first.batches.close()
    second = Run("flow", shuffle=True, workers=workers)
    second.accelerator.load_state(str(tmp_path / "state"))
    assert [second.train(second.batches), second.train(second.batches)] == [order[1][3:], order[2]]
    assert weights(second.net) == weights(whole.net)
    second.batches.close()


def test_a_state_while_another_loader_reads_the_epoch() -> None:
    """Exact where nothing is loaded ahead, and refused where nobody knows how far that loader is."""
    run = Run("flow")
    for number, batch in enumerate(run.accelerator.skip_first_batches(run.batches, 2)):
        assert run.batches.state_dict()["consumed"] == BATCH * (3 + number) - 2 * (len(batch[1]) < BATCH)
    with loader("flow", workers=1) as ahead:
        for _ in accelerate.skip_first_batches(ahead, 2):
            with pytest.raises(JobError, match="skip_first_batches"):
                ahead.state_dict()
            break
        assert [ids(batch) for batch in ahead] == [ids(batch) for batch in loader("torch")]
        assert ahead.state_dict()["epoch"] == 2
