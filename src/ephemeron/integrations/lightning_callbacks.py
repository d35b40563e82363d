"""Callbacks of Lightning as keys of a job, or on worker 0; those that functions cannot honour are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import JobError
from ephemeron.integrations.callbacks import overrides

PACKAGES = ("lightning", "pytorch_lightning")
_WITHOUT_EFFECT = ("ProgressBar", "ModelSummary")
_INSTEAD = {
    "BaseFinetuning": "set requires_grad in configure_model, before the run",
    "BasePredictionWriter": "use ephemeron predict RUN --out FILE",
    "BatchSizeFinder": "ephemeron plan chooses batch sizes",
    "DeviceStatsMonitor": "the report has memory and time of each function",
    "GradientAccumulationScheduler": "say accumulate, which holds for the whole run",
    "LearningRateFinder": "search for it with ephemeron tune",
    "ModelPruning": "prune the trained model, result.model()",
    "OnExceptionCheckpoint": "say checkpoint_every; a run that fails can be resumed",
    "SpikeDetection": "say on_non_finite, and follow the loss in the report",
    "StochasticWeightAveraging": "say ema_decay",
    "ThroughputMonitor": "the report has the time of each iteration",
    "Timer": "say time_limit_s in [limits]",
    "WeightAveraging": "say ema_decay",
}
"""By class of Lightning, what takes its place."""
_REFUSED = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_exception")


@dataclass(slots=True)
class Callbacks:
    """What the callbacks of a program ask for."""

    settings: dict[str, object] = field(default_factory=dict)
    """Keys of a job."""
    rates: Any = None
    """The `LearningRateMonitor`, if there is one."""
    own: list[Any] = field(default_factory=list)
    """Those that worker 0 calls."""


def divided(callbacks: Sequence[Any]) -> Callbacks:
    """Callbacks by what is done with them.

    Raises:
        JobError: one of them, or an option or a hook of it, cannot be honoured.
    """
    found = Callbacks()
    for each in callbacks:
        known = next((cls for cls in type(each).__mro__ if cls.__module__.split(".")[0] in PACKAGES), None)
        if known is None or not any(cls.__name__ == "Callback" for cls in type(each).__mro__):
            raise JobError(f"callback {each!r} is no lightning.Callback", remedy="give objects of lightning.Callback")
        kinds = [cls.__name__ for cls in type(each).__mro__ if cls.__module__.split(".")[0] in PACKAGES]
        name, derived = kinds[0], type(each) is not known
        key = {"EarlyStopping": "early_stopping", "ModelCheckpoint": "keep_best", "LearningRateMonitor": "learning-rate metrics"}.get(name)
        if key is not None and derived:
            raise JobError(
                f"callback {type(each).__name__} changes {name}, which is the job's {key}", remedy=f"give {name} itself, or a Callback"
            )
        if name == "EarlyStopping":
            _put(found.settings, key, _early_stopping(each), name)
        elif name == "ModelCheckpoint":
            if (kept := _keep_best(each)) is not None:
                _put(found.settings, key, kept, name)
        elif name == "LearningRateMonitor":
            found.rates = each
        elif instead := next((_INSTEAD[kind] for kind in kinds if kind in _INSTEAD), None):
            raise JobError(f"callback {type(each).__name__}: functions have no {name}", remedy=instead)
        elif not any(kind in _WITHOUT_EFFECT for kind in kinds):
            base = next(cls for cls in type(each).__mro__ if cls.__name__ == "Callback")
            hook = next((hook for hook in _REFUSED if overrides(each, hook, base)), None)
            if hook is not None:
                raise JobError(
                    f"callback {type(each).__name__} has {hook}, which functions do not call: they exchange gradients there",
                    remedy="use on_train_batch_end, or job keys such as clip_norm",
                )
            found.own.append(each)
    return found


def _put(settings: dict[str, object], key: str | None, value: object, name: str) -> None:
    assert key is not None
    if key in settings:
        raise JobError(f"two callbacks {name}, and a job has one {key}", remedy="leave one of them out")
    settings[key] = value


def _refuse_options(name: str, given: Mapping[str, object], instead: Mapping[str, str]) -> None:
    for option, remedy in instead.items():
        if given.get(option) not in (None, False):
            raise JobError(f"{name}({option}={given[option]!r}) is not for functions", remedy=remedy)


def _early_stopping(given: Any) -> dict[str, object]:
    _refuse_options(
        "EarlyStopping",
        {"divergence_threshold": given.divergence_threshold, "check_on_train_epoch_end": given._check_on_train_epoch_end},
        {
            "divergence_threshold": 'say on_non_finite = "stop", or report a metric to stop by',
            "check_on_train_epoch_end": "monitor a metric of validation_step",
        },
    )
    threshold = {} if given.stopping_threshold is None else {"threshold": float(given.stopping_threshold)}
    return {
        "monitor": given.monitor,
        "mode": given.mode,
        "patience": int(given.patience),
        "min_delta": abs(float(given.min_delta)),
        **threshold,
    }


def _keep_best(given: Any) -> dict[str, object] | None:
    """None: it keeps the last weights, which every run has at its end."""
    epochs = given._every_n_epochs
    _refuse_options(
        "ModelCheckpoint",
        {
            "every_n_train_steps": given._every_n_train_steps or None,
            "train_time_interval": given._train_time_interval,
            "every_n_epochs": epochs if epochs > 1 else None,
            "save_top_k": given.save_top_k if given.save_top_k < 0 else None,
        },
        {
            "every_n_train_steps": f'say evaluate_every = "{given._every_n_train_steps} steps", after which keep_best chooses; state for '
            "resuming is saved by checkpoint_every",
            "train_time_interval": "say checkpoint_every, in iterations",
            "every_n_epochs": f'say evaluate_every = "{epochs} epochs", after which keep_best chooses',
            "save_top_k": "say keep_last = N with the number of evaluations whose weights are kept",
        },
    )
    if given.monitor is None or not given.save_top_k:
        return None
    return {"monitor": given.monitor, "mode": given.mode, "count": int(given.save_top_k)}


def learning_rates(monitor: Any, optimizers: Sequence[Any], names: Mapping[int, str]) -> Iterator[tuple[str, float]]:
    """Learning rates by the names of Lightning's `LearningRateMonitor`.

    Args:
        monitor: with its options.
        optimizers: of the program.
        names: by identity of an optimiser, the name of its scheduler, where it has one.
    """
    kinds: dict[str, int] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        kinds[kind] = kinds.get(kind, 0) + 1
        name = names.get(id(optimizer)) or f"lr-{kind}" + (f"-{kinds[kind] - 1}" if kinds[kind] > 1 else "")
        several = len(optimizer.param_groups) > 1
        for i, group in enumerate(optimizer.param_groups, start=1):
            full = f"{name}/pg{i}" if several else name
            yield full, float(group["lr"])
            if monitor.log_momentum:
                yield f"{full}-momentum", float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
            if monitor.log_weight_decay:
                yield f"{full}-weight_decay", float(group.get("weight_decay", 0.0))


def merged(given: Iterable[Any], configured: Iterable[Any]) -> list[Any]:
    """Callbacks of a caller and those of a module's `configure_callbacks`, which take the place of others of their class."""
    more = list(configured)
    return [each for each in given if type(each) not in {type(other) for other in more}] + more
