"""A LightningModule as a task: `ephemeron train lightning:module:Class`, or `ephemeron.train(Class, workers=4)`.

The module runs unmodified: its hooks are called where a function computes, its loaders give dataset, batch size and collate
function, and what it logs is reported. Samples are shuffled by the job's seed. Hooks that change what happens between a
backward pass and an optimiser's step are refused by name, since functions exchange gradients there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.integrations.callbacks import MainCallbacks
from ephemeron.integrations.lightning_callbacks import Callbacks, divided, learning_rates, merged
from ephemeron.integrations.lightning_trainer import Log, TrainerStandIn, own_name
from ephemeron.runs.metrics import counted
from ephemeron.training.task.evaluation import is_metric
from ephemeron.training.task.task import Task

REFUSED = (
    "backward",
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
    """A LightningModule with its data and callbacks.

    Args:
        module: a LightningModule, its class, or a function that returns one. A module's own weights are the initial ones.
        data: a LightningDataModule, its class, or a function that returns one; None: the module's own loaders.
        callbacks: of Lightning, as those of its Trainer: keys of the job, or called on worker 0.
    """

    def __init__(self, module: Any, data: Any = None, callbacks: Any = ()) -> None:
        self._module, self._data = module, data
        self._callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        self._divided: Callbacks | None = None
        self._main = MainCallbacks()
        self._rates: dict[int, str] = {}
        self._name = getattr(module, "__name__", type(module).__name__)
        self._built: Any = None
        self._loaded: tuple[Any, Sequence[Any]] | None = None
        self._log = Log()
        self._evaluated: dict[int, int] | None = None
        """By validation loader, batches of the evaluation so far; None: none is under way."""
        self._last: tuple[Any, Any] = (None, None)
        """Output and batch of the last training step."""
        self._shown_step: int | None = None
        """Step of which hooks see the epoch; None: the present one."""
        self._epoch_ends = False
        """Whether callbacks are to be told that an epoch has ended: they are after its evaluation."""
        self._evaluated_at = -1
        self._started = -1
        """Step at which the last epoch was started here."""

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module, "data": self._data, "callbacks": self._callbacks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LightningTask.__init__(self, state["module"], state["data"], state["callbacks"])

    @property
    def settings(self) -> Mapping[str, object]:  # type: ignore[override]
        """Batch size and treatment of the last batch, from the loader; without validation, no samples are held out. Keys of callbacks."""
        train, evaluation = self._loaders()
        data: dict[str, object] = {"last_batch": "drop"} if train.drop_last else {}
        if not evaluation:
            data["test_fraction"] = 0.0
        return {"run": {"batch_size": train.batch_size}, **({"data": data} if data else {}), **self._asked().settings}

    def _asked(self, module: Any = None) -> Callbacks:
        """What callbacks ask for, those of the module's `configure_callbacks` among them."""
        if self._divided is None:
            kind = self._module if isinstance(self._module, (type, nn.Module)) else None
            configured: Any = ()
            if kind is None or _overrides(kind, "configure_callbacks"):
                with torch.random.fork_rng(devices=[]):
                    configured = (module or self._new()).configure_callbacks()
            self._divided = divided(merged(self._callbacks, configured if isinstance(configured, (list, tuple)) else [configured]))
        return self._divided

    @property
    def program_name(self) -> str:
        """Name of the module's class."""
        return self._name

    # -- model --------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        module: Any = self._new()
        self._built = module
        module.setup("fit")
        module.configure_model()
        self._check(module)
        self._main = MainCallbacks(
            self._asked(module).own, remedy="change it in a hook of the LightningModule, which every worker calls, or by keys of the job"
        )
        self._main.model = module
        module.trainer.callbacks = list(self._main.callbacks)
        self._tell("setup", "fit")
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

    def _tell(self, hook: str, *args: Any) -> None:
        """Calls a hook of the callbacks, on worker 0."""
        if self.is_main and self._main:
            self._main.call(hook, self._built.trainer, self._built, *args)

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
        module.trainer.optimizers = self._main.optimizers = list(optimizers_in(found))
        self._rates = {id(s["scheduler"].optimizer): s["name"] for s in schedulers_in(found) if s.get("name")}
        self._tell("on_fit_start")
        module.on_fit_start()
        self._tell("on_train_start")
        module.on_train_start()
        self._log.taken()
        return found

    # -- steps --------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        module = self._own(model)
        trainer, self._evaluated = module.trainer, None
        trainer.training, self._shown_step = True, None
        self._end_epoch()
        number = self.global_step % trainer.num_training_batches
        with self._no_lists(module, "training_step"):
            if number == 0 and self._started != self.global_step:
                self._started = self.global_step
                self._tell("on_train_epoch_start")
                module.on_train_epoch_start()
            batch = _moved(module, batch)
            self._tell("on_train_batch_start", batch, number)
            if module.on_train_batch_start(batch, number) == -1:
                raise JobError("on_train_batch_start returned -1", remedy="end the run with early_stopping or epochs")
            output = _call(module.training_step, batch, number)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        named = {n: _number(e.value) for n, e in self._log.taken().items() if n != "loss"}
        logged = {n: v for n, v in named.items() if v is not None}
        if self.is_main and self._main:
            self._last = tree_map(_detached, output if isinstance(output, Mapping) else {"loss": output}), batch
            trainer.callback_metrics |= {n: torch.as_tensor(v) for n, v in logged.items()}
        monitor = self._asked().rates
        if monitor is not None and (monitor.logging_interval != "epoch" or number == 0):
            logged |= learning_rates(monitor, trainer.optimizers, self._rates)
        return {"loss": loss, **_weight_in(output), **logged}

    def on_step_end(self, model: nn.Module) -> None:
        module: Any = self._own(model)
        length = module.trainer.num_training_batches
        with self._at(self.global_step - 1):
            number = (self.global_step - 1) % length
            self._tell("on_train_batch_end", *self._last, number)
            module.on_train_batch_end(None, None, number)
            if self.global_step % length == 0:
                self._epoch_ends = True
                module.on_train_epoch_end()
                for metric in _metrics(module).values():
                    metric.reset()
            if self.global_step == self.total_steps:
                module.on_train_end()
                module.on_fit_end()
        self._log.taken()

    @contextmanager
    def _at(self, step: int) -> Iterator[None]:
        """`trainer.current_epoch` is that of a step."""
        self._shown_step = step
        try:
            yield
        finally:
            self._shown_step = None

    def _end_epoch(self) -> None:
        """Tells callbacks that an epoch has ended, if they were not told."""
        if self._epoch_ends:
            self._epoch_ends = False
            with self._at(self.global_step - 1):
                self._tell("on_train_epoch_end")

    def on_end(self, model: nn.Module) -> None:
        self._own(model)
        self._end_epoch()
        for hook in ("on_train_end", "on_fit_end"):
            self._tell(hook)
        self._tell("teardown", "fit")

    def evaluation_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        if len(self._loaders()[1]) == 1:
            return self._validation_step(model, batch, None)
        if not isinstance(batch, _ByLoader):  # a training batch, on which the check before a run tries every loader's step
            batch = dict.fromkeys(range(len(self._loaders()[1])), (1, batch))
        parts = [(self._validation_step(model, each, loader), n) for loader, (n, each) in batch.items()]
        found: dict[str, Any] = {}
        losses = []
        for part, n in parts:
            weight = part.pop("weight", n)
            losses.append(_summed(part.pop("loss"), weight))
            found |= {name: _summed(value, weight) for name, value in part.items()}
        found["loss"] = None if None in losses else tuple(map(sum, zip(*losses, strict=True)))
        return found

    def _validation_step(self, model: nn.Module, batch: Any, loader: int | None) -> dict[str, Any]:
        """The report of a batch of one validation loader; None: there is one loader."""
        module, several = self._own(model), () if loader is None else (loader,)
        with self._no_lists(module, "validation_step"), self._at(max(0, self.global_step - 1)):
            if self._evaluated is None:
                self._evaluated, module.trainer.training = {}, False
                for hook in ("on_validation_start", "on_validation_epoch_start"):
                    self._tell(hook)
                    getattr(module, hook)()
            number = self._evaluated.get(loader or 0, 0)
            self._evaluated[loader or 0] = number + 1
            before = {name: metric.update_count for name, metric in _metrics(module).items()}
            batch = _moved(module, batch, loader or 0)
            self._tell("on_validation_batch_start", batch, number, *several)
            module.on_validation_batch_start(batch, number, *several)
            self._log.loader = loader
            output = _call(module.validation_step, batch, number, *several)
            self._log.loader = None
            self._tell("on_validation_batch_end", output, batch, number, *several)
            module.on_validation_batch_end(output, batch, number, *several)
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
        metrics = {own_name(n): v for n, v in metrics.items()}
        module.trainer.callback_metrics |= {n: torch.tensor(v) for n, v in metrics.items() if not n.startswith("_")}
        self._log.taken()
        again, self._evaluated_at = self._evaluated_at == self.global_step, self.global_step
        with torch.no_grad(), self._at(max(0, self.global_step - 1)):
            for hook in ("on_validation_epoch_end", "on_validation_end"):
                if not again:  # the end of a run computes the metrics of its last evaluation once more
                    self._tell(hook)
                getattr(module, hook)()
        ended = self._ended()
        module.trainer.callback_metrics |= {n: torch.tensor(v) for n, v in ended.items()}
        self._end_epoch()
        return {**metrics, **ended, **self._ended()}

    def _ended(self) -> dict[str, float]:
        """Numbers that hooks at the end of an evaluation or of an epoch have logged."""
        found = {name: _number(e.value) for name, e in self._log.taken().items()}
        return {name: float(value) for name, value in found.items() if value is not None}

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
        """What the module's and the callbacks' `on_save_checkpoint` add, and the state of the callbacks."""
        checkpoint: dict[str, Any] = {}
        self._tell("on_save_checkpoint", checkpoint)
        self._built.on_save_checkpoint(checkpoint)
        return {"checkpoint": checkpoint, "callbacks": self._main.state(), "epoch_ends": self._epoch_ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Calls the module's and the callbacks' `on_load_checkpoint`."""
        self._main.load(state["callbacks"])
        self._epoch_ends = state["epoch_ends"]
        self._tell("on_load_checkpoint", state["checkpoint"])
        self._built.on_load_checkpoint(state["checkpoint"])

    # -- data ---------------------------------------------------------------------------------------------

    def train_data(self) -> Any:
        return self._loaders()[0].dataset

    def evaluation_data(self) -> Any:
        evaluation = self._loaders()[1]
        return _Evaluated([loader.dataset for loader in evaluation]) if evaluation else None

    def collate(self, samples: list[Any]) -> Any:
        """The collate function of the loader that the samples belong to."""
        train, evaluation = self._loaders()
        if isinstance(samples[0], _Sample):
            if len(evaluation) == 1:
                return evaluation[0].collate_fn([sample.value for sample in samples])
            of = {number: [s.value for s in samples if s.loader == number] for number in range(len(evaluation))}
            return _ByLoader({number: (len(own), evaluation[number].collate_fn(own)) for number, own in of.items() if own})
        return train.collate_fn(samples)

    def _loaders(self) -> tuple[DataLoader[Any], Sequence[DataLoader[Any]]]:
        """Training loader, and validation loaders."""
        if self._loaded is None:
            with torch.random.fork_rng(devices=[]):  # a module that is built for its loaders draws no numbers of the caller
                source = self._source()
                train = _one(source.train_dataloader(), where := f"train_dataloader of {self._name}")
                _refuse_sampler(train, where)
                module = self._module if isinstance(self._module, (type, nn.Module)) else self._new()
                validates = _overrides(module, "validation_step") and _overrides(source, "val_dataloader")
                found = source.val_dataloader() if validates else None
            where = f"val_dataloader of {self._name}"
            self._loaded = train, [_one(each, where) for each in _several(found, where)]
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


def _several(loaders: Any, where: str) -> list[Any]:
    """Loaders of a `val_dataloader`, which come one after the other: none, one, a list, a mapping or a `CombinedLoader`."""
    if any(cls.__name__ == "CombinedLoader" for cls in type(loaders).__mro__):
        if loaders._mode != "sequential":
            raise JobError(f"{where} combines loaders by mode {loaders._mode!r}", remedy='use mode "sequential", or a list of loaders')
        loaders = loaders.flattened
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [each for inner in loaders for each in _several(inner, where)]
    return [] if loaders is None else [loaders]


def _one(loader: Any, where: str) -> DataLoader[Any]:
    """The loader, of which dataset, batch size and collate function are used.

    Raises:
        JobError: it is no single DataLoader over a map-style dataset, or it draws no batches of samples.
    """
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise JobError(f"{where} returned {type(loader).__name__}", remedy="return one torch.utils.data.DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise JobError(f"{where} reads an IterableDataset", remedy="use a map-style dataset")
    if loader.batch_size is None:
        _refuse_sampler(loader, where)
    return loader


def _refuse_sampler(loader: DataLoader[Any], where: str) -> None:
    usual = isinstance(loader.sampler, SequentialSampler) or (isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement)
    if loader.batch_size is None or not usual:
        own = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        raise JobError(
            f"{where} has a {type(own).__name__}, which functions do not use: they draw each sample once an epoch",
            remedy="leave sampler and batch_sampler out",
        )


class _Sample:
    """A sample of the validation data."""

    __slots__ = ("loader", "value")

    def __init__(self, value: Any, loader: int) -> None:
        self.value, self.loader = value, loader


class _ByLoader(dict[int, tuple[int, Any]]):
    """By validation loader, the number of its samples in a batch, and what its collate function made of them."""


class _Evaluated:
    """The datasets of the validation loaders as one, whose samples know their loader.

    Samples of several loaders are mixed evenly, so that every worker's slice has some of each.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = datasets
        lengths = [len(each) for each in datasets]
        number = np.repeat(np.arange(len(datasets)), lengths)
        place = np.concatenate([np.arange(n) for n in lengths])
        order = np.argsort(place / np.repeat(lengths, lengths), kind="stable")
        self._number, self._place = number[order], place[order]

    def __len__(self) -> int:
        return len(self._number)

    def __getitem__(self, i: int) -> _Sample:
        loader = int(self._number[i])
        return _Sample(self._datasets[loader][int(self._place[i])], loader)


def _moved(module: Any, batch: Any, loader: int = 0) -> Any:
    return module.on_after_batch_transfer(module.on_before_batch_transfer(batch, loader), loader)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _summed(value: Any, weight: Any) -> Any:
    """A mean as a total and the number of its terms; sums, metrics and what is absent as they are."""
    if value is None or isinstance(value, tuple) or is_metric(value) or hasattr(value, "compute"):
        return value
    return counted(float(value) * float(weight), float(weight))


def optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    """Optimisers in what `configure_optimizers` has returned, in their order."""
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from optimizers_in(found.get("optimizer"))
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from optimizers_in(each)


def schedulers_in(found: Any) -> Iterator[Mapping[str, Any]]:
    """Mappings of schedulers in it."""
    if isinstance(found, Mapping):
        if "scheduler" in found:
            yield found
        yield from schedulers_in(found.get("lr_scheduler"))
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from schedulers_in(each)


def _call(step: Any, batch: Any, number: int, *loader: int) -> Any:
    """A step with the arguments that it takes."""
    if loader:
        return step(batch, number, *loader)
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
