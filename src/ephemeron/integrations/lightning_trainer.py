"""What a LightningModule finds in place of `lightning.Trainer`: where training is, and a place to log to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ephemeron.errors import JobError
from ephemeron.runs.metrics import LOADER
from ephemeron.training.task.evaluation import is_metric
from ephemeron.training.task.task import Task


class TrainerStandIn:
    """Attributes of `lightning.Trainer` that modules commonly read; any other is refused by its name.

    A program sees itself as one process over the global batch, however many functions there are.

    Args:
        task: whose steps are counted.
        datamodule: of the program.
    """

    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0
    is_global_zero = True
    logger = progress_bar_callback = None
    sanity_checking = testing = predicting = fast_dev_run = barebones = False
    max_steps = -1

    def __init__(self, task: Task, datamodule: Any) -> None:
        self._task, self.datamodule = task, datamodule
        self.training = True
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        """Metrics of the whole evaluation data, in `on_validation_epoch_end`."""

    @property
    def should_stop(self) -> bool:
        return False

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            raise JobError(
                "trainer.should_stop = True would end one worker", remedy="say early_stopping, on which all workers decide alike"
            )

    @property
    def default_root_dir(self) -> str:
        return str(self._task.output_dir)

    log_dir = default_root_dir

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    progress_bar_metrics = logged_metrics

    @property
    def validating(self) -> bool:
        return not self.training

    @property
    def evaluating(self) -> bool:
        return not self.training

    @property
    def max_epochs(self) -> int:
        return self._task.total_epochs

    @property
    def estimated_stepping_batches(self) -> int:
        return self._task.total_steps

    @property
    def num_training_batches(self) -> int:
        return max(1, self._task.total_steps // max(1, self._task.total_epochs))

    @property
    def global_step(self) -> int:
        return self._task.global_step

    @property
    def current_epoch(self) -> int:
        shown = getattr(self._task, "_shown_step", None)
        return (self._task.global_step if shown is None else shown) // self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = sorted({n for cls in type(self).__mro__ for n in vars(cls)} | set(self.__dict__))
        raise JobError(
            f"the module or a callback reads trainer.{name}, which functions do not have",
            remedy=f"they have {', '.join(n for n in known if not n.startswith('_'))}",
        )


class Log:
    """Numbers and metrics that a module logs in one step."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.loader: int | None = None
        """Number of the validation loader; None: there is one."""

    def taken(self) -> dict[str, Any]:
        """What has been logged since the last call."""
        found, self.entries = self.entries, {}
        return found

    def log(
        self, name: str, value: Any, *_: Any, reduce_fx: str | Callable[[Any], Any] = "mean", batch_size: int | None = None, **more: Any
    ) -> None:
        """`LightningModule.log`.

        Raises:
            JobError: `reduce_fx` is no mean; a mapping is logged that is no collection of metrics.
        """
        if reduce_fx not in ("mean", "avg") and getattr(reduce_fx, "__name__", "") != "mean" and not is_metric(value):
            raise JobError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): functions merge means only",
                remedy="log a metric such as torchmetrics.MaxMetric or torchmetrics.SumMetric",
            )
        if isinstance(value, Mapping) and not hasattr(value, "compute"):
            raise JobError(f"self.log({name!r}) of a mapping", remedy="use self.log_dict")
        if self.loader is not None:
            name = f"{name}{LOADER}{self.loader}{'' if more.get('add_dataloader_idx', True) else OWN}"
        self.entries["logged_weight" if name == "weight" else name] = _Weighted(value, batch_size)

    def log_dict(self, values: Mapping[str, Any], *_: Any, **options: Any) -> None:
        """`LightningModule.log_dict`."""
        items = values.items(keep_base=False, copy_state=False) if hasattr(values, "compute") else values.items()  # type: ignore[call-arg]
        for name, value in items:
            self.log(name, value, **options)


OWN = "/own"
"""End of the name of a metric of one loader that a module logs without the loader's number."""


def own_name(name: str) -> str:
    """The name under which a module has logged a metric of one of several loaders."""
    return name.partition(LOADER)[0] if LOADER in name and name.endswith(OWN) else name


class _Weighted:
    __slots__ = ("batch_size", "value")

    def __init__(self, value: Any, batch_size: int | None) -> None:
        self.value, self.batch_size = value, batch_size
