"""This package's source for functions, and its requirements there."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

REQUIREMENTS = (
    "numpy>=1.26",
    "obstore>=0.6",
    "psutil>=5.9",
    "safetensors>=0.4.3",
    "xxhash>=3.4",
    "click>=8.1",
    "rich>=13.7",
    "redis>=5.0",
    "hiredis>=2.3",
)
"""Requirements of every function: the core, and channels in a cache."""
TRAINING = ("torch>=2.4,<3", "pillow>=10", "pyarrow>=16", "cloudpickle>=3")
"""Requirements of a function that trains: the framework, and decoders of data flows."""
_UNNEEDED = (("testing",), ("dashboard",), ("partition", "report"))
"""Packages that functions do not import, also where they drive a run and write its report."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every file of this package that a function may need, by its name below `ephemeron/`."""
    root = Path(__file__).parents[1]
    left_out = {root.joinpath(*parts) for parts in _UNNEEDED}
    found: list[tuple[str, Path]] = []
    for folder, below, files in os.walk(root):
        here = Path(folder)
        below[:] = [name for name in below if name != "__pycache__" and here / name not in left_out]
        inside = here.relative_to(root).as_posix()
        found += [(name if here == root else f"{inside}/{name}", here / name) for name in files]
    yield from sorted(found, key=lambda entry: entry[0].split("/"))


@functools.cache
def digest() -> str:
    """Digest of the deployed code: client and function must be of the same release. Computed once per process, whose code stays."""
    hashed = xxhash.xxh3_64()
    for name, path in sources():
        hashed.update(name.encode() + b"\0")
        hashed.update(path.read_bytes())
    return str(hashed.hexdigest())
