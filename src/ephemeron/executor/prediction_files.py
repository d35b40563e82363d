"""Inputs and outputs of predictions as files: `.npz`, `.npy`, and JSON lines, a line per sample."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ephemeron.data.formats.lines import text_lines
from ephemeron.errors import JobError

Inputs: TypeAlias = Mapping[str, np.ndarray]
"""Arrays with one row per sample; the array `x` is the model's only argument, others are arguments by their names."""
Outputs: TypeAlias = dict[str, np.ndarray]

ONLY = "x"
IN_SUFFIXES, OUT_SUFFIXES = (".npz", ".npy", ".jsonl"), (".npz", ".npy", ".jsonl")


def check_inputs(inputs: Inputs) -> int:
    """Number of rows.

    Raises:
        JobError: there are none, arrays differ in them, or they hold something else than numbers.
    """
    for name, array in inputs.items():
        if not array.ndim:
            raise JobError(f"input {name} is a single value", remedy="give an array with a row for each sample")
        if array.dtype.kind not in "biufc":
            kind = "text" if array.dtype.kind in "SU" else f"of type {array.dtype}"
            raise JobError(f"input {name} is {kind}, and models take numbers", remedy="give an array such as float32")
    rows = {name: len(array) for name, array in inputs.items()}
    if not rows or not min(rows.values()):
        raise JobError("there are no inputs", remedy="give arrays with a row for each sample")
    if len(set(rows.values())) > 1:
        raise JobError(f"arrays of inputs differ in length: {', '.join(f'{n} has {k}' for n, k in rows.items())}")
    return next(iter(rows.values()))


def read_inputs(path: Path) -> Inputs:
    """Inputs from a file: `.npz` (the array `x`, or the only one, or arguments by name), `.npy`, or `.jsonl` (a line per sample).

    Raises:
        JobError: the file cannot be read, or holds something else.
    """
    if path.suffix not in IN_SUFFIXES:
        raise JobError(f"{path} is of no known kind", remedy=f"give a file *{', *'.join(IN_SUFFIXES)}")
    try:
        if path.suffix == ".jsonl":
            return _of_lines(path)
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {ONLY: content}
        with content:
            names = [ONLY] if ONLY in content.files else content.files
            found = {name: content[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise JobError(f"{path} cannot be read: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from None
    return {ONLY: next(iter(found.values()))} if len(found) == 1 else found


def _of_lines(path: Path) -> Inputs:
    """Arrays by name from objects with the same keys, or the array `x` from other values of one shape."""
    rows: list[tuple[int, Mapping[str, Any]]] = []
    named: bool | None = None
    for number, line in text_lines(path.read_bytes(), str(path)):
        try:
            value = json.loads(line)
        except ValueError as e:
            raise JobError(f"{path}, line {number} is no JSON: {e}", remedy="write one JSON value per line") from None
        if named not in (None, isinstance(value, dict)):
            raise JobError(f"{path}, line {number}: objects and other values are mixed")
        named = isinstance(value, dict)
        row = value if named else {ONLY: value}
        if rows and row.keys() != rows[0][1].keys():
            keys = ", ".join(map(repr, rows[0][1])) or "none"
            raise JobError(f"{path}, line {number} has the keys {', '.join(map(repr, row)) or 'none'}, line {rows[0][0]} has {keys}")
        rows.append((number, row))
    if not rows:
        raise JobError(f"{path} has no inputs", remedy="write a JSON value per line, for each sample")
    return {name: _column(path, name, [(number, row[name]) for number, row in rows]) for name in rows[0][1]}


def _column(path: Path, name: str, values: list[tuple[int, Any]]) -> np.ndarray:
    """Values of one shape, as float32 where one of them has a point.

    Raises:
        JobError: a line has another shape, or something else than numbers.
    """
    what = "" if name == ONLY else f", key {name!r}"
    first: tuple[int, tuple[int, ...]] | None = None
    for number, value in values:
        try:
            row = np.asarray(value)
        except (ValueError, OverflowError):
            row = np.asarray(None)
        if row.dtype.kind not in "biufU":
            raise JobError(
                f"{path}, line {number}{what}: {json.dumps(value)[:80]} is no number, and no list of lists of numbers of one length",
                remedy="encode text and fill in what is absent first",
            )
        if first is None:
            first = number, row.shape
        elif row.shape != first[1]:
            raise JobError(
                f"{path}, line {number}{what} has the shape {list(row.shape)}, line {first[0]} has {list(first[1])}",
                remedy="pad them to one length",
            )
    array = np.asarray([value for _, value in values])
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def write_outputs(path: Path, outputs: Outputs) -> None:
    """Writes outputs as `.npz`, as `.npy` (a single array), or as `.jsonl`, a line per sample. What is not finite is `NaN`,
    `Infinity` and `-Infinity` there, which Python's reader and `read_inputs` take."""
    single = next(iter(outputs.values())) if len(outputs) == 1 else None
    if path.suffix == ".npz":
        np.savez(path, **outputs)  # type: ignore[arg-type]
    elif path.suffix == ".npy":
        assert single is not None
        np.save(path, single)
    else:
        with path.open("w") as out:
            out.writelines(json.dumps(row) + "\n" for row in _rows(outputs, single))


def check_out(path: Path, outputs: Outputs | None = None) -> None:
    """Checks a file before anything is computed, and again with the outputs.

    Raises:
        JobError: no known kind, an absent folder, or a kind that holds one array for a model that has several outputs.
    """
    if path.suffix not in OUT_SUFFIXES:
        raise JobError(f"{path} is of no known kind", remedy=f"name a file *{', *'.join(OUT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise JobError(f"there is no folder {path.absolute().parent}")
    if path.suffix == ".npy" and outputs is not None and len(outputs) > 1:
        raise JobError(f"the model has outputs {', '.join(outputs)}, and .npy holds one array", remedy="name a file *.npz")
    for name, array in ({} if outputs is None or path.suffix != ".jsonl" else outputs).items():
        if array.dtype.kind == "c":
            raise JobError(f"output {name} of the model is {array.dtype}, which JSON has not", remedy="name a file *.npz")


def _rows(outputs: Outputs, single: np.ndarray | None) -> Iterator[Any]:
    if single is not None:
        yield from (row.tolist() for row in single)
        return
    for n in range(len(next(iter(outputs.values())))):
        yield {name: array[n].tolist() for name, array in outputs.items()}
