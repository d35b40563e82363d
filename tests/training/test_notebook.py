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


@pytest.mark.slow
def test_a_notebook_trains_on_local_functions_and_shows_a_table(home: Path) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in (LOAD, TRAIN, "result.metrics")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    _, trained, shown = (cell.outputs for cell in notebook.cells)
    printed = "".join(output.text for output in trained if output.output_type == "stream" and output.name == "stdout")
    assert "finished 12 " in printed
    assert "<table" in shown[-1].data["text/html"]
