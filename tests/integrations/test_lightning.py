"""LightningModules run unmodified: as Lightning trains them, independent of the number of functions, and after any kill."""

from __future__ import annotations

import csv
import dataclasses
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from lazy_modules import lazy_import

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
lightning = lazy_import("lightning", reason="no Lightning; pip install 'ephemeron[lightning]'")

from training_runs import WORLD, batch_indices, real  # noqa: E402

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import FaultFired, Invoked, Progress  # noqa: E402
from ephemeron.training.driver.launching.programs import job_of  # noqa: E402
from ephemeron.training.job import parse_fault  # noqa: E402
from ephemeron.training.task.program import program_of  # noqa: E402

CODE = Path(__file__).parent / "code"
CLASSIFIER = "lightning:lightning_programs:Classifier,lightning_programs:Data"
PROGRAMS = [CLASSIFIER, "lightning:lightning_programs:Plateau"]
FAULTS = ("kill:rank=0,iteration=3,phase=upload", "kill:rank=3,iteration=5,phase=compute", "kill:rank=1,iteration=6,phase=download")


def job(target, **options):
    made = job_of(target, {"epochs": 3, **options})
    return dataclasses.replace(made, simulation=WORLD, code=(CODE,))


def settings(workers, **more):
    return {"workers": workers, "aggregators": min(2, workers), "batch_size": 16 // workers, **more}


class EpochBatches:
    """Batch sampler with the batches of one epoch after the other."""

    def __init__(self, epochs):
        self.epochs, self.next = epochs, 0

    def __len__(self):
        return len(self.epochs[0])

    def __iter__(self):
        self.next += 1
        return iter(self.epochs[self.next - 1])


def reference(run, made, *callbacks, **options):
    """The same program under Lightning's own trainer: module, losses, and metrics of the last validation."""
    spec = run.trigger.spec
    program = program_of(spec, folders=made.code, epoch_length=spec.split.iterations, epochs=spec.epochs)
    # The program built the module for a stand-in of the trainer: Lightning trains a new one with its weights.
    module = type(program.model)()
    module.load_state_dict(program.model.state_dict())
    module.epochs_begun.zero_()
    epochs = [
        [batch_indices(spec, e * spec.split.iterations + i).tolist() for i in range(spec.split.iterations)] for e in range(spec.epochs)
    ]
    data, evaluations = program.task.train_data(), program.task._loaders()[1]
    loader = torch.utils.data.DataLoader(data, batch_sampler=EpochBatches(epochs))
    module.train_dataloader = lambda: loader
    module.val_dataloader = lambda: [torch.utils.data.DataLoader(each.dataset, batch_size=64) for each in evaluations]

    class Losses(lightning.Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.found.append(float(outputs["loss"]))

    losses = Losses()
    trainer = lightning.Trainer(
        max_epochs=spec.epochs,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[losses, *callbacks],
        use_distributed_sampler=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    return state, losses.found, {name: float(value) for name, value in trainer.callback_metrics.items()}


def loss_curve(run):
    """By iteration, the mean loss over ranks by samples."""
    sums = {}
    for e in run.of(Progress):
        total, samples = sums.get(e.iteration, (0.0, 0))
        sums[e.iteration] = (total + e.loss * e.samples, samples + e.samples)
    return [total / samples for _, (total, samples) in sorted(sums.items())]


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS)
def test_one_function_is_lightnings_trainer_to_the_last_bit(target, home):
    made = job(target)
    run = real(made, **settings(1))
    state, losses, metrics = reference(run, made)
    assert loss_curve(run) == losses
    got = run.ending.arrays
    assert got.keys() == state.keys()
    for name, value in state.items():
        assert np.array_equal(got[name], value), name
    found = run.ending.final.metrics
    for name in ("val_loss", "val_acc", "val_auroc", "val_f1", "val_precision"):
        assert found[name] == pytest.approx(metrics[name], abs=1e-6), name


@pytest.mark.slow
def test_local_steps_are_lightnings_steps(home):
    run = real(job(CLASSIFIER), **settings(1, exchange={"local_steps": 4, "quantity": "parameters"}))
    plain = real(job(CLASSIFIER), **settings(1))
    assert 4 * run.ending.final.iterations == plain.ending.final.iterations
    assert run.sha == plain.sha
    assert run.ending.final.metrics == plain.ending.final.metrics


def test_clipping_and_accumulation_are_lightnings(home):
    made = job(CLASSIFIER, clip_norm=0.1, accumulate=1, precision="bf16-mixed")
    run = real(made, **settings(1))
    state, losses, _ = reference(run, made, gradient_clip_val=0.1, precision="bf16-mixed")
    assert np.allclose(loss_curve(run), losses, atol=1e-6)
    assert all(np.allclose(run.ending.arrays[name], value, atol=1e-6) for name, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(CLASSIFIER, marks=pytest.mark.slow), *PROGRAMS[1:]])
def test_four_functions_are_one_on_the_same_global_batches(target, home):
    made = job(target, accumulate=2, clip_norm=1.0)
    run = real(made, **settings(4))
    state, losses, metrics = reference(run, made, gradient_clip_val=1.0)
    assert np.allclose(loss_curve(run), losses, atol=1e-5)
    for name, value in state.items():
        assert np.allclose(run.ending.arrays[name], value, atol=2e-5), name
    for name in ("val_loss", "val_acc", "val_auroc", "val_f1", "val_precision"):
        assert run.ending.final.metrics[name] == pytest.approx(metrics[name], abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS)
def test_kills_and_hand_offs_do_not_change_it(target, home):
    made, more = job(target), settings(4, checkpoint_every=2)
    undisturbed = real(made, **more)
    run = real(made, faults=[parse_fault(fault) for fault in FAULTS], **more)
    assert len(run.of(FaultFired)) == len(FAULTS)
    assert run.sha == undisturbed.sha
    assert run.ending.final.metrics == undisturbed.ending.final.metrics
    handed_off = real(made, **{**more, "function_timeout_s": 4.0})
    assert [e for e in handed_off.of(Invoked) if e.reason == "relay"]
    assert handed_off.sha == undisturbed.sha


def test_hooks_of_epochs_and_batches_are_called(home):
    run = real(job(CLASSIFIER), **settings(2))
    got = run.ending.arrays
    assert (got["epochs_begun"], got["epochs_ended"], got["batches_ended"]) == (3, 0 + 1 + 2, 12)


def test_batch_size_and_last_batch_are_the_loaders(home):
    made = job_of(CLASSIFIER)
    assert (made.run["batch_size"], made.data.last_batch) == (8, "drop")
    assert made.task.options == {"module": "lightning_programs:Classifier", "data": "lightning_programs:Data"}
    assert job_of("lightning:lightning_programs:Regression").data.test_fraction == 0


def test_a_module_without_validation_is_not_evaluated(home):
    run = real(job("lightning:lightning_programs:Regression"), **settings(2))
    assert run.ending.status == "finished"
    assert run.ending.final.metrics == {"loss": None}


@pytest.mark.slow
def test_a_weight_beside_the_loss_is_that_of_the_mean(home):
    """A fifth of the samples is known, and many parts have none: functions equal one, and the loss told is that of all data."""
    from lightning_programs import samples

    options = {"dtype": "float64", "data": {"sampling": "global"}}
    runs = [
        real(job("lightning:lightning_programs:Labelled", accumulate=parts, **options), **settings(workers))
        for workers, parts in ((1, 1), (1, 4), (2, 1), (4, 2))
    ]
    x, y = samples(32, 1).tensors
    known = x[:, 2] > 1
    for run in runs:
        assert run.ending.status == "finished", run.ending.causes
        weight, bias = (torch.from_numpy(run.ending.arrays[name]) for name in ("net.weight", "net.bias"))
        np.testing.assert_allclose(weight, runs[0].ending.arrays["net.weight"], rtol=0, atol=1e-12)
        told = torch.nn.functional.cross_entropy(x[known].double() @ weight.T + bias, y[known])
        assert run.ending.final.metrics["loss"] == pytest.approx(float(told), rel=1e-12)


@pytest.mark.slow
def test_classes_and_modules_are_programs(home):
    from lightning_programs import Classifier, Data, Plateau

    from ephemeron.integrations.lightning import LightningTask

    assert job_of(Plateau).task.options == {"module": "lightning_programs:Plateau"}
    pytest.importorskip("cloudpickle", reason="no cloudpickle; pip install 'ephemeron[notebook]'")
    module = Classifier(width=3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    made = job_of(LightningTask(module, Data(batch_size=4)), {"epochs": 1})
    assert made.run["batch_size"] == 4
    run = real(dataclasses.replace(made, simulation=WORLD), **settings(2))
    assert run.ending.status == "finished", run.ending.causes
    assert run.ending.arrays["net.0.weight"].shape == (3, 6)
    assert not np.array_equal(run.ending.arrays["net.0.weight"], before["net.0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    plateau = dataclasses.replace(job_of(Plateau(), {"epochs": 1}), simulation=WORLD)
    assert real(plateau, **settings(2)).ending.status == "finished"


def test_callbacks_and_validation_loaders_are_those_of_lightnings_trainer(home, tmp_path):
    """Early stopping, the best weights, learning rates, an own callback, and two validation loaders."""
    from lightning_programs import Recorder, TwoLoaders

    pytest.importorskip("cloudpickle", reason="no cloudpickle; pip install 'ephemeron[notebook]'")
    made = dataclasses.replace(job_of(TwoLoaders, {"epochs": 3, "callbacks": [Recorder()]}), simulation=WORLD)
    assert (made.early_stopping.monitor, made.early_stopping.patience, made.keep_best.count) == ("val_loss/dataloader_idx_1", 1, 1)
    run = real(made, **settings(1))
    assert run.ending.status == "finished", run.ending.causes
    state, losses, metrics = reference(
        run,
        made,
        Recorder(tmp_path),
        logger=lightning.pytorch.loggers.CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    assert loss_curve(run) == losses
    for name, value in state.items():
        assert np.array_equal(run.ending.arrays[name], value), name
    found = run.ending.final.metrics
    for name in ("val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "own_0", "own_1", "val_acc/dataloader_idx_1"):
        assert found[name] == pytest.approx(metrics[name], abs=1e-6), name
    assert run.ending.final.iterations == 8, "of 12: the metric of the second loader has not improved by 0.5"
    (logged,) = tmp_path.rglob("metrics.csv")
    with logged.open() as rows:
        rates = [float(row["lr-AdamW/pg1"]) for row in csv.DictReader(rows) if row["lr-AdamW/pg1"]]
    assert [e.metrics["lr-AdamW/pg1"] for e in run.of(Progress)] == pytest.approx(rates)
    told = json.loads(run.ending.files["files/calls.json"].tobytes())
    expected = json.loads((tmp_path / "calls.json").read_text())
    steps = [call for call in expected["calls"] if not call.startswith("validation")]
    assert [call for call in told["calls"] if not call.startswith("validation")] == steps
    assert {call for call in told["calls"] if call.startswith("validation")} == {f"validation batch of {i}" for i in (0, 1)}
    assert told["losses"] == expected["losses"] == losses

    killed = real(made, faults=[parse_fault("kill:rank=0,iteration=5,phase=compute")], **settings(2, checkpoint_every=2))
    assert len(killed.of(FaultFired)) == 1
    for name in ("own_0", "own_1"):
        assert killed.ending.final.metrics[name] == pytest.approx(metrics[name], abs=1e-6), name
    again = json.loads(killed.ending.files["files/calls.json"].tobytes())
    assert [call for call in again["calls"] if not call.startswith("validation")] == steps, "its state is in checkpoints"


def test_callbacks_that_cannot_be_honoured_are_refused_by_name(home):
    from lightning.pytorch import callbacks
    from lightning_programs import Changing, Classifier, Data

    from ephemeron.integrations.lightning import LightningTask

    class Backward(lightning.Callback):
        def on_after_backward(self, trainer, pl_module):
            pass

    class Stopping(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = True

    refused = {
        "say ema_decay": callbacks.StochasticWeightAveraging(0.1),
        "has on_after_backward, which functions do not call": Backward(),
        "EarlyStopping(divergence_threshold=9.0) is not for functions": callbacks.EarlyStopping("loss", divergence_threshold=9.0),
        'ModelCheckpoint(every_n_epochs=2) is not for functions; say evaluate_every = "2 epochs"': callbacks.ModelCheckpoint(
            monitor="loss", every_n_epochs=2
        ),
        "save_top_k=-1": callbacks.ModelCheckpoint(save_top_k=-1),
        "is no lightning.Callback": print,
    }
    for says, callback in refused.items():
        with pytest.raises(JobError) as caught:
            _ = LightningTask(Classifier, Data, [callbacks.TQDMProgressBar(), callback]).settings
        assert says in str(caught.value), says
    for says, callback in {"changes the model or an optimiser": Changing(), "say early_stopping": Stopping()}.items():
        task = LightningTask(Classifier, Data, [callback])
        task.total_steps, task.total_epochs = 8, 1
        model = task.model()
        task.optimizers(model)
        task.training_step(model, next(iter(task._loaders()[0])))
        task.global_step = 1
        with pytest.raises(JobError, match=says):
            task.on_step_end(model)
        task.is_main = False
        task.on_step_end(model)
    with pytest.raises(JobError, match="a Task has on_step_end"):
        job_of("tasks:Some", {"callbacks": []})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Manual", "optimises manually (automatic_optimization = False): manual_backward"),
        ("Stepping", "Stepping overrides optimizer_step, which functions do not call"),
        ("Strategic", "reads trainer.strategy, which functions do not have"),
        ("Collecting", "training_step of Collecting collects values in self.outputs"),
        ("Largest", "torchmetrics.MaxMetric"),
        ("Weighted", "has a WeightedRandomSampler, which functions do not use"),
        ("Streaming", "reads an IterableDataset"),
        ("samples", "samples is a TensorDataset; name a LightningModule"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, says, home, monkeypatch):
    import lightning_programs

    if name == "samples":
        monkeypatch.setattr(lightning_programs.samples, "__defaults__", (4, 1))
    with pytest.raises(JobError) as caught:
        real(job(f"lightning:lightning_programs:{name}"), **settings(2))
    assert says in str(caught.value)
