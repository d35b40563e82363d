"""A `transformers` model as a task with its own loss, and a `Trainer` that takes `TrainingArguments`.

    trainer = Trainer(model=model, args=TrainingArguments("out", learning_rate=3e-4), train_dataset=data)
    result = trainer.train(workers=4)

Optimiser, parameter groups with and without weight decay, and schedule are those of `transformers.Trainer`, by its own
functions. The loss of a batch is a mean over its labels, and functions weight it by their number, so that the merged gradient
is that of the global batch. Only parameters that are trained are exchanged: of a model with adapters of `peft`, the adapters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ephemeron.errors import JobError, MissingExtra
from ephemeron.integrations.transformers_arguments import monitored, refuse_unhonoured, settings_of
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.task import Task

try:
    import transformers

    from ephemeron.integrations.transformers_callbacks import TrainerCallbacks, early_stopping, logging_steps, made
except ModuleNotFoundError:
    raise MissingExtra("transformers", "transformers") from None

if TYPE_CHECKING:
    from ephemeron.training.driver import Result

_hf: Any = transformers
PREDICTIONS = "_predictions"
_PREPARED = "_model_preparation_time"
"""End of the name of a metric of a `transformers.Trainer` that has not trained itself."""


class TransformersTask(Task):
    """A model of `transformers` that computes its own loss.

    Args:
        model: a model, whose weights are the initial ones; a configuration; or a local folder written by `save_pretrained`.
        args: `transformers.TrainingArguments`.
        train_dataset: map-style, such as `datasets.Dataset`, of which the selected rows are sent in Arrow.
        eval_dataset: the same; None: there are no evaluations.
        model_init: function that builds the model, in place of `model`.
        data_collator: from a list of samples to a batch; None: `transformers.default_data_collator`.
        compute_metrics: from a `transformers.EvalPrediction` over the whole evaluation data to numbers by name.
        callbacks: `EarlyStoppingCallback`, and `transformers.TrainerCallback`s of one's own, which worker 0 calls.
        processing_class: given to callbacks.

    Raises:
        JobError: a field of the arguments cannot be honoured, or there is no model.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        model_init: Callable[[], nn.Module] | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        processing_class: Any = None,
    ) -> None:
        self._args = _usual_arguments() if args is None else args.to_dict()
        refuse_unhonoured(self._args, _usual_arguments())
        if isinstance(eval_dataset, Mapping):
            raise JobError("eval_dataset is several datasets", remedy="give one, and the others to trainer.evaluate after the run")
        strategy = self._args["eval_strategy"]
        evaluates = eval_dataset is not None and str(getattr(strategy, "value", strategy)) != "no"
        self._given, self._processing_class = made(callbacks or ()), processing_class
        self.settings = settings_of(self._args, evaluates=eval_dataset is not None) | early_stopping(
            self._given, self._args, evaluates=evaluates
        )
        self._callbacks = self._new_callbacks()
        if (model is None) == (model_init is None) or train_dataset is None:
            raise JobError("a task needs a model or model_init, and train_dataset")
        self._model = _loaded(model) if model_init is None else None
        self._init = model_init
        self._collate = data_collator or transformers.default_data_collator
        self._compute_metrics = compute_metrics
        self._metric: Any = None
        self._train, self._evaluation = _sendable(train_dataset), _sendable(eval_dataset)
        self._columns: frozenset[str] | None = None

    def _new_callbacks(self) -> TrainerCallbacks:
        return TrainerCallbacks(self, self._given, self._args, self._processing_class)

    def state_dict(self) -> dict[str, Any]:
        """State of the callbacks."""
        return self._callbacks.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        self._callbacks.load_state_dict(state)

    # -- model --------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        model: Any = copy.deepcopy(self._model) if self._init is None else self._init()
        self._callbacks = self._new_callbacks()
        if self._args.get("gradient_checkpointing") or self._args.get("activation_checkpointing"):
            model.gradient_checkpointing_enable(self._args.get("gradient_checkpointing_kwargs"))
        return model  # type: ignore[no-any-return]

    def optimizers(self, model: nn.Module) -> Any:
        args = SimpleNamespace(**self._args)
        args.optim = _hf.training_args.OptimizerNames(args.optim)
        with eager_optimizers():
            make, options = _hf.Trainer.get_optimizer_cls_and_kwargs(args, model)
            decayed = set(_hf.Trainer.get_decay_parameter_names(None, model))
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for n, p in named if n in decayed], "weight_decay": args.weight_decay},
                {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
            ]
            optimizer = make(groups, **options)
        warmup = _hf.TrainingArguments.get_warmup_steps(args, self.total_steps)
        scheduler = _hf.get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=self.total_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        self._callbacks.begin(model, optimizer, scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": monitored(self._args)}}

    # -- steps --------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        self._callbacks.begin_step()
        report, _ = self._report(model, batch)
        self._callbacks.computed(report["loss"])
        return report

    def on_step_end(self, model: nn.Module) -> None:
        self._callbacks.end_step()

    def on_end(self, model: nn.Module) -> None:
        self._callbacks.end()

    def evaluation_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        report, output = self._report(model, batch)
        self._callbacks.evaluated_batch()
        if self._compute_metrics is None:
            return report
        if self._metric is None:
            from ephemeron.integrations.transformers_metrics import Predictions

            self._metric = Predictions(self._compute_metrics)
        ignored = {"loss", *getattr(plain_model(model).config, "keys_to_ignore_at_inference", ())}
        values = [v for k, v in output.items() if k not in ignored and isinstance(v, torch.Tensor)]
        self._metric.update(values, [batch[name] for name in self._label_names if name in batch])
        return {**report, PREDICTIONS: self._metric}

    def evaluation_end(self, metrics: dict[str, float]) -> Mapping[str, float]:
        own = {n.removeprefix(f"{PREDICTIONS}_").removeprefix("eval_"): v for n, v in metrics.items()}
        shown = {n: v for n, v in own.items() if not n.startswith("_")}
        self._callbacks.evaluated(shown)
        return shown

    def _report(self, model: nn.Module, batch: Any) -> tuple[dict[str, Any], Any]:
        items = items_of(plain_model(model), batch)
        more = {"num_items_in_batch": items} if items is not None and accepts_loss_options(plain_model(model)) else {}
        output = model(**batch, **more)
        if "loss" not in output:
            raise JobError(
                f"{type(plain_model(model)).__name__} returned no loss for {', '.join(batch)}",
                remedy="give samples labels, by the dataset or by the data_collator",
            )
        return {"loss": output["loss"], **({} if items is None else {"weight": int(items)})}, output

    @property
    def _label_names(self) -> list[str]:
        return list(self._args["label_names"] or ["labels"])

    # -- data ---------------------------------------------------------------------------------------------

    def train_data(self) -> Any:
        return self._train

    def evaluation_data(self) -> Any:
        return self._evaluation

    def collate(self, samples: list[Any]) -> Any:
        """A batch by the data collator, of the columns that the model takes."""
        if self._args["remove_unused_columns"] and isinstance(samples[0], Mapping):
            if self._columns is None:
                model = plain_model(self._model if self._init is None else self._init())
                taken = inspect.signature(model.forward).parameters
                self._columns = frozenset({*taken, "label", "label_ids", *self._label_names})
            samples = [{name: v for name, v in sample.items() if name in self._columns} for sample in samples]
        return dict(self._collate(samples))


class Trainer:
    """`transformers.Trainer`'s arguments, for training on functions. Evaluation and prediction are done here, by `transformers.Trainer`.

    Args:
        model, args, train_dataset, eval_dataset, model_init, data_collator, compute_metrics, callbacks: see `TransformersTask`.
            `train_dataset` is needed by `train` alone.
        processing_class: tokeniser; pads samples where there is no collator, and is saved with the model.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        model_init: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        if data_collator is None and processing_class is not None:
            data_collator = transformers.DataCollatorWithPadding(processing_class)
        if (model is None) == (model_init is None):
            raise JobError("a Trainer needs a model or model_init")
        self.args = _hf.TrainingArguments("trainer_output") if args is None else args
        self._given = {"model_init": model_init, "data_collator": data_collator, "compute_metrics": compute_metrics}
        self._model, self._train, self._processing_class = model, train_dataset, processing_class
        self.eval_dataset = eval_dataset
        self.callbacks = made(callbacks or ())
        """Callbacks, those of `add_callback` among them."""
        self.state = _hf.TrainerState()
        """Steps, epochs and `log_history` of the run, after `train`."""
        self.model: Any = _loaded(model) if model_init is None else model_init()
        """The model; after `train` the trained one: with `load_best_model_at_end`, that of the best evaluation."""
        if train_dataset is not None:
            _ = self.task  # what cannot be honoured is refused at once

    @property
    def task(self) -> TransformersTask:
        """The training program.

        Raises:
            JobError: see `TransformersTask`.
        """
        more = {"callbacks": self.callbacks, "processing_class": self._processing_class}
        return TransformersTask(self._model, self.args, self._train, self.eval_dataset, **self._given, **more)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, or one of a class."""
        self.callbacks = [*self.callbacks, *made([callback])]

    def pop_callback(self, callback: Any) -> Any:
        """Takes away the first callback that is this one, or of this class, and returns it; None: there is none."""
        found = next((each for each in self.callbacks if each is callback or type(each) is callback), None)
        self.callbacks = [each for each in self.callbacks if each is not found]
        return found

    def remove_callback(self, callback: Any) -> None:
        """Takes away the first callback that is this one, or of this class."""
        self.pop_callback(callback)

    def train(self, **options: Any) -> Result:
        """Trains and waits for the end of the run.

        Args:
            options: of `ephemeron.train`, such as `workers`.

        Raises:
            JobError: an option is unknown, or the program does not accept its data.
            RunFailed: functions failed for good.
        """
        from ephemeron.training.driver import train

        result = train(self.task, **options)
        if result.finished:
            self.model = result.model(best=bool(self.args.load_best_model_at_end))
        self._note(result)
        return result

    def _note(self, result: Result) -> None:
        """Takes the metrics of a run into `state`."""
        args, rows = self.args.to_dict(), list(result.metrics)
        epochs = int(args["num_train_epochs"])
        last: Mapping[str, Any] = rows[-1] if rows else {}
        self.state = state = _hf.TrainerState(
            global_step=result.summary.iterations, num_train_epochs=epochs, epoch=float(last.get("epoch") or 0.0)
        )
        every = logging_steps(args, round(result.summary.iterations * epochs / (state.epoch or epochs)))
        for row in rows:
            where = {"epoch": row["epoch"], "step": row["iteration"]}
            if row["iteration"] and int(row["iteration"]) % every == 0 and row.get("train/loss") is not None:
                state.log_history.append({"loss": row["train/loss"], **where})
            of = {f"eval_{n.partition('/')[2]}": v for n, v in row.items() if n.startswith("evaluation/") and v is not None}
            if of:
                state.log_history.append({**of, **where})

    def _local(self) -> Any:
        """`transformers.Trainer` of the model as it is now."""
        own = [each for each in self.callbacks if not isinstance(each, _hf.EarlyStoppingCallback)]
        given = {name: value for name, value in self._given.items() if name != "model_init"}
        found = _hf.Trainer(
            self.model, self.args, eval_dataset=self.eval_dataset, processing_class=self._processing_class, callbacks=own, **given
        )
        found.state = self.state
        return found

    def evaluate(self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Metrics of the model on evaluation data, in this process: `transformers.Trainer.evaluate`.

        Args:
            eval_dataset: None: that of the trainer.
            ignore_keys, metric_key_prefix: see there.
        """
        found: dict[str, float] = self._local().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        found.pop(f"{metric_key_prefix}{_PREPARED}", None)
        return found

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predictions of the model, in this process: `transformers.Trainer.predict`, which returns a `PredictionOutput`."""
        found = self._local().predict(test_dataset, ignore_keys, metric_key_prefix)
        (found.metrics or {}).pop(f"{metric_key_prefix}{_PREPARED}", None)
        return found

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Saves the model, or its adapters of `peft`, with tokeniser and arguments: `transformers.Trainer.save_model`.

        Args:
            output_dir: None: that of the arguments.
        """
        self._local().save_model(None if output_dir is None else str(output_dir))


@cache
def _usual_arguments() -> dict[str, Any]:
    """Fields of arguments that name nothing. Made once, since `accelerate` begins anew whenever arguments are made."""
    found: dict[str, Any] = _hf.TrainingArguments("unused", use_cpu=True).to_dict()
    return found


def plain_model(model: Any) -> Any:
    """The model below wrappers of `peft` and of the compiler."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accepts_loss_options(model: Any) -> bool:
    """Whether a model's loss takes the number of its items, as `transformers.Trainer` finds it."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def items_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Number of labels that the loss is a mean over, as `transformers.Trainer` counts them; None: there are none."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    shifts = LOSS_MAPPING.get(str(getattr(model, "loss_type", ""))) is ForCausalLMLoss and not model.config.is_encoder_decoder
    return (labels[..., 1:] if shifts and "shift_labels" not in batch else labels).ne(-100).sum()


def _loaded(model: Any) -> Any:
    """A model from a configuration or from a local folder; a model as it is."""
    if isinstance(model, nn.Module):
        return model
    folder = Path(model) if isinstance(model, (str, Path)) else None
    if folder is not None and not folder.is_dir():
        raise JobError(f"there is no folder {folder}", remedy="name a folder written by save_pretrained")
    config = model if folder is None else transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    cls = getattr(transformers, name, None)
    if cls is None:
        raise JobError(f"{type(config).__name__} names no architecture", remedy="give a model, or config.architectures")
    return cls(config) if folder is None else cls.from_pretrained(folder, local_files_only=True)


def _sendable(dataset: Any) -> Any:
    return ArrowRows(dataset) if type(dataset).__module__.split(".")[0] == "datasets" else dataset


class ArrowRows:
    """A `datasets.Dataset` that is pickled with its selected rows in Arrow, and without the files that it was read from."""

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "with_format")):
            raise JobError(f"a {type(dataset).__name__} is not map-style", remedy="choose a split of datasets.Dataset")
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Any:
        return self._dataset[int(i)]

    def __getstate__(self) -> dict[str, Any]:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        table = self._dataset.with_format("arrow")[:]
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        form = self._dataset.format
        return {"rows": sink.getvalue().to_pybytes(), "format": {k: form[k] for k in ("type", "columns")}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import datasets
        import pyarrow as pa

        dataset = datasets.Dataset(pa.ipc.open_stream(state["rows"]).read_all())
        self._dataset = dataset.with_format(**state["format"])
