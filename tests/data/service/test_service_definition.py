"""What a reader hands to a service: pinned to one dataset, and told apart from what is not the same."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_worlds import Numbered, World, drawn, epochs_of, local

from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.flow import Flow
from ephemeron.data.service.flow_definition import define


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, data: Any) -> Any:
        return data * self.factor


def power(data: Any, *, exponent: float) -> Any:
    return data**exponent


def added(amount: float) -> Callable[[Any], Any]:
    return lambda data: data + amount


def signature(step: Callable[[Any], Any], dataset: Any = None) -> str:
    return define(Flow("a/b").dataset(dataset or Numbered(3)).map_data("step", step), 3).signature


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (lambda data: data + 1, lambda data: data + 1, lambda data: data + 2),
        (added(1), added(1), added(2)),
        (Scaled(1), Scaled(1), Scaled(2)),
        (Scaled(1).__call__, Scaled(1).__call__, Scaled(2).__call__),
        (partial(power, exponent=2), partial(power, exponent=2), partial(power, exponent=3)),
        (Scaled(np.ones(3)), Scaled(np.ones(3)), Scaled(np.zeros(3))),
        (Scaled({"b", "a"}), Scaled({"a", "b"}), Scaled({"a", "c"})),
    ],
    ids=["lambda", "closure", "object", "method", "partial", "array", "set"],
)
def test_steps_of_one_name_are_told_apart_by_what_they_do(one, same, other):
    def qualified(step: Any) -> Any:
        if hasattr(step, "__qualname__") and "lambda" in step.__qualname__:
            step.__qualname__ = "lambda"
        return step

    assert signature(qualified(one)) == signature(qualified(same))
    assert signature(qualified(one)) != signature(qualified(other))


def test_datasets_of_one_type_are_told_apart_by_what_they_hold():
    assert signature(drawn, Numbered(3)) == signature(drawn, Numbered(3))
    assert signature(drawn, Numbered(3)) != signature(drawn, Numbered(3, giants=[1]))


def test_a_definition_is_the_same_in_every_process():
    here = Path(__file__).parent
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from test_service_definition import *;"
        "print(signature(Scaled({'b', 'a', 'c'})), signature(partial(power, exponent=2)), signature(drawn))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code, str(here), str(here.parents[1])],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(seen) == 1


def numbers(folder: Path, value: int) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "train.npz", x=np.full((12, 300), value, dtype=np.float32), y=np.arange(12))
    import_dataset("npz", str(folder / "train.npz"), "me/numbers", DatasetStore.open(None), variant="train")


@pytest.mark.slow
def test_loaders_read_the_version_and_the_store_that_the_reader_saw(
    own_world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders that start later, without the reader's environment, while a newer version is already there."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    numbers(tmp_path / "first", 1)
    flow = Flow("me/pinned").dataset("me/numbers", variant="train").map_data("noise", drawn)
    expected = epochs_of(local(flow), 1, seed=3)
    world = own_world()
    read = world.read(flow)
    numbers(tmp_path / "second", 2)
    assert epochs_of(read, 1, seed=3) == expected
    world.kill_loaders("me/pinned")
    assert epochs_of(read, 1, seed=3) == expected
    assert epochs_of(local(flow), 1, seed=3) != expected, "there is a newer one"


READS_WHEN_IMPORTED = """
from ephemeron.data.catalog import DatasetReader
from ephemeron.data.flow import Flow

everything = DatasetReader.open("me/numbers", "train")  # of the store in the client's home folder


def less(x):
    return x - len(everything)


flow = Flow("me/imported").dataset("me/numbers").map_data("less", less)
"""


@pytest.mark.slow
def test_a_module_that_reads_when_it_is_imported_reads_the_clients_store(
    own_world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPHEMERON_HOME", "home")
    numbers(tmp_path / "first", 1)
    (tmp_path / "reads_when_imported.py").write_text(READS_WHEN_IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    flow = importlib.import_module("reads_when_imported").flow
    expected = epochs_of(local(flow), 1, seed=3)
    assert epochs_of(own_world().read(flow), 1, seed=3) == expected
    sys.modules.pop("reads_when_imported")
