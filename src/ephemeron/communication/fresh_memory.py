"""Memory that is about to be filled, without clearing it first where that costs time.

NumPy gives such memory, but its import takes a third of the start of a process that needs nothing else of it (0.1 s of CPU time), such
as the host of local functions. So small memory is Python's, and NumPy is imported with the first large one.
"""

from __future__ import annotations

_SMALL = 64 << 10


def fresh_memory(nbytes: int) -> memoryview:
    """Writable bytes with any contents."""
    if nbytes < _SMALL:
        return memoryview(bytearray(nbytes))
    import numpy as np

    return np.empty(nbytes, np.uint8).data
