"""A tile as bytes: the header of NumPy's `.npy` format, which names dtype, order and shape, then the values. Never a pickle."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import CorruptMessage

_HEADER_BYTES = 256
DTYPES = ("float32", "float64", "complex64", "complex128")


def encode_tile(tile: npt.NDArray[np.generic]) -> list[Buffer]:
    """Header and values in one buffer, a copy: what stores, caches and tasks that follow take without another one.

    Args:
        tile: of any shape with at most two dimensions.
    """
    is_fortran = tile.flags.f_contiguous and not tile.flags.c_contiguous
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(tile.dtype), "fortran_order": is_fortran, "shape": tile.shape}
    np.lib.format.write_array_header_1_0(header, described)
    made = np.empty(header.tell() + tile.nbytes, np.uint8)
    made[: header.tell()] = np.frombuffer(header.getbuffer(), np.uint8)
    if tile.size:
        values = tile.T if is_fortran else tile
        np.copyto(made[header.tell() :].view(tile.dtype).reshape(values.shape), values)
    return [made.data]


def decode_tile(data: memoryview, *, key: str = "") -> npt.NDArray[np.generic]:
    """The tile, as a read-only view of the bytes.

    Args:
        data: what `encode_tile` gave.
        key: of the object, for errors.

    Raises:
        CorruptMessage: it is no tile.
    """
    head = io.BytesIO(bytes(data[:_HEADER_BYTES]))
    try:
        if np.lib.format.read_magic(head) != (1, 0):
            raise ValueError("another version of the format")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(head)
        if dtype.hasobject:
            raise ValueError("a tile holds numbers")
        values = np.frombuffer(data, dtype=dtype, offset=head.tell())
        tile: npt.NDArray[np.generic] = values.reshape(shape, order="F" if is_fortran else "C")
    except ValueError as e:
        raise CorruptMessage(f"not a tile: {e}", key=key) from None
    return tile
