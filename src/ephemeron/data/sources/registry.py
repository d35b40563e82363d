"""From `data` of a job to two sets of samples. One reader per source; their common part is here.

A reader returns the training samples and, if its source has them, the test samples. Where it has none, a seeded
share of the training samples is held out. Readers are imported on use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ephemeron.config.typed import near
from ephemeron.data.samples import DataSets, Samples
from ephemeron.data.spec import DataSpec
from ephemeron.data.split import held_out
from ephemeron.errors import JobError

_log = logging.getLogger(__name__)
SOURCES = ("digits", "idx", "cifar10", "cifar100", "npz", "prepared", "files")
"""Sources by name; any other is `module:function`."""


def load(spec: DataSpec, *, seed: int, code: Sequence[Path] = ()) -> DataSets:
    """Reads the samples of a job.

    Args:
        spec: the source.
        seed: of the choice of samples that are held out, where the source has no test set of its own.
        code: folders in which `module:function` is searched.

    Raises:
        JobError: the source is unknown, or a path, an option, a file or the user's code is wrong.
        MissingExtra: the source needs a package that is not installed.
    """
    if not 0 <= spec.test_fraction < 1:
        raise JobError(f"data.test_fraction = {spec.test_fraction} is not in [0, 1)")
    train, test = _read(spec, code)
    if len(train) == 0:
        raise JobError(f"source {spec.source!r} has no training samples")
    if test is None:
        return hold_out(train, spec.test_fraction, seed=seed)
    _check_same_shapes(spec.source, train, test)
    _log.debug("source %s: %d training and %d test samples", spec.source, len(train), len(test))
    return DataSets(train, test)


def hold_out(samples: Samples, fraction: float, *, seed: int) -> DataSets:
    """Splits off a seeded share for testing, rounded to whole samples. At least one sample stays for training.

    Both parts keep the order of `samples`.
    """
    train, test = held_out(len(samples), fraction, seed=seed)
    return DataSets(train=samples.take(train), test=samples.take(test))


def _read(spec: DataSpec, code: Sequence[Path]) -> tuple[Samples, Samples | None]:
    if ":" in spec.source or spec.source == "files":
        from ephemeron.data.sources import datasets

        return datasets.read(spec, code)
    if spec.source == "digits":
        from ephemeron.data.sources import readers

        return readers.read_digits(spec)
    if spec.source == "idx":
        from ephemeron.data.sources import readers

        return readers.read_idx_files(spec)
    if spec.source in ("cifar10", "cifar100"):
        from ephemeron.data.sources import readers

        return readers.read_cifar(spec)
    if spec.source == "npz":
        from ephemeron.data.sources import readers

        return readers.read_npz(spec)
    if spec.source == "prepared":
        from ephemeron.data.sources import readers

        return readers.read_prepared(spec)
    remedy = near(spec.source, SOURCES, what="known sources")
    raise JobError(f"data.source = {spec.source!r} is not known", remedy=f"{remedy} (or write module:function)")


def _check_same_shapes(source: str, train: Samples, test: Samples) -> None:
    for name, a, b in (("inputs", train.inputs, test.inputs), ("targets", train.targets, test.targets)):
        if a.dtype.fields != b.dtype.fields and (a.dtype.names or b.dtype.names):
            raise JobError(
                f"source {source!r}: columns are {a.dtype} for training but {b.dtype} for testing", remedy="prepare both together"
            )
        if a.shape[1:] != b.shape[1:]:
            raise JobError(
                f"source {source!r}: {name} have shape {a.shape[1:]} for training but {b.shape[1:]} for testing",
                remedy="bring both to one shape",
            )
