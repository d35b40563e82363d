"""States of optimisers and schedulers, written without pickle and read back with their types."""

from __future__ import annotations

import json
from collections import Counter, deque

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from ephemeron.errors import CorruptMessage, JobError  # noqa: E402
from ephemeron.training.task.state_codec import pack, unpack  # noqa: E402


def through_json(value):
    arrays = {}
    packed = json.loads(json.dumps(pack(value, "s", arrays)))
    return unpack(packed, arrays)


def test_types_survive():
    value = {
        "tuple": (1, (2.5, None)),
        "set": {3, 1},
        "keys": {0: "a", 7: {"b": [True]}},
        "counter": Counter({30: 2}),
        "deque": deque([1, 2]),
        "array": np.arange(4, dtype=np.int16),
        "scalar": np.float32(0.5),
        "$": "a key like the mark",
        "inf": float("inf"),
        "complex": 1 + 2j,
    }
    got = through_json(value)
    assert repr(got) == repr(value)
    assert {k: type(v) for k, v in got.items()} == {k: type(v) for k, v in value.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_keep_dtype_and_bits(dtype):
    tensor = torch.arange(5).to(dtype)
    got = through_json({"t": [tensor]})["t"][0]
    assert got.dtype == dtype
    assert torch.equal(got, tensor)


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 6)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(name):
    def made():
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    straight, first, second = made(), made(), made()
    expected = rates(*straight, 7)
    begun = rates(*first, 3)
    for a, b in zip(first, second, strict=True):
        b.load_state_dict(through_json(a.state_dict()))
    assert begun + rates(*second, 4) == expected


def test_a_function_is_refused_by_its_path():
    with pytest.raises(JobError, match=r"the state s/schedule/0 is a builtins.function"):
        pack({"schedule": [lambda: 0]}, "s", {})


def test_a_missing_array_is_damage():
    with pytest.raises(CorruptMessage, match="without its array 's/t'"):
        unpack(pack({"t": torch.zeros(1)}, "s", {}), {})
