"""A user's own Datasets: what is accepted, and how each refusal names the sample."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ephemeron.data import DataSets, load
from ephemeron.data.sources.datasets import stack
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError

pytestmark = pytest.mark.usefixtures("clean_imports")

MODULE = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

class Squares(Dataset):
    def __init__(self, n, fail_at=-1):
        self.n, self.fail_at = n, fail_at
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if i == self.fail_at:
            raise RuntimeError("no\\nsuch image")
        return torch.full((2, 3), float(i)), i * i

class Endless(IterableDataset):
    def __len__(self):
        return 3
    def __iter__(self):
        return iter(())

def one(n=10, fail_at=-1):
    return Squares(n, fail_at)

def two(n, *, m):
    return Squares(n), Squares(m)

def tensors():
    return TensorDataset(torch.zeros(4, 2, requires_grad=True), torch.arange(4.0))

def half():
    return TensorDataset(torch.zeros(4, 2, dtype=torch.bfloat16), torch.arange(4))

def endless():
    return Endless()

def loader():
    return DataLoader(Squares(3))

def generator():
    yield 1, 2

def three():
    return Squares(1), Squares(1), Squares(1)

def located(path, scale=1):
    return [(float(path.read_text()) * scale, 0)] * 5

def broken():
    return {}["gone"]

CONSTANT = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "mydata.py").write_text(MODULE)
    return folder


def read(code: Path, name: str, *, path: Path | None = None, fraction: float = 0.2, **options: object) -> DataSets:
    spec = DataSpec(source=f"mydata:{name}", options=options, path=path, test_fraction=fraction)
    return load(spec, seed=0, code=[code])


def test_one_dataset_is_split(code: Path) -> None:
    data = read(code, "one", n=5, fraction=0)
    assert data.train.inputs.shape == (5, 2, 3)
    assert data.train.inputs.dtype == np.float32
    assert data.train.targets.tolist() == [0, 1, 4, 9, 16]
    assert data.train.targets.dtype == np.int64
    assert len(read(code, "one").test) == 2


def test_two_datasets(code: Path) -> None:
    data = read(code, "two", n=4, m=3)
    assert (len(data.train), len(data.test)) == (4, 3)


def test_tensors_that_require_gradients(code: Path) -> None:
    assert read(code, "tensors", fraction=0).train.targets.tolist() == [0, 1, 2, 3]


def test_the_path_is_passed_on(code: Path, tmp_path: Path) -> None:
    (tmp_path / "v").write_text("2.5")
    data = read(code, "located", path=tmp_path / "v", scale=2, fraction=0)
    assert data.train.inputs.tolist() == [5.0] * 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("endless", {}, "mydata:endless: Endless is not a map-style Dataset; give an object with __len__"),
        ("loader", {}, "loader: DataLoader is not a map-style Dataset"),
        ("generator", {}, "generator: generator is not"),
        ("three", {}, "mydata:three returned a tuple of 3"),
        ("one", {"n": 0}, "mydata:one is empty"),
        ("one", {"nn": 3}, r"mydata:one: got an unexpected keyword argument 'nn'; did you mean n\?"),
        ("two", {"n": 3}, "mydata:two: missing a required.* 'm'; it takes: m, n"),
        ("one", {"fail_at": 7}, r"mydata:one: sample 7 raised RuntimeError: no such image \(mydata\.py, line 12\)"),
        ("broken", {}, r"mydata:broken raised KeyError: 'gone' \(mydata\.py, line \d+\)"),
        ("half", {}, "mydata:half: sample 0 is not made of numbers: .*BFloat16"),
        ("CONSTANT", {}, "mydata:CONSTANT is not callable but int"),
        ("ones", {}, r"mydata has no name 'ones'; did you mean one"),
    ],
)
def test_refusals(code: Path, name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message) as e:
        read(code, name, **options)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(np.zeros(3), 0), (np.zeros(4), 0)], r"d: x of sample 1 has shape \(4,\), but that of sample 0 has \(3,\)"),
        ([(0, [1]), (0, [1]), (0, 1)], r"d: y of sample 2 has shape \(\), but that of sample 0 has \(1,\)"),
        ([(0, 0), (0.5, 0)], "d: x of sample 1 has dtype float64, but that of sample 0 has int64"),
        ([(0, 0), (0, 0, 0)], r"d: sample 1 is tuple of 3; return a pair"),
        ([(0, 0), 5], "d: sample 1 is int; return a pair"),
        ([("cat", 0)], "d: sample 0 is not made of numbers: str of dtype <U3"),
        ([([[1], [1, 2]], 0)], "d: sample 0 is not made of numbers"),
        ([(None, 0)], "d: sample 0 is not made of numbers: NoneType"),
        ([], "d is empty"),
        (iter([(0, 0)]), "d: list_iterator is not a map-style"),
    ],
)
def test_samples_that_do_not_stack(samples: object, message: str) -> None:
    with pytest.raises(JobError, match=message):
        stack(samples, "d")


def test_a_list_of_pairs_is_a_dataset() -> None:
    samples = stack([([1.0, 2.0], 3), ([4.0, 5.0], 6)], "d")
    assert samples.inputs.tolist() == [[1, 2], [4, 5]]
    assert samples.targets.tolist() == [3, 6]


class Augmented:
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.full(3, i) + self.draw(), i


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: int.from_bytes(os.urandom(2), "little")])
def test_random_augmentation_that_every_epoch_would_see_again_is_refused(draw: Any) -> None:
    with pytest.raises(JobError, match=r"d: reading a sample draws random numbers.*data\.flow"):
        stack(Augmented(draw), "d", may_be_random=False)


def test_a_random_test_set_is_the_same_in_every_run() -> None:
    before = random.getstate(), repr(np.random.get_state())
    one, other = (stack(Augmented(lambda: random.random() + np.random.random()), "d").inputs for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one % 1)) == 12
    assert (random.getstate(), repr(np.random.get_state())) == before
