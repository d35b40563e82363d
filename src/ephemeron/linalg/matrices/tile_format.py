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
    """Header and values, the values without a copy where they are contiguous.

    Args:
        tile: of any shape with at most two dimensions.
    """
    if not (tile.flags.c_contiguous or tile.flags.f_contiguous):
        tile = np.ascontiguousarray(tile)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tile))
    values = tile.T if not tile.flags.c_contiguous else tile
    return [header.getvalue(), values.reshape(-1).view(np.uint8).data] if tile.size else [header.getvalue()]


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
