"""Provisional steps: they arrive where the optimiser arrives, and leave nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ephemeron.training.job.convergence import MOST_PROVISIONAL
from ephemeron.training.task.staleness import OwnGradient, ProvisionalSteps

OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    lambda p: torch.optim.Adagrad(p),
]


def world(make, *, steps=3):
    """A model whose optimiser has made some steps."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = make(model.parameters())
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(steps + 2)]
    for each in gradients[:steps]:
        put(model, each)
        optimizer.step()
    return model, optimizer, gradients[steps:]


def put(model, gradients):
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g.clone()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def provisional(model, optimizer):
    return ProvisionalSteps(list(model.parameters()), [optimizer], lambda turn: optimizer.step() and None)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_provisional_steps_arrive_where_the_optimiser_arrives_and_are_taken_back(make, steps):
    model, optimizer, gradients = world(make, steps=steps)
    own = provisional(model, optimizer)
    for i, each in enumerate(gradients):
        own.computed(OwnGradient(i, None, tuple(each)))
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    with own.taken():
        there = values(model)
    for a, b in zip(values(model), before, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    for each in gradients:
        put(model, each)
        optimizer.step()
    for a, b in zip(values(model), there, strict=True):
        assert torch.equal(a, b)


def test_parameters_return_where_the_computation_raises():
    model, optimizer, gradients = world(OPTIMIZERS[0])
    own = provisional(model, optimizer)
    own.computed(OwnGradient(0, None, tuple(gradients[0])))
    before = values(model)
    with pytest.raises(RuntimeError), own.taken():
        raise RuntimeError
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


def test_a_parameter_that_took_no_part_stays():
    model, optimizer, gradients = world(OPTIMIZERS[3])
    own = provisional(model, optimizer)
    own.computed(OwnGradient(0, None, (gradients[0][0], None)))
    before = values(model)
    with own.taken():
        there = values(model)
    assert not torch.equal(there[0], before[0])
    assert torch.equal(there[1], before[1])


def test_an_applied_version_takes_its_gradient_along():
    model, optimizer, gradients = world(OPTIMIZERS[1])
    own = provisional(model, optimizer)
    for i, each in enumerate(gradients):
        own.computed(OwnGradient(i, None, tuple(each)))
    own.applied(0)
    with own.taken():
        there = values(model)
    put(model, gradients[1])
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), there, strict=True))
    own.applied(1)
    before = values(model)
    with own.taken():
        assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


def test_a_rank_far_ahead_keeps_the_latest_gradients_and_its_state_is_the_same_after_loading():
    model, optimizer, gradients = world(OPTIMIZERS[2])
    own = provisional(model, optimizer)
    for i in range(MOST_PROVISIONAL + 3):
        own.computed(OwnGradient(i, None, tuple(g * i for g in gradients[0])))
    own.applied(3)
    other = provisional(model, optimizer)
    other.load(own.state())
    with own.taken():
        there = values(model)
    with other.taken():
        assert all(torch.equal(a, b) for a, b in zip(values(model), there, strict=True))
    for i in (4, 5, 6):
        put(model, [g * i for g in gradients[0]])
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), there, strict=True))
