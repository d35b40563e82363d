"""MNIST's IDX files as a job's samples: from a folder, with or without gzip."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from ephemeron.data.formats.idx import idx_files, parse_idx
from ephemeron.data.formats.one_line import one_line
from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.options import NoOptions, need_path, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError

_FOLDER = "a folder with train-images-idx3-ubyte and train-labels-idx1-ubyte, each perhaps with .gz"


def read(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Training and, if the folder has `t10k-…` files, test samples.

    Returns:
        Inputs float32, bytes scaled to [0, 1], rank 3 as (N, 1, H, W) and other ranks as they are; targets int64,
        or float32 where the file holds floating-point numbers.

    Raises:
        JobError: a file is absent, or not what its header says.
    """
    read_options(spec, NoOptions)
    folder = need_path(spec, _FOLDER)
    if not folder.is_dir():
        raise JobError(f"data.path = {str(folder)!r} is not a folder", remedy=f"give {_FOLDER}")
    files = {key: folder / name for key, name in idx_files(path.name for path in folder.iterdir()).items()}
    train = _pair(folder, files, "train")
    has_test = any(part == "t10k" for part, _ in files)
    return train, _pair(folder, files, "t10k") if has_test else None


def read_idx(path: Path) -> Array:
    """One IDX file, with or without gzip, as an array in native byte order.

    Raises:
        JobError: it cannot be read, its magic number is unknown, or it is shorter or longer than its header says.
    """
    return parse_idx(_contents(path), path)[0]


def _pair(folder: Path, files: dict[tuple[str, str], Path], part: str) -> Samples:
    for kind, rank in (("images", 3), ("labels", 1)):
        if (part, kind) not in files:
            raise JobError(f"{folder} has no file {part}-{kind}-idx{rank}-ubyte", remedy=f"give {_FOLDER}")
    inputs, targets = read_idx(files[part, "images"]), read_idx(files[part, "labels"])
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise JobError(
            f"{files[part, 'images']} has shape {inputs.shape} but {files[part, 'labels'].name} has {targets.shape}",
            remedy="give files of the same data set",
        )
    return Samples(_as_inputs(inputs), targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64))


def _as_inputs(array: Array) -> Array:
    values = array.astype(np.float32)
    if array.dtype == np.uint8:
        values /= 255
    return values[:, np.newaxis] if values.ndim == 3 else values


def _contents(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as e:
        raise JobError(f"{path} cannot be read: {one_line(e)}", remedy="fetch the file again") from None
