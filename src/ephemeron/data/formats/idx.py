"""MNIST's IDX files: two zero bytes, a type code, the rank, the lengths (big endian), the values (big endian).

Source of the format: the description on MNIST's page (LeCun, Cortes, Burges); Fashion-MNIST, KMNIST and EMNIST use it too. A file
must be exactly as long as its header says: an interrupted download is refused rather than trained on.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np

from ephemeron.data.samples import Array
from ephemeron.errors import JobError

_DTYPE_OF = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAME = re.compile(r"(?P<part>train|t10k)-(?P<kind>images|labels)[-.]idx\d+-\w+(?P<gz>\.gz)?")


def idx_files(paths: Iterable[str]) -> dict[tuple[str, str], str]:
    """Paths by part (`train`, `t10k`) and kind (`images`, `labels`); a plain file is preferred to a compressed one."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(paths):  # "x" sorts before "x.gz"
        if match := _NAME.fullmatch(PurePosixPath(path).name):
            found.setdefault((match["part"], match["kind"]), path)
    return found


def parse_idx(data: bytes, path: Path | str) -> tuple[Array, int]:
    """The content of an IDX file as an array in native byte order, and how many bytes of header come before it.

    Args:
        data: unpacked.
        path: its name in messages.

    Raises:
        JobError: its magic number is unknown, or it is shorter or longer than its header says.
    """
    if len(data) < 4:
        raise _broken(path, f"has only {len(data)} bytes")
    zero, code, rank = struct.unpack_from(">HBB", data)
    if zero or code not in _DTYPE_OF:
        raise JobError(f"{path} starts with 0x{data[:4].hex()}, which is not an IDX magic number", remedy="give an IDX file")
    start = 4 + 4 * rank
    if len(data) < start:
        raise _broken(path, f"has {len(data)} bytes but a header of {start}")
    shape = struct.unpack_from(f">{rank}I", data, 4)
    dtype = np.dtype(_DTYPE_OF[code])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise _broken(path, f"has {len(data)} bytes, but its header states {expected}")
    array = np.frombuffer(data, dtype=dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False), start


def _broken(path: Path | str, how: str) -> JobError:
    return JobError(f"{path} {how}", remedy="fetch the file again")
