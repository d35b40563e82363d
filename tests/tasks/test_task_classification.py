"""ResNet-18 on a folder of images: on a flow as on a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import classification
import numpy as np
import pytest
import torch
from task_curves import falls, on_dataloader, on_flow, seeded_view, weights_as_job

Image = pytest.importorskip("PIL.Image", reason="no Pillow; pip install 'ephemeron[data]'")

BATCH = 16
WIDTH = 16
"""Of the first stage; 64 is ResNet-18's own."""


class Plain(torch.utils.data.Dataset[Any]):
    """The images without random steps, read without ephemeron."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted((folder / "images").rglob("*.png"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        with Image.open(self.files[i]) as image:
            pixels = np.asarray(image.convert("RGB")).astype(np.float32) / 127.5 - 1
        return pixels[4:36, 4:36].transpose(2, 0, 1).copy(), self.classes.index(self.files[i].parent.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("classification")
    classification.make(made, samples=90)
    return made


def test_it_is_resnet_18():
    model = classification.build(classes=1000)
    assert sum(p.numel() for p in model.parameters()) == 11_689_512  # as torchvision's
    assert sum(isinstance(m, torch.nn.Conv2d) and m.kernel_size != (1, 1) for m in model.modules()) == 17
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


@pytest.mark.slow
def test_the_loss_curve_is_that_of_a_dataloader(folder):
    mine = on_flow(classification, classification.held_out(folder / "store"), batch_size=BATCH, width=WIDTH)
    theirs = on_dataloader(classification, Plain(folder), batch_size=BATCH, width=WIDTH)
    assert mine == theirs
    assert len(mine) == 3 * 6
    assert falls(mine, 0.8)


@pytest.mark.slow
def test_random_steps_draw_the_same_in_loaders_and_in_a_dataloader(folder):
    flow = classification.train(folder / "store")
    mine = on_flow(classification, flow, batch_size=BATCH, epochs=2, width=8)
    assert mine == on_flow(classification, flow, batch_size=BATCH, epochs=2, loaders=0, width=8)
    assert mine == on_dataloader(classification, seeded_view(flow), batch_size=BATCH, epochs=2, width=8)
    still = classification.held_out(folder / "store")
    assert mine != on_flow(classification, still, batch_size=BATCH, epochs=2, loaders=0, width=8)


@pytest.mark.slow
def test_as_a_job_whose_function_dies(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    whole = weights_as_job("classification", folder / "store", collate=False, width=4)
    dying = "kill:rank=1,iteration=3,phase=upload"
    assert weights_as_job("classification", folder / "store", dying, collate=False, width=4) == whole
