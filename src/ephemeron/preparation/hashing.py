"""Hashes of values, for feature hashing and for the split of rows into training and test by hash.

A value's hash is XXH3 (64 bits) of its UTF-8 text, seeded by the hash of its column's name, which is seeded by the user's seed. It
depends on nothing else, so it is the same in every function, in every run, and at inference.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from ephemeron.data.tables import TableDataset
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.columns import Categories, ColumnData, Rows, SparseRows, chosen, from_table, length_of, names_of, taken, whole


def column_seed(name: str, seed: int) -> int:
    """Seed of the hashes of a column's values."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed)


def text_hashes(texts: Sequence[str], seed: int) -> NDArray[np.uint64]:
    """Hashes of texts."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter(map(digest, map(str.encode, texts), itertools.repeat(seed)), np.uint64, len(texts))


class HashSplit:
    """Rows for training and for testing, by the hash of their key: a row's side depends on its key, fraction and seed alone.

    Args:
        test_fraction: expected share of test rows, between 0 and 1.
        key: columns whose values are the key; None: all but the label. Rows with equal keys are on one side.
        seed: of the hashes.
    """

    def __init__(self, test_fraction: float = 0.2, *, key: Sequence[str] | None = None, seed: int = 0) -> None:
        if not 0 < test_fraction < 1:
            raise JobError(f"split: test_fraction = {test_fraction} should be between 0 and 1")
        self.test_fraction, self.seed = float(test_fraction), whole(seed, "split: seed")
        self.key = None if key is None else names_of(key, "split: key")

    def names(self, schema: Sequence[Column]) -> list[str]:
        """Columns of the key.

        Raises:
            JobError: one is unknown.
        """
        return chosen(schema, self.key, ("numeric", "categorical", "sparse"), step="split")

    def document(self) -> dict[str, Any]:
        """Its arguments, as JSON."""
        return {"test_fraction": self.test_fraction, "key": self.key, "seed": self.seed}

    def check(self, dataset: TableDataset) -> None:
        """Refuses a dataset of which no row is for training. Reads partitions up to the first such row: one, as a rule.

        Raises:
            JobError: there is none, or a column of the key is unknown.
        """
        names = self.names(dataset.schema)
        for table in dataset.tables():
            if not self.is_test(from_table(table, dataset.schema), names).all():
                return
        raise JobError(
            f"split: all {len(dataset)} rows are for testing, and none for training, by {', '.join(names)}",
            remedy="lower test_fraction, or give another seed or key",
        )

    def side(self, rows: Rows, schema: Sequence[Column], side: Literal["train", "test"]) -> dict[str, ColumnData]:
        """The rows of one side."""
        test = self.is_test(rows, self.names(schema))
        return taken(rows, test if side == "test" else ~test)

    def is_test(self, rows: Rows, names: Sequence[str]) -> NDArray[np.bool_]:
        """Whether each row is for testing.

        Args:
            rows: to divide.
            names: columns of the key.
        """
        return row_hashes(rows, names, self.seed) < np.uint64(int(self.test_fraction * 2.0**64))


def row_hashes(rows: Rows, names: Sequence[str], seed: int) -> NDArray[np.uint64]:
    """A hash of each row's values in some columns."""
    found = np.zeros(length_of(rows), np.uint64)
    for name in names:
        found = _mixed(found ^ _value_hashes(rows[name], column_seed(name, seed)))
    return found


def _value_hashes(data: ColumnData, seed: int) -> NDArray[np.uint64]:
    if isinstance(data, Categories):
        return np.append(text_hashes(data.values, seed), np.uint64(seed))[data.codes].astype(np.uint64)
    if isinstance(data, SparseRows):
        bits = (data.values + np.float32(0)).view(np.uint32).astype(np.uint64)
        each = _mixed(_mixed(data.indices.astype(np.uint64) ^ np.uint64(seed)) ^ bits)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)])
        of_rows: NDArray[np.uint64] = sums[data.indptr[1:]] - sums[data.indptr[:-1]]  # modulo 2**64
        return of_rows
    values = np.asarray(data, np.float64) + 0.0
    values = np.where(np.isnan(values), np.nan, values)  # one NaN
    return _mixed(values.view(np.uint64) ^ np.uint64(seed))


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): each bit of the result depends on all bits."""
    z = hashes + np.uint64(0x9E37_79B9_7F4A_7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
