"""Twenty models: each traced, checked, cut, and trained for 10 steps, at night 20, in pieces as well as whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from cutting_worlds import example, optimizer, placed  # noqa: E402
from models import MODELS, Example  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from ephemeron.partition.tracing import (  # noqa: E402
    ModelSplit,
    SequentialPass,
    Tracing,
    graph_of,
    mean_square,
    split,
    trace,
    train_step,
)
from random_schedules import examples  # noqa: E402

STEPS = examples(20)
OPAQUE = {"data-dependent-branch": ("gate",)}
"""Modules that no tracer can look into, and nothing else is opaque."""
SLICED = set(MODELS) - {"gnn"}
"""Models whose samples are rows of every input; a graph's nodes are not."""

SINGLE = ("u-net", "gpt-2", "lstm")
"""Models that are trained in single precision, too: convolutions with statistics, attention, and recurrence."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """Models this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def traced(name: str, dtype: torch.dtype = torch.float32) -> tuple[Example, Tracing]:
    e = example(name, dtype)
    return e, trace(e.model, e.args, e.kwargs)


def batches(name: str, e: Example) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Every fourth is the short one at the end of an epoch."""
    draw = torch.Generator().manual_seed(1)

    def fresh(t: Any, short: bool) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if t.is_floating_point() and t.dim() > 0:
            t = t + 0.1 * torch.randn(t.shape, generator=draw, dtype=t.dtype)
        return t[:-1] if short else t

    return [tree_map(lambda t, short=(k % 4 == 3 and name in SLICED): fresh(t, short), (e.args, e.kwargs)) for k in range(STEPS)]


def train_whole(model: Any, todo: Any, *, keyed: bool) -> list[float]:
    opt, losses = optimizer(model.parameters()), []
    for k, (args, kwargs) in enumerate(todo):
        torch.manual_seed(k)
        if keyed:
            model.draw_from(7, iteration=k)
        opt.zero_grad()
        loss = mean_square(model(*args, **kwargs))
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def train_parts(parts: ModelSplit, todo: Any, *, keyed: bool) -> list[float]:
    opts = [optimizer([p for _, p in parts.parameters(d)]) for d in parts.devices if list(parts.parameters(d))]
    losses = []
    for k, (args, kwargs) in enumerate(todo):
        torch.manual_seed(k)
        for stage in parts.stages:
            stage.draw_from(7 if keyed else None, iteration=k)
        for opt in opts:
            opt.zero_grad()
        _, loss = train_step(parts, args, kwargs, mean_square)
        for opt in opts:
            opt.step()
        losses.append(loss.item())
    return losses


def furthest(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    assert set(a) == set(b)
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_traced_exactly(name):
    e, tracing = traced(name)
    assert tracing.checked.largest_difference <= 1e-6
    assert tracing.checked.steps == 3
    assert tracing.checked.evaluation
    assert tracing.checked.smaller_batch == (name in SLICED)
    assert tracing.opaque == OPAQUE.get(name, ())
    assert [n for n, _ in tracing.model.named_parameters()] == [n for n, _ in e.model.named_parameters()]
    assert [p.requires_grad for p in tracing.model.parameters()] == [p.requires_grad for p in e.model.parameters()]
    copy.deepcopy(e.model).load_state_dict(tracing.model.original_state(), strict=True)
    assert len(graph_of(tracing.model).nodes) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "limit"), [*((n, torch.float32, 1e-6) for n in SINGLE), *((n, torch.float64, 1e-10) for n in MODELS)], ids=str
)
def test_stages_train_as_the_original_does(name, dtype, limit):
    """The parts have the original's draws, because they follow one another; short batches among them."""
    e, tracing = traced(name, dtype)
    todo = batches(name, e)
    whole = copy.deepcopy(e.model).train()
    expected = train_whole(whole, todo, keyed=False)
    assert expected[0] != expected[-1]
    graph = graph_of(tracing.model)
    rng = Random(name)
    for count in (2, 4) if dtype == torch.float32 else (3,):
        parts = split(tracing.model, placed(graph, count, rng))
        losses = train_parts(parts, todo, keyed=False)
        assert losses == pytest.approx(expected, rel=limit, abs=limit)
        assert furthest(parts.state(), whole.state_dict()) <= limit
        loaded = copy.deepcopy(e.model)
        loaded.load_state_dict(parts.state(), strict=True)
        for stage in parts.stages:
            stage.eval()
        expected_result = tree_leaves(copy.deepcopy(loaded).eval()(*e.args, **e.kwargs))
        for a, b in zip(tree_leaves(SequentialPass(parts, e.args, e.kwargs).result), expected_result, strict=True):
            assert (a is b is None) or torch.allclose(a, b, rtol=limit, atol=limit), "in evaluation"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_stages_anywhere_train_as_the_whole_does(name):
    """Operators on devices at random, shared parameters apart: draws are keyed by step, so the order of stages does not matter."""
    e, tracing = traced(name, torch.float64)
    todo = batches(name, e)
    whole = copy.deepcopy(tracing.model).train()
    train_whole(whole, todo, keyed=True)
    graph = graph_of(tracing.model, ties="apart")
    placement = placed(graph, 3, Random(name + "anywhere"))
    parts = split(tracing.model, placement, ties="apart")
    train_parts(parts, todo, keyed=True)
    assert furthest(parts.state(), whole.original_state()) <= 1e-10


def test_every_result_has_its_place():
    e, tracing = traced("multiple-outputs")
    parts = split(tracing.model, placed(graph_of(tracing.model), 3, Random(3)))
    made, _ = train_step(parts, e.args, e.kwargs, mean_square)
    expected = e.model(*e.args)
    assert made["none"] is None
    assert list(made) == list(expected)
    for a, b in zip(tree_leaves(made), tree_leaves(expected), strict=True):
        assert a is b is None or torch.equal(a, b)
