"""Costs of models and links: sizes exactly, times by structure, fits against lines that are known."""

from __future__ import annotations

import asyncio
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_worlds import WORK

from ephemeron.errors import JobError
from ephemeron.partition import Device, Schedule, connected, graph_to_json, parse_graph, parse_topology, place, replay, topology_to_json
from ephemeron.partition.costs import Throttle, fit_link, measure_here
from ephemeron.partition.costs.peer import LinkPeer


@given(st.floats(1e-6, 0.5), st.floats(1e4, 1e11), st.booleans())
def test_a_line_is_found_again(latency_s, bandwidth, replies):
    sizes = [0, 4096, 1 << 20, 8 << 20]
    way = 2 if replies else 1
    f = fit_link({n: [way * latency_s + n / bandwidth] * 3 for n in sizes}, replies=replies)
    slowest = 8 * (1 << 20) / bandwidth
    assert f.latency_s == pytest.approx(latency_s, rel=1e-6)
    if slowest > 1e-6 * latency_s:  # else the bandwidth is lost in rounding
        assert f.bandwidth_bytes_s == pytest.approx(bandwidth, rel=1e-3)
    assert f.worst_error < 1e-6


def test_one_slow_message_changes_nothing():
    good = {0: [0.001, 0.001, 0.001], 1000: [0.002, 0.002, 0.002]}
    assert fit_link({**good, 1000: [0.5, 0.002, 9.0]}) == fit_link(good)


def test_a_link_has_no_latency_below_0():
    f = fit_link({100: [1.0], 200: [3.0]})
    assert f.latency_s == 0.0
    assert 100 / 3 < f.bandwidth_bytes_s < 200 / 1


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({5: [1.0]}, r"messages of two sizes, not of \[5\]"),
        ({0: [0.0], 5: [1.0]}, "a message of 0 bytes took 0.0 s"),
        ({0: [2.0], 5: [1.0]}, "messages of 5 bytes are not slower than those of 0"),
    ],
)
def test_times_that_make_no_link_are_refused(samples, message):
    with pytest.raises(JobError, match=message):
        fit_link(samples)


def test_every_ordered_pair_of_processes_is_measured():
    devices = [Device(name=n, kind="cpu", memory_bytes=1) for n in "abc"]
    pairs = set(itertools.permutations("abc", 2))
    limits = {p: Throttle(latency_s=0.05 if p == ("a", "b") else 0.0, bandwidth_bytes_s=2e7) for p in pairs}
    made = asyncio.run(measure_here(devices, sizes=(0, 1 << 20), repeats=2, throttles=limits))
    assert set(made.fits) == pairs
    assert made.fits["a", "b"].latency_s >= 0.05, "what holds a message back cannot be missed"
    assert parse_topology(topology_to_json(made.topology)) == made.topology


def test_a_throttle_of_no_pair_is_refused():
    devices = [Device(name=n, kind="cpu", memory_bytes=1) for n in "ab"]
    with pytest.raises(JobError, match="throttle for a → x, which is no pair of devices"):
        asyncio.run(measure_here(devices, throttles={("a", "x"): Throttle()}))


def test_a_throttle_holds_back_by_size():
    assert Throttle(latency_s=0.5).wait_s(0) == 0.5
    assert Throttle(latency_s=0.5, bandwidth_bytes_s=100.0).wait_s(1000) == 10.5


def test_a_peer_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown method steal"):
        asyncio.run(LinkPeer("t").handle("steal", {}, []))


def test_links_are_measured_without_pytorch():
    import subprocess

    code = "import sys, ephemeron.partition.costs.peer_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from models import MODELS  # noqa: E402

from ephemeron.partition.costs.optimizer import alpha, optimizer_bytes  # noqa: E402
from ephemeron.partition.costs.profile import profile_model  # noqa: E402
from ephemeron.partition.costs.times import measure_times  # noqa: E402
from ephemeron.partition.tracing import mean_square, operators, split, trace, train_step  # noqa: E402


@pytest.mark.parametrize(
    ("make", "per_element", "per_parameter"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0, 0),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 4, 0),
        (lambda ps: torch.optim.Adam(ps), 8, 4),
        (lambda ps: torch.optim.Adam(ps, amsgrad=True), 12, 4),
        (lambda ps: torch.optim.Adagrad(ps), 4, 4),
    ],
)
def test_optimiser_state_is_what_the_optimiser_keeps(make, per_element, per_parameter):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    model[0].bias.requires_grad_(False)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = optimizer_bytes(model, make)
    sizes = {n: p.numel() for n, p in model.named_parameters() if n != "0.bias"}
    assert found == {n: per_element * size + per_parameter for n, size in sizes.items()}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    total = 4 * sum(sizes.values())
    assert alpha(model, found) == pytest.approx((2 * total + sum(found.values())) / total)


def test_an_optimiser_that_wants_a_closure_is_refused():
    with pytest.raises(JobError, match="cannot make one step with dense gradients: TypeError"):
        optimizer_bytes(torch.nn.Linear(2, 2), lambda ps: torch.optim.LBFGS(ps))


def test_every_operator_has_its_times():
    torch.manual_seed(0)
    e = MODELS["frozen-parameters"]()
    traced = trace(e.model, e.args).model
    before = {n: t.clone() for n, t in traced.state_dict().items()}
    times = measure_times(traced, e.args, repeats=3, warmup=1)
    found = {o.name: o for o in operators(traced)}
    assert set(times.forward) == set(times.backward) == set(found)
    for name, o in found.items():
        assert (times.forward[name].median_s > 0) == bool(o.steps)
        if not any(traced.observation.values[n].needs_gradient for n in o.outputs):
            assert times.backward[name].median_s == 0, "below the first trained parameter nothing goes back"
        assert times.forward[name].low_s <= times.forward[name].median_s <= times.forward[name].high_s
    assert times.whole_backward.median_s > 0
    assert all(torch.equal(before[n], t) for n, t in traced.state_dict().items())


def test_quartiles_need_three_repetitions():
    e = MODELS["odd-last-batch"]()
    with pytest.raises(JobError, match="repeats = 2 gives no quartiles"):
        measure_times(trace(e.model, e.args).model, e.args, repeats=2)


@pytest.mark.parametrize("name", ["u-net", "gpt-2", "data-dependent-branch"])
def test_a_measured_model_is_placed_cut_and_trained(name):
    """The whole way: trace, measure, place with proof, cut, train; equal to the model that was given."""
    torch.manual_seed(0)
    e = MODELS[name]()
    tracing = trace(e.model.double(), *doubled(e))
    profile = profile_model(tracing.model, *doubled(e), optimizer=lambda ps: torch.optim.Adam(ps), repeats=3)
    graph = parse_graph(graph_to_json(profile.graph))
    assert graph == profile.graph
    own = sum(p.numel() * p.element_size() for p in e.model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in e.model.buffers())
    assert sum(n.gradient_bytes for n in graph.nodes) == own
    assert own <= sum(n.parameter_bytes for n in graph.nodes) <= own + buffers
    topology = connected([Device(name=f"d{k}", kind="cpu", memory_bytes=1 << 30) for k in range(3)], lambda a, b: (1e-5, 1e9))
    plan = place(graph, topology, schedule=Schedule(kind="1f1b", micro_batches=4), budget=WORK)
    assert replay(graph, topology, plan.placement).fits
    parts = split(tracing.model, plan.placement)
    whole = e.model.train()
    args, kwargs = doubled(e)
    optimisers = [torch.optim.Adam([p for _, p in parts.parameters(d)]) for d in parts.devices if list(parts.parameters(d))]
    whole_optimiser = torch.optim.Adam(whole.parameters())
    for k in range(3):
        for model_step in (lambda: mean_square(whole(*args, **kwargs)).backward(), lambda: train_step(parts, args, kwargs, mean_square)):
            torch.manual_seed(k)
            model_step()
        for o in (*optimisers, whole_optimiser):
            o.step()
            o.zero_grad()
    for n, t in whole.state_dict().items():
        assert torch.allclose(parts.state()[n].double(), t.double(), rtol=1e-10, atol=1e-10), n


def doubled(e):
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, (e.args, e.kwargs)
    )
