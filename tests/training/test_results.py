"""What is done with a run that has ended: its model, its weights, its metrics, and commands that evaluate and export it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from training_runs import CODE, make_job

import ephemeron
from ephemeron.cli.main import main
from ephemeron.errors import JobError, MissingExtra, UserError
from ephemeron.events import RunStarted
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.evaluation import evaluate
from ephemeron.training.driver.metric_table import MetricTable
from ephemeron.training.driver.result import result_of
from ephemeron.training.driver.step_metrics import StepMetrics
from ephemeron.training.driver.trained import job_of_run
from ephemeron.training.job import Target

torch = pytest.importorskip("torch", reason="pip install 'ephemeron[torch]'")


def train(code: Path = CODE, **job: object) -> ephemeron.Result:
    wanted = make_job(**{"epochs": 2, "code": (code,), **job})
    c = ephemeron.configure(wanted, platform="simulated", workers=2, batch_size=200)
    return ephemeron.train(wanted, c)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ephemeron.Result:
    """A run of two epochs, whose code is in a folder of its own."""
    folder = tmp_path_factory.mktemp("home")
    code = tmp_path_factory.mktemp("code")
    (code / "mine.py").write_text((CODE / "tiny.py").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(folder))
        return train(code, model=Target(target="mine:mlp", options={"hidden": 8}))


@pytest.fixture(autouse=True)
def home(run: ephemeron.Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(run.folder.path.parents[1]))
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> str:
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_the_model_has_the_weights_that_the_functions_have_written(run: ephemeron.Result) -> None:
    model, weights = run.model(), run.state_dict()
    assert not model.training
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in load_file(run.folder.weights).items()
    }
    assert weights.keys() == model.state_dict().keys()
    assert type(model).__name__ == "Sequential"
    assert "mine" in sys.modules
    assert evaluate(job_of_run(run.folder), weights) == pytest.approx(dict(run.summary.metrics), rel=1e-5)


def test_the_model_is_that_of_the_run_after_its_code_has_changed(run: ephemeron.Result) -> None:
    source = run.model()[1].weight.tolist()
    (code,) = {Path(p) for p in json.loads((run.folder.path / "run.json").read_text())["payload"]["source"]["folders"]}
    before = (code / "mine.py").read_text()
    try:
        (code / "mine.py").write_text("def mlp(hidden):\n    raise ValueError('another model')\n")
        assert run.model()[1].weight.tolist() == source
        shutil.move(code / "mine.py", code / "other.py")
        assert run.model()[1].weight.tolist() == source
    finally:
        (code / "mine.py").write_text(before)
        (code / "other.py").unlink(missing_ok=True)


def test_metrics_are_a_table_by_step(run: ephemeron.Result) -> None:
    table = run.metrics
    iterations = run.summary.iterations
    assert [row["iteration"] for row in table] == list(range(1, iterations + 1))
    assert table.columns == ("iteration", "epoch", "time_s", "train/loss", "evaluation/loss", "evaluation/accuracy")
    assert table[-1]["epoch"] == 2.0
    assert table.column("evaluation/accuracy") == [
        (iterations // 2, table[iterations // 2 - 1]["evaluation/accuracy"]),
        (iterations, pytest.approx(run.summary.metrics["accuracy"])),
    ]
    assert len(table.column("train/loss")) == iterations
    with pytest.raises(JobError, match="the run has no metric 'accuracy'; it has iteration, epoch, time_s, train/loss"):
        table.column("accuracy")


def test_a_table_shows_the_latest_values_with_gaps_and_without_what_is_too_long() -> None:
    steps = [StepMetrics(step=i, epoch=i / 30, t=float(i), split="train", metrics={"loss": 1 / i}) for i in range(1, 31)]
    steps.append(StepMetrics(step=30, epoch=1.0, t=31.5, split="evaluation", metrics={"<auc>": 0.5}))
    steps.append(StepMetrics(step=1, epoch=1 / 30, t=40.0, split="train", metrics={"loss": 4.0}))
    table = MetricTable(steps)
    assert len(table) == 30
    assert table[0] == {"iteration": 1, "epoch": 1 / 30, "time_s": 40.0, "train/loss": 4.0, "evaluation/<auc>": None}
    assert table[29]["time_s"] == 31.5
    html = table._repr_html_()
    assert "<th>evaluation/&lt;auc&gt;</th>" in html
    assert html.count("<tr>") == 1 + 20 + 1
    assert "… 10 rows …" in html
    assert "… 10 rows …" in repr(table)
    assert len(repr(table).splitlines()) == 1 + 20 + 1


def test_a_table_becomes_a_data_frame(run: ephemeron.Result) -> None:
    pytest.importorskip("pandas", reason="pip install 'ephemeron[pandas]'")
    frame = run.metrics.to_pandas()
    assert list(frame.columns) == list(run.metrics.columns)
    assert frame["train/loss"].notna().all()
    assert frame["evaluation/accuracy"].notna().sum() == 2


def test_without_pandas_the_command_that_installs_it_is_named(run: ephemeron.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[pandas\]'"):
        run.metrics.to_pandas()


def test_a_plain_module_is_saved_as_safetensors_with_its_origin(run: ephemeron.Result, tmp_path: Path) -> None:
    assert run.save(tmp_path / "saved") == tmp_path / "saved"
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model"] == {"target": "mine:mlp", "options": {"hidden": 8}}
    assert config["metrics"] == run.summary.metrics
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {n: t.tolist() for n, t in saved.items()} == {n: t.tolist() for n, t in run.state_dict().items()}


@pytest.mark.slow
def test_a_transformers_model_is_saved_for_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    code = tmp_path / "hf"
    code.mkdir()
    (code / "bert.py").write_text(
        "import torch\n"
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "import ephemeron\n"
        "class Classifier(ephemeron.Task):\n"
        "    def model(self):\n"
        "        return BertForSequenceClassification(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1,\n"
        "            num_attention_heads=1, intermediate_size=8, max_position_embeddings=16, num_labels=3))\n"
        "    def training_step(self, model, batch):\n"
        "        inputs, labels = batch\n"
        "        return model(input_ids=inputs, labels=labels).loss\n"
        "    def train_data(self):\n"
        "        torch.manual_seed(0)\n"
        "        return torch.randint(0, 20, (64, 6)), torch.randint(0, 3, (64,))\n"
    )
    job = ephemeron.Job(name="bert", task=Target(target="bert:Classifier"), epochs=1, code=(code,))
    c = ephemeron.configure(job, platform="simulated", workers=2, batch_size=16)
    result = ephemeron.train(job, c)
    result.save(tmp_path / "saved")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, result.model()(tokens).logits)
    wanted = dict(result.summary.metrics)
    assert json.loads(invoke("evaluate", "last", "--json"))["metrics"] == pytest.approx(wanted, rel=1e-4)


def test_evaluate_prints_the_metrics_of_a_run_and_of_a_file(run: ephemeron.Result, tmp_path: Path) -> None:
    printed = json.loads(invoke("evaluate", run.folder.run_id, "--json"))
    assert printed["metrics"] == pytest.approx(dict(run.summary.metrics), rel=1e-5)
    text = invoke("evaluate", run.folder.run_id)
    assert re.fullmatch(r"loss \d\.\d+  accuracy 0\.\d+\n", text)

    job = tmp_path / "job.toml"
    job.write_text(
        f'model = {{ target = "tiny:mlp", options = {{ hidden = 8 }} }}\ncode = [{json.dumps(str(CODE))}]\n[data]\nsource = "digits"\n'
    )
    shutil.copy(run.folder.weights, tmp_path / "w.safetensors")
    of_file = json.loads(invoke("evaluate", "w.safetensors", "--job", str(job), "--json"))
    assert of_file["metrics"] == printed["metrics"]

    refused = CliRunner().invoke(main, ["evaluate", "w.safetensors"])
    assert (refused.exit_code, refused.stderr) == (
        2,
        "error: w.safetensors is a file of weights: say by --job whose model and data it is evaluated with\n",
    )
    save_file({"0.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    refused = CliRunner().invoke(main, ["evaluate", "other.safetensors", "--job", str(job)])
    assert refused.exit_code == 2
    assert "the weights are of another model: 5 names differ" in refused.stderr


@pytest.mark.slow
def test_exported_calculations_are_those_of_the_model(run: ephemeron.Result, tmp_path: Path) -> None:
    """Also for batches of another size than the example's."""
    inputs = torch.rand(5, 8, 8)
    with torch.no_grad():
        wanted = run.model()(inputs)
    invoke("export", run.folder.run_id, "--format", "torchscript", "--out", "m.pt")
    torch.testing.assert_close(torch.jit.load("m.pt")(inputs), wanted)
    invoke("export", run.folder.run_id)
    written = load_file(tmp_path / f"{run.folder.run_id}.safetensors")
    assert written.keys() == run.state_dict().keys()

    pytest.importorskip("onnxscript", reason="pip install 'ephemeron[onnx]'")
    from onnx.reference import ReferenceEvaluator

    assert invoke("export", run.folder.run_id, "--format", "onnx", "--out", "m.onnx") == "wrote m.onnx\n"
    made = ReferenceEvaluator("m.onnx")
    (found,) = made.run(None, {made.input_names[0]: inputs.numpy()})
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_task_that_calls_parts_of_its_model_is_not_exported_as_a_calculation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    code = tmp_path / "parts"
    code.mkdir()
    (code / "parts.py").write_text(
        "import torch\nimport ephemeron\nfrom torch import nn\n"
        "class Parts(ephemeron.Task):\n"
        "    def model(self):\n"
        "        return nn.ModuleDict({'body': nn.Flatten(), 'head': nn.Linear(64, 10)})\n"
        "    def training_step(self, model, batch):\n"
        "        inputs, targets = batch\n"
        "        return nn.functional.cross_entropy(model['head'](model['body'](inputs)), targets)\n"
    )
    job = ephemeron.Job(name="parts", task=Target(target="parts:Parts"), epochs=1, code=(code,))
    ephemeron.train(job, ephemeron.configure(job, platform="simulated", workers=2, batch_size=200))
    refused = CliRunner().invoke(main, ["export", "last", "--format", "torchscript", "--out", "m.pt"])
    assert (refused.exit_code, refused.stderr) == (
        2,
        "error: evaluation_step does not call the model itself, so what is to be exported is not known; "
        "export safetensors, or export a part of result.model()\n",
    )
    invoke("export", "last", "--out", "m.safetensors")
    assert set(load_file("m.safetensors")) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "job",
    [{"ema_decay": 0.9}, {"precision": "bf16-mixed"}, {"dtype": "float64"}, {"model": Target(target="tiny:tied")}],
    ids=["averaged", "bf16", "float64", "tied"],
)
def test_evaluations_equal_those_of_the_run(job: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    result = train(**{"epochs": 1, **job})
    found = evaluate(job_of_run(result.folder), result.state_dict())
    assert found == pytest.approx(dict(result.summary.metrics), rel=1e-5)
    result.save(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")


def test_onnx_that_is_not_installed_is_named_with_its_extra(run: ephemeron.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused = CliRunner().invoke(main, ["export", run.folder.run_id, "--format", "onnx"])
    assert refused.exit_code == 2
    assert "pip install 'ephemeron[onnx]'" in refused.stderr


@pytest.mark.slow
def test_weights_of_the_best_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that is much too high makes the last evaluation worse than an earlier one."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    wanted = make_job(
        epochs=4,
        keep_best={"monitor": "loss", "mode": "min", "count": 2},
        keep_last=1,
        optimizer=Target(target="SGD", options={"lr": 4.0, "momentum": 0.9}),
    )
    result = ephemeron.train(wanted, ephemeron.configure(wanted, platform="simulated", workers=2, batch_size=100))
    losses = dict(result.metrics.column("evaluation/loss"))
    best = min(losses, key=lambda i: losses[i])
    assert best != result.summary.iterations
    job = job_of_run(result.folder)
    assert evaluate(job, result.state_dict(best=True))["loss"] == pytest.approx(losses[best], rel=1e-4)
    assert evaluate(job, result.state_dict())["loss"] == pytest.approx(result.summary.metrics["loss"], rel=1e-4)
    assert torch.equal(result.model(best=True)[1].weight, result.state_dict(best=True)["1.weight"])


def test_what_a_run_does_not_have_is_named(run: ephemeron.Result) -> None:
    with pytest.raises(UserError, match="keeps no best weights: set keep_best in its job"):
        run.state_dict(best=True)
    copy = run.folder.path.parent / "copy-1"
    shutil.copytree(run.folder.path, copy)
    try:
        result = result_of(type(run.folder)(copy))
        (copy / "code.zip").unlink()
        with pytest.raises(UserError, match=r"run copy-1 has no code.zip"):
            result.model()
        (copy / "weights.safetensors").unlink()
        with pytest.raises(UserError, match="run copy-1 has no weights: it is finished"):
            result.state_dict()
        (copy / "result.json").unlink()
        with pytest.raises(UserError, match="run copy-1 has no result yet"):
            result_of(type(run.folder)(copy))
    finally:
        shutil.rmtree(copy)


def test_the_stored_job_has_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    job = make_job(epochs=1, run={"channel": "redis://:a-password@host"})
    c = ephemeron.configure(make_job(), platform="simulated", workers=1)
    folder = ephemeron.train(job, c).folder
    assert [p.name for p in folder.path.iterdir() if p.is_file() and b"a-password" in p.read_bytes()] == []
    assert job_of_run(folder).model == job.model


def test_a_run_whose_functions_read_a_flow_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_flow_jobs import flow_job, publish

    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    publish(tmp_path / "store")
    publish(tmp_path / "store", seed=1, samples=40, variant="val")
    job = flow_job(tmp_path / "store", "shaken", test_flow="tiny_flows:held_out")
    result = ephemeron.train(job, ephemeron.configure(job, platform="simulated", workers=2, batch_size=30))
    printed = json.loads(invoke("evaluate", "last", "--json"))
    assert printed["metrics"] == pytest.approx(dict(result.summary.metrics), rel=1e-5)
    invoke("export", "last", "--format", "torchscript", "--out", "flow.pt")
    inputs = torch.rand(3, 8, 8)
    torch.testing.assert_close(torch.jit.load("flow.pt")(inputs), result.model()(inputs))


# -- weights to start from --------------------------------------------------------------------------------


def started(result: ephemeron.Result) -> list[str]:
    from ephemeron.runs.folders import events_of

    return next(e for e in events_of(result.folder) if isinstance(e, RunStarted)).notes


def test_a_run_starts_from_weights(run: ephemeron.Result, tmp_path: Path) -> None:
    """With a learning rate of 0 it ends with them, and its first loss is that of the weights."""
    save_file(run.state_dict(), tmp_path / "start.safetensors")
    still = Target(target="SGD", options={"lr": 0.0})
    model = Target(target="tiny:mlp", options={"hidden": 8})
    same = train(model=model, init=tmp_path / "start.safetensors", optimizer=still, epochs=1)
    assert {n: t.tolist() for n, t in same.state_dict().items()} == {n: t.tolist() for n, t in run.state_dict().items()}
    assert "init start.safetensors: 4 tensors loaded" in started(same)


@pytest.mark.slow
def test_a_divided_model_starts_from_weights_and_is_put_together(run: ephemeron.Result, tmp_path: Path) -> None:
    save_file(run.state_dict(), tmp_path / "start.safetensors")
    job = make_job(
        epochs=1,
        model=Target(target="tiny:mlp", options={"hidden": 8}),
        init=tmp_path / "start.safetensors",
        optimizer=Target(target="SGD", options={"lr": 0.0}),
    )
    c = ephemeron.configure(job, platform="simulated", stages={"count": 2, "replicas": 1}, batch_size=200)
    model = ephemeron.train(job, c).model()
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {n: t.tolist() for n, t in run.state_dict().items()}


def test_partial_weights_are_loaded_with_a_report(run: ephemeron.Result, tmp_path: Path) -> None:
    tensors = run.state_dict()
    del tensors["4.bias"]
    tensors["head.scale"] = torch.ones(3)
    save_file(tensors, tmp_path / "part.safetensors")
    model, still = Target(target="tiny:mlp", options={"hidden": 8}), Target(target="SGD", options={"lr": 0.0})
    part = train(model=model, init=tmp_path / "part.safetensors", optimizer=still, epochs=1)
    fresh = train(model=model, optimizer=still, epochs=1)
    assert (
        "init part.safetensors: 3 tensors loaded; 1 of the model not in the file: 4.bias; 1 of the file not in the model: head.scale"
    ) in started(part)
    assert torch.equal(part.state_dict()["1.weight"], tensors["1.weight"])
    assert torch.equal(part.state_dict()["4.bias"], fresh.state_dict()["4.bias"])
    assert not torch.equal(fresh.state_dict()["1.weight"], tensors["1.weight"])


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"1.weight": (8, 60)}, r"1 tensor of w.safetensors has another shape: 1.weight is \[8, 60\], in the model \[8, 64\]"),
        ({"encoder": (2,)}, "no name in w.safetensors is one of the model: it has encoder, the model 1.weight, 1.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_starts(
    tensors: dict[str, tuple[int, ...]], said: str, run: ephemeron.Result, tmp_path: Path
) -> None:
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "w.safetensors")
    before = len(list(run.folder.path.parent.iterdir()))
    with pytest.raises(JobError, match=said):
        train(model=Target(target="tiny:mlp", options={"hidden": 8}), init=tmp_path / "w.safetensors")
    assert len(list(run.folder.path.parent.iterdir())) == before


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(UserError, match=r"w\.safetensors cannot be read"):
        train(init=tmp_path / "w.safetensors")


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the picture was written ended a finished run in a traceback."""
    from ephemeron.runs.folders import RunFolder
    from ephemeron.training import report
    from ephemeron.training.driver.result import write_report

    def full(*args: object, **how: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_report", full)
    with pytest.raises(JobError, match=r"the report of run r cannot be written to .*: No space left on device; make room"):
        write_report(RunFolder(tmp_path / "r"), load_prices("objects"))
