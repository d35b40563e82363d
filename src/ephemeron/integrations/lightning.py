"""A LightningModule as a task: `ephemeron train lightning:module:Class`, or `ephemeron.train(Class, workers=4)`.

The module runs unmodified: its hooks are called where a function computes, its loaders give dataset, batch size and collate
function, and what it logs is reported. Samples are shuffled by the job's seed. Hooks that change what happens between a
backward pass and an optimiser's step are refused by name, since functions exchange gradients there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.integrations.lightning_trainer import Log, TrainerStandIn
from ephemeron.training.task.evaluation import is_metric
from ephemeron.training.task.task import Task

REFUSED = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_sharded_model",
    "lr_scheduler_step",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""Hooks of a LightningModule that functions do not call. A module that overrides one of them is refused."""


def task_of(module: str, data: str = "") -> LightningTask:
    """The task of a LightningModule that is named.

    Args:
        module: `module:Class`, or a function that returns a LightningModule.
        data: the same for a LightningDataModule; empty: the module's own loaders.

    Raises:
        JobError: one of them cannot be imported.
    """
    return LightningTask(resolve(module, ()), resolve(data, ()) if data else None)


class LightningTask(Task):
    """A LightningModule with its data.

    Args:
        module: a LightningModule, its class, or a function that returns one. A module's own weights are the initial ones.
        data: a LightningDataModule, its class, or a function that returns one; None: the module's own loaders.
    """

    def __init__(self, module: Any, data: Any = None) -> None:
        self._module, self._data = module, data
        self._name = getattr(module, "__name__", type(module).__name__)
        self._built: Any = None
        self._loaded: tuple[Any, Any] | None = None
        self._log = Log()
        self._evaluated = -1
        """Batches of the evaluation so far; -1: none is under way."""
        self._started = -1
        """Step at which the last epoch was started here."""

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module, "data": self._data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LightningTask.__init__(self, state["module"], state["data"])

    @property
    def settings(self) -> Mapping[str, object]:  # type: ignore[override]
        """Batch size and treatment of the last batch, from the loader; without validation, no samples are held out."""
        train, evaluation = self._loaders()
        data: dict[str, object] = {"last_batch": "drop"} if train.drop_last else {}
        if evaluation is None:
            data["test_fraction"] = 0.0
        return {"run": {"batch_size": train.batch_size}, **({"data": data} if data else {})}

    # -- model --------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        module: Any = self._new()
        self._built = module
        module.setup("fit")
        module.configure_model()
        self._check(module)
        return module  # type: ignore[no-any-return]

    def _new(self) -> Any:
        """A module of its own, attached to a stand-in of the trainer."""
        module: Any = self._module() if not isinstance(self._module, nn.Module) else copy.deepcopy(self._module)
        if not is_lightning(type(module), "LightningModule"):
            raise JobError(f"{self._name} is a {type(module).__name__}", remedy="name a LightningModule")
        module.trainer = TrainerStandIn(self, None if callable(self._data) else self._data)
        module.log, module.log_dict = self._log.log, self._log.log_dict
        module.prepare_data()
        return module

    def _check(self, module: Any) -> None:
        if not module.automatic_optimization:
            raise JobError(
                f"{self._name} optimises manually (automatic_optimization = False): manual_backward and several steps of "
                "optimizers() in one training_step are not supported",
                remedy="write an ephemeron.Task whose training_step has a parameter optimizer_index",
            )
        for hook in REFUSED:
            if _overrides(module, hook):
                raise JobError(
                    f"{self._name} overrides {hook}, which functions do not call",
                    remedy="use on_train_batch_end, or job keys such as clip_norm",
                )
        if not _overrides(module, "training_step"):
            raise JobError(f"{self._name} has no training_step", remedy="define training_step(self, batch, batch_idx)")
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise JobError(f"training_step of {self._name} takes dataloader_iter", remedy="take batch and batch_idx")

    def optimizers(self, model: nn.Module) -> Any:
        module: Any = model
        self.cast_inputs = next(module.parameters()).dtype == torch.float64
        found = module.configure_optimizers()
        if found is None:
            raise JobError(f"configure_optimizers of {self._name} returned None", remedy="return an optimiser")
        module.on_fit_start()
        module.on_train_start()
        self._log.taken()
        return found

    # -- steps --------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        module = self._own(model)
        trainer, self._evaluated = module.trainer, -1
        trainer.training = True
        number = self.global_step % trainer.num_training_batches
        with self._no_lists(module, "training_step"):
            if number == 0 and self._started != self.global_step:
                self._started = self.global_step
                module.on_train_epoch_start()
            batch = _moved(module, batch)
            if module.on_train_batch_start(batch, number) == -1:
                raise JobError("on_train_batch_start returned -1", remedy="end the run with early_stopping or epochs")
            output = _call(module.training_step, batch, number)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        logged = {n: _number(e.value) for n, e in self._log.taken().items() if n != "loss"}
        return {"loss": loss, **_weight_in(output), **{n: v for n, v in logged.items() if v is not None}}

    def on_step_end(self, model: nn.Module) -> None:
        module: Any = self._own(model)
        length = module.trainer.num_training_batches
        with self._at(self.global_step - 1):
            module.on_train_batch_end(None, None, self.global_step % length)
            if self.global_step % length == 0:
                module.on_train_epoch_end()
                for metric in _metrics(module).values():
                    metric.reset()
            if self.global_step == self.total_steps:
                module.on_train_end()
                module.on_fit_end()
        self._log.taken()

    @contextmanager
    def _at(self, step: int) -> Iterator[None]:
        """`trainer.global_step` and `current_epoch` are those of a step."""
        after, self.global_step = self.global_step, step
        try:
            yield
        finally:
            self.global_step = after

    def evaluation_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        module = self._own(model)
        with self._no_lists(module, "validation_step"), self._at(max(0, self.global_step - 1)):
            if self._evaluated < 0:
                self._evaluated, module.trainer.training = 0, False
                module.on_validation_start()
                module.on_validation_epoch_start()
            number, self._evaluated = self._evaluated, self._evaluated + 1
            before = {name: metric.update_count for name, metric in _metrics(module).items()}
            batch = _moved(module, batch)
            module.on_validation_batch_start(batch, number)
            output = _call(module.validation_step, batch, number)
            module.on_validation_batch_end(output, batch, number)
        logged = self._log.taken()
        report: dict[str, Any] = {name: _weighted(e.value, e.batch_size) for name, e in logged.items()}
        shown = {id(metric) for metric in report.values()}
        for name, metric in _metrics(module).items():
            if metric.update_count != before[name] and id(metric) not in shown:
                report[f"_{name}"] = metric
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if "loss" not in report:
            scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1
            report["loss"] = loss if scalar else report.get("val_loss")
        return report | _weight_in(output)

    def evaluation_end(self, metrics: dict[str, float]) -> Mapping[str, float]:
        module = self._built
        if module is None:
            return metrics
        module.trainer.callback_metrics = {n: torch.tensor(v) for n, v in metrics.items() if not n.startswith("_")}
        self._log.taken()
        with torch.no_grad():
            module.on_validation_epoch_end()
            module.on_validation_end()
        ended = {name: _number(e.value) for name, e in self._log.taken().items()}
        return {**metrics, **{name: float(value) for name, value in ended.items() if value is not None}}

    def _own(self, model: nn.Module) -> Any:
        if model is not self._built:
            raise JobError("compile = true with a LightningModule", remedy="leave compile out, and compile parts in configure_model")
        return self._built

    @contextmanager
    def _no_lists(self, module: Any, hook: str) -> Iterator[None]:
        """Refuses steps that collect values in lists: each function sees only its part of them."""
        before = {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}
        yield
        for name, length in before.items():
            if len(getattr(module, name)) > length:
                raise JobError(
                    f"{hook} of {self._name} collects values in self.{name}, of which each function has only its part",
                    remedy="log them with self.log, or update a metric of torchmetrics",
                )

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the module's `on_save_checkpoint` adds."""
        checkpoint: dict[str, Any] = {}
        self._built.on_save_checkpoint(checkpoint)
        return checkpoint

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Calls the module's `on_load_checkpoint`."""
        self._built.on_load_checkpoint(state)

    # -- data ---------------------------------------------------------------------------------------------

    def train_data(self) -> Any:
        return self._loaders()[0].dataset

    def evaluation_data(self) -> Any:
        evaluation = self._loaders()[1]
        return None if evaluation is None else _Evaluated(evaluation.dataset)

    def collate(self, samples: list[Any]) -> Any:
        """The collate function of the loader that the samples belong to."""
        train, evaluation = self._loaders()
        if isinstance(samples[0], _Sample):
            assert evaluation is not None
            return evaluation.collate_fn([sample.value for sample in samples])
        return train.collate_fn(samples)

    def _loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """Training and validation loader."""
        if self._loaded is None:
            with torch.random.fork_rng(devices=[]):  # a module that is built for its loaders draws no numbers of the caller
                source = self._source()
                train = _one(source.train_dataloader(), f"train_dataloader of {self._name}")
                module = self._module if isinstance(self._module, (type, nn.Module)) else self._new()
                validates = _overrides(module, "validation_step") and _overrides(source, "val_dataloader")
                found = source.val_dataloader() if validates else None
            assert train is not None
            self._loaded = train, _one(found, f"val_dataloader of {self._name}", required=False)
        return self._loaded

    def _source(self) -> Any:
        """The data module, or the module."""
        if self._data is None:
            source = self._new()
        else:
            source = self._data() if callable(self._data) else self._data
            if not is_lightning(type(source), "LightningDataModule"):
                raise JobError(f"the data is a {type(source).__name__}", remedy="name a LightningDataModule")
            source.trainer = TrainerStandIn(self, source)
            source.prepare_data()
        source.setup("fit")
        return source


def is_lightning(cls: type, name: str) -> bool:
    """Whether a class derives from Lightning's class of a name, without importing it."""
    return _base(cls, name) is not None


def _base(cls: type, name: str) -> type | None:
    packages = ("lightning", "pytorch_lightning")
    return next((c for c in cls.__mro__ if c.__name__ == name and c.__module__.split(".")[0] in packages), None)


def _overrides(thing: Any, hook: str) -> bool:
    cls = thing if isinstance(thing, type) else type(thing)
    base = _base(cls, "LightningModule") or _base(cls, "LightningDataModule")
    return getattr(cls, hook, None) is not getattr(base, hook, None)


def _one(loader: Any, where: str, *, required: bool = True) -> DataLoader[Any] | None:
    """The loader, of which dataset, batch size and collate function are used.

    Raises:
        JobError: it is no single DataLoader over a map-style dataset, or it has a sampler of its own.
    """
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not required and (loader is None or (isinstance(loader, (list, tuple)) and not loader)):
        return None
    if not isinstance(loader, DataLoader):
        raise JobError(f"{where} returned {type(loader).__name__}", remedy="return one torch.utils.data.DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise JobError(f"{where} reads an IterableDataset", remedy="use a map-style dataset")
    usual = isinstance(loader.sampler, SequentialSampler) or (isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement)
    if loader.batch_size is None or (required and not usual):
        own = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        raise JobError(
            f"{where} has a {type(own).__name__}, which functions do not use: they draw each sample once an epoch",
            remedy="leave sampler and batch_sampler out",
        )
    return loader


class _Sample:
    """A sample of the validation data."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Evaluated:
    """A dataset whose samples are known as those of the validation loader."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> _Sample:
        return _Sample(self._dataset[i])


def _moved(module: Any, batch: Any) -> Any:
    return module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)


def _call(step: Any, batch: Any, number: int) -> Any:
    """A step with the arguments that it takes."""
    return step(batch, number) if "batch_idx" in inspect.signature(step).parameters or _positional(step) > 1 else step(batch)


def _positional(step: Any) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(step).parameters.values())


def _metrics(module: Any) -> dict[str, Any]:
    """Metrics of torchmetrics among a module's submodules, by name; parts of metrics are not listed."""
    found: dict[str, Any] = {}
    for name, each in module.named_modules():
        if is_metric(each) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = each
    return found


def _number(value: Any) -> Any:
    """The value of a metric for the batch that it has been called with, or its value so far; numbers as they are."""
    if not is_metric(value):
        return value.detach() if isinstance(value, torch.Tensor) else value
    found = value._forward_cache if value._forward_cache is not None else value.compute()
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _weight_in(output: Any) -> dict[str, Any]:
    """The weight that a step returned beside its loss, if it did."""
    return {"weight": output["weight"]} if isinstance(output, Mapping) and "weight" in output else {}


def _weighted(value: Any, batch_size: int | None) -> Any:
    if batch_size is None or is_metric(value) or hasattr(value, "compute"):
        return value
    return (float(value) * batch_size, batch_size)
