"""Dataclasses as arguments and results; and errors with the line of the model's code and a remedy."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402

from ephemeron.config.typed import build, plain  # noqa: E402
from ephemeron.config.user_code import resolve  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.partition import Schedule  # noqa: E402
from ephemeron.partition.runtime import Pipeline  # noqa: E402
from ephemeron.partition.serialization.stage_bundle import BundleDocument, StageBundle, load_bundle, make_bundle  # noqa: E402
from ephemeron.partition.tracing import mean_square, operators, split, trace  # noqa: E402


@dataclasses.dataclass
class Inner:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    scores: torch.Tensor
    inner: list[Inner]
    width: int = 4


@dataclasses.dataclass
class Input:
    x: torch.Tensor


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, given):
        h = torch.tanh(self.first(given.x))
        return Output(scores=self.last(h), inner=[Inner(hidden=h)])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.last(made[:, -1])


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        for _ in range(int(x.abs().sum()) % 3 + 1):
            h = torch.tanh(h)
        return self.last(h)


class DynamicCache:
    def __init__(self, keys):
        self.keys = keys


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, use_cache=True):
        h = self.first(x)
        return {"logits": self.last(h), "past_key_values": DynamicCache([h]) if use_cache else None}


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def line_of(kind, text):
    lines, start = inspect.getsourcelines(kind)
    return f"test_tracing_refusals.py:{start + next(i for i, line in enumerate(lines) if text in line)}: "


def in_two(traced):
    names = [o.name for o in operators(traced)]
    return split(traced, {n: f"d{i * 2 // len(names)}" for i, n in enumerate(names)})


def test_dataclasses_are_trees_of_tensors():
    tracing = trace(Structured(), (Input(drawn(4, 4)),))
    assert tracing.splittable
    assert tracing.checked.largest_difference == 0
    loss = lambda result, _: mean_square(result)  # noqa: E731
    schedule = Schedule(kind="1f1b", micro_batches=2)
    with Pipeline(in_two(tracing.model), schedule=schedule, optimizer=torch.optim.SGD, loss=loss) as pipe:
        first, second = pipe.step((Input(drawn(4, 4)),), results=True).results
    assert type(first) is Output
    assert type(second.inner[0]) is Inner
    assert first.scores.shape == (2, 2)
    assert first.inner[0].extra is None
    assert first.width == 4


def test_dataclasses_are_known_where_stages_are_joined():
    parts = in_two(trace(Structured(), (Input(drawn(4, 4)),), steps=1).model)
    bundle = make_bundle(parts, "d1")
    document = build(BundleDocument, json.loads(json.dumps(plain(bundle.document))), where="d1")
    assert sorted(document.program.dataclasses) == sorted(f"{__name__}:{k}" for k in ("Input", "Output", "Inner"))
    found = []
    there = load_bundle(
        StageBundle(document=document, constants=bundle.constants),
        resolve=lambda name: found.append(name) or resolve(name, []),
        build_model=Structured,
    )
    assert sorted(found) == sorted(document.program.dataclasses)
    assert there.traced.program.out_spec == parts.traced.program.out_spec


def test_a_dataclass_in_a_function_cannot_be_sent():
    @dataclasses.dataclass
    class Local:
        x: torch.Tensor

    class Model(Structured):
        def forward(self, x):
            return Local(self.last(torch.tanh(self.first(x))))

    parts = in_two(trace(Model(), (drawn(4, 4),), steps=1).model)
    with pytest.raises(JobError, match=r"Local.* has no name .*define it at the top of a module"):
        make_bundle(parts, "d0")


def test_a_dataclass_that_cannot_be_made_again_is_named():
    @dataclasses.dataclass
    class Late:
        x: torch.Tensor
        y: int = dataclasses.field(init=False, default=3)

    class Model(Structured):
        def forward(self, x):
            return Late(self.last(self.first(x)))

    with pytest.raises(JobError, match=r"Late\.y is a field that its constructor does not take"):
        trace(Model(), (drawn(4, 4),))


def test_packed_sequences_are_reported_with_their_line():
    tracing = trace(Packed(), (drawn(4, 5, 4), torch.tensor([5, 3, 2, 1])), steps=1)
    assert not tracing.splittable
    for text in (f"module lstm: {line_of(Packed, 'made, _')}made, _ = nn", line_of(Packed, "packed = nn")):
        assert any(text in f and "sequences are packed" in f for f in tracing.failures)
    assert "give the layer the padded batch" in tracing.remedy
    assert not any("FakeTensor" in f or "__cuda_array_interface__" in f for f in tracing.failures)


@pytest.mark.parametrize(("model", "module"), [(Loop(), "itself"), (nn.Sequential(nn.Linear(4, 4), Loop()), "1")])
def test_loops_over_data_are_reported_with_their_line(model, module):
    tracing = trace(model, (drawn(4, 4),), steps=1)
    assert tracing.splittable == (module == "1")
    assert tracing.failures[0].startswith(f"module {module}: {line_of(Loop, 'for _')}for _ in range(int(")
    assert "data-dependent" in tracing.failures[0]
    assert "module of its own" in tracing.remedy
    assert not any("zuf0" in f or "Proxy" in f for f in tracing.failures)


def test_caches_of_decoders_have_a_remedy():
    tracing = trace(Decoder(), (drawn(4, 4),), steps=1)
    assert "DynamicCache" in tracing.failures[0]
    assert "use_cache=False" in tracing.remedy
    without = trace(Decoder(), (drawn(4, 4),), {"use_cache": False}, steps=1)
    assert without.splittable
    assert without.remedy == ""
