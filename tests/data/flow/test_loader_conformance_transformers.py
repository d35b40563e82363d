"""Hugging Face's Trainer over a flow's loader, beside PyTorch's and torchdata's: the same samples, the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ephemeron.data.flow import Flow, LocalReader
from lazy_modules import lazy_import

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")
lazy_import("accelerate", reason="accelerate is not installed: pip install accelerate")
lazy_import("transformers", reason="transformers is not installed: pip install transformers")

from loader_kinds import KINDS, Table, loader, weights  # noqa: E402 - not without torchdata

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6
"""Of an epoch."""


def trainer_of(train: Any, test: Any, folder: Path, **options: Any) -> Any:
    from transformers_trainer import Trainer

    return Trainer(train, test, folder, **options)


def jitter(row: Any) -> Any:
    """A random step."""
    return row + np.float32(random.random() / 10)


def mix(samples: list[Any], rng: np.random.Generator) -> Any:
    """A random collate function."""
    rows = np.stack([row for row, _ in samples])
    share = np.float32(rng.random())
    return torch.from_numpy(share * rows + (1 - share) * rows[::-1]), torch.tensor([i for _, i in samples])


def augmented(workers: int = 0) -> Any:
    flow = Flow("test/table").dataset(Table()).map_data("jitter", jitter)
    return flow.prepare_read(LocalReader(workers)).to_shuffled(4, mix, seed=3)


@pytest.mark.slow
def test_train_and_evaluate(tmp_path: Path) -> None:
    got = []
    for kind in KINDS:
        trainer = trainer_of(loader(kind), loader(kind, samples=10, batch=5), tmp_path / kind, eval_strategy="epoch")
        result = trainer.train()
        assert result.global_step == 3 * STEPS
        assert sorted(trainer.evaluated) == sorted(3 * list(range(10)))
        got.append((trainer.trained, trainer.evaluated, weights(trainer.model), trainer.state.log_history[-1]["epoch"]))
    assert len(got[0][0]) == 3 * 22
    assert got[1] == got[0]
    assert got[2] == got[0]


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 12], ids=["mid-epoch", "end of an epoch"])
def test_resume_from_checkpoint_in_order(tmp_path: Path, at: int) -> None:
    got = []
    for kind in KINDS:
        trainer_of(loader(kind), None, tmp_path / kind, max_steps=at).train()
        resumed = trainer_of(loader(kind), None, tmp_path / kind, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / kind / f"checkpoint-{at}"))
        got.append((resumed.trained, weights(resumed.model)))
    assert len(got[0][0]) == 3 * 22 - at * 4 + 2 * (at // STEPS)
    assert got[1] == got[0]
    assert got[2] == got[0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_resume_from_checkpoint_with_random_order_steps_and_batches(tmp_path: Path, workers: int) -> None:
    """The samples, the bytes and the weights of an undisturbed run, although what resumes is a DataLoader."""
    whole = trainer_of(augmented(), None, tmp_path / "whole")
    whole.train()
    first = trainer_of(augmented(), None, tmp_path / "first", max_steps=8)
    first.train()
    with augmented(workers) as batches:
        resumed = trainer_of(batches, None, tmp_path / "first", save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-8"))
    assert first.trained + resumed.trained == whole.trained
    assert len(set(whole.trained[:22])) == 22
    assert whole.trained[:22] != whole.trained[22:44]
    assert first.saw + resumed.saw == whole.saw
    assert weights(resumed.model) == weights(whole.model)
