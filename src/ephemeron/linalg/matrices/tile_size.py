"""Size of tiles: large enough that computing hides transfers and requests, small enough for the memory of a function."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MULTIPLE, _LEAST = 8, 64
"""Of which sizes are multiples, and the smallest one."""
_CONFLICTS = 256
"""No size is a multiple of it: rows of such a tile compete for the same lines of the processor's cache (OpenBLAS takes a tenth longer for tiles of
1,024 rows than for those of 1,000, QR of a tile a quarter)."""
_TILES_IN_MEMORY = 12
"""Of one task, of those that are fetched ahead, written, and kept."""
_WORTH = 10
"""A task computes so many times as long as its requests take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpeed:
    """What a function can do, for the choice of a tile size."""

    flops: float = 3e10
    """Floating-point operations of a matrix product in a second, in float64 on one vCPU."""
    bytes_per_s: float = 1e9
    """To and from the store."""
    task_s: float = 0.004
    """Seconds of requests for one task."""
    memory_bytes: float = 1.769e9
    tiles: int = 24
    """For each function, where the matrix is large enough."""


LOCAL = FunctionSpeed(task_s=0.007, tiles=12)
"""A function of this machine: its own CPU time pays for requests, so that fewer and larger tiles are quicker. By the schedules that
`prediction` makes for Cholesky, QR and products of 4,000 and 8,000 rows on two functions, four or five rows of tiles are the quickest."""
CLOUD = FunctionSpeed(flops=3e10, bytes_per_s=7.5e7, task_s=0.1)
"""A function of one vCPU and an object store, by the order of magnitude of AWS's documentation: 75 MB/s, eight requests of some 12 ms."""


def tile_size(rows: int, columns: int, itemsize: int, *, workers: int, speed: FunctionSpeed = LOCAL) -> int:
    """Rows and columns of square tiles for a matrix.

    Compute time of a product of tiles, 2 b³ / flops, is at least the time to read two and write one, 3 b² itemsize / bandwidth, and
    `_WORTH` times the time of its requests; twelve tiles fit into memory; within that, every function has `speed.tiles` tiles where
    the matrix is large enough, so that factorisations, whose work shrinks, keep all of them busy. Tiles are about equal: the last row
    of them is no narrow rest.

    Args:
        rows, columns: of the matrix.
        itemsize: bytes of a value.
        workers: functions.
        speed: of one of them.
    """
    for_transfers = 1.5 * itemsize * speed.flops / speed.bytes_per_s
    for_requests: float = (0.5 * _WORTH * speed.task_s * speed.flops) ** (1 / 3)
    for_memory = math.sqrt(speed.memory_bytes / (_TILES_IN_MEMORY * itemsize))
    for_parallelism = math.sqrt(rows * columns / (speed.tiles * workers))
    wanted: float = max(min(max(for_transfers, for_requests, for_parallelism), for_memory), float(_LEAST))
    longest = max(rows, columns)
    equal = longest / max(1, round(longest / wanted))
    size: int = _MULTIPLE * math.ceil(equal / _MULTIPLE)
    if size > for_memory:
        size = max(_LEAST, _MULTIPLE * math.floor(for_memory / _MULTIPLE))
    if size > _CONFLICTS and size % _CONFLICTS == 0:
        size += _MULTIPLE if size + _MULTIPLE <= for_memory else -_MULTIPLE
    return min(size, longest)
