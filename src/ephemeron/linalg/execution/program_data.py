"""What functions need to compute any task of a program: its text, sizes, and where the tiles of its matrices are. Plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.config.typed import Typed, build, plain
from ephemeron.linalg.matrices.stored import StoredMatrix, TileFamily, Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramData(Typed):
    """A program that is to run. It is signed, for it names the code of kernels."""

    text: str
    """Of the program."""
    kernels: Mapping[str, str]
    """By name: reference of the code (`shipped_code.CodeLoader`)."""
    sizes: Mapping[str, int]
    """Numbers of tiles."""
    matrices: Mapping[str, StoredMatrix]
    """Inputs and outputs by the program's names."""
    families: Mapping[str, TileFamily]
    """Inputs and outputs whose tiles are no parts of one matrix, such as the reflectors of a QR factorisation."""
    temporaries: str
    """Prefix of the tiles of temporary matrices, below the store of the outputs."""
    store: str
    """Address of that store."""
    tries: int = 3
    """Of each task."""
    resumes: bool = False
    """Whether tiles of an earlier run may be there."""
    checked: tuple[str, ...] = ()
    """Inputs in which a value that is NaN or infinite is refused."""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(plain(self), separators=(",", ":"), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> ProgramData:
        """Reverse of `to_bytes`."""
        return build(ProgramData, json.loads(data), where="program")


def run_name(
    text: str,
    sizes: Mapping[str, int],
    inputs: Mapping[str, Tiles],
    *,
    kernels: Mapping[str, str] | None = None,
    checked: Sequence[str] = (),
) -> str:
    """Name of what a program makes of some inputs: the same for the same program and values, so that a run can be resumed.

    Args:
        text: of the program.
        sizes: numbers of tiles.
        inputs: by name. A generation says which values are stored under the name of a matrix.
        kernels: digests of those that may have changed since an earlier run, by name.
        checked: inputs in which all values are finite, or nothing is made.
    """
    parts = {"text": text, "sizes": dict(sizes), "inputs": {name: plain(each) for name, each in inputs.items()}}
    parts |= {"kernels": dict(kernels or {}), "checked": sorted(checked)}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
