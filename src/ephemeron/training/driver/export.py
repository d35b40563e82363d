"""Trained models as files of other tools: TorchScript, ONNX, safetensors."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ephemeron.errors import JobError, MissingExtra, UserError
from ephemeron.training.driver.launching.training_data import training_data
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.trained import job_of_run, put_weights, trained_task
from ephemeron.user_code import guarded, line_of, where_raised

if TYPE_CHECKING:
    from torch import nn

    from ephemeron.training.task.task import Task

Format = Literal["torchscript", "onnx", "safetensors"]
FORMATS: tuple[str, ...] = get_args(Format)
SUFFIXES: Mapping[str, str] = {"torchscript": ".pt", "onnx": ".onnx", "safetensors": ".safetensors"}


def export(result: Result, form: Format, out: Path, *, best: bool = False) -> Path:
    """Writes a run's model to a file.

    TorchScript and ONNX hold the calculation, too: that of the first call of the model by `evaluation_step`, for batches of any
    size if the model allows it.

    Args:
        result: of the run.
        form: `torchscript`, `onnx` or `safetensors`.
        out: the file.
        best: weights of the best evaluation; see `Result.state_dict`.

    Raises:
        UserError: the run has no weights, or the model cannot be written in this form.
        MissingExtra: ONNX is not installed.
    """
    tensors = result.state_dict(best=best)
    out.parent.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(out))
        return out
    task, model = trained_task(result.folder)
    put_weights(model, tensors)
    model.eval()
    arguments = _example(result, task, model)
    try:
        with guarded():
            (_onnx if form == "onnx" else _torchscript)(model, arguments, out)
    except UserError:
        raise
    except Exception as e:
        raise JobError(
            f"{type(model).__name__} cannot be written as {form}: {line_of(e)[:200]}", remedy="export safetensors, or use result.model()"
        ) from e
    return out


def _example(result: Result, task: Task, model: nn.Module) -> inspect.BoundArguments:
    """Arguments with which the task's evaluation calls the model, from a batch of two samples.

    Raises:
        JobError: it does not call the model, or raises.
    """
    import torch

    from ephemeron.training.task.tensors import as_tensors

    job = job_of_run(result.folder)
    feed = training_data(job).trial()
    batch = next(iter(feed.tests()), None) or feed.batch(_FirstSamples(), 0)
    calls: list[inspect.BoundArguments] = []
    signature = inspect.signature(model.forward)

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append(signature.bind(*args, **kwargs))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    dtype = next((p.dtype for p in model.parameters()), None) if task.cast_inputs else None
    try:
        with guarded(), torch.no_grad():
            task.evaluation_step(model, as_tensors(batch.data, dtype))
    except Exception as e:
        raise JobError(f"the evaluation raised {where_raised(e, job.code)}") from e
    finally:
        handle.remove()
    if not calls:
        raise JobError(
            "evaluation_step does not call the model itself, so what is to be exported is not known",
            remedy="export safetensors, or export a part of result.model()",
        )
    return calls[0]


class _FirstSamples:
    """Positions of the first samples."""

    def batch(self, iteration: int) -> Any:
        import numpy as np

        return np.arange(2)


def _torchscript(model: nn.Module, arguments: inspect.BoundArguments, out: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = (
            torch.jit.trace(model, example_kwarg_inputs=_by_name(arguments), strict=False)  # type: ignore[no-untyped-call]
            if arguments.kwargs
            else torch.jit.trace(model, arguments.args, strict=False)  # type: ignore[no-untyped-call]
        )
        made.save(str(out))


def _by_name(arguments: inspect.BoundArguments) -> dict[str, Any]:
    names = list(arguments.signature.parameters)
    return dict(zip(names, arguments.args, strict=False)) | arguments.kwargs


def _onnx(model: nn.Module, arguments: inspect.BoundArguments, out: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401 - the exporter of torch needs it
    except ImportError:
        raise MissingExtra("ONNX (onnx and onnxscript), which the exporter needs,", "onnx") from None
    import torch

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                model,
                arguments.args,
                kwargs=dict(arguments.kwargs),
                dynamo=True,
                verbose=False,
                dynamic_shapes={name: _batch_axis(value) for name, value in _by_name(arguments).items()},
            )
            assert made is not None
            made.save(str(out))
    finally:
        log.setLevel(level)


def _batch_axis(value: Any) -> Any:
    """Which axes of an argument may have another size: the first one of tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return {0: torch.export.Dim.AUTO} if value.ndim else None
    if isinstance(value, Mapping):
        return {key: _batch_axis(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_batch_axis(inner) for inner in value)
    return None
