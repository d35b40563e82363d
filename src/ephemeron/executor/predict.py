"""Batch inference: the model of a finished run, applied to many inputs by functions.

Weights and code are shipped once, as one signed object; a function builds the model with its first batch and keeps it. Before that the
client tries the model on three, two and one sample: an output that has no value for each sample is refused before anything is paid for.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import plain
from ephemeron.config.user_code import isolated
from ephemeron.errors import JobError, TaskFailed, UserError
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.prediction_files import ONLY, Inputs, Outputs, check_inputs, read_inputs, write_outputs
from ephemeron.functions.entries import PRELOADS
from ephemeron.runs.folders import CODE_FILE, RESULT_FILE, RUN_FILE
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.trained import best_weights, record_of
from ephemeron.training.worker.spec import RunSpec
from ephemeron.user_code import guarded, line_of, where_raised

if TYPE_CHECKING:
    from ephemeron.executor.session import Bill

_log = logging.getLogger(__name__)

RESULT = "y"
"""Name of the output of a model that returns one tensor."""


@dataclass
class Predictor:
    """The model of a run as a function of inputs, which can be pickled and builds the model when it is first called."""

    spec: dict[str, Any]
    """`RunSpec` as JSON."""
    code: bytes
    """Bundle."""
    weights: bytes
    """A safetensors file."""
    pads: bool = False
    """Whether a batch of one sample is run as two of them, since the model treats it otherwise (`squeeze()`)."""
    as_floats: bool = False
    """Whether integers are given to the model as floating-point numbers."""
    _model: Callable[[Inputs], Any] | None = field(default=None, repr=False)

    def __call__(self, inputs: Inputs) -> Outputs:
        """Outputs of the model in evaluation mode, with a row for each sample.

        Raises:
            JobError: the model cannot be built, raises, or has an output without a row for each sample.
        """
        if self._model is None:
            folder = Path(tempfile.mkdtemp(prefix="ephemeron-predict-"))
            self._model = self.build(folder)
            weakref.finalize(self._model, shutil.rmtree, folder, ignore_errors=True)
        return self.outputs(self._model, inputs)

    def outputs(self, model: Callable[[Inputs], Any], inputs: Inputs) -> Outputs:
        """What a model that was built gives for a batch. See `__call__`."""
        samples = len(next(iter(inputs.values())))
        doubled = self.pads and samples == 1
        given = {name: _native(np.repeat(a, 2, axis=0) if doubled else a) for name, a in inputs.items()}
        if self.as_floats:
            given = {name: a.astype(np.float32) if a.dtype.kind in "iu" else a for name, a in given.items()}
        found = _arrays(model(given))
        for name, array in found.items():
            if array.shape[:1] != (samples + doubled,):
                raise JobError(
                    f"output {name} of the model has the shape {list(array.shape)} for {samples + doubled} samples: its first axis is not the sample",
                    remedy="give the task a predict_step(model, batch) that returns a row for each sample",
                )
        return {name: array[:samples] for name, array in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"_model": None}

    def build(self, folder: Path) -> Callable[[Inputs], Any]:
        """The model, with its code in a folder.

        Raises:
            JobError: it cannot be built.
        """
        from safetensors.torch import load

        from ephemeron.training.driver.trained import put_weights
        from ephemeron.training.task.program import model_of, task_from

        spec = RunSpec.read(self.spec, where="specification of the run")
        folders = unbundle(self.code, folder)
        task = task_from(spec, folders)
        model = model_of(task, spec)
        put_weights(model, load(self.weights))
        model.eval()
        dtype = next((p.dtype for p in model.parameters()), None) if task.cast_inputs else None
        step = getattr(task, "predict_step", None)

        def run(inputs: Inputs) -> Any:
            import torch

            from ephemeron.training.task.tensors import as_tensors

            only = list(inputs) == [ONLY]
            try:
                arguments = as_tensors(dict(inputs), dtype)
                with guarded(), torch.inference_mode():
                    if step is not None:
                        return step(model, arguments[ONLY] if only else arguments)
                    return model(arguments[ONLY]) if only else model(**arguments)
            except Exception as e:
                kinds = ", ".join(f"{name} of {a.dtype} and shape {list(a.shape)}" for name, a in inputs.items())
                raise JobError(f"the model raised {where_raised(e, folders)}, given {kinds}") from e

        return run


def _native(array: np.ndarray) -> np.ndarray:
    """The array in this machine's byte order, which tensors have."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _arrays(value: Any) -> Outputs:
    """The leaves of a model's output by name: `y` of a single one, `y0`, `y1` of a tuple, its own names, `a.0.b` within others.

    Raises:
        JobError: a leaf is no array of numbers, or there are none.
    """
    found = {name: _array(name, leaf) for name, leaf in _leaves(RESULT, value, top=True) if not _is_left_out(leaf)}
    if not found:
        raise JobError(f"the model returned {type(value).__name__}, not tensors", remedy="give its task a predict_step")
    return found


def _leaves(name: str, value: Any, *, top: bool = False) -> Iterator[tuple[str, Any]]:
    inner: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        inner = value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, (tuple, list)) and not (value and all(isinstance(v, (int, float, complex)) for v in value)):
        inner = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not hasattr(value, "detach"):
        inner = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if inner is None:
        yield name, value
        return
    for key, each in inner.items():
        yield from _leaves((key if isinstance(key, str) else f"{RESULT}{key}") if top else f"{name}.{key}", each)


def _is_left_out(leaf: Any) -> bool:
    """Whether an output is nothing, or an object that is no value of a sample, such as a language model's cache of keys and values."""
    return not isinstance(leaf, (str, bytes, list, tuple, int, float, complex)) and not hasattr(leaf, "__array__")


def _array(name: str, leaf: Any) -> np.ndarray:
    try:
        if hasattr(leaf, "detach"):
            leaf = leaf.detach().cpu()
            leaf = (leaf if str(leaf.dtype) != "torch.bfloat16" else leaf.float()).numpy()
        array = np.asarray(leaf)
    except Exception as e:
        raise JobError(f"output {name} of the model cannot be an array: {line_of(e)}") from e
    if array.dtype.kind not in "biufc":
        raise JobError(f"output {name} of the model is a {type(leaf).__name__}, not numbers", remedy="give its task a predict_step")
    return array


def predictor_of(result: Result, *, best: bool = False) -> Predictor:
    """The predictor of a run.

    Args:
        result: of the run, which has weights.
        best: weights of the best evaluation.

    Raises:
        UserError: the run has no weights or no code, or its model is made by a script.
    """
    folder = result.folder
    spec = run_spec(record_of(folder))
    if spec.script is not None:
        raise JobError(
            "the model of a script is made by the script, and cannot be built without it",
            remedy="load result.state_dict() into a model of your own, and give its call to FunctionExecutor.map",
        )
    if spec.sparse is not None:
        raise JobError(
            f"run {folder.run_id} is of a sparse job, whose inputs are rows of a table",
            remedy="give a file *.csv or *.parquet with the columns from which its data was prepared",
        )
    files = model_files(result, best=best)
    return Predictor(spec=dict(plain(spec)), code=files[CODE_FILE], weights=files[folder.weights.name])


def model_files(result: Result, *, best: bool = False) -> dict[str, bytes]:
    """Files of a run's folder that its predictor needs, by their names; a folder with them is one of a run.

    Args:
        result, best: see `predictor_of`.

    Raises:
        UserError: the run has no weights or no code.
    """
    folder = result.folder
    weights = best_weights(folder) if best else folder.weights
    for path, what in ((folder.path / CODE_FILE, "code"), (weights, "weights")):
        if not path.exists():
            raise UserError(f"run {folder.run_id} has no {what}: there is no {path.name} in its folder")
    files = {name: (folder.path / name).read_bytes() for name in (RUN_FILE, RESULT_FILE, CODE_FILE)}
    return {**files, folder.weights.name: weights.read_bytes()}


def predict(
    result: Result,
    inputs: Inputs,
    *,
    batch_size: int = 256,
    best: bool = False,
    casts: bool = False,
    on_trial: Callable[[Outputs], object] | None = None,
    on_pool: Callable[[FunctionExecutor], object] | None = None,
    on_outputs: Callable[[Outputs], object] = lambda outputs: None,
    **options: Any,
) -> tuple[Outputs, Bill]:
    """Outputs of a run's model for many inputs, computed by functions, and the bill.

    Args:
        result: of the run.
        inputs: arrays by name, with as many rows each.
        batch_size: rows of one task.
        best: weights of the best evaluation.
        casts: integers become floating-point numbers where the model takes no integers: JSON does not tell them apart.
        on_trial: is given the outputs for two samples before anything is started.
        on_pool: is given the executor before it starts.
        on_outputs: is given the outputs before its run ends.
        options: of `FunctionExecutor`.

    Returns:
        Arrays by name, with a row for each sample: `y`, or the names of a tuple (`y0`, `y1`), mapping or dataclass; those within others are
        `y1.0`. What is None, or an object such as a cache, is left out, and a warning names it.

    Raises:
        UserError: inputs, options, the run or an output of its model are refused; nothing was started.
        TaskFailed: the model raised.
    """
    rows = check_inputs(inputs)
    if batch_size < 1:
        raise JobError(f"batch_size = {batch_size} is below 1")
    predictor = tried(predictor_of(result, best=best), inputs, casts=casts, on_trial=on_trial)
    parts = ({name: a[at : at + batch_size] for name, a in inputs.items()} for at in range(0, rows, batch_size))
    with modules_kept(), FunctionExecutor(name="predict", preload=PRELOADS["predict"], **options) as pool:
        if on_pool is not None:
            on_pool(pool)
        outputs = _joined(list(pool.map(predictor, parts)))
        on_outputs(outputs)
    return outputs, pool.bill()


@contextmanager
def modules_kept() -> Iterator[None]:
    """Keeps this process's own modules: simulated functions are in this process, and import the run's."""
    modules, path = dict(sys.modules), list(sys.path)
    try:
        yield
    finally:
        sys.modules.update(modules)
        sys.path[:] = path


def tried(predictor: Predictor, inputs: Inputs, *, casts: bool = False, on_trial: Callable[[Outputs], object] | None = None) -> Predictor:
    """The predictor, as it has to be for these inputs; as it is where this process has no PyTorch to try it. See `predict`.

    Raises:
        JobError: the model raises, or an output has no row for each sample.
    """
    try:
        import torch  # noqa: F401 - to try the model
    except ModuleNotFoundError:
        return predictor

    def some(samples: int) -> Inputs:
        return {name: a[np.arange(samples) % len(a)] for name, a in inputs.items()}

    with tempfile.TemporaryDirectory(prefix="ephemeron-predict-") as folder, isolated(Path(folder)):
        built = predictor.build(Path(folder) / "code")
        returned: list[Any] = []

        def model(batch: Inputs) -> Any:
            returned.append(built(batch))
            return returned[-1]

        try:
            of_three = predictor.outputs(model, some(3))
        except JobError:
            if not casts or not any(a.dtype.kind in "iu" for a in inputs.values()):
                raise
            predictor = replace(predictor, as_floats=True)
            of_three = predictor.outputs(model, some(3))
        of_two = predictor.outputs(model, some(2))
        for name, array in of_two.items():
            if array.shape[1:] != of_three.get(name, array).shape[1:] or of_two.keys() != of_three.keys():
                raise JobError(
                    f"output {name} of the model has the shape {list(array.shape)} for 2 samples, and {list(of_three[name].shape)} for 3"
                    if name in of_three
                    else f"output {name} of the model is there for 2 samples, and not for 3",
                    remedy="give the task a predict_step(model, batch) that pads it to one length",
                )
        kinds: dict[str, list[str]] = {}
        for name, leaf in _leaves(RESULT, returned[-1], top=True):
            if _is_left_out(leaf):
                kinds.setdefault("None" if leaf is None else type(leaf).__name__, []).append(name)
        for kind, names in kinds.items():
            _log.warning("the model gives %s as %s, which is left out", kind, ", ".join(names))
        if on_trial is not None:
            on_trial(of_two)
        return replace(predictor, pads=not _is_plain_for_one(predictor, model, some(1), of_two))


def _is_plain_for_one(predictor: Predictor, model: Callable[[Inputs], Any], one: Inputs, of_two: Outputs) -> bool:
    """Whether a batch of one sample has the same outputs as others."""
    try:
        of_one = predictor.outputs(model, one)
    except JobError:
        return False
    return {n: a.shape[1:] for n, a in of_one.items()} == {n: a.shape[1:] for n, a in of_two.items()}


def _joined(parts: list[Outputs]) -> Outputs:
    """The outputs of all batches.

    Raises:
        TaskFailed: they differ in more than the number of samples.
    """
    for number, part in enumerate(parts):
        for name in part.keys() | parts[0].keys():
            shapes = [list(p[name].shape[1:]) if name in p else None for p in (parts[0], part)]
            if shapes[0] != shapes[1]:
                raise TaskFailed(
                    f"output {name} of the model has rows of the shape {shapes[0]} in batch 0, and {shapes[1]} in batch {number}; "
                    "give the task a predict_step(model, batch) that pads it to one length",
                    task=f"batch {number}",
                )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


__all__ = ["Predictor", "predict", "read_inputs", "write_outputs"]
