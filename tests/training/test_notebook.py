"""A notebook kernel, in which an event loop runs while a cell trains."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples" / "digits"
LOAD = """
import asyncio, dataclasses, ephemeron
assert asyncio.get_running_loop().is_running()
job = dataclasses.replace(ephemeron.load_job("job.toml"), epochs=1)
"""
TRAIN = """
how = ephemeron.configure(job, workers=2, aggregators=1, batch_size=64, platform="local")
result = ephemeron.train(job, how)
print(result.summary.status, result.summary.iterations, result.model().training)
"""


DEFINE = """
import numpy as np, torch, ephemeron

class Line(ephemeron.Task):
    settings = {"epochs": 2}

    def model(self):
        return torch.nn.Linear(3, 1)

    def training_step(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def evaluation_step(self, model, batch):
        inputs, targets = batch
        return {"loss": torch.nn.functional.mse_loss(model(inputs), targets)}

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self):
        inputs = np.random.default_rng(1).normal(size=(60, 3)).astype("float32")
        return inputs, inputs.sum(1, keepdims=True)
"""
SHOWN = "result = ephemeron.train(Line, workers=2, aggregators=1, batch_size=8, platform='local')"


@pytest.mark.slow
def test_jobs_of_files_and_classes_of_cells_train_on_local_functions(home: Path) -> None:
    """The one shows a table of its metrics, the other its progress."""
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    texts = (LOAD, TRAIN, "result.metrics", DEFINE, SHOWN, "result.model()", "attached = ephemeron.attach('last')")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    _, of_job, table, _, trained, shown, attached = (cell.outputs for cell in notebook.cells)
    printed = "".join(output.text for output in of_job if output.output_type == "stream" and output.name == "stdout")
    assert "finished 12 " in printed
    assert "<table" in table[-1].data["text/html"]
    (again,) = [output.data for output in attached if output.output_type == "display_data"]
    assert "iteration 6 of 6" in again["text/plain"], "attach shows what train does"
    (progress,) = [output.data for output in trained if output.output_type == "display_data"]
    assert ": finished" in progress["text/plain"]
    assert "iteration 6 of 6" in progress["text/plain"]
    assert '<progress value="6" max="6"' in progress["text/html"]
    assert "test loss" in progress["text/plain"]
    assert "Linear" in shown[-1].data["text/plain"]


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs_and_a_kill_changes_nothing(home: Path, pictures: None) -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    path = EXAMPLES.parent / "notebook" / "digits.ipynb"
    notebook = nbformat.read(path, as_version=4)
    source = next(c.source for c in notebook.cells if c.source.startswith("result = "))
    killed = SAME.format(source=source.removesuffix(")") + ", faults=faults)")
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in (killed, "result")]
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    last = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"][-4:]
    table, predicted, same, whole = (outputs[-1].data for outputs in last)
    assert "accuracy" in table["text/html"]
    assert predicted["text/plain"].startswith("[0, 1, 2")
    assert same["text/plain"] == "(True, 4)"
    assert "<th>accuracy</th>" in whole["text/html"]
    assert "data:image/png;base64," in whole["text/html"]


SAME = """
from ephemeron.training.job import parse_fault

first, faults = result.summary, [parse_fault("kill:rank=1,iteration=5,phase=compute")]
{source}
(result.summary.weights_sha256 == first.weights_sha256, result.summary.invocations)
"""
