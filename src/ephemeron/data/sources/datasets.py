"""A user's own data, turned into arrays once, before anything is started.

Functions have no disk to read samples from, and data cannot be sent without its files. So every sample is read once, in the
process that starts the run. That would freeze random augmentation, so a random training set is refused: use a data flow, which reads
anew in every epoch, or put the augmentation into the model. A random test set is read under fixed seeds. Limitation: the data set has
to fit into memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.config.user_code import resolve
from ephemeron.data.formats.lines import one_line
from ephemeron.data.randomness import generators_in, kept, sample_seed, seed_everything
from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.adapters import FILES, Pairs, Rows, array_of, as_dataset, rows_of, split_of
from ephemeron.data.sources.readers import NoOptions, need_path, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.data.user_function import call
from ephemeron.errors import EphemeronError, JobError
from ephemeron.user_code import guarded, where_raised


def read(spec: DataSpec, code: Sequence[Path]) -> tuple[Samples, Samples | None]:
    """The samples of `files`, or of what `module:function` returns with the options (and `path=data.path`, if given).

    Images of files become float32 (N, channels, height, width) in [0, 1].

    Raises:
        JobError: the function cannot be had, does not take these options or raises; or its result is none of the values that
            `as_dataset` takes, nor two of them, for training and testing.
    """
    if spec.source == FILES:
        read_options(spec, NoOptions)
        where, value = f"data.path {spec.path}", need_path(spec, "a folder, a file or a glob of CSV, Parquet or image files")
    else:
        function = resolve(spec.source, code)
        options = dict(spec.options) if spec.path is None else {"path": spec.path, **spec.options}
        where, value = spec.source, call(spec.source, function, options, code)
        if isinstance(value, tuple) and len(value) != 2:
            raise JobError(f"{where} returned a tuple of {len(value)}", remedy="return a Dataset, or (train, test)")
    if (both := split_of(value)) is None:
        return _scaled(spec, stack(value, where, code, may_be_random=False, target=spec.target_column)), None
    train, test = both
    stacked = stack(train, f"{where} (train)", code, may_be_random=False, target=spec.target_column)
    return _scaled(spec, stacked), None if test is None else _scaled(spec, stack(test, f"{where} (test)", code, target=spec.target_column))


def _scaled(spec: DataSpec, samples: Samples) -> Samples:
    """The samples; images of files as float32 (N, channels, height, width) in [0, 1]."""
    if spec.source != FILES or samples.inputs.dtype != np.uint8 or samples.inputs.ndim != 4:
        return samples
    return Samples(np.moveaxis(samples.inputs, 3, 1).astype(np.float32) / 255, samples.targets)


def stack(value: Any, where: str, code: Sequence[Path] = (), *, may_be_random: bool = True, target: str | None = None) -> Samples:
    """All samples as two arrays. The caller's random generators stay as they were.

    Args:
        value: what `as_dataset` takes. Its samples are pairs `(x, y)` of tensors, arrays or numbers, or rows of named numbers.
        where: its name in messages.
        code: folders of the user's code, to name the user's own line where it raises.
        may_be_random: whether one draw per sample is acceptable for all epochs.
        target: column that is predicted, where samples are rows of named columns.

    Raises:
        JobError: it is iterable only or empty, raises, is random and may not be, its samples differ in shape or dtype, or rows have
            values other than numbers.
    """
    dataset = as_dataset(value, where, target=target)
    count = _length(dataset, where, code)
    if count < 1:
        raise JobError(f"{where} is empty", remedy="return at least one sample")
    if isinstance(dataset, (Rows, Pairs)):
        return Samples(*dataset.arrays())
    if not may_be_random:
        _refuse_random(dataset, where)
    held = generators_in(dataset)
    with kept(held):
        samples = (_sample(dataset, index, held, where, code) for index in range(count))
        first = next(samples)
        if isinstance(first, Mapping) or (isinstance(first, (tuple, list)) and len(first) == 2 and isinstance(first[0], Mapping)):
            return Samples(*rows_of([first, *samples], where, target=target).arrays())
        columns: list[Array] = []
        for index, sample in enumerate(itertools.chain([first], samples)):
            pair = _pair(sample, index, where)
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


def _length(dataset: Any, where: str, code: Sequence[Path]) -> int:
    try:
        with guarded():
            return len(dataset)
    except Exception as e:
        raise JobError(f"{where}: len() raised {where_raised(e, code)}") from e


def _sample(dataset: Any, index: int, held: Any, where: str, code: Sequence[Path]) -> Any:
    seed_everything(sample_seed(0, 0, index), held)
    try:
        with guarded():
            return dataset[index]
    except EphemeronError:
        raise
    except Exception as e:
        raise JobError(f"{where}: sample {index} raised {where_raised(e, code)}") from e


def _pair(sample: Any, index: int, where: str) -> tuple[Array, Array]:
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        size = f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
        raise JobError(f"{where}: sample {index} is {type(sample).__name__}{size}", remedy="return a pair (x, y)")
    try:
        return _as_array(sample[0]), _as_array(sample[1])
    except (TypeError, ValueError, RuntimeError) as e:
        raise JobError(f"{where}: sample {index} is not made of numbers: {one_line(e)}") from None


def _as_array(value: Any) -> Array:
    array = array_of(value)
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
