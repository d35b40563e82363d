"""A user's own torch Dataset, turned into arrays once, before anything is started.

Functions have no disk to read samples from, and a Dataset cannot be sent without its files. So every sample is read once, in the
process that starts the run. That would freeze random augmentation, so a random training set is refused: use a data flow, which reads
anew in every epoch, or put the augmentation into the model. A random test set is read under fixed seeds. Limitation: the data set has
to fit into memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.config.user_code import resolve
from ephemeron.data.formats.lines import one_line
from ephemeron.data.randomness import generators_in, kept, sample_seed, seed_everything
from ephemeron.data.samples import Array, Samples
from ephemeron.data.spec import DataSpec
from ephemeron.data.user_function import call
from ephemeron.errors import JobError
from ephemeron.user_code import guarded, where_raised


def read(spec: DataSpec, code: Sequence[Path]) -> tuple[Samples, Samples | None]:
    """Calls `module:function` with the options (and `path=data.path`, if given) and stacks what it returns.

    Raises:
        JobError: the function cannot be had, does not take these options or raises; or its result is neither a
            map-style Dataset of pairs nor a tuple (train, test) of two.
    """
    function = resolve(spec.source, code)
    options = dict(spec.options) if spec.path is None else {"path": spec.path, **spec.options}
    result = call(spec.source, function, options, code)
    if not isinstance(result, tuple):
        return stack(result, spec.source, code, may_be_random=False), None
    if len(result) != 2:
        raise JobError(f"{spec.source} returned a tuple of {len(result)}", remedy="return a Dataset, or (train, test)")
    train, test = result
    stacked = stack(train, f"{spec.source} (train)", code, may_be_random=False)
    return stacked, stack(test, f"{spec.source} (test)", code)


def stack(dataset: Any, where: str, code: Sequence[Path] = (), *, may_be_random: bool = True) -> Samples:
    """All pairs of a map-style Dataset as two arrays. The caller's random generators stay as they were.

    Args:
        dataset: `dataset[i]` for 0 ≤ i < `len(dataset)` gives `(x, y)`: tensors, arrays or numbers.
        where: its name in messages.
        code: folders of the user's code, to name the user's own line where it raises.
        may_be_random: whether one draw per sample is acceptable for all epochs.

    Raises:
        JobError: it is iterable only or empty, raises, is random and may not be, or its samples differ in shape or dtype.
    """
    _check_map_style(dataset, where)
    count = _length(dataset, where, code)
    if count < 1:
        raise JobError(f"{where} is empty", remedy="return at least one sample")
    if not may_be_random:
        _refuse_random(dataset, where)
    columns: list[Array] = []
    held = generators_in(dataset)
    with kept(held):
        for index in range(count):
            seed_everything(sample_seed(0, 0, index), held)
            pair = _pair(dataset, index, where, code)
            if not columns:
                columns = [np.empty((count, *value.shape), dtype=value.dtype) for value in pair]
            for name, value, column in zip(("x", "y"), pair, columns, strict=True):
                _check_like_first(name, value, column, index, where)
                column[index] = value
    return Samples(*columns)


def _refuse_random(dataset: Any, where: str) -> None:
    from ephemeron.data.flow.description import FlowDescription
    from ephemeron.data.flow.determinism import TRYING_S, examine
    from ephemeron.data.flow.sample_loader import SampleLoader

    flow = FlowDescription("job/source").dataset(dataset)
    found = examine(SampleLoader(flow, dataset), limit_s=TRYING_S)
    if found.tried and found.fixed < 0:
        raise JobError(
            f"{where}: reading a sample draws random numbers, but each is read once, before the run: every epoch would see the same draws",
            remedy="name a data flow instead (data.flow), which reads anew in every epoch, or augment in the model",
        )


def _check_map_style(dataset: Any, where: str) -> None:
    utils = sys.modules.get("torch.utils.data")  # who returns one of torch's has imported it
    iterable = utils is not None and isinstance(dataset, utils.IterableDataset)
    kind = type(dataset)
    if iterable or not callable(getattr(kind, "__len__", None)) or not callable(getattr(kind, "__getitem__", None)):
        raise JobError(
            f"{where} returned {kind.__name__}, which is not a map-style Dataset",
            remedy="return an object with __len__ and __getitem__, or (train, test) of two",
        )


def _length(dataset: Any, where: str, code: Sequence[Path]) -> int:
    try:
        with guarded():
            return len(dataset)
    except Exception as e:
        raise JobError(f"{where}: len() raised {where_raised(e, code)}") from e


def _pair(dataset: Any, index: int, where: str, code: Sequence[Path]) -> tuple[Array, Array]:
    try:
        with guarded():
            sample = dataset[index]
    except Exception as e:
        raise JobError(f"{where}: sample {index} raised {where_raised(e, code)}") from e
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        size = f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
        raise JobError(f"{where}: sample {index} is {type(sample).__name__}{size}", remedy="return a pair (x, y)")
    try:
        return _as_array(sample[0]), _as_array(sample[1])
    except (TypeError, ValueError, RuntimeError) as e:
        raise JobError(f"{where}: sample {index} is not made of numbers: {one_line(e)}") from None


def _as_array(value: Any) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return np.asarray(value.detach().cpu().numpy())
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{type(value).__name__} of dtype {array.dtype}")
    return array


def _check_like_first(name: str, value: Array, column: Array, index: int, where: str) -> None:
    if value.shape != column.shape[1:]:
        raise JobError(
            f"{where}: {name} of sample {index} has shape {value.shape}, but that of sample 0 has {column.shape[1:]}",
            remedy="bring all samples to one shape",
        )
    if value.dtype != column.dtype:
        raise JobError(
            f"{where}: {name} of sample {index} has dtype {value.dtype}, but that of sample 0 has {column.dtype}",
            remedy="bring all samples to one dtype",
        )
