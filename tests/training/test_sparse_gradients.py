"""Gradients that are mostly zero: the weights of dense contributions to the bit, for few bytes; PyTorch's sparse gradients."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from training_runs import make_job, real

from ephemeron.events import FaultFired
from ephemeron.training.job import Target, parse_fault


def job(**options):
    return make_job(model=Target(target="hashed:Hashed", options=options), optimizer=Target(target="SGD", options={"lr": 0.05}))


@pytest.mark.parametrize(
    "how",
    [{"aggregators": 2}, {"pattern": "pipelined", "aggregators": 2}, {"sync": "hap", "aggregators": 1}, {"channel": "direct"}],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_sparse_contributions_give_the_weights_of_dense_ones(how):
    settings = {"workers": 3, "batch_size": 20, **how}
    dense, sparse = (real(job(), exchange={"compression": compression}, **settings) for compression in ("none", "sparse"))
    assert dense.ending.status == sparse.ending.status == "finished"
    assert sparse.sha == dense.sha
    if how.get("channel") != "direct":
        assert sparse.trigger.ledger.traffic.bytes_up < 0.15 * dense.trigger.ledger.traffic.bytes_up


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 0.003)])
def test_sparse_embeddings_train_like_dense_ones(workers, dtype, error):
    """But for the order in which PyTorch adds up the gradients of one row."""
    sparse, dense = (
        real(job(sparse=sparse, dtype=dtype), workers=workers, aggregators=1, batch_size=60).ending.arrays for sparse in (True, False)
    )
    assert np.abs(_numbers(dense["weights.weight"])).max() > 20 * min(error, 1e-3)
    for name, expected in dense.items():
        np.testing.assert_allclose(_numbers(sparse[name]), _numbers(expected), rtol=0, atol=error)


def _numbers(array):
    """Of bfloat16, as whose bits arrays of uint16 are kept."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


@pytest.mark.parametrize("phase", ["aggregate", "upload"])
def test_a_kill_changes_nothing(phase):
    settings = {"workers": 3, "batch_size": 20, "exchange": {"compression": "sparse"}, "checkpoint_every": 5}
    killed = real(job(), faults=[parse_fault(f"kill:rank=1,iteration=13,phase={phase}")], **settings)
    assert killed.of(FaultFired)
    assert killed.sha == real(job(), **settings).sha
