"""Callbacks of `transformers.Trainer`: early stopping as a key of a job, others called on worker 0 with `args`, `state` and `control`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import transformers

from ephemeron.errors import JobError
from ephemeron.integrations.callbacks import MainCallbacks, overrides
from ephemeron.integrations.transformers_arguments import monitored
from ephemeron.training.task.task import Task

_hf: Any = transformers
_WITHOUT_EFFECT = ("DefaultFlowCallback", "NotebookProgressCallback", "PrinterCallback", "ProgressCallback")
_REFUSED = {
    "on_substep_end": "functions compute the parts of a batch in one step; use on_step_end",
    "on_pre_optimizer_step": "functions exchange gradients there; use on_step_end",
    "on_optimizer_step": "functions exchange gradients there; use on_step_end",
    "on_save": "functions save states for resuming, by checkpoint_every; use on_evaluate, or save_model after the run",
    "on_push_begin": "functions push nothing",
}
_FLAGS = {
    "should_training_stop": "give EarlyStoppingCallback, on which all workers decide alike",
    "should_epoch_stop": "say num_train_epochs",
    "should_save": "say load_best_model_at_end, or checkpoint_every for resuming",
    "should_evaluate": "say eval_strategy and eval_steps",
}
"""Flags of a `TrainerControl` that cannot be honoured on one worker, and what to do instead."""


def made(callbacks: Iterable[Any]) -> list[Any]:
    """Callbacks, of which classes may be given.

    Raises:
        JobError: one is no `TrainerCallback`, is of transformers and without a counterpart, or has a hook that functions do not call.
    """
    found = [each() if isinstance(each, type) else each for each in callbacks]
    for each in found:
        if not isinstance(each, _hf.TrainerCallback):
            raise JobError(f"callback {each!r} is no transformers.TrainerCallback", remedy="give objects or classes of TrainerCallback")
        name, is_own = type(each).__name__, type(each).__module__.split(".")[0] != "transformers"
        if not is_own and name != "EarlyStoppingCallback" and name not in _WITHOUT_EFFECT:
            raise JobError(
                f"functions have no {name}", remedy="name a logger of the run, such as loggers=['tensorboard']; see docs/loggers.md"
            )
        if is_own and isinstance(each, _hf.EarlyStoppingCallback):
            raise JobError(f"callback {name} changes EarlyStoppingCallback, which is the job's early_stopping", remedy="give that itself")
        hook = next((hook for hook in _REFUSED if is_own and overrides(each, hook, _hf.TrainerCallback)), None)
        if hook is not None:
            raise JobError(f"callback {name} has {hook}, which functions do not call", remedy=_REFUSED[hook])
    return found


def early_stopping(callbacks: Iterable[Any], args: Mapping[str, Any], *, evaluates: bool) -> dict[str, object]:
    """The key `early_stopping` of a job, from an `EarlyStoppingCallback`; empty: there is none.

    Raises:
        JobError: there are no evaluations, or no metric is named.
    """
    given = next((each for each in callbacks if isinstance(each, _hf.EarlyStoppingCallback)), None)
    if given is None:
        return {}
    if not evaluates or args["metric_for_best_model"] is None:
        missing = "metric_for_best_model" if evaluates else "eval_dataset and an eval_strategy"
        raise JobError(f"EarlyStoppingCallback needs {missing}", remedy="give it")
    return {
        "early_stopping": {
            "monitor": monitored(args),
            "mode": "max" if args["greater_is_better"] else "min",
            "patience": int(given.early_stopping_patience),
            "min_delta": float(given.early_stopping_threshold or 0.0),
        }
    }


class TrainerCallbacks:
    """Callbacks on worker 0 of a task, with their `TrainerState`.

    Args:
        task: whose steps are counted.
        callbacks: from `made`.
        args: fields of the arguments.
        processing_class: given to the callbacks.
    """

    def __init__(self, task: Task, callbacks: Iterable[Any], args: Mapping[str, Any], processing_class: Any) -> None:
        own = [each for each in callbacks if type(each).__module__.split(".")[0] != "transformers"]
        self._main = MainCallbacks(own, remedy="change it in model_init, or by TrainingArguments")
        self._task, self._args, self._processing_class = task, args, processing_class
        self.state = _hf.TrainerState()
        self._control = _hf.TrainerControl()
        self._losses: list[float] = []
        """Of steps since the last log."""
        self._begun = self._evaluated = -1
        self._scheduler: Any = None
        self._rate = 0.0
        """Learning rate of the last step."""

    @property
    def _calls(self) -> bool:
        return bool(self._main) and self._task.is_main

    def _tell(self, hook: str, **named: Any) -> None:
        if not self._calls:
            return
        args = SimpleNamespace(**{**self._args, "output_dir": str(self._task.output_dir)})
        optimizer = next(iter(self._main.optimizers), None)
        returned = self._main.call(
            hook,
            args,
            self.state,
            self._control,
            model=self._main.model,
            processing_class=self._processing_class,
            optimizer=optimizer,
            lr_scheduler=self._scheduler,
            train_dataloader=None,
            eval_dataloader=None,
            **named,
        )
        for control in [self._control, *filter(None, returned)]:
            for flag, instead in _FLAGS.items():
                if getattr(control, flag):
                    raise JobError(f"a callback sets control.{flag} in {hook}, which would hold for one worker", remedy=instead)
            self._control.should_log |= control.should_log

    @property
    def _epoch_length(self) -> int:
        return max(1, self._task.total_steps // max(1, self._task.total_epochs))

    def begin(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Before the first step."""
        self._main.model, self._main.optimizers, self._scheduler = model, [optimizer], scheduler
        self.state.max_steps, self.state.num_train_epochs = self._task.total_steps, self._task.total_epochs
        self._tell("on_init_end")
        self._tell("on_train_begin")

    def begin_step(self) -> None:
        """Before the forward pass of a part of a batch."""
        step = self._task.global_step
        if step == self._begun:
            return
        self._begun = step
        if step % self._epoch_length == 0:
            self._tell("on_epoch_begin")
        self._tell("on_step_begin")

    def computed(self, loss: Any) -> None:
        """After the forward pass of a part of a batch."""
        if self._calls:
            self._losses.append(float(loss.detach()))
            self._rate = float(self._main.optimizers[0].param_groups[0]["lr"])

    def end_step(self) -> None:
        """After a step of the optimiser."""
        step = self._task.global_step
        self.state.global_step, self.state.epoch = step, step / self._epoch_length
        self._tell("on_step_end")
        ends = step % self._epoch_length == 0
        if self._logs_after(step, ends):
            self._log()
        if ends:
            self._tell("on_epoch_end")
            if self._control.should_log:
                self._log()

    def _logs_after(self, step: int, ends_epoch: bool) -> bool:
        strategy = str(getattr(self._args["logging_strategy"], "value", self._args["logging_strategy"]))
        every = logging_steps(self._args, self._task.total_steps)
        first = step == 1 and bool(self._args["logging_first_step"])
        due = ends_epoch if strategy == "epoch" else strategy == "steps" and step % every == 0
        return bool(self._control.should_log) or first or due

    def _log(self) -> None:
        self._control.should_log = False
        if self._calls and self._losses:
            mean = sum(self._losses) / len(self._losses)
            self._losses = []
            self._record({"loss": mean, "learning_rate": self._rate})

    def _record(self, logs: dict[str, float]) -> None:
        logs = {**logs, "epoch": float(self.state.epoch or 0.0)}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def evaluated_batch(self) -> None:
        """After a batch of the evaluation data."""
        self._tell("on_prediction_step")

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """After an evaluation, with the metrics of all workers. The end of a run computes those of the last one again."""
        if not self._calls or self._evaluated == self.state.global_step:
            return
        self._evaluated = self.state.global_step
        named = {f"eval_{name}": value for name, value in metrics.items()}
        best = named.get(f"eval_{monitored(self._args)}")
        sign = 1 if self._args["greater_is_better"] else -1
        if best is not None and not math.isnan(best) and (self.state.best_metric is None or sign * (best - self.state.best_metric) > 0):
            self.state.best_metric, self.state.best_global_step = best, self.state.global_step
        self._record(named)
        self._tell("on_evaluate", metrics=named)

    def end(self) -> None:
        """When the run has ended."""
        self._tell("on_train_end")

    def state_dict(self) -> dict[str, Any]:
        """What a replacement goes on with."""
        known = self.state
        return {
            "callbacks": self._main.state(),
            "losses": list(self._losses),
            "state": {name: getattr(known, name) for name in ("global_step", "epoch", "log_history", "best_metric", "best_global_step")},
            "evaluated": self._evaluated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._main.load(state["callbacks"])
        self._losses, self._evaluated = list(state["losses"]), state["evaluated"]
        for name, value in state["state"].items():
            setattr(self.state, name, value)


def logging_steps(args: Mapping[str, Any], steps: int) -> int:
    """Steps between two logs; below 1, `logging_steps` is a share of the run."""
    every = args["logging_steps"]
    return max(1, int(every) if every >= 1 else math.ceil(steps * every))
