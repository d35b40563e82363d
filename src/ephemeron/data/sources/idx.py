"""MNIST's IDX files: two zero bytes, a type code, the rank, the lengths (big endian), the values (big endian).

Source of the format: the description on MNIST's page (LeCun, Cortes, Burges); Fashion-MNIST, KMNIST and EMNIST use
it too. The files are read whole and must be exactly as long as their header says: a download that stopped half way
is refused rather than trained on.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.options import need_path, one_line, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError

_DTYPE_OF = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
NAME = re.compile(r"(?P<part>train|t10k)-(?P<kind>images|labels)[-.]idx\d+-\w+(?P<gz>\.gz)?")
_FOLDER = "a folder with train-images-idx3-ubyte and train-labels-idx1-ubyte, each perhaps with .gz"


def read(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Training and, if the folder has `t10k-…` files, test samples.

    Returns:
        Inputs float32, bytes scaled to [0, 1], rank 3 as (N, 1, H, W) and other ranks as they are; targets int64,
        or float32 where the file holds floating-point numbers.

    Raises:
        JobError: a file is absent, or not what its header says.
    """
    read_options(spec, {})
    folder = need_path(spec, _FOLDER)
    if not folder.is_dir():
        raise JobError(f"data.path = {str(folder)!r} is not a folder", remedy=f"give {_FOLDER}")
    files = _find(folder)
    train = _pair(folder, files, "train")
    has_test = any(part == "t10k" for part, _ in files)
    return train, _pair(folder, files, "t10k") if has_test else None


def read_idx(path: Path) -> Array:
    """One IDX file, with or without gzip, as an array in native byte order.

    Raises:
        JobError: it cannot be read, its magic number is unknown, or it is shorter or longer than its header says.
    """
    return parse_idx(_contents(path), path)[0]


def parse_idx(data: bytes, path: Path | str) -> tuple[Array, int]:
    """The content of an IDX file as an array in native byte order, and how many bytes of header come before it.

    Args:
        data: unpacked.
        path: what to call it in messages.

    Raises:
        JobError: its magic number is unknown, or it is shorter or longer than its header says.
    """
    if len(data) < 4:
        raise _broken(path, f"has only {len(data)} bytes")
    zero, code, rank = struct.unpack_from(">HBB", data)
    if zero or code not in _DTYPE_OF:
        raise JobError(
            f"{path} starts with 0x{data[:4].hex()}, which is no IDX magic number", remedy="give an IDX file"
        )
    start = 4 + 4 * rank
    if len(data) < start:
        raise _broken(path, f"has {len(data)} bytes but a header of {start}")
    shape = struct.unpack_from(f">{rank}I", data, 4)
    dtype = np.dtype(_DTYPE_OF[code])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise _broken(path, f"has {len(data)} bytes, but its header says {expected}")
    array = np.frombuffer(data, dtype=dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False), start


def _find(folder: Path) -> dict[tuple[str, str], Path]:
    """(part, kind) -> file; a plain file is preferred to its compressed twin."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir()):  # "x" sorts before "x.gz"
        if match := NAME.fullmatch(path.name):
            found.setdefault((match["part"], match["kind"]), path)
    return found


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


def _broken(path: Path | str, how: str) -> JobError:
    return JobError(f"{path} {how}", remedy="fetch the file again")
