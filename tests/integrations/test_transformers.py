"""Models of `transformers`: as its own Trainer trains them, independent of the number of functions, and after any kill."""

from __future__ import annotations

import dataclasses
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
