"""Stage boundaries carry every dtype and nesting with its gradient, and a boundary that loses one is found before training."""

from __future__ import annotations

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402

from ephemeron.errors import TraceMismatch  # noqa: E402
from ephemeron.partition import Schedule  # noqa: E402
from ephemeron.partition.runtime import Pipeline, check_stages, execution  # noqa: E402
from ephemeron.partition.tracing import mean_square, operators, split, trace, train_step  # noqa: E402

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
SGD = partial(torch.optim.SGD, lr=0.05)
SCHEDULES = (Schedule(), Schedule(kind="1f1b", micro_batches=2), Schedule(kind="gpipe", micro_batches=2, recompute=True))


class Spectral(nn.Module):
    """A layer, a product in the frequency domain, a layer: complex tensors between them, and a complex parameter."""

    def __init__(self, dtype=torch.complex64):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.real = torch.zeros(0, dtype=dtype).real.dtype
        self.first = nn.Linear(4, 4, dtype=self.real)
        self.filter = nn.Parameter(torch.randn(4, dtype=dtype, generator=draw))
        self.last = nn.Linear(4, 2, dtype=self.real)

    def forward(self, x):
        h = torch.fft.fft(self.first(x).to(self.filter.dtype))
        h = torch.tanh(h * self.filter).conj()
        return self.last(torch.fft.ifft(h).real)


class Typed(nn.Module):
    """A layer computed in one dtype, a value of another dtype beside it, both nested in the result."""

    def __init__(self, dtype, other):
        super().__init__()
        self.dtype, self.other = dtype, other
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, more):
        h = torch.tanh(self.first(x)).to(self.dtype)
        count = (h.real > 0).to(self.other)
        h = h * more["scale"][0].to(self.dtype)
        made = self.last(h.real.float()) + count.float().sum(1, keepdim=True)
        return {"scores": made, "inner": [h, (count, {"deep": h * 2})]}


def halved(traced, parts=2):
    """Cuts in the middle of the operators."""
    names = [o.name for o in operators(traced)]
    return split(traced, {n: f"d{i * parts // len(names)}" for i, n in enumerate(names)})


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_gradients_cross_complex_boundaries(dtype, parts):
    model = Spectral(dtype)
    x = drawn(4, 4, dtype=model.real)
    traced = trace(model, (x,), steps=1).model
    cut = halved(traced, parts)
    assert any(traced.observation.values[p.name].dtype.startswith("complex") for s in cut.stages for p in s.spec.inputs)
    whole = copy.deepcopy(model)
    mean_square(whole(x)).backward()
    train_step(cut, (x,), None, mean_square)
    got = {n: p.grad for d in cut.devices for n, p in cut.parameters(d)}
    for name, p in whole.named_parameters():
        assert got[name] is not None, f"{name} is not trained"
        torch.testing.assert_close(got[name], p.grad)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_complex_boundaries_train_in_a_pipeline(schedule):
    model = Spectral(torch.complex128)
    x = drawn(4, 4, dtype=torch.float64)
    cut = halved(trace(model, (x,), steps=1).model, 3)
    whole, optimizer = copy.deepcopy(model), None
    optimizer = SGD(whole.parameters())
    with Pipeline(cut, schedule=schedule, optimizer=SGD, loss=lambda result, _: mean_square(result)) as pipe:
        for _ in range(2):
            pipe.step(x)
            optimizer.zero_grad()
            mean_square(whole(x)).backward()
            optimizer.step()
        state = pipe.state_dict()
    for name, t in whole.state_dict().items():
        torch.testing.assert_close(state[name], t)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [*((d, o) for d in (*REAL, *COMPLEX) for o in (torch.int64, torch.bool)), *((torch.float32, o) for o in WHOLE_NUMBERS[:-2])],
    ids=str,
)
def test_every_dtype_and_nesting_is_checked_over_real_boundaries(dtype, other):
    torch.manual_seed(0)
    model = Typed(dtype, other)
    args = (drawn(4, 4), {"scale": [drawn(4, 1)]})
    traced = trace(model, args, steps=1).model
    checked = check_stages(halved(traced, 3), schedule=Schedule(kind="1f1b", micro_batches=2), original=model)
    assert checked.steps == 2


def test_a_boundary_that_loses_gradients_is_found_before_training(monkeypatch):
    model = Spectral()
    cut = halved(trace(model, (drawn(4, 4),), steps=1).model, 2)
    before = {n: p.detach().clone() for d in cut.devices for n, p in cut.parameters(d)}

    def lossy(value, needs_gradient):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(needs_gradient and value.is_floating_point())

    monkeypatch.setattr(execution, "leaf", lossy)
    with pytest.raises(TraceMismatch, match=r"gradient of first\.(weight|bias) is there only in the (traced|original) model"):
        Pipeline(cut, schedule=Schedule(), optimizer=SGD, loss=lambda result, _: mean_square(result))
    assert all(torch.equal(before[n], p) for d in cut.devices for n, p in cut.parameters(d))


def test_results_of_complex_numbers_are_trained_and_compared():
    class Transform(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.fft.fft(self.second(torch.tanh(self.first(x))))

    class Wrong(Transform):
        def forward(self, x):
            return super().forward(x).conj() if torch.compiler.is_exporting() else super().forward(x)

    torch.manual_seed(0)
    tracing = trace(Transform(), (drawn(4, 4),))
    assert tracing.checked.largest_difference <= 1e-6
    check_stages(halved(tracing.model), schedule=Schedule())
    assert any("output 0 differs" in f for f in trace(Wrong(), (drawn(4, 4),)).failures)


def test_whole_numbers_have_to_be_equal_to_the_last_digit():
    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x), torch.full((4,), 2_000_000_000 + torch.compiler.is_exporting())

    tracing = trace(Indices(), (drawn(4, 4),), steps=1)
    assert any("output 1 differs" in f for f in tracing.failures)
