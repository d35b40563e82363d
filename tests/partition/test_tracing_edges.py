"""What is refused, what is opaque, what cannot be apart; and that the check finds a trace that is wrong."""

from __future__ import annotations

import copy
import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from models import MODELS, Bert, OddBatch, Quantised, ResNet  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ephemeron.errors import JobError, TraceMismatch  # noqa: E402
from ephemeron.partition.tracing import (  # noqa: E402
    Operator,
    Traced,
    check,
    graph_of,
    mean_square,
    operators,
    split,
    trace,
    train_step,
)
from ephemeron.partition.tracing.exporting import export_program  # noqa: E402
from ephemeron.partition.tracing.split import stages_of  # noqa: E402


class Sum(nn.Module):
    """Branches on data in its own code: nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.a(x) if x.sum() > 0 else self.b(x)


class NoExport(nn.Module):
    """Its own code refuses to be exported; symbolic tracing sees through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x, scale=2.0):
        if torch.compiler.is_exporting():
            raise RuntimeError("not for export")
        return self.second(torch.relu(self.norm(self.first(x))) * scale)


class Recomputing(nn.Module):
    """Checkpoints its activations the old way: a custom function that reads parameters behind the tracer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=True))


class InPlace(nn.Module):
    """Writes into parts of tensors, and counts for itself; sums otherwise in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        h = self.first(x)
        h += 1
        table = torch.zeros(x.shape[0], 4)
        table[:, 0] = 3.0
        table[:, 1:] += h[:, 1:]
        if self.training:
            self.seen += 1
            return self.second(h) + table * self.seen
        return self.second(h)


def batch(n=4, width=4):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(0))


def trained_apart(traced: Traced, args, *, ties="together", parts=2, steps=5):
    """Cuts at random, trains, and says how far the parts are from the whole."""
    whole = copy.deepcopy(traced).train()
    order = [o.name for o in operators(traced, ties=ties)]
    groups = {o.name: o.group or o.name for o in operators(traced, ties=ties)}
    draws = Random(1)
    device = {g: f"d{draws.randrange(parts)}" for g in dict.fromkeys(groups.values())}
    pieces = split(traced, {n: device[groups[n]] for n in order}, ties=ties)
    for k in range(steps):
        for model in (whole, *pieces.stages):
            model.draw_from(3, iteration=k)
            model.zero_grad()
        mean_square(whole(*args)).backward()
        train_step(pieces, args, None, mean_square)
        for p in (*whole.parameters(), *(p for d in pieces.devices for _, p in pieces.parameters(d))):
            if p.grad is not None:
                p.data -= 0.05 * p.grad
    state = pieces.state()
    return max(float((t - state[n]).abs().max()) for n, t in whole.original_state().items()), pieces


def test_a_model_that_branches_in_its_own_code_is_one_node():
    model = Sum()
    tracing = trace(model, (batch(),))
    assert tracing.opaque == ("",)
    assert not tracing.splittable
    assert tracing.model.program.tracer == "one opaque node"
    assert any("data-dependent" in f for f in tracing.failures)
    assert float(model.calls) == 0, "tracing leaves the model as it was"
    assert [n for n, _ in tracing.model.named_parameters()] == [n for n, _ in model.named_parameters()]
    gap, parts = trained_apart(tracing.model, (batch(),))
    assert gap == 0
    assert float(parts.state()["calls"]) == 5
    assert parts.state().keys() == model.state_dict().keys()


def test_what_export_refuses_fx_may_take():
    tracing = trace(NoExport(), (batch(),))
    assert tracing.model.program.tracer == "torch.fx"
    assert any("not for export" in f for f in tracing.failures)
    assert tracing.checked.smaller_batch
    assert tracing.checked.evaluation
    assert trained_apart(tracing.model, (batch(),))[0] <= 1e-6


def test_gradients_that_a_tracer_loses_are_found_and_another_is_taken():
    tracing = trace(Recomputing(), (batch(),))
    assert any("gradient of body.weight is there only in the original model" in f for f in tracing.failures)
    assert tracing.model.program.tracer != "torch.export"
    assert tracing.checked.largest_difference <= 1e-6
    assert trained_apart(tracing.model, (batch(),))[0] <= 1e-6


def test_a_module_may_be_kept_opaque_on_demand():
    tracing = trace(ResNet(), (torch.randn(4, 3, 8, 8),), opaque=["blocks.1"])
    assert tracing.opaque == ("blocks.1",)
    (node,) = [o for o in operators(tracing.model) if o.steps and o.steps[0].module == "blocks.1"]
    assert set(node.states) == {f"blocks.1.{n}" for n in ResNet().blocks[1].state_dict()}
    assert trained_apart(tracing.model, (torch.randn(4, 3, 8, 8),))[0] <= 1e-6


def test_memory_that_is_written_stays_together():
    tracing = trace(InPlace(), (batch(),))
    assert tracing.checked.largest_difference == 0
    found = {o.name: o for o in operators(tracing.model)}
    (zeros,) = [o for o in found.values() if o.name.startswith("zeros")]
    writers = [o for o in found.values() if any(tracing.model.observation.side_effects[s.name].changed for s in o.steps)]
    assert len(writers) >= 3
    assert {o.group for o in writers if o.group == zeros.group}, "who writes into the table is where the table is"
    order = graph_of(tracing.model).topological_order()
    for writer in (o.name for o in writers if o.group == zeros.group):
        assert order.index(writer) < order.index("mul"), "who reads the table waits for what was written into it"
    gap, _ = trained_apart(tracing.model, (batch(),), parts=3)
    assert gap <= 1e-6
    apart = {n: "b" if n == zeros.name else "a" for n in found}
    with pytest.raises(JobError, match="they share state that changes; put nodes of one group on one device"):
        split(tracing.model, apart)


def test_a_model_that_is_another_in_evaluation_is_not_evaluated():
    tracing = trace(InPlace(), (batch(),))
    assert not tracing.checked.evaluation
    with pytest.raises(JobError, match="not found equal to the original in evaluation; load its state_dict"):
        tracing.model.eval()(batch())


def test_copies_of_a_shared_parameter_stay_equal():
    torch.manual_seed(0)
    model = Bert()
    ids = torch.randint(0, 20, (4, 6))
    tracing = trace(model, (ids,))
    order = [o.name for o in operators(tracing.model, ties="apart")]
    placement = {n: "first" if i < len(order) // 2 else "last" for i, n in enumerate(order)}
    parts = split(tracing.model, placement, ties="apart")
    assert parts.shared == {"words.weight": ("first", "last")}
    train_step(parts, (ids,), None, mean_square)
    a, b = (dict(parts.parameters(d))["words.weight"] for d in ("first", "last"))
    assert a is not b
    assert torch.equal(a.grad, b.grad)
    together = graph_of(tracing.model)
    apart = graph_of(tracing.model, ties="apart")
    more = sum(n.parameter_bytes for n in apart.nodes) - sum(n.parameter_bytes for n in together.nodes)
    assert more == 4 * model.words.weight.numel()
    with pytest.raises(JobError, match="share state that changes"):
        split(tracing.model, placement)


def test_keyed_draws_do_not_touch_the_global_generator():
    tracing = trace(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), (batch(),))
    model = tracing.model.train()
    state = torch.random.get_rng_state()
    model.draw_from(5, iteration=1)
    a, b = model(batch()), model(batch())
    model.draw_from(5, iteration=2)
    c = model(batch())
    model.draw_from(5, iteration=2, micro_batch=1)
    d = model(batch())
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(c, d)


def test_a_forgotten_backward_is_found():
    """Export of a custom function without interception: right results, wrong gradients."""
    torch.manual_seed(0)
    model, x = Quantised(), torch.randn(4, 6)
    good = trace(model, (x,)).model
    steps = tuple(
        dataclasses.replace(s, target=lambda t, levels: torch.round(t * levels) / levels) if s.shape else s for s in good.program.steps
    )
    wrong = Traced(dataclasses.replace(good.program, steps=steps), model, (x,), {})
    with pytest.raises(TraceMismatch, match=r"gradient of first.weight differs by .* at operator aten::linear"):
        check(model, wrong, (x,), {})


def test_a_wrong_operator_is_named():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), batch()
    program = export_program(model.train(), (x,), {})
    steps = tuple(dataclasses.replace(s, target=torch.ops.aten.tanh.default) if "relu" in s.name else s for s in program.steps)
    with pytest.raises(TraceMismatch, match=r"output 0 differs by .* at module 1 \(ReLU\)"):
        check(model, Traced(dataclasses.replace(program, steps=steps), model, (x,), {}), (x,), {})


def test_a_lost_buffer_is_found():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(), batch()
    program = export_program(model, (x,), {})
    steps = tuple(s for s in program.steps if "add_" not in s.name)
    with pytest.raises(TraceMismatch, match=r"buffer 1\.num_batches_tracked differs by 1"):
        check(model, Traced(dataclasses.replace(program, steps=steps), model, (x,), {}), (x,), {})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.randn(4, 3, 5)), "input x of the model is 4 × 3 × 5, and was traced as any × 3 × 4; pass that"),
        (lambda m: m(torch.randn(4, 3)), "input x of the model is 4 × 3, and"),
        (lambda m: m(3), "input x of the model is int, and was traced as a tensor"),
        (lambda m: m(torch.randn(4, 3, 4), torch.randn(1)), "arguments of the model are nested as"),
    ],
)
def test_other_arguments_are_refused_by_name(call, message):
    model = trace(OddBatch(), (torch.randn(4, 3, 4),)).model
    with pytest.raises(JobError, match=message):
        call(model)


def test_a_plain_argument_holds_for_its_value():
    torch.manual_seed(0)
    e = MODELS["two-inputs"]()
    model = trace(e.model, e.args, e.kwargs).model
    with pytest.raises(JobError, match=r"= 2.0, and was traced with 0.5; trace it again for this value"):
        model(*e.args, **{**e.kwargs, "scale": 2.0})


def test_a_model_that_cannot_be_trained_is_refused():
    with pytest.raises(JobError, match="Linear cannot be trained on its example batch: RuntimeError: mat1 and mat2"):
        trace(nn.Linear(3, 3), (batch(),))
    with pytest.raises(JobError, match="opaque = 'nowhere' is no module"):
        trace(nn.Linear(4, 3), (batch(),), opaque=["nowhere"])
    with pytest.raises(JobError, match="the model returns no floating tensor"):
        trace(nn.Flatten(), (torch.ones(4, 2, dtype=torch.long),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {**p, "nothing": "a"}, "placement has nothing, which is no operator"),
        (lambda p: dict(list(p.items())[1:]), "placement has no device for operator"),
    ],
)
def test_a_placement_of_another_model_is_refused(change, message):
    traced = trace(nn.Linear(4, 4), (batch(),)).model
    placement = {o.name: "a" for o in operators(traced)}
    with pytest.raises(JobError, match=message):
        split(traced, change(placement))


def test_stages_are_in_the_order_given_where_tensors_only_go_forward():
    made = [
        Operator(name=n, steps=(), inputs=inputs, outputs=(f"{n}.out",), states=())
        for n, inputs in (("p", ()), ("q", ()), ("r", ("p.out", "q.out")))
    ]
    placement = {"p": "x", "q": "y", "r": "z"}
    assert [d for d, _ in stages_of(made, placement)] == ["x", "y", "z"]
    assert [d for d, _ in stages_of(made, placement, ("y", "x", "z"))] == ["y", "x", "z"]
    for wrong in (("y", "z", "x"), ("x", "y"), ("x", "x", "y", "z")):
        with pytest.raises(JobError, match="no order of the placement's devices"):
            stages_of(made, placement, wrong)


def test_a_stage_says_what_it_misses():
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (batch(),)).model
    names = [o.name for o in operators(traced)]
    parts = split(traced, {n: "b" if n == names[-1] else "a" for n in names})
    with pytest.raises(JobError, match="stage 1 on b was not given linear"):
        parts.stages[1]({})


@st.composite
def placed_operators(draw):
    rng = Random(draw(st.integers(0, 2**32)))
    count, devices = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    made, placement = [], {}
    for i in range(count):
        inputs = tuple(f"v{j}" for j in range(i) if rng.random() < 0.3)
        made.append(Operator(name=f"o{i}", steps=(), inputs=inputs, outputs=(f"v{i}",), states=()))
        placement[f"o{i}"] = f"d{rng.randrange(devices)}"
    return made, placement


@given(placed_operators())
def test_stages_can_run_one_after_the_other(world):
    made, placement = world
    layout = stages_of(made, placement)
    at = {n: i for i, (_, names) in enumerate(layout) for n in names}
    assert sorted(at) == sorted(o.name for o in made), "each operator is in one stage"
    assert all(placement[n] == d for d, names in layout for n in names)
    crossings = {(placement[f"o{v[1:]}"], placement[o.name]) for o in made for v in o.inputs}
    for o in made:
        for v in o.inputs:
            assert at[f"o{v[1:]}"] <= at[o.name], "nothing is read before it is made"
    order = [d for d, _ in layout]
    if len(set(order)) < len(order):
        reach = set(crossings)
        while more := {(a, d) for a, b in reach for c, d in reach if b == c} - reach:
            reach |= more
        assert any(a != b and (b, a) in reach for a, b in reach), "a device has two stages only where devices send in a circle"
