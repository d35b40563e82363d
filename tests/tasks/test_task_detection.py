"""A single-shot detector on COCO's layout, with targets of unequal length: on a flow as on a DataLoader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import detection
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from task_curves import falls, on_dataloader, on_flow, seeded_view, weights_as_job

from ephemeron.data.catalog import DatasetReader

Image = pytest.importorskip("PIL.Image", reason="no Pillow; pip install 'ephemeron[data]'")

BATCH = 8


class Plain(torch.utils.data.Dataset[Any]):
    """Images and boxes without random steps, read without ephemeron."""

    def __init__(self, folder: Path) -> None:
        self.folder, table = folder, json.loads((folder / "instances.json").read_text())
        self.images = sorted(table["images"], key=lambda image: image["id"])
        self.notes = {image["id"]: [n for n in table["annotations"] if n["image_id"] == image["id"]] for image in self.images}
        self.number = {category["id"]: i for i, category in enumerate(table["categories"])}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        with Image.open(self.folder / "images" / self.images[i]["file_name"]) as image:
            pixels = np.asarray(image.convert("RGB"))
        height, width = pixels.shape[:2]
        rows, columns = np.arange(64) * height // 64, np.arange(64) * width // 64
        data = pixels[np.ix_(rows, columns)].transpose(2, 0, 1).copy().astype(np.float32) / 127.5 - 1
        boxes, labels = [], []
        for note in self.notes[self.images[i]["id"]]:
            x, y, w, h = (np.float32(n) for n in note["bbox"])
            size = np.array([width, height, width, height], dtype=np.float32)
            boxes.append(np.array([x + w / 2, y + h / 2, w, h], dtype=np.float32) / size)
            labels.append(self.number[note["category_id"]])
        return data, {"boxes": np.stack(boxes), "labels": np.array(labels)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("detection")
    detection.make(made, samples=60)
    return made


def test_images_differ_in_size_and_in_the_number_of_their_objects(folder):
    reader = DatasetReader.open(detection.NAME, "train", store=str(folder / "store"))
    assert len({reader[i][0].shape for i in range(20)}) > 5
    assert {len(reader[i][1]["boxes"]) for i in range(60)} == {1, 2, 3}


@pytest.mark.slow
def test_the_loss_curve_is_that_of_a_dataloader(folder):
    mine = on_flow(detection, detection.held_out(folder / "store"), batch_size=BATCH)
    assert mine == on_dataloader(detection, Plain(folder), batch_size=BATCH)
    assert len(mine) == 3 * 8
    assert falls(mine, 0.8)


@pytest.mark.slow
def test_images_and_boxes_are_flipped_together_and_alike_everywhere(folder):
    flow = detection.train(folder / "store")
    mine = on_flow(detection, flow, batch_size=BATCH, epochs=2)
    assert mine == on_dataloader(detection, seeded_view(flow), batch_size=BATCH, epochs=2)
    assert mine != on_flow(detection, detection.held_out(folder / "store"), batch_size=BATCH, epochs=2, loaders=0)


@pytest.mark.slow
def test_as_a_job_whose_function_dies(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    whole = weights_as_job("detection", folder / "store", width=4)
    assert weights_as_job("detection", folder / "store", "kill:rank=2,iteration=2,phase=compute", width=4) == whole


def test_the_loss_of_a_batch_is_the_mean_of_its_images_losses(folder):
    """So gradients of workers may be added up, weighted by samples."""
    samples = detection.train(folder / "store").prepare_read().to_mapped(seed=0).__getitems__(range(6))
    torch.manual_seed(0)
    model = detection.build()

    def loss_of(part: list[Any]) -> float:
        images, targets = detection.collate(part)
        return float(detection.loss(model(images), targets).detach())

    whole, first, rest = loss_of(samples), loss_of(samples[:2]), loss_of(samples[2:])
    assert whole == pytest.approx((2 * first + 4 * rest) / 6, rel=1e-5)


boxes = st.lists(st.tuples(*[st.floats(0.2, 0.8)] * 2, *[st.floats(0.05, 0.4)] * 2), min_size=1, max_size=5).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)


@given(a=boxes, b=boxes)
def test_overlap(a, b):
    shared = detection.overlap(a, b)
    assert ((shared >= 0) & (shared <= 1 + 1e-9)).all()
    assert torch.allclose(shared, detection.overlap(b, a).T)
    assert torch.allclose(detection.overlap(a, a).diagonal(), torch.ones(len(a), dtype=torch.float64))


@given(objects=boxes)
def test_offsets_can_be_undone(objects):
    defaults = detection.default_boxes(2, 0.4).double()[: len(objects)]
    assert torch.allclose(detection.decoded(detection.encoded(objects, defaults), defaults), objects)


@given(objects=boxes, labels=st.lists(st.integers(0, 1), min_size=5, max_size=5))
def test_every_object_whose_best_box_is_its_own_is_matched(objects, labels):
    defaults = detection.default_boxes(8, 0.2).double()
    target = {"boxes": objects, "labels": torch.tensor(labels[: len(objects)])}
    classes, which = detection.match(defaults, target)
    shared = detection.overlap(defaults, objects)
    best = shared.argmax(dim=0)
    for i, place in enumerate(best.tolist()):
        if best.tolist().count(place) == 1:
            assert (int(classes[place]), int(which[place])) == (int(target["labels"][i]) + 1, i)
    for place in set(torch.nonzero(classes).flatten().tolist()) - set(best.tolist()):
        assert shared[place, which[place]] >= detection.MATCHED


def test_an_image_without_objects_has_a_loss():
    torch.manual_seed(0)
    target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    value = detection.loss(detection.build()(torch.zeros(1, 3, 64, 64)), [target])
    assert value > 0
    assert value.isfinite()
