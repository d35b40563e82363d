"""Files that a program writes for its user below `output_dir`.

They are part of a function's state, so that a replacement has them, and rank 0's are collected into the run's folder at its end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import overload

import numpy as np

from ephemeron.errors import JobError

PREFIX = "files/"
"""Of the names of arrays that hold files."""
MOST_BYTES = 64 << 20
"""Most bytes of all files of a function: they are in each of its checkpoints."""


class Outputs:
    """A folder that is there once it is asked for. A copy, or one that is unpickled, has a folder of its own."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def __reduce__(self) -> tuple[type[Outputs], tuple[()]]:
        return Outputs, ()

    @property
    def folder(self) -> Path:
        """The folder."""
        if self._made is None:
            self._made = tempfile.TemporaryDirectory(prefix="ephemeron-outputs-", ignore_cleanup_errors=True)
        return Path(self._made.name)

    def files(self) -> dict[str, np.ndarray]:
        """Content of each file, by `PREFIX` and its path in the folder. Links are not followed.

        Raises:
            JobError: they are too large.
        """
        paths = [] if self._made is None else sorted(p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())
        nbytes = sum(path.stat().st_size for path in paths)
        if nbytes > MOST_BYTES:
            raise JobError(
                f"the program has written {nbytes / 1e6:.1f} MB below output_dir, and at most {MOST_BYTES / 1e6:.1f} MB are collected",
                remedy="write less there, or put large files into storage of your own",
            )
        return {f"{PREFIX}{p.relative_to(self.folder).as_posix()}": np.frombuffer(p.read_bytes(), np.uint8) for p in paths}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Makes the folder what `files` has found. Files are written in place and folders stay: the program may have
        opened and made them."""
        held = {name: array for name, array in arrays.items() if name.startswith(PREFIX)}
        if self._made is not None:
            for path in sorted(self.folder.rglob("*"), reverse=True):  # what is in a folder before the folder
                wanted = f"{PREFIX}{path.relative_to(self.folder).as_posix()}" in held
                if path.is_dir() and not path.is_symlink():
                    if wanted:
                        shutil.rmtree(path)
                elif path.is_symlink() or not wanted:
                    path.unlink()
        if held:
            write_files(self.folder, held)


def outputs_of(holder: object) -> Outputs:
    """The files of an object, such as a task."""
    found: Outputs = holder.__dict__.setdefault("_outputs", Outputs())
    return found


class OutputDir:
    """Attribute of a class: the folder of each of its objects, unless that has an attribute of this name."""

    @overload
    def __get__(self, holder: None, owner: type) -> OutputDir: ...
    @overload
    def __get__(self, holder: object, owner: type) -> Path: ...
    def __get__(self, holder: object | None, owner: type) -> OutputDir | Path:
        return self if holder is None else outputs_of(holder).folder


def write_files(folder: Path, held: Mapping[str, np.ndarray]) -> None:
    """Writes files into a folder.

    Args:
        held: by `PREFIX` and path.

    Raises:
        JobError: a path leads out of the folder.
    """
    for name, array in held.items():
        path = (folder / name.removeprefix(PREFIX)).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise JobError(f"the program's file {name.removeprefix(PREFIX)} is not in output_dir")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(array.tobytes())
