"""Twenty models in two to four stages: trained for 10 steps, at night 20, some of them on odd batches, they equal the unsplit model.

The unsplit model adds up gradients of the same micro-batches; the plain schedule is compared with the whole batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from cutting_worlds import optimizer  # noqa: E402
from models import MODELS  # noqa: E402
from training_worlds import WHOLE, batches, furthest, loss, parts_of, traced, train_whole  # noqa: E402

from ephemeron.partition import Schedule  # noqa: E402
from ephemeron.partition.runtime import Pipeline  # noqa: E402

MICRO_BATCHES = 3
CASES = {
    "plain": (Schedule(), 2, {}),
    "gpipe, recomputed": (Schedule(kind="gpipe", micro_batches=MICRO_BATCHES, recompute=True), 3, {}),
    "1f1b": (Schedule(kind="1f1b", micro_batches=MICRO_BATCHES), 4, {}),
    "1f1b, anywhere, parameters apart": (
        Schedule(kind="1f1b", micro_batches=MICRO_BATCHES, overlap=False, recompute=True),
        3,
        {"pipeline": False, "ties": "apart"},
    ),
}
ANYWHERE = ("u-net", "bert", "gpt-2", "siamese", "lstm", "frozen-parameters", "data-dependent-branch", "multiple-outputs")
"""Skips, ties, statistics, opaque parts and several results; one of each kind is enough for many stages on few devices."""
WITHOUT_STATISTICS = ("llama", "custom-autograd-function", "multiple-outputs")
"""Neither statistics over a batch nor random steps, so how a batch is cut changes nothing."""


@cache
def whole(name: str, micro_batches: int, dtype: Any) -> tuple[dict[str, Any], list[float]]:
    return train_whole(name, batches(name, traced(name, dtype)[0]), micro_batches, dtype=dtype)


def trained(name: str, case: str, dtype: Any) -> tuple[dict[str, Any], list[float]]:
    schedule, stages, cutting = CASES[case]
    e, _ = traced(name, dtype)
    parts = parts_of(name, stages, dtype=dtype, **cutting)
    with Pipeline(parts, schedule=schedule, optimizer=optimizer, loss=loss) as pipe:
        losses = [pipe.step(args, kwargs=kwargs).loss for args, kwargs in batches(name, e)]
        return pipe.state_dict(), losses


def tried() -> list[tuple[str, str]]:
    """Each model in one of the schedules with micro-batches, by turns, and every fourth in the plain schedule."""
    turns = ("gpipe, recomputed", "1f1b")
    return [
        *((name, "plain") for k, name in enumerate(MODELS) if k % 4 == 0 or name in WHOLE),
        *((name, turns[k % 2]) for k, name in enumerate(MODELS)),
        *((name, "1f1b, anywhere, parameters apart") for name in ANYWHERE),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), tried())
def test_stages_train_as_the_unsplit_model_does(name, case):
    if name in WHOLE and CASES[case][0].micro_batches > 1:
        pytest.skip("this model's first size is not samples, so there are no micro-batches")
    state, losses = trained(name, case, torch.float64)
    expected, expected_losses = whole(name, CASES[case][0].micro_batches, torch.float64)
    assert furthest(state, expected) <= 1e-10
    assert losses == pytest.approx(expected_losses, abs=1e-10)
    e, _ = traced(name)
    e.model.load_state_dict(state, strict=True)


def test_single_precision_is_as_good_as_it_can_be():
    name = "u-net"
    state, losses = trained(name, "1f1b", torch.float32)
    expected, expected_losses = whole(name, MICRO_BATCHES, torch.float32)
    assert furthest(state, expected) <= 1e-6
    assert losses == pytest.approx(expected_losses, abs=1e-6)


@pytest.mark.parametrize("name", WITHOUT_STATISTICS)
def test_an_uneven_cut_changes_nothing(name):
    """Batches of 7 and 6 in three micro-batches, weighted by samples, against the whole batch."""
    state, losses = trained(name, "1f1b", torch.float64)
    expected, expected_losses = whole(name, 1, torch.float64)
    assert furthest(state, expected) <= 1e-10
    assert losses == pytest.approx(expected_losses, abs=1e-10)


def test_running_statistics_are_updated_once_per_micro_batch_though_passes_are_repeated():
    name = "resnet"
    e, _ = traced(name)
    schedule = Schedule(kind="gpipe", micro_batches=MICRO_BATCHES, recompute=True)
    with Pipeline(parts_of(name, 3), schedule=schedule, optimizer=optimizer, loss=loss) as pipe:
        pipe.step(batches(name, e)[0][0])
        counters = {int(t) for n, t in pipe.state_dict().items() if n.endswith("num_batches_tracked")}
    assert counters == {MICRO_BATCHES}
