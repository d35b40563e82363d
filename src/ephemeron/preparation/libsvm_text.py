"""Rows of LIBSVM text, `LABEL INDEX:VALUE …`, as arrays: all numbers at once, and line by line only where one is invalid."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables.arrow import INDICES, VALUES, pyarrow
from ephemeron.data.tables.batches import beyond_float32
from ephemeron.preparation.layout import LabelKind, Parsed, Reject
from ephemeron.preparation.values import NUMBER

FEATURES, LABEL = "features", "label"
LARGEST_WIDTH = 1 << 31
_COMMENT = re.compile(rb"#[^\n]*")
_ZERO = re.compile(rb"[^:]*:[+-]?[0.]+(?![1-9.0])")
"""From the beginning of an entry on: its value is 0."""


class LibsvmParser:
    """Parses whole lines.

    Args:
        label_kind: which labels are allowed; binary ones may be -1 and 1, too.
        zero_based: whether indices begin at 0.
        n_features: indices are below it; None: any.
    """

    def __init__(self, label_kind: LabelKind, *, zero_based: bool = False, n_features: int | None = None) -> None:
        self._kind: LabelKind = label_kind
        self._first, self._width = 0 if zero_based else 1, n_features or LARGEST_WIDTH

    def parse(self, text: bytes) -> Parsed:
        """Valid rows and invalid ones. Blank lines and comments are no rows."""
        if b"#" in text:
            text = _COMMENT.sub(b"", text)
        found = self._read(text)
        if found is not None:
            return Parsed(_table(*found), [], _width(found[2]))
        lines = text.split(b"\n")
        reasons = {n: self._reason(line) for n, line in enumerate(lines) if line.strip()}
        rejects = [Reject(n, *reason, lines[n].decode(errors="replace")) for n, reason in reasons.items() if reason]
        good = self._read(b"\n".join(lines[n] for n, reason in reasons.items() if not reason))
        assert good is not None, "valid line by line, and not together"
        return Parsed(_table(*good), rejects, _width(good[2]))

    def _read(self, text: bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]] | None:
        """Labels, offsets, indices and values; None: something is invalid."""
        empty = np.empty(0)
        if not text.strip():
            return empty, np.zeros(1, np.int64), empty.astype(np.int64), empty
        data = np.frombuffer(text, np.uint8)
        space = (data == 32) | ((data >= 9) & (data <= 13))
        begins = ~space & np.concatenate([[True], space[:-1]])
        words = np.cumsum(begins)
        colons = np.flatnonzero(data == 58)
        breaks = np.flatnonzero(data == 10)
        edges = np.concatenate([[0], words[breaks], words[-1:]])
        per_line = np.diff(edges)
        rows = edges[:-1][per_line > 0]  # number of the first word of each row
        counts = per_line[per_line > 0] - 1
        of_word = np.bincount(words[colons] - 1, minlength=int(words[-1]))
        expected = np.ones(int(words[-1]), np.int64)
        expected[rows] = 0
        if not np.array_equal(of_word, expected):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # older NumPy warns where others raise
            try:
                numbers = np.fromstring(text.replace(b":", b" ").decode("latin-1"), np.float64, sep=" ")
            except (ValueError, DeprecationWarning):
                return None
        if len(numbers) != len(rows) + 2 * int(counts.sum()):
            return None
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        at = np.arange(len(rows)) + 2 * indptr[:-1]
        labels, pairs = numbers[at], np.delete(numbers, at).reshape(-1, 2)
        indices = pairs[:, 0] - self._first
        whole = np.array_equal(indices, np.floor(indices)) and bool(np.all((indices >= 0) & (indices < self._width)))
        rising = np.diff(indices) > 0
        rising[indptr[1:-1][(indptr[1:-1] > 0) & (indptr[1:-1] < len(indices))] - 1] = True
        labels = self._labels(labels)
        if not (whole and rising.all() and np.isfinite(labels).all()) or beyond_float32(pairs[:, 1]).any():
            return None
        zeros = np.flatnonzero(pairs[:, 1] == 0)
        if len(zeros):  # of which some may be written as numbers that float64 makes 0
            of_entry = np.flatnonzero(begins)[np.delete(np.arange(len(expected)), rows)]
            if any(not _ZERO.match(text, at) for at in of_entry[zeros].tolist()):
                return None
        return labels, indptr, indices.astype(np.int64), pairs[:, 1]

    def _labels(self, labels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Labels as they are stored; NaN: not allowed."""
        if self._kind == "binary":
            return np.where(labels == -1, 0.0, np.where((labels == 0) | (labels == 1), labels, np.nan))
        if self._kind == "class":
            return np.where((labels >= 0) & (labels == np.floor(labels)) & (labels < 2**31), labels, np.nan)
        return labels

    def _reason(self, line: bytes) -> tuple[str, str] | None:
        """Column and reason of an invalid line."""
        label, *entries = (word.decode(errors="replace") for word in line.split())  # only ASCII's spaces part words
        number = _number(label)
        if number is None:
            return LABEL, f"{label!r} is not a number"
        if not np.isfinite(self._labels(np.array([number])))[0]:
            allowed = {"binary": "no binary label: 0 or 1, or -1 or 1", "class": "no class: a whole number from 0"}
            return LABEL, f"{label} is {allowed.get(self._kind, 'infinite')}"
        before = self._first - 1.0
        for entry in entries:
            index, colon, value = entry.partition(":")
            at, number = _number(index), _number(value)
            if not colon or at is None or not math.isfinite(at) or at != math.floor(at):
                return FEATURES, f"{entry!r} is no INDEX:VALUE"
            if number is None:
                return FEATURES, f"{value!r} is not a number"
            if beyond_float32(np.array([number]))[0] or (number == 0 and not _ZERO.match(f":{value}".encode())):
                return FEATURES, f"{value} is beyond float32"
            if at < self._first:
                return FEATURES, f"index {index} is below {self._first}"
            if at - self._first >= self._width:
                return FEATURES, f"index {index} is above {self._width - 1 + self._first}, the last of n_features"
            if at <= before:
                return FEATURES, f"index {index} comes after {before:g}: indices should rise"
            before = at
        return None


def _number(text: str) -> float | None:
    return float(text) if NUMBER.fullmatch(text) else None


def _width(indices: NDArray[np.int64]) -> int:
    return int(indices.max()) + 1 if len(indices) else 1


def _table(labels: NDArray[Any], indptr: NDArray[Any], indices: NDArray[Any], values: NDArray[Any]) -> Any:
    pa = pyarrow()
    offsets = pa.array(indptr.astype(np.int32))
    return pa.table(
        {
            LABEL: labels,
            FEATURES + INDICES: pa.ListArray.from_arrays(offsets, pa.array(indices)),
            FEATURES + VALUES: pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.float32))),
        }
    )
