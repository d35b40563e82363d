"""Arrays as text in JSON."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray


def array_text(array: NDArray[Any]) -> str:
    """Content of an array, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def text_array(text: str, dtype: Any) -> NDArray[Any]:
    """The inverse of `array_text`."""
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
