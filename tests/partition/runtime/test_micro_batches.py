"""Batches cut into micro-batches: nothing lost, nothing twice, the mean the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.partition.runtime import cut, sizes  # noqa: E402


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_are_equal_but_for_one(samples, parts):
    made = sizes(samples, parts)
    assert sum(made) == samples
    assert len(made) == min(parts, samples)
    assert max(made) - min(made) <= 1
    assert min(made) >= 1


@given(st.integers(1, 30), st.integers(1, 8))
def test_a_mean_over_micro_batches_is_the_batchs(samples, parts):
    x, y = torch.arange(samples, dtype=torch.float64), torch.arange(samples)
    made = cut((x, 3.0), {"table": x[:, None]}, {"y": [y]}, parts)
    assert torch.equal(torch.cat([m.args[0] for m in made]), x)
    assert torch.equal(torch.cat([m.kwargs["table"] for m in made]), x[:, None])
    assert torch.equal(torch.cat([m.targets["y"][0] for m in made]), y)
    assert all(m.args[1] == 3.0 for m in made)
    assert sum(m.weight for m in made) == pytest.approx(1)
    assert sum(m.args[0].mean() * m.weight for m in made) == pytest.approx(x.mean().item())


def test_what_is_no_batch_goes_whole():
    table = torch.ones(5, 2)
    made = cut((torch.ones(4, 2), table), {}, None, 2)
    assert [m.args[1].shape for m in made] == [(5, 2), (5, 2)]


def test_weights_can_follow_the_targets():
    """A mean over words counts words, not sentences."""
    words = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    made = cut((words,), {}, words, 3, weigh=lambda t: float(t.sum()))
    assert [m.weight for m in made] == pytest.approx([3 / 6, 1 / 6, 2 / 6])


@pytest.mark.parametrize(
    ("args", "weigh", "message"),
    [
        ((3.0,), None, "has no samples to cut"),
        ((torch.ones(0, 2),), None, "has no samples to cut"),
        ((torch.ones(4, 2),), lambda t: -1.0, r"micro-batches weigh \[-1.0, -1.0\]"),
        ((torch.ones(4, 2),), lambda t: 0.0, r"micro-batches weigh \[0.0, 0.0\]"),
    ],
)
def test_what_cannot_be_cut_is_refused(args, weigh, message):
    with pytest.raises(JobError, match=message):
        cut(args, {}, None, 2, weigh=weigh)
