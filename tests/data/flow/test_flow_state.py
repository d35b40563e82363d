"""A loader's state belongs to a flow, a version, a dataset and a view, and is refused for any other."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from flows import Numbers, noisy, pairs

from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.flow import Flow, FlowView, random_split
from ephemeron.data.flow.fingerprint import attributes_of, configured
from ephemeron.errors import JobError


def view(name: str = "a/b", version: int = 1, dataset: Any = None, steps: tuple[str, ...] = ("noisy",)) -> FlowView:
    flow = Flow(name, version).dataset(Numbers(40) if dataset is None else dataset)
    for step in steps:
        flow = flow.map_data(step, noisy)
    return flow.prepare_read()


def state_of(read: FlowView, **options: Any) -> dict[str, Any]:
    loader = read.to_shuffled(4, **options)
    for _ in itertools.islice(loader, 2):
        pass
    return json.loads(json.dumps(loader.state_dict()))


class Others(Numbers):
    pass


@pytest.mark.parametrize(
    ("other", "options", "match"),
    [
        (lambda: view(name="a/c"), {}, "another flow: flow = 'a/b', this loader has 'a/c'"),
        (lambda: view(version=2), {}, "another flow version: version = 1, this loader has 2"),
        (lambda: view(dataset=Others(40)), {}, r"another dataset: dataset = 'Numbers\(samples#\w+\)', this loader has 'Others\("),
        (lambda: view(dataset=Numbers(41)), {}, r"another dataset: dataset = 'Numbers\(samples#\w+\)', this loader has 'Numbers"),
        (lambda: view(steps=("noisy", "more")), {}, "another steps"),
        (lambda: view(steps=("noisier",)), {}, "another steps"),
        (lambda: view().subset(range(40)), {}, "another subset or split"),
        (lambda: random_split(view(), [30, 10])[0], {}, "another subset or split"),
        (lambda: view(), {"seed": 1}, "seed = 0"),
        (lambda: view(), {"shuffle": False}, "shuffle = True"),
    ],
)
def test_a_state_of_something_else_is_refused_by_the_name_of_what_differs(other, options, match):
    loader = other().to_shuffled(4, **options)
    with pytest.raises(JobError, match=match):
        loader.load_state_dict(state_of(view()))
    assert loader.batches_left == len(loader), "it is as it was"


def test_parts_of_one_split_do_not_take_each_others_state():
    one, other = random_split(view(), [20, 20], seed=3)
    again, _ = random_split(view(), [20, 20], seed=3)
    state = state_of(one)
    with pytest.raises(JobError, match="another subset or split"):
        other.to_shuffled(4).load_state_dict(state)
    loader = again.to_shuffled(4)
    loader.load_state_dict(state)
    assert len(pairs(loader)) == 12


class Files(Numbers):
    """A dataset that remembers what it has read, and where it is."""

    def __init__(self, path: str, inner: Any = None) -> None:
        super().__init__(40)
        self.path, self.inner, self._cache = path, inner, {}  # type: ignore[var-annotated]

    def __getitem__(self, i: int) -> Any:
        self._cache[i] = True
        self._last = i
        return super().__getitem__(i)


def mapped(function: Any, key: Any = None, dataset: Any = None) -> FlowView:
    return Flow("a/b").dataset(dataset or Numbers(40)).map_data("step", function, key=key).prepare_read()


def plus(amount: float) -> Any:
    return lambda data: data + amount


def scaled(data: Any, by: float = 1.0) -> Any:
    return data * by


class Shift:
    """A step that is an object."""

    def __init__(self, by: float) -> None:
        self.by, self._calls = by, 0

    def __call__(self, data: Any) -> Any:
        self._calls += 1
        return data + self.by


@pytest.mark.parametrize(
    ("make", "other", "match"),
    [
        (lambda: mapped(lambda x: x + 1), lambda: mapped(lambda x: x - 1), "another steps"),
        (lambda: mapped(lambda x: x + 1), lambda: mapped(lambda x: x + 2), "another steps"),
        (lambda: mapped(plus(1)), lambda: mapped(plus(2)), "another steps"),
        (lambda: mapped(partial(scaled, by=2)), lambda: mapped(partial(scaled, by=3)), "another steps"),
        (lambda: mapped(Shift(1)), lambda: mapped(Shift(2)), "another steps"),
        (lambda: mapped(scaled), lambda: mapped(scaled, key=0), "another steps"),
        (lambda: view(dataset=Files("/a")), lambda: view(dataset=Files("/b")), "another dataset"),
        (lambda: view(dataset=Files("/a", Files("/c"))), lambda: view(dataset=Files("/a", Files("/d"))), "another dataset"),
    ],
)
def test_a_state_belongs_to_the_content_of_steps_and_dataset(make, other, match):
    state = state_of(make())
    with pytest.raises(JobError, match=match):
        other().to_shuffled(4).load_state_dict(state)
    again = make().to_shuffled(4)
    again.load_state_dict(state)
    assert len(pairs(again)) == 32
    again = make().to_shuffled(4)  # what reading leaves in dataset and steps does not count
    again.load_state_dict(state)


def test_what_a_dataset_has_read_is_no_part_of_its_identity():
    dataset, step = Files("/a", inner=Files("/b")), Shift(1)
    state = state_of(mapped(step, dataset=dataset))
    assert "/a" not in json.dumps(state), "attributes may be secret"
    assert attributes_of(Files("/a", inner=Files("/b")))[0][0] == "inner"
    some = [configured(Shift([f"{n}.png" for n in range(100_000)])) for n in (1, 2)]  # type: ignore[arg-type]
    assert some[0] == some[1]
    assert len(str(some[0])) < 10_000, "a dataset may name each of a million files"
    again = mapped(step, dataset=dataset).to_shuffled(4)
    again.load_state_dict(state)
    assert len(pairs(again)) == 32


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"samples": 40, "seed": 0, "shuffle": True, "epoch": 0, "consumed": 4}])
def test_what_is_no_state_of_a_loader_is_refused(state):
    with pytest.raises(JobError, match="does not name its flow"):
        view().to_shuffled(4).load_state_dict(state)


def test_latest_is_the_version_that_was_read(tmp_path):
    """A version that is imported later makes a state of `latest` one of other data."""
    store = DatasetStore.open(str(tmp_path / "store"))

    def imported(samples: int) -> FlowView:
        file = tmp_path / f"{samples}.npz"
        np.savez(file, x=np.zeros((samples, 2)), y=np.arange(samples))
        import_dataset("npz", str(file), "me/numbers", store, variant="train")
        flow = Flow("a/b").dataset("me/numbers", variant="train", store=str(tmp_path / "store"))
        return flow.prepare_read()

    first = imported(8)
    state = first.to_shuffled(2).state_dict()
    assert state["dataset"] == "me/numbers@1:train"
    with pytest.raises(JobError, match="another dataset: dataset = 'me/numbers@1:train', this loader has 'me/numbers@2:train'"):
        imported(9).to_shuffled(2).load_state_dict(state)


def test_batch_size_ranks_and_rule_may_change():
    state = state_of(view())
    left = []
    for rank in range(2):
        loader = view().to_shuffled(3, rank=rank, world_size=2, remainder="keep", on_error="skip", prefetch=1)
        loader.load_state_dict(state)
        left += pairs(loader)
    assert len(left) == 32
