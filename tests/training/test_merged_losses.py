"""Means over labels, class weights and elements are merged by these: W functions and parts of a batch equal PyTorch on the whole."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch.nn import functional  # noqa: E402
from training_runs import CODE, WORLD, batch_indices, configuration, simulate  # noqa: E402

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import Progress  # noqa: E402
from ephemeron.functions.base import Limits  # noqa: E402
from ephemeron.prices import load_prices  # noqa: E402
from ephemeron.training.driver.launching.prepare import prepare  # noqa: E402
from ephemeron.training.job import DataSpec, Job, Target  # noqa: E402
from ephemeron.training.report.metrics import _counted, _means  # noqa: E402
from ephemeron.training.task.losses import _OVER, make_loss  # noqa: E402

SAMPLES, EPOCHS = 24, 3
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((SAMPLES, 6))
CLASSES = RNG.integers(0, 3, SAMPLES)
REAL = RNG.standard_normal((SAMPLES, 3))
BITS = (REAL > 0).astype(np.float64)


def ignoring(count, labels=CLASSES):
    """Labels of which the first are ignored."""
    return np.where(np.arange(len(labels)) < count, -100, labels)


LOSSES = {
    "ignored labels": ("cross_entropy", {}, ignoring(11)),
    "one label": ("cross_entropy", {}, ignoring(23)),
    "another ignored class": ("cross_entropy", {"ignore_index": 2}, CLASSES),
    "class weights": ("cross_entropy", {"weight": [0.1, 1.0, 10.0]}, ignoring(5)),
    "a class without weight": ("cross_entropy", {"weight": [0.0, 1.0, 0.0]}, CLASSES),
    "smoothed labels": ("cross_entropy", {"label_smoothing": 0.2, "weight": [0.1, 1.0, 10.0]}, ignoring(5)),
    "probabilities": ("cross_entropy", {"weight": [0.1, 1.0, 10.0]}, np.abs(REAL)),
    "summed labels": ("cross_entropy", {"reduction": "sum"}, ignoring(11)),
    "log likelihoods": ("nll_loss", {"weight": [0.1, 1.0, 10.0]}, ignoring(5)),
    "mean squares": ("mse_loss", {}, REAL),
    "summed squares": ("mse_loss", {"reduction": "sum"}, REAL),
    "absolute": ("l1_loss", {}, REAL),
    "smooth": ("smooth_l1_loss", {"beta": 0.5}, REAL),
    "huber": ("huber_loss", {}, REAL),
    "poisson": ("poisson_nll_loss", {}, np.abs(REAL)),
    "gaussian": ("gaussian_nll_loss", {"var": 0.5}, REAL),
    "divergence": ("kl_div", {}, np.abs(REAL)),
    "divergence of samples": ("kl_div", {"reduction": "batchmean"}, np.abs(REAL)),
    "bits": ("binary_cross_entropy", {"weight": [0.1, 1.0, 10.0]}, BITS),
    "logits": ("binary_cross_entropy_with_logits", {"pos_weight": [0.1, 1.0, 10.0]}, BITS),
    "soft margin": ("soft_margin_loss", {}, 2 * BITS - 1),
    "hinge": ("hinge_embedding_loss", {}, 2 * BITS - 1),
    "margin": ("multi_margin_loss", {"weight": [0.1, 1.0, 10.0]}, CLASSES),
    "margins": ("multilabel_margin_loss", {}, np.stack([CLASSES, np.full(SAMPLES, -1), np.full(SAMPLES, -1)], 1)),
    "soft margins": ("multilabel_soft_margin_loss", {"weight": [0.1, 1.0, 10.0]}, BITS),
}
DIVIDED = [(1, 1), (1, 5), (2, 1), (4, 2)]
"""Functions, and parts of each one's batch."""


def ready(folder, loss, options, y, *, x=X, workers=1, accumulate=1, epochs=EPOCHS, model="labels:build", task=None, **more):
    """Functions that share batches of `SAMPLES` samples; the test data are the training data."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "d.npz", x=x, y=y)
    sampling = {} if "stages" in more else {"sampling": "global"}
    data = DataSpec(source="npz", path=str(folder / "d.npz"), options={"test_inputs": "x", "test_targets": "y"}, **sampling)
    program = (
        {"task": task}
        if task is not None
        else {
            "model": Target(target=model, options={"end": "sigmoid"} if loss == "binary_cross_entropy" else {}),
            "loss": Target(target=loss, options=options),
            "optimizer": Target(target="SGD", options=SGD),
        }
    )
    job = Job(name="test", data=data, epochs=epochs, dtype="float64", accumulate=accumulate, code=(CODE,), simulation=WORLD, **program)
    how = {"workers": workers, "aggregators": 1, "batch_size": SAMPLES // (workers // more.get("stages", {}).get("count", 1)), **more}
    return prepare(job, configuration(**how), run_id="run", limits=Limits(), prices=load_prices("objects"))


def trained(*args, **more):
    return simulate(ready(*args, **more))


def alone(run, loss, options, y, *, x=X, model="build"):
    """The same in PyTorch, on the same global batches, and the loss of all data after it."""
    if str(CODE) not in sys.path:
        sys.path.insert(0, str(CODE))
    import labels

    spec = run.trigger.spec
    torch.manual_seed(spec.seed)
    net = getattr(labels, model)(**{"end": "sigmoid"} if loss == "binary_cross_entropy" else {}).double()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    bound = {n: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for n, v in options.items()}

    def loss_of(chosen):
        return getattr(functional, loss)(net(x[chosen]), y[chosen], **bound)

    for iteration in range(spec.iterations):
        optimizer.zero_grad()
        loss_of(slice(None) if len(x) == SAMPLES else batch_indices(spec, iteration)).backward()
        optimizer.step()
    told = loss_of(slice(None)).item()
    return {n: v.detach().numpy() for n, v in net.state_dict().items()}, (told / len(x) if options.get("reduction") == "sum" else told)


def assert_equal(run, expected, what=""):
    assert run.ending.status == "finished", run.ending.causes
    for name, value in expected.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-12, err_msg=f"{what} {name}")


QUICK = {"ignored labels", "one label", "class weights", "a class without weight", "summed labels", "mean squares"}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(LOSSES)])
def test_a_loss_of_pytorch_is_merged_by_its_own_weight(name, tmp_path):
    loss, options, y = LOSSES[name]
    for workers, accumulate in DIVIDED:
        run = trained(tmp_path, loss, options, y, workers=workers, accumulate=accumulate)
        expected, told = alone(run, loss, options, y)
        assert_equal(run, expected, f"{workers} functions, {accumulate} parts:")
        assert run.ending.final.metrics["loss"] == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize("name", ["ignored labels", "one label", "summed labels"])
def test_a_parameter_server_merges_alike(name, tmp_path):
    loss, options, y = LOSSES[name]
    run = trained(tmp_path, loss, options, y, workers=3, aggregators=2, pattern="parameter-server")
    assert_equal(run, alone(run, loss, options, y)[0])


@pytest.mark.parametrize("name", ["ignored labels", "one label", "summed labels"])
@pytest.mark.parametrize("aggregators", [1, 3])
def test_direct_channels_merge_alike(name, aggregators, tmp_path):
    loss, options, y = LOSSES[name]
    run = trained(tmp_path, loss, options, y, workers=3, aggregators=aggregators, channel="direct")
    assert_equal(run, alone(run, loss, options, y)[0])


@pytest.mark.parametrize("name", ["ignored labels", "one label", "class weights", "summed labels", "mean squares"])
@pytest.mark.parametrize("workers", [2, 4])
def test_stages_and_their_replicas_merge_alike(name, workers, tmp_path):
    loss, options, y = LOSSES[name]
    run = trained(tmp_path, loss, options, y, model="labels:stack", workers=workers, stages={"count": 2, "micro_batches": 3})
    expected, told = alone(run, loss, options, y, model="stack")
    assert_equal(run, expected)
    assert run.ending.final.metrics["loss"] == pytest.approx(told, rel=1e-12)


def test_every_loss_of_an_output_and_targets_has_a_weight_and_a_test():
    named = {name for name in dir(functional) if name.endswith("_loss") or "entropy" in name or name == "kl_div"}
    assert {loss for loss, _, _ in LOSSES.values()} == set(_OVER) <= named
    for name in named - set(_OVER):  # all others take three tensors
        with pytest.raises(JobError, match="is no loss of an output and targets"):
            make_loss(Target(target=name), dict.get)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "none"}, r"reduction = 'none' gives no single number to train on; give one of mean, sum"),
        ({"reduction": "batchmean"}, "gives no single number"),
        ({"size_average": False}, "size_average is out of use"),
        ({"reduce": False}, "reduce is out of use"),
    ],
)
def test_a_reduction_without_a_number_is_refused(options, message):
    with pytest.raises(JobError, match=message):
        make_loss(Target(target="cross_entropy", options=options), dict.get)


def test_outputs_that_would_be_broadcast_across_samples_are_refused():
    loss = make_loss(Target(target="mse_loss"), dict.get)
    with pytest.raises(JobError, match=r"outputs of shape \[4, 1\] and targets of shape \[4\] do not correspond"):
        loss(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lists_among_options_are_tensors_of_the_models_dtype(dtype):
    output, targets = torch.rand(4, 2, dtype=dtype), torch.tensor([0, 1, 1, 0])
    loss = make_loss(Target(target="cross_entropy", options={"weight": [0.1, 1.0]}), dict.get)
    expected = functional.cross_entropy(output, targets, weight=torch.tensor([0.1, 1.0], dtype=dtype))
    assert torch.equal(loss(output, targets), expected)


def task(how, **options):
    return Target(target="labels:Labels", options={"how": how, **options})


@pytest.mark.parametrize("name", ["straight", "weighed"])
def test_a_function_of_the_users_says_its_weight(name, tmp_path):
    """By its graph, or in a mapping."""
    for workers, accumulate in DIVIDED:
        run = trained(tmp_path, f"labels:{name}", {}, ignoring(17), workers=workers, accumulate=accumulate)
        expected, told = alone(run, "cross_entropy", {}, ignoring(17))
        assert_equal(run, expected, f"{workers} functions, {accumulate} parts:")
        assert run.ending.final.metrics["loss"] == pytest.approx(told, rel=1e-12)
        assert run.ending.final.metrics["accuracy"] is not None


@pytest.mark.parametrize("kind", ["given", "plain", "masked", "summed", "said"])
def test_a_task_is_merged_by_its_weight(kind, tmp_path):
    """Only one of 24 samples has a label, so that most parts have none."""
    options = {"reduction": "sum"} if kind in ("summed", "said") else {}
    for workers, accumulate in DIVIDED:
        run = trained(tmp_path, "", {}, ignoring(23), workers=workers, accumulate=accumulate, task=task(kind))
        expected, told = alone(run, "cross_entropy", options, ignoring(23))
        assert_equal(run, expected, f"{workers} functions, {accumulate} parts:")
        assert run.ending.final.metrics["loss"] == pytest.approx(told, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["given", "plain", "masked", "of a job"])
def test_a_batch_without_any_label_is_a_step_with_zero_gradient(kind, tmp_path):
    """One of the two batches of an epoch has no label. PyTorch's gradient is zero there, and momentum goes on; its loss is NaN."""
    x, y = np.concatenate([X, X + 0.5]), np.concatenate([ignoring(23), ignoring(24)])
    loss, named = ("cross_entropy", None) if kind == "of a job" else ("", task(kind))
    for workers, accumulate in DIVIDED:
        run = trained(tmp_path, loss, {}, y, x=x, workers=workers, accumulate=accumulate, task=named)
        assert run.trigger.spec.iterations == 2 * EPOCHS
        expected, told = alone(run, "cross_entropy", {}, y, x=x)
        assert_equal(run, expected, f"{workers} functions, {accumulate} parts:")
        assert run.ending.final.metrics["loss"] == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize("exchange", ["parameters", "deltas"])
def test_data_without_any_label_leave_exchanged_parameters_alone(exchange, tmp_path):
    run = trained(tmp_path, "cross_entropy", {}, ignoring(24), workers=2, exchange={"quantity": exchange}, epochs=1)
    torch.manual_seed(run.trigger.spec.seed)
    import labels

    assert_equal(run, {n: v.numpy() for n, v in labels.build().double().state_dict().items()})
    assert run.ending.final.metrics["loss"] is None


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_terms_is_refused(weight, tmp_path):
    with pytest.raises(JobError, match=r"training_step reports weight (-1|nan|inf); report how many terms"):
        trained(tmp_path, "", {}, CLASSES, task=task("own", weight=weight))


@pytest.mark.parametrize(
    ("kind", "noted"), [("plain", False), ("summed", False), ("given", False), ("scaled", True), ("noisy", False), ("own", False)]
)
def test_a_loss_that_does_not_bear_to_be_divided_is_told_before_the_run(kind, noted, tmp_path):
    def told(**how):
        notes = ready(tmp_path, "", {}, CLASSES, task=task(kind), **how).notes
        return any("a batch that is divided (workers, accumulate) trains otherwise than as a whole" in n for n in notes)

    assert (told(workers=2), told(accumulate=2), told()) == (noted, noted, False)


def test_losses_told_while_training_are_merged_by_their_own_weights(tmp_path):
    run = trained(tmp_path, "cross_entropy", {}, ignoring(21), workers=2, epochs=1)
    prepared = trained(tmp_path, "cross_entropy", {}, ignoring(21), workers=1, epochs=1)
    one, both = (_means(_counted(each.of(Progress)))[0][1]["loss"] for each in (prepared, run))
    assert both == pytest.approx(one, rel=1e-12)
    assert run.trigger.ledger.loss == pytest.approx(one, rel=1e-12)
