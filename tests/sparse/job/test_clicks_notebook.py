"""The notebook of examples/clicks, with few rows: generated data, prepared, trained, tuned, predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'ephemeron[tuning]'")
pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")

EXAMPLE = Path(__file__).parents[3] / "examples" / "clicks"


@pytest.mark.slow
def test_the_notebook_runs_from_raw_data_to_predictions(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLICKS_ROWS", "4000")
    monkeypatch.setenv("CLICKS_FOLDER", str(tmp_path / "work"))
    notebook = nbformat.read(EXAMPLE / "clicks.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLE)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    generated, prepared, trained, metrics, summary, tuned, predicted = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert float(generated[-1].data["text/plain"]) < 0.5
    assert "'raw': 4000" in prepared[-1].data["text/plain"]
    (shown,) = [output.data for output in trained if output.output_type == "display_data"]
    assert ": finished" in shown["text/plain"]
    assert "accuracy" in metrics[-1].data["text/html"]
    assert "'loss'" in summary[-1].data["text/plain"]
    assert "learning_rate" in tuned[-1].data["text/plain"]
    assert predicted[-1].data["text/plain"].startswith("array([0.")
