"""Batch inference: the model of a finished run, applied to many inputs by functions.

Weights and code are shipped once, as one signed object; a function builds the model with its first batch and keeps it.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import build, plain
from ephemeron.data.formats.lines import text_lines
from ephemeron.errors import JobError, UserError
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.run_dir import CODE_FILE
from ephemeron.training.driver.trained import best_weights, record_of
from ephemeron.training.worker.spec import RunSpec
from ephemeron.user_code import where_raised

if TYPE_CHECKING:
    from ephemeron.executor.session import Bill

Inputs: TypeAlias = Mapping[str, np.ndarray]
"""Arrays with one row per sample; the array `x` is the model's only argument, others are arguments by their names."""
Outputs: TypeAlias = dict[str, np.ndarray]

ONLY = "x"
RESULT = "y"
"""Name of the output of a model that returns one tensor."""
IN_SUFFIXES, OUT_SUFFIXES = (".npz", ".npy", ".jsonl"), (".npz", ".npy", ".jsonl")


@dataclass
class Predictor:
    """The model of a run as a function of inputs, which can be pickled and builds the model when it is first called."""

    spec: dict[str, Any]
    """`RunSpec` as JSON."""
    code: bytes
    """Bundle."""
    weights: bytes
    """A safetensors file."""
    _model: Callable[[Inputs], Outputs] | None = field(default=None, repr=False)

    def __call__(self, inputs: Inputs) -> Outputs:
        """Outputs of the model in evaluation mode.

        Raises:
            JobError: the model cannot be built, or raises.
        """
        if self._model is None:
            self._model = self._build()
        return self._model(inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "code": self.code, "weights": self.weights, "_model": None}

    def _build(self) -> Callable[[Inputs], Outputs]:
        import torch
        from safetensors.torch import load

        from ephemeron.training.driver.trained import put_weights
        from ephemeron.training.task.program import model_of, task_from
        from ephemeron.training.task.tensors import as_tensors

        spec = build(RunSpec, self.spec, where="specification of the run")
        folders = unbundle(self.code, Path(tempfile.mkdtemp(prefix="ephemeron-predict-")))
        task = task_from(spec, folders)
        model = model_of(task, spec)
        put_weights(model, load(self.weights))
        model.eval()
        dtype = next((p.dtype for p in model.parameters()), None) if task.cast_inputs else None
        step = getattr(task, "predict_step", None)

        def run(inputs: Inputs) -> Outputs:
            arguments = as_tensors(dict(inputs), dtype)
            only = list(arguments) == [ONLY]
            try:
                with torch.inference_mode():
                    if step is not None:
                        value = step(model, arguments[ONLY] if only else arguments)
                    else:
                        value = model(arguments[ONLY]) if only else model(**arguments)
            except Exception as e:
                raise JobError(f"the model raised {where_raised(e, folders)}") from e
            return _arrays(value)

        return run


def _arrays(value: Any) -> Outputs:
    """Tensors of a model's output by name."""
    if hasattr(value, "detach"):
        return {RESULT: _array(value)}
    named = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    )
    found = {
        name if isinstance(name, str) else f"{RESULT}{name}": _array(v) for name, v in named if hasattr(v, "detach")
    }
    if not found:
        raise JobError(f"the model returned {type(value).__name__}, not tensors", remedy="give its task a predict_step")
    return found


def _array(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor if str(tensor.dtype) != "torch.bfloat16" else tensor.float()).numpy()  # type: ignore[no-any-return]


def predictor_of(result: Result, *, best: bool = False) -> Predictor:
    """The predictor of a run.

    Args:
        result: of the run, which has weights.
        best: weights of the best evaluation.

    Raises:
        UserError: the run has no weights or no code, or its model is made by a script.
    """
    folder = result.folder
    spec = record_of(folder).run_spec()
    if spec.script is not None:
        raise JobError(
            "the model of a script is made by the script, and cannot be built without it",
            remedy="load result.state_dict() into a model of your own, and give its call to FunctionExecutor.map",
        )
    weights = best_weights(folder) if best else folder.weights
    for path, what in ((folder.path / CODE_FILE, "code"), (weights, "weights")):
        if not path.exists():
            raise UserError(f"run {folder.run_id} has no {what}: there is no {path.name} in its folder")
    return Predictor(spec=dict(plain(spec)), code=(folder.path / CODE_FILE).read_bytes(), weights=weights.read_bytes())


def predict(
    result: Result, inputs: Inputs, *, batch_size: int = 256, best: bool = False, on_pool: Callable[[FunctionExecutor], object] | None = None,
    **options: Any,
) -> tuple[Outputs, Bill]:  # fmt: skip
    """Outputs of a run's model for many inputs, computed by functions, and the bill.

    Args:
        result: of the run.
        inputs: arrays by name, with as many rows each.
        batch_size: rows of one task.
        best: weights of the best evaluation.
        on_pool: is given the executor before it starts.
        options: of `FunctionExecutor`.

    Raises:
        UserError: inputs, options or the run are refused; nothing was started.
        TaskFailed: the model raised.
    """
    rows = check_inputs(inputs)
    if batch_size < 1:
        raise JobError(f"batch_size = {batch_size} is below 1")
    predictor = predictor_of(result, best=best)
    parts = ({name: a[at : at + batch_size] for name, a in inputs.items()} for at in range(0, rows, batch_size))
    with FunctionExecutor(preload=("torch", "ephemeron.training.task.program"), **options) as pool:
        if on_pool is not None:
            on_pool(pool)
        found = list(pool.map(predictor, parts))
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}, pool.bill()


def check_inputs(inputs: Inputs) -> int:
    """Number of rows.

    Raises:
        JobError: there are none, or arrays differ in them.
    """
    rows = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
    if not rows or not min(rows.values()):
        raise JobError("there are no inputs", remedy="give arrays with a row for each sample")
    if len(set(rows.values())) > 1:
        raise JobError(f"arrays of inputs differ in length: {', '.join(f'{n} has {k}' for n, k in rows.items())}")
    return next(iter(rows.values()))


def read_inputs(path: Path) -> Inputs:
    """Inputs from a file: `.npz` (the array `x`, or the only one, or arguments by name), `.npy`, or `.jsonl` (a line per sample).

    Raises:
        JobError: the file cannot be read, or holds something else.
    """
    if path.suffix not in IN_SUFFIXES:
        raise JobError(f"{path} is of no known kind", remedy=f"give a file *{', *'.join(IN_SUFFIXES)}")
    try:
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for _, line in text_lines(path.read_bytes(), str(path))]
            if lines and all(isinstance(line, dict) for line in lines):
                return {name: np.asarray([line[name] for line in lines]) for name in lines[0]}
            array = np.asarray(lines)
            return {ONLY: array.astype(np.float32) if array.dtype == np.float64 else array}
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {ONLY: content}
        with content:
            names = [ONLY] if ONLY in content.files else content.files
            found = {name: content[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise JobError(f"{path} cannot be read: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from None
    return {ONLY: next(iter(found.values()))} if len(found) == 1 else found


def write_outputs(path: Path, outputs: Outputs) -> None:
    """Writes outputs as `.npz`, as `.npy` (a single array), or as `.jsonl`, a line per sample."""
    single = next(iter(outputs.values())) if len(outputs) == 1 else None
    if path.suffix == ".npz":
        np.savez(path, **outputs)  # type: ignore[arg-type]
    elif path.suffix == ".npy":
        assert single is not None
        np.save(path, single)
    else:
        with path.open("w") as out:
            out.writelines(json.dumps(row) + "\n" for row in _rows(outputs, single))


def check_out(path: Path, outputs: Outputs | None = None) -> None:
    """Checks a file before anything is computed, and again with the outputs.

    Raises:
        JobError: no known kind, an absent folder, or a kind that holds one array for a model that has several outputs.
    """
    if path.suffix not in OUT_SUFFIXES:
        raise JobError(f"{path} is of no known kind", remedy=f"name a file *{', *'.join(OUT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise JobError(f"there is no folder {path.absolute().parent}")
    if path.suffix == ".npy" and outputs is not None and len(outputs) > 1:
        raise JobError(
            f"the model has outputs {', '.join(outputs)}, and .npy holds one array", remedy="name a file *.npz"
        )


def _rows(outputs: Outputs, single: np.ndarray | None) -> Iterator[Any]:
    if single is not None:
        yield from (row.tolist() for row in single)
        return
    for n in range(len(next(iter(outputs.values())))):
        yield {name: array[n].tolist() for name, array in outputs.items()}
