"""Lightning's Trainer over a flow's loader, beside PyTorch's and torchdata's: the same samples, the same weights."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from lazy_modules import lazy_import

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")
lightning = lazy_import("lightning.pytorch", reason="lightning is not installed: pip install lightning")

from loader_kinds import KINDS, SAMPLES, loader, weights  # noqa: E402 - not without torchdata

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EPOCHS = 3


def fit(train: Any, val: Any = None, *, checkpoint: Path | None = None, **options: Any) -> tuple[Any, Any]:
    from lightning_modules import Fit

    module = Fit()
    made = lightning.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    made.fit(module, train, val, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=False)
    return module, made


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}, {"val_check_interval": 0.5}, {"max_steps": 8}])
def test_fit(options: dict[str, Any]) -> None:
    """All epochs, with validation in between, and before the first one."""
    got = [fit(loader(kind), loader(kind, samples=10, batch=5), **options)[0] for kind in KINDS]
    assert all(epoch for module in got for epoch in (*module.trained, *module.validated))
    for module in got[1:]:
        assert module.trained == got[0].trained
        assert module.validated == got[0].validated
        assert weights(module) == weights(got[0])
    shuffled = fit(loader("flow", shuffle=True, workers=1), **options)[0].trained
    assert [len(epoch) for epoch in shuffled] == [len(epoch) for epoch in got[0].trained]
    assert shuffled[0] != shuffled[1]
    assert all(len(set(epoch)) == len(epoch) for epoch in shuffled)


def save_at(path: Path, step: int) -> Any:
    from lightning_modules import Save

    return Save(path, step)


@pytest.mark.parametrize("step", [2, 6, 8, 11], ids=lambda s: f"step{s}")
def test_resumed_in_mid_epoch_and_at_its_end(tmp_path: Path, step: int) -> None:
    """With the samples and the weights of an undisturbed run; at the end of an epoch, too."""
    whole = fit(loader("flow", shuffle=True))[0]
    order = [i for epoch in whole.trained for i in epoch]
    path = tmp_path / "at.ckpt"
    first = fit(loader("flow", shuffle=True), callbacks=[save_at(path, step)])[0]
    resumed = fit(loader("flow", shuffle=True), checkpoint=path)[0]
    done = sum(len(batch) for batch in [range(4)] * (step - step // 6) + [range(2)] * (step // 6))
    assert [i for epoch in first.trained for i in epoch][:done] == order[:done]
    assert [i for epoch in resumed.trained for i in epoch] == order[done:]
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize("step", [2, 8])
def test_resumed_as_torchdata_s(tmp_path: Path, step: int) -> None:
    """In mid-epoch, in order: what each of the two is given after the resumption, and what it makes of it."""
    got = []
    for kind in ("stateful", "flow"):
        path = tmp_path / f"{kind}.ckpt"
        fit(loader(kind), callbacks=[save_at(path, step)])
        got.append(fit(loader(kind), checkpoint=path)[0])
    assert got[0].trained == got[1].trained
    assert sum(map(len, got[1].trained)) == EPOCHS * SAMPLES - step * 4 + (step > 6) * 2
    assert weights(got[0]) == weights(got[1])


def test_four_epochs_of_twenty_samples() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, made = fit(loader("flow", samples=20), loader("flow", samples=12), max_epochs=4)
    assert [len(epoch) for epoch in module.trained] == [20] * 4
    assert [len(epoch) for epoch in module.validated] == [8, 12, 12, 12, 12], "two batches before the first epoch"
    assert made.global_step == 20
