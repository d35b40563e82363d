"""What the functions of a run have imported when they train: they start cold, and each import is paid for."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from ephemeron.training.driver import train
from test_imports import UNUSED, found, fresh

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="no scikit-learn; pip install 'ephemeron[digits]'")

MODEL = f"""
import json, sys
from torch import nn
from torch.nn.functional import cross_entropy

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def loss(output, target):
    unused = {[name for name in UNUSED if name != "ephemeron.testing"]!r}
    there = sorted(m for m in sys.modules for u in unused if m == u or m.startswith(u + "."))
    print("imported", there, flush=True)
    print("all", json.dumps(sorted(sys.modules)), flush=True)
    return cross_entropy(output, target)
"""
JOB = """
model = "model:build"
loss = "model:loss"
optimizer = { target = "SGD", options = { lr = 0.1, momentum = 0.9 } }
epochs = 1

[run]
workers = 2
batch_size = 300
"""


@pytest.mark.slow
def test_functions_have_imported_nothing_that_training_does_not_need(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    result = train(tmp_path / "job.toml")
    said = [log.read_text() for log in (result.folder.path / "logs").iterdir() if "imported" in log.read_text()]
    assert len(said) == 2
    for text in said:
        lines = [line for line in text.splitlines() if line.startswith("imported")]
        assert len(lines) >= result.summary.iterations
        assert set(lines) == {"imported []"}
    last = [line for line in said[0].splitlines() if line.startswith("all")][-1]
    beforehand = fresh(
        "import ephemeron.functions.function_main, json, sys; from ephemeron.functions.entries import preload; preload();"
        "print(json.dumps(sorted(sys.modules)))"
    )
    late = set(json.loads(last.removeprefix("all "))) - set(json.loads(beforehand.stdout))
    assert found(late, ["ephemeron", "numpy", "obstore"]) == [], "the fork server imports them once for all functions"
