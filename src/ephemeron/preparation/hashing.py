"""Hashes of values: feature hashing, and the split of rows into training and test by hash.

A value's hash is XXH3 (64 bits) of its UTF-8 text, seeded by the hash of its column's name, which is seeded by the user's seed. It
depends on nothing else, so it is the same in every function, in every run, and at inference.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from ephemeron.data.tables import TableDataset
from ephemeron.data.tables.batches import beyond_float32
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError, NotRepresentable
from ephemeron.preparation.columns import Categories, ColumnData, Rows, SparseRows, from_table, length_of, taken
from ephemeron.preparation.occupancy import Occupancy
from ephemeron.preparation.transforms import Statistic, Transform, chosen, names_of, whole

LARGEST = 1 << 31


def column_seed(name: str, seed: int) -> int:
    """Seed of the hashes of a column's values."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed)


def text_hashes(texts: Sequence[str], seed: int) -> NDArray[np.uint64]:
    """Hashes of texts."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter(map(digest, map(str.encode, texts), itertools.repeat(seed)), np.uint64, len(texts))


class FeatureHasher(Transform):
    """Categories and numbers as one sparse vector: the hashing trick (Weinberger et al. 2009).

    A category adds 1 at the bucket of its column and text, a number adds itself at the bucket of its column's name. Absent values
    and zeros add nothing. What falls into one bucket of a row is summed. Numbers that float32 would make infinite, or 0, are refused.

    Args:
        columns: names; None: all numeric and categorical columns.
        n_features: buckets.
        seed: of the hashes.
        alternate_sign: let half of the categories add -1, so that collisions cancel on average.
        output: name of the sparse column; the columns that were hashed are left out.
    """

    step = "hash"
    kinds = ("numeric", "categorical")

    distinct_: int
    """Columns of numbers, and pairs of column and text, that were seen (`preparation.occupancy` states the error)."""
    occupied_: int
    """Buckets that at least one of them has."""
    exact_: bool
    """Whether `distinct_` is exact."""

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        *,
        n_features: int = 1 << 20,
        seed: int = 0,
        alternate_sign: bool = False,
        output: str = "features",
    ) -> None:
        if isinstance(columns, int):
            raise JobError(f"hash: columns = {columns!r} is a number", remedy=f"write FeatureHasher(n_features={columns!r})")
        super().__init__(columns)
        n_features, seed = whole(n_features, "hash: n_features"), whole(seed, "hash: seed")
        if not 1 <= n_features <= LARGEST:
            raise JobError(f"hash: n_features = {n_features} should be from 1 to {LARGEST}", remedy="the default is 1048576")
        if not 0 <= seed < 1 << 53:
            raise JobError(f"hash: seed = {seed} should be from 0 to 2**53 - 1")
        self.n_features, self.seed, self.alternate_sign, self.output = n_features, seed, bool(alternate_sign), output

    @property
    def collisions_(self) -> int:
        """Keys that share a bucket with an earlier one: `distinct_` less `occupied_`."""
        return self.distinct_ - self.occupied_

    def fitted(self) -> dict[str, Any]:
        return {"distinct_": self.distinct_, "occupied_": self.occupied_, "exact_": self.exact_}

    def restore(self, fitted: Mapping[str, Any]) -> None:
        self.distinct_, self.occupied_, self.exact_ = (fitted[name] for name in ("distinct_", "occupied_", "exact_"))

    def bind(self, schema: Sequence[Column]) -> None:
        super().bind(schema)
        left = {column.name for column in schema} - set(self.feature_names_in_)
        if self.output in left:
            raise JobError(f"hash: there is a column {self.output} already", remedy="give another output")

    def observed_columns(self) -> set[str]:
        kinds = {column.name: column.kind for column in self.schema_in_}
        return {name for name in self.feature_names_in_ if kinds[name] == "categorical"}

    def observe(self, rows: Rows) -> dict[str, Statistic]:
        hashes = [self._hashes(name, rows[name]) for name in self.feature_names_in_]
        return {self.output: Occupancy.of(np.concatenate(hashes), self.n_features)}

    def conclude(self, found: Mapping[str, Any]) -> None:
        seen: Occupancy = found[self.output]
        self.distinct_, self.occupied_, self.exact_ = seen.distinct, seen.occupied, seen.exact

    def schema_out(self) -> tuple[Column, ...]:
        hashed = set(self.feature_names_in_)
        made = Column(name=self.output, kind="sparse", dtype="float32", width=self.n_features)
        return (*(column for column in self.schema_in_ if column.name not in hashed), made)

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        count, names = length_of(rows), self.feature_names_in_
        buckets, values = np.empty((count, len(names)), np.int64), np.empty((count, len(names)))
        for n, name in enumerate(names):
            data, hashes = rows[name], self._hashes(name, rows[name])
            at = (hashes % np.uint64(self.n_features)).astype(np.int64)
            signs = np.where(hashes >> np.uint64(63), -1.0, 1.0) if self.alternate_sign else np.ones(len(hashes))
            if isinstance(data, Categories):  # absent: code -1, the last entry
                buckets[:, n] = np.append(at, 0)[data.codes]
                values[:, n] = np.append(signs, 0.0)[data.codes]
            else:
                numbers = np.asarray(data, np.float64)
                buckets[:, n] = at[0]
                values[:, n] = np.where(np.isnan(numbers), 0.0, numbers)
                self._check(name, numbers, beyond_float32(numbers))
        made = _sparse(buckets, values, self.n_features)
        if len(infinite := np.flatnonzero(np.isinf(made.values))):  # a sum of several columns
            at_row = np.searchsorted(made.indptr, infinite, side="right") - 1
            raise NotRepresentable(
                step=self.step,
                column=", ".join(names),
                rows=np.unique(at_row).tolist(),
                reason="a sum in a bucket is beyond float32",
                remedy="scale the columns first",
            )
        hashed = set(names)
        kept = {name: data for name, data in rows.items() if name not in hashed}
        return {**kept, self.output: made}

    def _check(self, name: str, numbers: NDArray[np.float64], beyond: NDArray[np.bool_]) -> None:
        if beyond.any():
            bad = np.flatnonzero(beyond)
            raise NotRepresentable(
                step=self.step,
                column=name,
                rows=bad.tolist(),
                reason=f"{float(numbers[bad[0]])!r} is beyond float32",
                remedy="scale the column first",
            )

    def _hashes(self, name: str, data: ColumnData) -> NDArray[np.uint64]:
        """Of all distinct texts of a column; of a numeric column: one, of its name."""
        texts = data.values if isinstance(data, Categories) else [""]
        return text_hashes(texts, column_seed(name, self.seed))


def _sparse(buckets: NDArray[np.int64], values: NDArray[np.float64], width: int) -> SparseRows:
    """Entries [rows, columns] as sparse rows with sorted indices; entries of one bucket are summed, zeros left out."""
    order = np.argsort(buckets, axis=1, kind="stable")
    buckets, values = np.take_along_axis(buckets, order, 1), np.take_along_axis(values, order, 1)
    there = values != 0
    row = np.broadcast_to(np.arange(len(buckets))[:, None], buckets.shape)[there]
    indices, values = buckets[there], values[there]
    if len(indices):
        first = np.concatenate([[True], (indices[1:] != indices[:-1]) | (row[1:] != row[:-1])])
        if not first.all():
            begins = np.flatnonzero(first)
            values, indices, row = np.add.reduceat(values, begins), indices[begins], row[begins]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(buckets)))]).astype(np.int64)
    with np.errstate(over="ignore"):
        return SparseRows(indptr, indices, values.astype(np.float32), width)


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
