"""Stages loaded from bundles train bit-identically to the original stages."""

from __future__ import annotations

import json

import pytest
import torch
from models import MODELS

from ephemeron.config.typed import build, plain
from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.partition.serialization.stage_bundle import BundleDocument, StageBundle, load_bundle, make_bundle, owners
from ephemeron.partition.tracing import ModelSplit, mean_square, operators, split, trace, train_step

KINDS = ["resnet", "bert", "t5", "lstm", "multiple-outputs", "data-dependent-branch", "custom-autograd-function"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def halves(traced):
    """A device for each half of the operators; groups stay with their first."""
    nodes = operators(traced, ties="apart")
    home, placement = {}, {}
    for i, o in enumerate(nodes):
        device = "a" if i < len(nodes) / 2 else "b"
        placement[o.name] = home.setdefault(o.group, device) if o.group else device
    return placement


def named(stage):
    return dict([*stage.named_parameters(), *stage.named_buffers()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stages_come_back(kind):
    torch.manual_seed(0)
    example = MODELS[kind]()
    traced = trace(example.model, example.args, example.kwargs).model
    sent = split(traced, halves(traced), ties="apart")
    find = lambda target: resolve(target, [])  # noqa: E731
    parts = {}
    for device in sent.devices:
        bundle = make_bundle(sent, device)
        document = build(BundleDocument, json.loads(json.dumps(plain(bundle.document))), where=device)
        received = StageBundle(document=document, constants=bundle.constants)
        parts[device] = load_bundle(received, resolve=find, build_model=lambda: MODELS[kind]().model)
        for stage in parts[device].stages:
            assert (stage.spec.device == device) or not named(stage)  # a function holds its own stages only
    stages = [parts[s.spec.device].stages[s.spec.index] for s in sent.stages]
    for before, after in zip(sent.stages, stages, strict=True):
        assert before.spec == after.spec
        assert named(before).keys() == named(after).keys()
        with torch.no_grad():
            for name, t in named(after).items():
                t.copy_(named(before)[name])
    back = ModelSplit(parts[sent.devices[0]].traced, stages, sent.shared)
    for _ in range(2):
        state = torch.get_rng_state()
        _, expected = train_step(sent, example.args, example.kwargs, mean_square)
        torch.set_rng_state(state)
        _, loss = train_step(back, example.args, example.kwargs, mean_square)
        assert torch.equal(loss, expected)
    for before, after in zip(sent.stages, stages, strict=True):
        for name, t in before.named_parameters():
            grad = dict(after.named_parameters())[name].grad
            assert (grad is None) == (t.grad is None)
            assert grad is None or torch.equal(grad, t.grad)
        for name, t in before.named_buffers():
            assert torch.equal(dict(after.named_buffers())[name], t)


def test_every_state_has_an_owner():
    example = MODELS["resnet"]()
    traced = trace(example.model, example.args, example.kwargs).model
    speaks = owners(split(traced, halves(traced), ties="apart"))
    assert speaks.keys() == {n for n, _ in [*example.model.named_parameters(), *example.model.named_buffers()]}


def test_a_function_in_a_function_cannot_be_sent():
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Uses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.last(Local.apply(self.first(x)))

    traced = trace(Uses(), (torch.randn(4, 4),)).model
    parts = split(traced, halves(traced), ties="apart")
    calls = {step.name for step in traced.program.steps if step.opaque}
    home = next(s.spec.device for s in parts.stages if calls & {step.name for step, _ in s._box.steps[True]})
    with pytest.raises(JobError, match="cannot be sent to another function"):
        make_bundle(parts, home)
