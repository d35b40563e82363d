"""The port of transforms, scalers, quantile bins, and feature hashing.

A transform sees rows twice. `observe` takes statistics of some rows, which merge; `conclude` sets the fitted attributes from those of
all rows, and `apply` changes rows, from the fitted attributes alone. Fitted attributes have scikit-learn's names and end in `_`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import plain
from ephemeron.data.tables.arrow import beyond_float32
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError, NotRepresentable
from ephemeron.preparation.columns import Categories, ColumnData, Rows, SparseRows, chosen, length_of, names_of, whole
from ephemeron.preparation.hashing import column_seed, text_hashes
from ephemeron.preparation.statistics import Histogram, Moments, Occupancy, Statistic

if TYPE_CHECKING:
    from typing import Self

    from ephemeron.preparation.stages import Runner

_LEAST = float(np.finfo(np.float64).tiny)
"""The least number that has all bits of float64."""
LARGEST = 1 << 31
"""Buckets of a hashed vector."""


class Transform(ABC):
    """One step of a pipeline.

    Args:
        columns: names; None: all that it can change.
    """

    step: ClassVar[str]
    """Name in recipes and pipeline files."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self.columns = None if columns is None else names_of(columns, "columns")
        self.feature_names_in_: list[str] = []
        """Columns that it changes, once it is bound to a schema."""

    def fit(self, data: Any, *, pool: Runner | None = None) -> Self:
        """Sets the fitted attributes; see `Pipeline.fit`."""
        from ephemeron.preparation.pipeline import Pipeline

        Pipeline([self]).fit(data, pool=pool)
        return self

    def transform(self, data: Any, **options: Any) -> Any:
        """Changes rows by the fitted attributes; see `Pipeline.transform`."""
        from ephemeron.preparation.pipeline import Pipeline

        return Pipeline.of_fitted([self]).transform(data, **options)

    def fit_transform(self, data: Any, **options: Any) -> Any:
        """`fit`, then `transform`."""
        return self.fit(data, pool=options.get("pool")).transform(data, **options)

    def save(self, path: str) -> None:
        """Writes it as a pipeline of one step."""
        from ephemeron.preparation.pipeline import Pipeline

        Pipeline.of_fitted([self]).save(path)

    def bind(self, schema: Sequence[Column]) -> None:
        """Chooses the columns of a schema.

        Raises:
            JobError: a column is unknown, or of a kind that this step cannot change.
        """
        self.schema_in_ = tuple(schema)
        self.feature_names_in_ = chosen(schema, self.columns, self.kinds, step=self.step)

    kinds: ClassVar[tuple[str, ...]] = ("numeric",)
    """Kinds of columns that it can change."""

    def options(self) -> dict[str, Any]:
        """Arguments from which an equal transform is made, as JSON: attributes with the names of the constructor's arguments."""
        return {name: plain(getattr(self, name)) for name in inspect.signature(type(self)).parameters}

    @abstractmethod
    def fitted(self) -> dict[str, Any]:
        """Fitted attributes, as JSON."""

    @abstractmethod
    def restore(self, fitted: Mapping[str, Any]) -> None:
        """The inverse of `fitted`."""

    @abstractmethod
    def observe(self, rows: Rows) -> dict[str, Statistic]:
        """Statistics of rows by name. Bound."""

    @abstractmethod
    def conclude(self, found: Mapping[str, Any]) -> None:
        """Sets the fitted attributes from the statistics of all rows. Bound."""

    @abstractmethod
    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        """Changed rows. Fitted."""

    @abstractmethod
    def schema_out(self) -> tuple[Column, ...]:
        """Columns of changed rows. Bound."""

    def observed_columns(self) -> set[str]:
        """Columns whose values its statistics depend on. Bound."""
        return set(self.feature_names_in_)


class _NumericStep(Transform):
    """A step on numeric columns by their moments."""

    n_samples_seen_: NDArray[np.int64]
    """Values per column that are there."""

    def observe(self, rows: Rows) -> dict[str, Statistic]:
        return {name: Moments.of(_numbers(rows, name)) for name in self.feature_names_in_}

    def schema_out(self) -> tuple[Column, ...]:
        changed = set(self.feature_names_in_)
        return tuple(Column(name=c.name, kind="numeric", dtype="float64") if c.name in changed else c for c in self.schema_in_)

    def _held(self, name: str, values: NDArray[np.float64], made: NDArray[np.float64]) -> NDArray[np.float64]:
        """What was made of a column; refuses what became infinite."""
        beyond = np.flatnonzero(np.isinf(made) & np.isfinite(values))
        if len(beyond):
            reason = f"{float(values[beyond[0]])!r} becomes infinite"
            raise NotRepresentable(step=self.step, column=name, rows=beyond.tolist(), reason=reason)
        return made

    def _moments(self, found: Mapping[str, Any]) -> list[Moments]:
        moments = [found[name] for name in self.feature_names_in_]
        for name, one in zip(self.feature_names_in_, moments, strict=True):
            if one.infinite:
                raise JobError(f"{self.step}: column {name} has {one.infinite} infinite values")
        self.n_samples_seen_ = np.array([one.count for one in moments], np.int64)
        return moments


class StandardScaler(_NumericStep):
    """(x - mean) / standard deviation, of the population. Columns of one value are only centred. Absent values stay absent.

    A column whose deviation is not 0 and below 2.2e-308 is refused, since float64 does not hold its mean well enough; so is a value that
    would become infinite.

    Args:
        columns: names; None: all numeric columns.
        with_mean: subtract the mean.
        with_std: divide by the standard deviation.
    """

    step = "standardise"

    mean_: NDArray[np.float64]
    mean_rest_: NDArray[np.float64]
    """What `mean_` lacks of the exact mean, for columns whose values differ by less than its rounding."""
    var_: NDArray[np.float64]
    """NaN where it is beyond float64; `scale_`, its root, is not."""
    scale_: NDArray[np.float64]

    _FITTED: ClassVar = ("mean_", "mean_rest_", "var_", "scale_")

    def __init__(self, columns: Sequence[str] | None = None, *, with_mean: bool = True, with_std: bool = True) -> None:
        super().__init__(columns)
        self.with_mean, self.with_std = bool(with_mean), bool(with_std)

    def conclude(self, found: Mapping[str, Any]) -> None:
        moments = self._moments(found)
        self.mean_ = np.array([one.mean for one in moments])
        self.mean_rest_ = np.array([one.mean_rest for one in moments])
        deviations = [one.deviation for one in moments]
        for name, deviation, one in zip(self.feature_names_in_, deviations, moments, strict=True):
            if self.with_std and deviation < _LEAST and one.minimum < one.maximum:
                raise JobError(
                    f"standardise: column {name} has the standard deviation {deviation:g}, which float64 does not hold well enough",
                    remedy="multiply the column by a constant first",
                )
        self.scale_ = np.array([1.0 if deviation == 0 else deviation for deviation in deviations])
        held = [_LEAST <= one.variance < np.inf or deviation == 0 for one, deviation in zip(moments, deviations, strict=True)]
        self.var_ = np.array([one.variance if fits else np.nan for one, fits in zip(moments, held, strict=True)])

    def fitted(self) -> dict[str, Any]:
        return {name: _listed(getattr(self, name)) for name in self._FITTED} | {"n_samples_seen_": self.n_samples_seen_.tolist()}

    def restore(self, fitted: Mapping[str, Any]) -> None:
        for name in self._FITTED:
            setattr(self, name, _floats(fitted[name]))
        self.n_samples_seen_ = np.array(fitted["n_samples_seen_"], np.int64)

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        out = dict(rows)
        for n, name in enumerate(self.feature_names_in_):
            values = _numbers(rows, name)
            mean, rest = (self.mean_[n], self.mean_rest_[n]) if self.with_mean else (0.0, 0.0)
            out[name] = self._held(name, values, _scaled(values, mean, self.scale_[n] if self.with_std else 1.0, rest))
        return out


class MinMaxScaler(_NumericStep):
    """Least value to the lower end of a range, greatest to the upper one. Absent values stay absent.

    Args:
        columns: names; None: all numeric columns.
        feature_range: of the result.
        clip: bring values that were not seen into the range.
    """

    step = "min_max"

    data_min_: NDArray[np.float64]
    data_max_: NDArray[np.float64]
    data_range_: NDArray[np.float64]
    """Infinite where it is beyond float64; `scale_` and `min_` are then no numbers, or 0, and results are right all the same."""
    scale_: NDArray[np.float64]
    min_: NDArray[np.float64]

    def __init__(
        self, columns: Sequence[str] | None = None, *, feature_range: tuple[float, float] = (0.0, 1.0), clip: bool = False
    ) -> None:
        super().__init__(columns)
        low, high = feature_range
        if not low < high:
            raise JobError(f"min_max: feature_range = {list(feature_range)} is empty", remedy="write the lower end first")
        if not np.isfinite(float(high) - float(low)):
            raise JobError(f"min_max: feature_range = {list(feature_range)} is wider than float64")
        self.feature_range, self.clip = (float(low), float(high)), bool(clip)

    def conclude(self, found: Mapping[str, Any]) -> None:
        moments = self._moments(found)
        self._from(
            np.array([one.minimum if one.count else np.nan for one in moments]),
            np.array([one.maximum if one.count else np.nan for one in moments]),
        )

    def _from(self, least: NDArray[np.float64], most: NDArray[np.float64]) -> None:
        low, high = self.feature_range
        self.data_min_, self.data_max_ = least, most
        with np.errstate(over="ignore", invalid="ignore"):
            self.data_range_ = most - least
            self.scale_ = (high - low) / np.where(self.data_range_ == 0, 1.0, self.data_range_)
            self.min_ = low - least * self.scale_

    def fitted(self) -> dict[str, Any]:
        return {
            "data_min_": _listed(self.data_min_),
            "data_max_": _listed(self.data_max_),
            "n_samples_seen_": self.n_samples_seen_.tolist(),
        }

    def restore(self, fitted: Mapping[str, Any]) -> None:
        self._from(_floats(fitted["data_min_"]), _floats(fitted["data_max_"]))
        self.n_samples_seen_ = np.array(fitted["n_samples_seen_"], np.int64)

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        out, (low, high) = dict(rows), self.feature_range
        for n, name in enumerate(self.feature_names_in_):
            values = _numbers(rows, name)
            made = low + (high - low) * self._shares(values, n)
            out[name] = np.clip(made, low, high) if self.clip else self._held(name, values, made)
        return out

    def _shares(self, values: NDArray[np.float64], n: int) -> NDArray[np.float64]:
        """How far between the least value and the greatest one."""
        least, most = self.data_min_[n], self.data_max_[n]
        if np.isinf(self.data_range_[n]):
            return _scaled(values / 2, least / 2, most / 2 - least / 2)
        return _scaled(values, least, 1.0 if most == least else most - least)


class QuantileBinner(Transform):
    """Numbers as categories: into which of `n_bins` ranges with equal numbers of rows a value belongs. Absent values stay absent.

    Edges are exact for up to 8,192 distinct values of a column; beyond that their rank is wrong by at most `rank_error_`
    (`preparation.statistics`). Equal edges are one, so a column may have fewer bins.

    Args:
        columns: names; None: all numeric columns.
        n_bins: at least 2.
    """

    step = "quantile_bins"

    bin_edges_: list[NDArray[np.float64]]
    """Per column, ascending, with both ends."""
    rank_error_: NDArray[np.float64]
    """Per column: bound of the error of an edge, as a share of the rows."""

    def __init__(self, columns: Sequence[str] | None = None, *, n_bins: int = 10) -> None:
        super().__init__(columns)
        self.n_bins = whole(n_bins, "quantile_bins: n_bins")
        if self.n_bins < 2:
            raise JobError(f"quantile_bins: n_bins = {n_bins} is below 2")

    @property
    def n_bins_(self) -> NDArray[np.int64]:
        """Bins per column."""
        return np.array([max(1, len(edges) - 1) for edges in self.bin_edges_], np.int64)

    def observe(self, rows: Rows) -> dict[str, Statistic]:
        return {name: Histogram.of(_numbers(rows, name)) for name in self.feature_names_in_}

    def conclude(self, found: Mapping[str, Any]) -> None:
        shares = [float(share) for share in np.linspace(0, 1, self.n_bins + 1)]
        histograms = [found[name] for name in self.feature_names_in_]
        self.bin_edges_ = [np.unique(one.quantiles(shares)) for one in histograms]
        self.rank_error_ = np.array([one.largest_share for one in histograms])

    def fitted(self) -> dict[str, Any]:
        return {"bin_edges_": [_listed(edges) for edges in self.bin_edges_], "rank_error_": _listed(self.rank_error_)}

    def restore(self, fitted: Mapping[str, Any]) -> None:
        self.bin_edges_ = [_floats(edges) for edges in fitted["bin_edges_"]]
        self.rank_error_ = _floats(fitted["rank_error_"])

    def schema_out(self) -> tuple[Column, ...]:
        changed = set(self.feature_names_in_)
        return tuple(Column(name=c.name, kind="categorical", dtype="string") if c.name in changed else c for c in self.schema_in_)

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        out = dict(rows)
        for name, edges in zip(self.feature_names_in_, self.bin_edges_, strict=True):
            values = _numbers(rows, name)
            codes = np.searchsorted(edges[1:-1], values, side="right").astype(np.int64)
            codes[np.isnan(values)] = -1
            out[name] = Categories(codes, [str(n) for n in range(max(1, len(edges) - 1))])
        return out


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
    """Columns of numbers, and pairs of column and text, that were seen (`preparation.statistics` states the error)."""
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


def _scaled(values: NDArray[np.float64], centre: float, scale: float, rest: float = 0.0) -> NDArray[np.float64]:
    """(values - centre - rest) / scale, also where the difference alone is beyond float64."""
    with np.errstate(over="ignore", under="ignore"):
        differences = values - centre
        made: NDArray[np.float64] = (differences - rest) / scale
        beyond = np.isinf(differences) & np.isfinite(values)
        made[beyond] = (values[beyond] / 2 - centre / 2) / (scale / 2)
    return made


def _numbers(rows: Rows, name: str) -> NDArray[np.float64]:
    return np.asarray(rows[name], np.float64)


def _listed(values: NDArray[np.float64]) -> list[float | None]:
    """Numbers as JSON, which reads them back unchanged; NaN as null."""
    return [None if np.isnan(value) else float(value) for value in values]


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


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
