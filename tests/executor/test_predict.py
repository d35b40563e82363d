"""Predictions: outputs of every form have a row for each sample, or are refused by name before anything is started."""

from __future__ import annotations

import collections
import dataclasses
import json
import tempfile

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="predictions need a model")

import ephemeron  # noqa: E402
from ephemeron.errors import JobError, TaskFailed  # noqa: E402
from ephemeron.executor import predict as predicting  # noqa: E402
from ephemeron.executor.predict import Predictor, predict  # noqa: E402
from ephemeron.executor.prediction_files import check_inputs, check_out, read_inputs, write_outputs  # noqa: E402

X = np.arange(20.0, dtype="f4").reshape(5, 4)
Pair = collections.namedtuple("Pair", "mean spread")


@dataclasses.dataclass
class Found:
    logits: object
    hidden: object = None


FORMS = {
    "tensor": (lambda y: y, {"y": (5, 2)}),
    "numpy": (lambda y: y.numpy(), {"y": (5, 2)}),
    "numbers": (lambda y: y[:, 0].tolist(), {"y": (5,)}),
    "int": (lambda y: y.argmax(1), {"y": (5,)}),
    "bfloat16": (lambda y: y.bfloat16(), {"y": (5, 2)}),
    "list": (lambda y: [y], {"y0": (5, 2)}),
    "nested": (lambda y: (y, (y, {"a": [y[:, 0]]})), {"y0": (5, 2), "y1.0": (5, 2), "y1.1.a.0": (5,)}),
    "mapping": (lambda y: {"a": y, "b": (y, None)}, {"a": (5, 2), "b.0": (5, 2)}),
    "dataclass": (Found, {"logits": (5, 2)}),
    "named": (lambda y: Pair(y, y), {"mean": (5, 2), "spread": (5, 2)}),
    "squeezed": (lambda y: y[:, :1].squeeze(), {"y": (5,)}),
    "squeezed twice": (lambda y: (y.squeeze(), y[:, 1].squeeze()), {"y0": (5, 2), "y1": (5,)}),
}
WRONG = {
    "mean": (lambda y: y.mean(), "output y of the model has the shape [] for 3 samples"),
    "transposed": (lambda y: y.t(), "output y of the model has the shape [2, 3] for 3 samples"),
    "layers first": (lambda y: (y, torch.stack([y, y])), "output y1 of the model has the shape [2, 3, 2] for 3 samples"),
    "text": (lambda y: ["a"] * len(y), "output y0 of the model is a str, not numbers"),
    "nothing": (lambda y: None, "the model returned NoneType, not tensors"),
    "square": (lambda y: y @ y.t(), "output y of the model has the shape [2, 2] for 2 samples, and [3, 3] for 3"),
}


@dataclasses.dataclass
class Direct(Predictor):
    """A predictor whose model is a function of this process."""

    spec: dict = dataclasses.field(default_factory=dict)
    code: bytes = b""
    weights: bytes = b""
    form: object = None

    def build(self, folder):
        return lambda inputs: self.form(torch.from_numpy(inputs["x"])[:, :2])


def batches(predictor, size):
    return predicting._joined([predictor({"x": X[at : at + size]}) for at in range(0, 5, size)])


@pytest.mark.parametrize("name", FORMS)
def test_outputs_have_a_row_for_each_sample_and_names(name):
    form, shapes = FORMS[name]
    found = predicting.tried(Direct(form=form), {"x": X})
    assert found.pads == name.startswith("squeezed")
    for size in (1, 2, 4, 5):
        outputs = batches(found, size)
        assert {key: array.shape for key, array in outputs.items()} == shapes
        first = next(iter(outputs.values())).reshape(5, -1)[:, 0]
        np.testing.assert_array_equal(first, X[:, 0] if name != "int" else np.ones(5))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_outputs_are_refused_by_name_on_the_client(name):
    form, said = WRONG[name]

    with pytest.raises(JobError) as found:
        predicting.tried(Direct(form=form), {"x": X})
    assert said in str(found.value)


def test_none_is_told_and_rows_of_several_lengths_are_named(caplog):
    predicting.tried(Direct(form=lambda y: (y, None, {"a": None})), {"x": X[:1]})
    assert "the model gives None as y1, y2.a, which is left out" in caplog.text
    with pytest.raises(TaskFailed, match=r"output y .* rows of the shape \[2\] in batch 0, and \[3\] in batch 1"):
        predicting._joined([{"y": np.zeros((2, 2))}, {"y": np.zeros((1, 3))}])


def test_a_language_model_keeps_its_logits_where_it_returns_a_cache_too(caplog):
    class Cache:
        pass

    found = predicting.tried(Direct(form=lambda y: {"logits": y, "past_key_values": Cache()}), {"x": X})
    assert found({"x": X}).keys() == {"logits"}
    assert "the model gives Cache as past_key_values, which is left out" in caplog.text
    with pytest.raises(JobError, match="the model returned Cache, not tensors"):
        predicting.tried(Direct(form=lambda y: Cache()), {"x": X})


class Squeezing(ephemeron.Task):
    """Its outputs lose the axis of a single sample."""

    def train_data(self):
        g = np.random.default_rng(0)
        return g.standard_normal((16, 4)).astype("f4"), g.standard_normal(16).astype("f4")

    def model(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, x):
                return self.layer(x).squeeze()

        return Model()

    def training_step(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).mean()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(home))
        return ephemeron.train(Squeezing(), platform="simulated", workers=1, batch_size=4, epochs=1, on_event=lambda event: None)


@pytest.fixture
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return {"platform": "simulated", "max_workers": 1, "retries": 0, "progress": False}


@pytest.mark.slow
def test_a_last_batch_of_one_and_no_folder_left(result, quick, tmp_path):
    outputs, bill = predict(result, {"x": X}, batch_size=2, **quick)
    state = {name: value.numpy() for name, value in result.state_dict().items()}
    want = X @ state["layer.weight"][0] + state["layer.bias"]
    np.testing.assert_allclose(outputs["y"], want, rtol=1e-5)
    assert bill.tasks == 3
    assert list(tmp_path.glob("ephemeron-predict-*")) == []
    for other in (X.astype("f8"), X.astype(">f4"), np.asfortranarray(X), X.astype("f2")):
        np.testing.assert_allclose(predict(result, {"x": other}, **quick)[0]["y"], want, rtol=1e-2)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (X[:0], "there are no inputs"),
        (np.float32(3), "input x is a single value"),
        (X.astype(object), "input x is of type object"),
        (X.astype(str), "input x is text"),
        (X[:, :3], "given x of float32 and shape [3, 3]"),
        (X.astype("i8"), "given x of int64"),
        (X.astype("u1"), "given x of uint8"),
    ],
)
def test_inputs_that_a_model_does_not_take_are_named_before_anything_is_started(result, quick, x, said):
    pools = []
    with pytest.raises(JobError) as found:
        predict(result, {"x": x}, on_pool=pools.append, **quick)
    assert said in str(found.value)
    assert not pools


def test_json_does_not_tell_integers_from_numbers(result, quick, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(f"{row.astype(int).tolist()}\n" for row in X))
    inputs = read_inputs(tmp_path / "x.jsonl")
    assert inputs["x"].dtype == np.int64
    np.testing.assert_array_equal(predict(result, inputs, casts=True, **quick)[0]["y"], predict(result, {"x": X}, **quick)[0]["y"])


GOOD_LINES = {
    "plain": ("[1, 2]\n[3, 4]\n", [[1, 2], [3, 4]]),
    "BOM": ("\ufeff[1, 2]\n", [[1, 2]]),
    "CRLF": ("[1]\r\n[2]\r\n", [[1], [2]]),
    "no end": ("1\n2", [1, 2]),
    "empty lines": ("\n1\n\n2\n", [1, 2]),
    "booleans": ("[true]\n", [[True]]),
    "infinities": ("[Infinity, -Infinity]\n", [[np.inf, -np.inf]]),
    "large": ("[9007199254740993]\n", [[9007199254740993]]),
}


@pytest.mark.parametrize("name", GOOD_LINES)
def test_lines_that_are_read(name, tmp_path):
    text, want = GOOD_LINES[name]
    (tmp_path / "x.jsonl").write_bytes(text.encode())
    assert read_inputs(tmp_path / "x.jsonl")["x"].tolist() == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]\n\n[3]\n", "line 3 has the shape [1], line 1 has [2]"),
        ('{"a": 1}\n{"b": 2}\n', "line 2 has the keys 'b', line 1 has 'a'"),
        ('{"a": 1}\n{"a": 1, "b": 2}\n', "line 2 has the keys 'a', 'b'"),
        ('{"a": 1}\n[1]\n', "line 2: objects and other values are mixed"),
        ("[1]\n[null]\n", "line 2: [null] is no number"),
        ("[[1, 2], [3]]\n", "line 1: [[1, 2], [3]] is no number"),
        ("", "has no inputs"),
        ("[1\n", "line 1 is no JSON"),
    ],
)
def test_lines_that_are_refused_with_their_number(text, said, tmp_path):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(JobError) as found:
        read_inputs(tmp_path / "x.jsonl")
    assert said in str(found.value)


def test_text_is_read_and_refused_as_input(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"t": "a\u2028b"}\n{"t": "longer"}\n')
    inputs = read_inputs(tmp_path / "x.jsonl")
    assert inputs["t"].tolist() == ["a\u2028b", "longer"]
    with pytest.raises(JobError, match="input t is text, and models take numbers"):
        check_inputs(inputs)


def test_what_is_not_finite_is_written_and_read_again(tmp_path):
    y = np.array([[np.nan, 1.0], [np.inf, -np.inf]], dtype="f4")
    write_outputs(tmp_path / "y.jsonl", {"y": y})
    assert (tmp_path / "y.jsonl").read_text() == "[NaN, 1.0]\n[Infinity, -Infinity]\n"
    np.testing.assert_array_equal(read_inputs(tmp_path / "y.jsonl")["x"], y)
    assert len(json.loads((tmp_path / "y.jsonl").read_text().splitlines()[0])) == 2
    with pytest.raises(JobError, match="output y of the model is complex64, which JSON has not"):
        check_out(tmp_path / "y.jsonl", {"y": y.astype("c8")})
