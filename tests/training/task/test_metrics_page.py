"""The programs of `docs/metrics.md` report what they say, whatever the number of functions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from lazy_modules import lazy_import

pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
lazy_import("torchmetrics", reason="no torchmetrics; pip install 'ephemeron[lightning]'")

from training_runs import WORLD, real  # noqa: E402

from ephemeron.training.driver.launching.programs import job_of  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
EXAMPLES = {
    re.search(r"^class (\w+)\(ephemeron.Task\)", block, re.MULTILINE)[1]: block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}
METRICS = {
    "Regression": {"loss", "mae", "r2", "rmse"},
    "Ranking": {"loss", "mrr", "ndcg"},
    "Language": {"loss", "perplexity"},
    "Detection": {"loss", "recall_50", "iou"},
}


@pytest.mark.parametrize("name", [name if name == "Regression" else pytest.param(name, marks=pytest.mark.slow) for name in METRICS])
def test_the_metrics_do_not_depend_on_the_number_of_functions(name, tmp_path, monkeypatch, home):
    module = f"page_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(EXAMPLES[name])
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for workers in (1, 2, 4):
        # A learning rate so small that all runs have the same weights at their ends.
        job = dataclasses.replace(job_of(f"{module}:{name}", {"epochs": 1}), simulation=WORLD, code=(tmp_path,))
        monkeypatch.setattr(f"{module}.ephemeron.Task.optimizers", _still)
        run = real(job, workers=workers, batch_size=24 // workers, aggregators=1)
        found.append(run.ending.final.metrics)
    assert found[0].keys() == METRICS[name]
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_a_batch_in_parts_is_the_whole_batch_where_losses_have_weights(tmp_path, monkeypatch, home):
    (tmp_path / "page_parts.py").write_text(EXAMPLES["Language"])
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = []
    for parts in (1, 3):
        job = job_of("page_parts:Language", {"epochs": 2, "accumulate": parts})
        job = dataclasses.replace(job, simulation=WORLD, code=(tmp_path,))
        runs.append([real(job, workers=workers, batch_size=24 // workers, aggregators=1) for workers in (1, 3)])
    for whole, cut in zip(*runs, strict=True):
        for name, value in whole.ending.arrays.items():
            assert np.allclose(cut.ending.arrays[name], value, atol=1e-6), name
        assert cut.ending.final.metrics == pytest.approx(whole.ending.final.metrics, abs=1e-5)


def _still(task, model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=1e-30)


@pytest.mark.slow
def test_sequences_without_words_count_nothing(tmp_path, monkeypatch, home):
    """Of 24 sequences one has words to predict: most functions and parts have none."""
    module = "page_empty"
    (tmp_path / f"{module}.py").write_text(EXAMPLES["Language"] + EMPTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = []
    for workers, parts in ((1, 1), (1, 4), (2, 1), (4, 2)):
        job = job_of(f"{module}:Empty", {"epochs": 2, "accumulate": parts, "dtype": "float64"})
        job = dataclasses.replace(job, simulation=WORLD, code=(tmp_path,))
        runs.append(real(job, workers=workers, batch_size=24 // workers, aggregators=1))
        assert runs[-1].ending.status == "finished", runs[-1].ending.causes
    for run in runs[1:]:
        for name, value in runs[0].ending.arrays.items():
            np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-12)
        assert run.ending.final.metrics == pytest.approx(runs[0].ending.final.metrics, rel=1e-12)
        assert run.ending.final.metrics["perplexity"] > 1


EMPTY = """

class Empty(Language):
    def train_data(self):
        return self.evaluation_data()

    def evaluation_data(self):
        rng = np.random.default_rng(0)
        tokens, following = (rng.integers(0, 11, (24, 5)) for _ in range(2))
        following[:23] = -100
        return tokens, following
"""
