"""Models of `transformers`: as its own Trainer trains them, independent of the number of functions, and after any kill."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from lazy_modules import lazy_import

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
transformers = lazy_import("transformers", reason="no transformers; pip install 'ephemeron[transformers]'")
lazy_import("accelerate", reason="no accelerate; pip install 'ephemeron[transformers]'")
datasets = lazy_import("datasets", reason="no datasets; pip install 'ephemeron[transformers]'")
cloudpickle = pytest.importorskip("cloudpickle", reason="no cloudpickle; pip install 'ephemeron[notebook]'")

from test_lightning import FAULTS, EpochBatches, loss_curve, settings  # noqa: E402
from training_runs import WORLD, batch_indices, real  # noqa: E402

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import FaultFired, Invoked, Progress  # noqa: E402
from ephemeron.training.driver.launching.programs import job_of  # noqa: E402
from ephemeron.training.driver.records import run_spec  # noqa: E402
from ephemeron.training.driver.trained import record_of  # noqa: E402
from ephemeron.training.job import KeepBest, parse_fault  # noqa: E402
from ephemeron.training.task.program import program_of  # noqa: E402

CODE = Path(__file__).parent / "code"


def job(name, **options):
    return dataclasses.replace(job_of(f"transformers_programs:{name}", options), simulation=WORLD, code=(CODE,))


def reference(run, made, **options):
    """The same program under `transformers.Trainer`, without accumulation: the weights, and the losses by step."""
    from transformers_programs import ARGUMENTS, arguments

    spec = run.trigger.spec
    program = program_of(spec, folders=made.code, epoch_length=spec.split.iterations, epochs=spec.epochs)
    task = program.task
    epochs = [
        [batch_indices(spec, e * spec.split.iterations + i).tolist() for i in range(spec.split.iterations)] for e in range(spec.epochs)
    ]
    rows = task.train_data()

    class Ordered(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(rows, batch_sampler=EpochBatches(epochs), collate_fn=task.collate)

    args = arguments(
        **{**ARGUMENTS, "gradient_accumulation_steps": 1, "eval_strategy": "no"},
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )

    class Losses(transformers.TrainerCallback):
        """Losses by step, as Trainer reports them."""

        def __init__(self):
            self.found = []

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                self.found.append(logs["loss"])

    losses = Losses()
    trainer = Ordered(program.model, args, train_dataset=rows, callbacks=[losses])
    trainer.train()
    return {name: value.detach().numpy() for name, value in trainer.model.state_dict().items()}, losses.found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", pytest.param("classification", marks=pytest.mark.slow)])
def test_one_function_is_the_trainer_of_transformers_to_the_last_bit(name, home):
    made = job(name, accumulate=1)
    run = real(made, **settings(1))
    state, losses = reference(run, made)
    assert run.ending.arrays.keys() == state.keys()
    for key, value in state.items():
        assert np.array_equal(run.ending.arrays[key], value), key
    assert loss_curve(run) == pytest.approx(losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", "classification", "lora"])
def test_four_functions_with_accumulation_are_one_on_the_same_global_batches(name, home):
    if name == "lora":
        pytest.importorskip("peft", reason="no peft; pip install 'ephemeron[peft]'")
    made = job(name)
    assert (made.accumulate, made.clip_norm, made.epochs, made.seed) == (2, 0.5, 2, 3)
    run = real(made, **settings(4))
    state, _ = reference(run, made)
    for key, value in state.items():
        # Adam makes noise of gradients that are exactly zero, such as those of a key's bias.
        tolerance = 0.05 if key.endswith(("c_attn.bias", "key.bias")) else 2e-4
        assert np.allclose(run.ending.arrays[key], value, atol=tolerance), key


@pytest.mark.slow
def test_parts_and_functions_without_labels_contribute_nothing(home):
    runs = [
        real(job("answers", accumulate=parts, dtype="float64", data={"sampling": "global"}), **settings(workers))
        for workers, parts in ((1, 1), (1, 4), (4, 2))
    ]
    for run in runs:
        assert run.ending.status == "finished", run.ending.causes
        for key, value in runs[0].ending.arrays.items():
            # transformers computes the loss of language models in float32.
            np.testing.assert_allclose(run.ending.arrays[key], value, rtol=0, atol=1e-7, err_msg=key)
        assert run.ending.final.metrics["loss"] == pytest.approx(runs[0].ending.final.metrics["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", "half", "classification", "lora"])
def test_kills_and_hand_offs_do_not_change_it(name, home):
    if name == "lora":
        pytest.importorskip("peft", reason="no peft; pip install 'ephemeron[peft]'")
    made, more = job(name), settings(4, checkpoint_every=2)
    undisturbed = real(made, **more)
    run = real(made, faults=[parse_fault(fault) for fault in FAULTS], **more)
    assert len(run.of(FaultFired)) == len(FAULTS)
    assert run.sha == undisturbed.sha
    assert run.ending.final.metrics == undisturbed.ending.final.metrics
    handed_off = real(made, **{**more, "function_timeout_s": 4.0})
    assert [e for e in handed_off.of(Invoked) if e.reason == "relay"]
    assert handed_off.sha == undisturbed.sha


@pytest.mark.slow
def test_compute_metrics_has_the_whole_evaluation_data(home):
    for workers in (1, 4):
        run = real(job("classification"), **settings(workers))
        metrics = run.ending.final.metrics
        assert metrics.keys() == {"loss", "accuracy", "counted"}
        assert metrics["counted"] == 22
        assert metrics["accuracy"] * 22 == pytest.approx(round(metrics["accuracy"] * 22), abs=1e-4)
        assert run.ending.final.best


@pytest.mark.slow
def test_only_adapters_are_exchanged(home):
    pytest.importorskip("peft", reason="no peft; pip install 'ephemeron[peft]'")
    run = real(job("lora"), **settings(4))
    trained = 4 * sum(a.size for n, a in run.ending.arrays.items() if "lora_" in n)
    whole = sum(a.nbytes for a in run.ending.arrays.values())
    assert whole > 10 * trained
    for e in run.of(Progress)[-4:]:
        assert e.traffic.bytes_up < 4 * trained * run.trigger.spec.iterations


def test_rows_are_sent_in_arrow_without_their_files(tmp_path):
    from ephemeron.integrations.transformers import ArrowRows

    datasets.Dataset.from_dict({"x": list(range(100)), "y": [[i] * 3 for i in range(100)]}).save_to_disk(tmp_path / "a")
    rows = ArrowRows(datasets.load_from_disk(tmp_path / "a").select([5, 7, 90]).with_format("torch"))
    data = cloudpickle.dumps(rows)
    assert str(tmp_path).encode() not in data
    again = cloudpickle.loads(data)
    assert len(again) == 3
    assert int(again[2]["x"]) == 90
    assert torch.equal(again[1]["y"], torch.tensor([7, 7, 7]))


def test_fields_of_the_arguments_are_keys_of_a_job():
    from transformers_programs import arguments

    from ephemeron.integrations.transformers_arguments import settings_of

    args = arguments(eval_strategy="steps", eval_steps=5, bf16=True, load_best_model_at_end=True, save_steps=5).to_dict()
    found = settings_of(args, evaluates=True)
    assert found["run"] == {"batch_size": 16}
    assert (found["evaluate_every"], found["precision"]) == ("5 steps", "bf16-mixed")
    assert found["keep_best"] == {"monitor": "loss", "mode": "min"}
    assert settings_of(args, evaluates=False)["data"] == {"test_fraction": 0.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"label_smoothing_factor": 0.1, "data_seed": 5}, "do not honour label_smoothing_factor = 0.1, data_seed = 5"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0"),
        ({"max_steps": 5}, "max_steps"),
        ({"num_train_epochs": 1.5}, "use whole num_train_epochs"),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, "eval_steps = 0.5"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options, says):
    from transformers_programs import language

    with pytest.raises(JobError) as caught:
        language(**options)
    assert says in str(caught.value)


def test_models_are_named_by_configuration_or_local_folder(tmp_path):
    from transformers_programs import arguments, gpt, sentences

    from ephemeron.integrations.transformers import TransformersTask

    model = gpt()
    model.save_pretrained(tmp_path / "gpt")
    task = TransformersTask(tmp_path / "gpt", arguments(), sentences(8, 1))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in task.model().state_dict().items())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "gpt")
    assert type(TransformersTask(config, arguments(), sentences(8, 1)).model()) is type(model)
    with pytest.raises(JobError, match="there is no folder"):
        TransformersTask(str(tmp_path / "none"), arguments(), sentences(8, 1))


class Recorder(transformers.TrainerCallback):
    """Writes down what its hooks get."""

    def __init__(self):
        self.calls, self.logged = [], []

    def on_step_end(self, args, state, control, model=None, **_):
        assert model is not None
        self.calls.append(f"step {state.global_step} of {state.max_steps}, epoch {state.epoch:g}")

    def on_epoch_end(self, args, state, control, **_):
        self.calls.append(f"epoch {state.epoch:g}")

    def on_log(self, args, state, control, logs=None, **_):
        self.logged.append({name: value for name, value in logs.items() if name in ("loss", "learning_rate", "eval_loss", "epoch")})

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.calls.append(
            f"evaluated at {state.global_step} {sorted(n for n in metrics if n.startswith('eval_') and 'per_second' not in n)}"
        )

    def on_train_end(self, args, state, control, **_):
        (Path(args.output_dir) / "calls.json").write_text(json.dumps({"calls": self.calls, "logged": self.logged}))


def test_adapters_callbacks_evaluation_and_prediction_are_those_of_the_plain_trainer(home, tmp_path):
    peft = pytest.importorskip("peft", reason="no peft; pip install 'ephemeron[peft]'")
    from transformers_programs import adapted, arguments, gpt, sentences

    from ephemeron.integrations.transformers import Trainer

    def error(found):
        scores = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        right = scores[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"error": float(1 - right[found.label_ids[:, 1:] >= 0].mean())}

    options = {"metric_for_best_model": "error", "greater_is_better": False, "logging_steps": 2, "save_strategy": "epoch"}
    args = arguments(load_best_model_at_end=True, gradient_accumulation_steps=1, **options)
    args.output_dir = str(tmp_path / "out")
    (rows, others), recorder = (sentences(32, 1), sentences(10, 2)), Recorder()
    given = {"data_collator": transformers.default_data_collator, "compute_metrics": error}
    trainer = Trainer(None, args, train_dataset=rows, eval_dataset=others, model_init=adapted, callbacks=[recorder], **given)
    trainer.add_callback(transformers.EarlyStoppingCallback(1))
    made = job_of(trainer.task)
    assert (made.early_stopping.monitor, made.early_stopping.mode, made.early_stopping.patience) == ("error", "min", 1)
    assert trainer.pop_callback(transformers.EarlyStoppingCallback).early_stopping_patience == 1
    assert job_of(trainer.task).early_stopping is None
    task = trainer.task
    result = trainer.train(workers=1, platform="simulated", on_event=lambda event: None)
    assert result.finished

    order = [batch_indices(run_spec(record_of(result.folder)), i).tolist() for i in range(8)]

    class Ordered(transformers.Trainer):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader
            return loader(rows, batch_sampler=EpochBatches([order[:4], order[4:]]), collate_fn=task.collate)

    plain_recorder = Recorder()
    torch.manual_seed(0)
    plain = Ordered(adapted(), args, train_dataset=rows, eval_dataset=others, callbacks=[plain_recorder], **given)
    plain.model.load_state_dict(task.model().state_dict())
    plain.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    told = json.loads((result.output_dir / "calls.json").read_text())
    assert told["calls"] == [call.replace("'eval_runtime', ", "").replace(", 'eval_runtime'", "") for call in plain_recorder.calls]
    for own, theirs in zip(told["logged"], plain_recorder.logged, strict=False):
        tolerance = 0.01 if "eval_loss" in own else 1e-6  # functions weight the loss by labels, transformers.Trainer by samples
        assert own == pytest.approx({n: theirs[n] for n in own}, abs=tolerance), (own, theirs)
    assert recorder.calls == [], "functions have copies"

    evaluated, expected = trainer.evaluate(), plain.evaluate()
    assert evaluated.keys() == expected.keys()
    for name in ("eval_loss", "eval_error", "epoch"):
        assert evaluated[name] == pytest.approx(expected[name], abs=1e-6), name
    assert [e["step"] for e in trainer.state.log_history if "eval_error" in e][:2] == [4, 8]
    predicted, wanted = trainer.predict(others), plain.predict(others)
    assert type(predicted) is type(wanted)
    assert predicted.metrics.keys() == wanted.metrics.keys()
    np.testing.assert_allclose(predicted.label_ids, wanted.label_ids)
    first, second = (found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions for found in (predicted, wanted))
    np.testing.assert_allclose(first, second, atol=1e-6)
    trainer.save_model(tmp_path / "saved")
    assert {"adapter_config.json", "adapter_model.safetensors", "training_args.bin"} <= {p.name for p in (tmp_path / "saved").iterdir()}
    base = gpt()
    base.load_state_dict(
        {n.replace(".base_layer", ""): v for n, v in trainer.model.get_base_model().state_dict().items() if "lora_" not in n}
    )
    again = peft.PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    batch = task.collate([others[0]])
    assert torch.allclose(again(**batch).loss, trainer.model.eval()(**batch).loss)


def test_callbacks_that_cannot_be_honoured_are_refused_by_name(home):
    from transformers_programs import arguments, bert, padded, texts

    from ephemeron.integrations.transformers import Trainer, TransformersTask

    class Saving(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            pass

    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = True

    class Changing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **_):
            optimizer.param_groups[0]["lr"] = 1.0

    given = {"train_dataset": texts(8, 1), "eval_dataset": texts(4, 2), "data_collator": padded}
    refused = {
        "Saving has on_save, which functions do not call": Saving,
        "EarlyStoppingCallback needs metric_for_best_model": transformers.EarlyStoppingCallback(),
        "functions have no TensorBoardCallback; name a logger": transformers.integrations.TensorBoardCallback,
        "is no transformers.TrainerCallback": print,
    }
    for says, callback in refused.items():
        with pytest.raises(JobError) as caught:
            Trainer(bert(), arguments(), callbacks=[callback], **given)
        assert says in str(caught.value), says
    for says, callback in {
        "sets control.should_training_stop in on_step_end": Stopping,
        "changes the model or an optimiser": Changing,
    }.items():
        task = TransformersTask(bert(), arguments(), callbacks=[callback, transformers.ProgressCallback], **given)
        task.total_steps, task.total_epochs = 4, 1
        model = task.model()
        task.optimizers(model)
        task.training_step(model, task.collate([given["train_dataset"][i] for i in range(4)]))
        task.global_step = 1
        with pytest.raises(JobError, match=says):
            task.on_step_end(model)
    with pytest.raises(JobError, match="eval_dataset is several datasets"):
        Trainer(bert(), arguments(), train_dataset=texts(8, 1), eval_dataset={"a": texts(4, 2)})


@pytest.mark.slow
def test_the_trainer_trains_on_functions(home):
    from transformers_programs import accuracy, arguments, bert, padded, texts

    from ephemeron.integrations.transformers import Trainer

    args = arguments(load_best_model_at_end=True, metric_for_best_model="eval_loss", save_strategy="epoch")
    trainer = Trainer(bert(), args, padded, texts(64, 1).with_format(None), texts(22, 2), compute_metrics=accuracy)
    result = trainer.train(workers=2, platform="simulated")
    assert result.finished
    best = result.state_dict(best=True)
    assert all(torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items())


def test_best_weights_are_kept_by_the_metric_that_is_named():
    assert job("classification").keep_best == KeepBest(monitor="accuracy", mode="max")
