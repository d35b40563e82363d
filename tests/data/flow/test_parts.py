"""Samples of any shape: what their data and target are, and that the rest passes through."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ephemeron.data.flow import Flow
from ephemeron.data.flow.collate import Collator, collated
from ephemeron.data.flow.prefetch import Inline, Prefetcher
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest
from ephemeron.data.service.flow_definition import define
from ephemeron.errors import SampleFailed

Scan = namedtuple("Scan", "image mask label")


@dataclass(frozen=True, slots=True)
class Record:
    image: int
    mask: int
    label: int


class Same:
    """A dataset of one sample, three times."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return self.sample


def mapped(sample: Any, step: str, **options: Any) -> Any:
    flow = Flow("a/b").dataset(Same(sample))
    return getattr(flow, step)("negate", lambda x: -x, **options).prepare_read().to_mapped()[1]


@pytest.mark.parametrize(
    ("sample", "step", "options", "expected"),
    [
        ((1, 2), "map_data", {}, (-1, 2)),
        ((1, 2), "map_target", {}, (1, -2)),
        ((1, 2, 3), "map_data", {}, (-1, 2, 3)),
        ((1, 2, 3), "map_target", {}, (1, 2, -3)),
        ((1, 2, 3), "map_data", {"key": 1}, (1, -2, 3)),
        ((1, 2, 3), "map_target", {"key": -2}, (1, -2, 3)),
        ((1,), "map_data", {}, (-1,)),
        ([1, 2, 3], "map_target", {}, [1, 2, -3]),
        (Scan(1, 2, 3), "map_data", {}, Scan(-1, 2, 3)),
        (Scan(1, 2, 3), "map_target", {}, Scan(1, 2, -3)),
        (Scan(1, 2, 3), "map_data", {"key": "mask"}, Scan(1, -2, 3)),
        (Scan(1, 2, 3), "map_data", {"key": 1}, Scan(1, -2, 3)),
        (Record(1, 2, 3), "map_data", {}, Record(-1, 2, 3)),
        (Record(1, 2, 3), "map_target", {}, Record(1, 2, -3)),
        (Record(1, 2, 3), "map_target", {"key": "mask"}, Record(1, -2, 3)),
        ({"image": 1, "label": 2, "id": 3}, "map_data", {"key": "image"}, {"image": -1, "label": 2, "id": 3}),
        ({"image": 1, "label": 2, "id": 3}, "map_target", {"key": "label"}, {"image": 1, "label": -2, "id": 3}),
        (OrderedDict(a=1, b=2), "map_data", {"key": "b"}, OrderedDict(a=1, b=-2)),
        (({"x": 1}, 2), "map_target", {}, ({"x": 1}, -2)),
        (5, "map_data", {}, -5),
    ],
)
def test_one_part_is_mapped_and_the_others_pass_through(sample, step, options, expected):
    before = repr(sample)
    got = mapped(sample, step, **options)
    assert got == expected
    assert type(got) is type(expected)
    assert repr(sample) == before, "the dataset's own sample is as it was"


def test_a_single_array_is_all_data():
    assert mapped(np.arange(3), "map_data").tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    ("sample", "step", "options", "match"),
    [
        ({"image": 1, "label": 2}, "map_data", {}, r"keys 'image', 'label': say which with map_data\(\.\.\., key="),
        ({"image": 1, "label": 2}, "map_target", {}, r"map_target\(\.\.\., key="),
        ({"image": 1}, "map_data", {"key": "pixels"}, "no key 'pixels' but 'image'"),
        (np.arange(3), "map_target", {}, "single ndarray and has no target"),
        (np.arange(3), "map_data", {"key": 0}, "single ndarray and has no part 0"),
        ("text", "map_data", {"key": "x"}, "single str"),
        ((1,), "map_target", {}, "tuple of 1, has no target"),
        ((), "map_data", {}, "tuple of 0, has no data"),
        ((1, 2), "map_data", {"key": 2}, "tuple of 2, has no part 2"),
        ((1, 2), "map_data", {"key": "image"}, "no field 'image' but none"),
        (Scan(1, 2, 3), "map_data", {"key": "box"}, "no field 'box' but image, mask, label"),
        (Record(1, 2, 3), "map_data", {"key": "box"}, "no field 'box' but image, mask, label"),
    ],
)
def test_a_part_that_is_not_there_is_named(sample, step, options, match):
    with pytest.raises(SampleFailed, match=match) as caught:
        mapped(sample, step, **options)
    assert caught.value.step == "negate"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lambda i: Scan(i, i * 10, i * 100), lambda i: {"image": i, "mask": i * 10, "label": i * 100}])
def test_batches_of_three_parts(make, workers):
    torch = pytest.importorskip("torch")
    from ephemeron.data.flow import LocalReader

    class Many(Same):
        def __getitem__(self, i: int) -> Any:
            return make(np.full(4, i))

    flow = Flow("a/b").dataset(Many(None)).map_data("negate", lambda x: -x, key="mask")
    with flow.prepare_read(LocalReader(workers)).to_shuffled(3, shuffle=False) as loader:
        (batch,) = loader
    parts = batch._asdict() if isinstance(batch, tuple) else batch
    assert {name: part[:, 0].tolist() for name, part in parts.items()} == {
        "image": [0, 1, 2],
        "mask": [0, -10, -20],
        "label": [0, 100, 200],
    }
    assert all(isinstance(part, torch.Tensor) for part in parts.values())


def test_a_service_tells_steps_of_different_parts_apart():
    flow = Flow("a/b").dataset(Same((1, 2, 3)))
    signatures = {define(flow.map_data("n", abs, key=key), 3).signature for key in (None, 0, 1, "x")}
    assert len(signatures) == 4


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        ({"image": np.ones(2), "label": 3}, "a dict with the keys 'image', 'label', not a pair of inputs and targets"),
        ((np.ones(2), 1, 2), "of 3 parts, not a pair"),
        (np.ones(2), "a Tensor, not a pair"),
    ],
)
def test_a_job_s_batches_are_pairs(sample, match):
    """Two keys of a dict are none, although they can be unpacked."""
    pytest.importorskip("torch")
    flow = Flow("a/b").dataset(Same(sample))
    loading = SampleLoader(flow, flow.source.dataset)
    with pytest.raises(SampleFailed, match=match):
        Prefetcher(loading=loading, strategy=Inline(loading)).get(0, lambda i: [SampleRequest(index=0), SampleRequest(index=1)])
    assert collated([(1, 2), (3, 4)], Collator(list), loading.flow, [SampleRequest(index=0)]) == ((1, 2), (3, 4))
