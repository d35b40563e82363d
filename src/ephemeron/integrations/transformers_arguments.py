"""Fields of `transformers.TrainingArguments` as keys of a job; those that functions cannot honour are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ephemeron.errors import JobError

HONOURED = frozenset(
    {
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "bf16",
        "dataloader_drop_last",
        "eval_steps",
        "eval_strategy",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "greater_is_better",
        "label_names",
        "learning_rate",
        "load_best_model_at_end",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        "max_grad_norm",
        "metric_for_best_model",
        "num_train_epochs",
        "optim",
        "optim_args",
        "per_device_train_batch_size",
        "remove_unused_columns",
        "seed",
        "torch_compile",
        "warmup_ratio",
        "warmup_steps",
        "weight_decay",
    }
)
"""Fields that functions honour."""
WITHOUT_EFFECT = frozenset(
    {
        "average_tokens_across_devices",
        "bf16_full_eval",
        "disable_tqdm",
        "do_eval",
        "do_predict",
        "do_train",
        "eval_accumulation_steps",
        "full_determinism",
        "include_num_input_tokens_seen",
        "local_rank",
        "output_dir",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "project",
        "report_to",
        "run_name",
        "skip_memory_metrics",
        "use_cache",
        "use_cpu",
    }
)
"""Fields about where one process computes and reports, which functions do in their own ways."""
_PREFIXES = ("dataloader_", "ddp_", "hub_", "log_", "logging_", "save_", "trackio_")


def refuse_unhonoured(given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Refuses fields that differ from their defaults and that functions do not honour.

    Args:
        given, usual: fields of the user's arguments, and of arguments that name nothing.

    Raises:
        JobError: names all such fields.
    """
    other = [
        name
        for name, value in given.items()
        if name not in HONOURED | WITHOUT_EFFECT and not name.startswith(_PREFIXES) and value != usual.get(name)
    ]
    if other:
        raise JobError(
            f"TrainingArguments: functions do not honour {', '.join(f'{name} = {given[name]!r}' for name in other)}",
            remedy="leave them out",
        )


def settings_of(args: Mapping[str, Any], *, evaluates: bool) -> dict[str, object]:
    """Keys of a job file.

    Args:
        args: fields of the arguments.
        evaluates: whether there is evaluation data.

    Raises:
        JobError: the run's length or the interval of evaluations is not a whole number of epochs or steps.
    """
    epochs, accumulate = args["num_train_epochs"], int(args["gradient_accumulation_steps"])
    if args["max_steps"] > 0 or epochs != int(epochs) or epochs < 1:
        raise JobError("TrainingArguments: max_steps or a part of an epoch", remedy="use whole num_train_epochs")
    strategy = str(getattr(args["eval_strategy"], "value", args["eval_strategy"]))
    found: dict[str, object] = {
        "epochs": int(epochs),
        "seed": int(args["seed"]),
        "accumulate": accumulate,
        "run": {"batch_size": int(args["per_device_train_batch_size"]) * accumulate},
    }
    data: dict[str, object] = {"last_batch": "drop"} if args["dataloader_drop_last"] else {}
    if args["max_grad_norm"]:
        found["clip_norm"] = float(args["max_grad_norm"])
    if args["bf16"]:
        found["precision"] = "bf16-mixed"
    if args["torch_compile"]:
        found["compile"] = True
    if strategy == "no" or not evaluates:
        data["test_fraction"] = 0.0
    elif strategy == "steps":
        steps = args["eval_steps"]
        if steps != int(steps) or steps < 1:
            raise JobError(f"TrainingArguments: eval_steps = {steps}", remedy="use a whole number of steps")
        found["evaluate_every"] = f"{int(steps)} steps"
    if args["load_best_model_at_end"]:
        found["keep_best"] = {"monitor": monitored(args), "mode": "max" if args["greater_is_better"] else "min"}
    return {**found, **({"data": data} if data else {})}


def monitored(args: Mapping[str, Any]) -> str:
    """Metric by which the best weights are chosen."""
    return str(args["metric_for_best_model"] or "loss").removeprefix("eval_")
