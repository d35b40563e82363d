"""Metrics of torchmetrics, and sums, over slices of any number: as over the whole data."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from lazy_modules import lazy_import

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
torchmetrics = lazy_import("torchmetrics", reason="no torchmetrics; pip install 'ephemeron[lightning]'")

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.training.task.evaluation import Evaluator, metrics_of, own_weight, recorded_after  # noqa: E402
from ephemeron.training.worker.evaluation_exchange import decode_evaluation, encode_evaluation  # noqa: E402

COUNT = 22
_random = np.random.default_rng(0)
SCORES = torch.from_numpy(_random.normal(size=(COUNT, 5)).astype(np.float32))
CLASSES = torch.from_numpy(_random.integers(0, 5, COUNT))
VALUES = torch.from_numpy(_random.normal(size=(COUNT, 2)).astype(np.float32))
NEAR = VALUES + 0.3 * SCORES[:, :2]
TOKENS = torch.from_numpy(_random.normal(size=(COUNT, 7, 11)).astype(np.float32))
IDS = torch.from_numpy(_random.integers(0, 11, (COUNT, 7)))
QUERIES = torch.from_numpy(np.sort(_random.integers(0, 6, COUNT)))
CLASSIFY, REGRESS, LANGUAGE = (SCORES, CLASSES), (NEAR, VALUES), (TOKENS, IDS)
RANK = (SCORES[:, 0], CLASSES > 2, QUERIES)

METRICS = {
    "Accuracy": (lambda: torchmetrics.Accuracy("multiclass", num_classes=5), CLASSIFY),
    "AccuracyByClass": (lambda: torchmetrics.Accuracy("multiclass", num_classes=5, average="macro"), CLASSIFY),
    "AUROC": (lambda: torchmetrics.AUROC("multiclass", num_classes=5), CLASSIFY),
    "AUROCBinned": (lambda: torchmetrics.AUROC("multiclass", num_classes=5, thresholds=9), CLASSIFY),
    "CohenKappa": (lambda: torchmetrics.CohenKappa("multiclass", num_classes=5), CLASSIFY),
    "MeanSquaredError": (lambda: torchmetrics.MeanSquaredError(), REGRESS),
    "R2Score": (lambda: torchmetrics.R2Score(), REGRESS),
    "PearsonCorrCoef": (lambda: torchmetrics.PearsonCorrCoef(), (NEAR[:, 0], VALUES[:, 0])),
    "SpearmanCorrCoef": (lambda: torchmetrics.SpearmanCorrCoef(), (NEAR[:, 0], VALUES[:, 0])),
    "Perplexity": (lambda: torchmetrics.text.Perplexity(), LANGUAGE),
    "RetrievalMRR": (lambda: torchmetrics.retrieval.RetrievalMRR(), RANK),
    "RetrievalNormalizedDCG": (lambda: torchmetrics.retrieval.RetrievalNormalizedDCG(), RANK),
    "MaxMetric": (lambda: torchmetrics.MaxMetric(), (VALUES,)),
    "MeanMetric": (lambda: torchmetrics.MeanMetric(), (VALUES,)),
    "CatMetric": (lambda: torchmetrics.CatMetric(), (VALUES,)),
    "Minimum": (lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()), REGRESS),
    "Classwise": (lambda: torchmetrics.ClasswiseWrapper(torchmetrics.Recall("multiclass", num_classes=5, average=None)), CLASSIFY),
}


def pieces(arrays, parts):
    """Batches of 3 in each of so many slices, one of which is empty where there are four."""
    ends = {1: [COUNT], 2: [9, COUNT], 3: [4, 5, COUNT], 4: [10, 10, 15, COUNT]}[parts]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield [tuple(a[i : min(i + 3, end)] for a in arrays) for i in range(start, end, 3)]


def evaluated(metric, arrays, parts, *, name="metric"):
    """Merged metrics, as rank 0 computes them from the messages of the others."""
    metrics = [copy.deepcopy(metric) for _ in range(parts)]
    sent, first = [], {}
    for rank, batches in enumerate(pieces(arrays, parts)):
        found = Evaluator()
        for batch in batches:
            metrics[rank].update(*batch)
            found.add({name: metrics[rank]}, len(batch[0]))
        sent.append(decode_evaluation(encode_evaluation(found.result()), key="evaluation"))
        first = first or found.metrics
    return metrics_of(sent, first), first


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_metric_is_that_of_the_whole_data(kind, parts):
    make, arrays = METRICS[kind]
    whole = make()
    whole.update(*arrays)
    expected = whole.compute()
    got, held = evaluated(make(), arrays, parts)
    if isinstance(expected, dict):
        named = {f"metric_{key}": value for key, value in expected.items()}
        if kind == "Minimum":  # the range of what has been computed: of one value here
            named = dict.fromkeys(named, expected["raw"])
    elif expected.numel() == 1:
        named = {"metric": expected}
    else:  # no single number, but it is there for the task
        assert torch.equal(held["metric"].compute(), expected)
        named = {"metric": None}
    for key, value in named.items():
        assert got[key] == (None if value is None else pytest.approx(float(value), rel=1e-5)), key


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_collections_share_states_and_are_one_metric_each(parts):
    make = torchmetrics.MetricCollection(
        {name: getattr(torchmetrics, name)("multiclass", num_classes=5, average="macro") for name in ("Precision", "Recall")}
    )
    whole = copy.deepcopy(make)
    whole.update(*CLASSIFY)
    got, _ = evaluated(make, CLASSIFY, parts, name="macro")
    for key, value in whole.compute().items():
        assert got[f"macro_{key}"] == pytest.approx(float(value), rel=1e-5)
    assert make.compute_groups


def test_a_second_evaluation_begins_anew():
    metric = torchmetrics.Accuracy("multiclass", num_classes=5)
    for _ in range(2):
        got, held = evaluated(metric, CLASSIFY, 3)
        assert held["metric"].update_count == 9
        metric.reset()
    assert got["metric"] == pytest.approx(float((SCORES.argmax(1) == CLASSES).float().mean()))


def test_names_with_slashes_do_not_meet():
    found, metric, other = Evaluator(), torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    metric.update(torch.tensor([1.0, 2.0]))
    other.update(torch.tensor([5.0]))
    found.add({"val": metric, "val/mean": other}, 2)
    assert metrics_of([found.result()], found.metrics) == {"loss": None, "val": 1.5, "val/mean": 5.0}


def test_detection_is_that_of_the_whole_data():
    pytest.importorskip("torchvision", reason="no torchvision, which metrics of detection need")
    pytest.importorskip("pycocotools", reason="no pycocotools, which mean average precision needs")
    from torchmetrics.detection import MeanAveragePrecision

    boxes = torch.rand(COUNT, 2, 2) * 50
    boxes = torch.cat([boxes, boxes + 30], dim=2)
    images = [{"boxes": b + 3, "scores": torch.rand(2), "labels": torch.tensor([0, 1])} for b in boxes]
    truths = [{"boxes": b, "labels": torch.tensor([0, 1])} for b in boxes]
    whole = MeanAveragePrecision()
    whole.update(images, truths)
    got, _ = evaluated(MeanAveragePrecision(), (images, truths), 4)
    assert got["metric_map"] == pytest.approx(float(whole.compute()["map"]))


def test_states_that_are_no_tensors_are_refused():
    metric = torchmetrics.CatMetric()
    metric.update(torch.ones(2))
    metric.value.append("text")
    found = Evaluator()
    found.add({"odd": metric}, 2)
    with pytest.raises(JobError, match="metric odd holds strs in its state 'value'"):
        found.result()


def test_only_what_follows_a_models_modules_is_recorded():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()), torch.nn.Linear(4, 2))
    x, y = torch.rand(5, 3), torch.tensor([0, 1, -100, 1, -100])
    with torch.no_grad():
        expected = model(x)
        with recorded_after(model):
            whole = model(x)
            parts = model[1](model[0](x))
            assert own_weight(torch.nn.functional.cross_entropy(parts, y)) == 3
        assert not torch.is_grad_enabled()
        assert not model(x).requires_grad
    for found in (whole, parts):
        assert found.requires_grad
        assert torch.equal(found, expected)


def test_outputs_whose_loss_is_recorded_may_be_changed_in_place():
    model, x, y = torch.nn.Linear(3, 4), torch.rand(5, 3), torch.tensor([1, 2, -100, 3, 1])
    with torch.no_grad():
        expected = model(x).div_(2.0)
        expected[:, 0] = -1e9
        with recorded_after(model):
            found = model(x).div_(2.0)
            found[:, 0] = -1e9
            loss = torch.nn.functional.cross_entropy(found, y)
    assert torch.equal(found, expected)
    assert own_weight(loss) == 4


def test_numbers_beside_a_loss_with_class_weights_are_means_over_labels():
    evaluator, output = Evaluator(), torch.zeros(3, 4, requires_grad=True)
    weight = torch.tensor([10.0, 0.5, 0.0, 0.1])
    for labels, accuracy in (([0, 0, -100], 1.0), ([1, 1, 1], 0.0), ([2, 2, 2], 0.5)):
        loss = torch.nn.functional.cross_entropy(output, torch.tensor(labels), weight=weight)
        evaluator.add({"loss": loss, "accuracy": accuracy}, 3)
    sums = evaluator.result().sums
    assert sums["loss"][1] == 21.5
    assert sums["accuracy"] == (2 * 1.0 + 3 * 0.5, 8)
