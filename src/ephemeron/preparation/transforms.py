"""The port of transforms, scalers, quantile bins, feature hashing, and steps for absent values and categories.

A transform sees rows twice. `observe` takes statistics of some rows, which merge; `conclude` sets the fitted attributes from those of
all rows, and `apply` changes rows, from the fitted attributes alone. Fitted attributes have scikit-learn's names and end in `_`.
"""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import plain
from ephemeron.data.tables.arrow import beyond_float32
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError, NotRepresentable
from ephemeron.preparation.columns import Categories, ColumnData, Rows, SparseRows, chosen, length_of, names_of, whole
from ephemeron.preparation.hashing import column_seed, text_hashes
from ephemeron.preparation.statistics import Counts, Histogram, Moments, Occupancy, Statistic

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

    kinds: tuple[str, ...] = ("numeric",)
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
        """Columns whose values its statistics depend on, and which rows it keeps. Bound."""
        return set(self.feature_names_in_)

    def changed_columns(self) -> set[str]:
        """Columns that it changes or adds. Bound."""
        return set(self.feature_names_in_)

    def kept(self, rows: Rows) -> NDArray[np.bool_] | None:
        """Which rows are left, before they are changed; None: all."""
        return None


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


# -- steps for absent values and categories -----------------------------------------------------------------------
#
# The categories of a column are those of the training rows, in the order of their texts, whatever the partitioning. They are counted
# exactly, up to a limit that each step has: a pipeline holds every one of them.


Strategy = Literal["mean", "median", "most_frequent", "constant"]
HandleUnknown = Literal["ignore", "error"]

MISSING = "_missing"
"""End of the name of an indicator."""
_MOST_VALUES = 100_000
"""Distinct values of a column whose most frequent one is found."""


def _choice(given: Any, known: Any, what: str) -> Any:
    if given not in get_args(known):
        raise JobError(f"{what} = {given!r} is not known", remedy=f"use one of {', '.join(get_args(known))}")
    return given


def _texts_of(data: ColumnData, limit: int) -> Counts:
    """How many rows have each text, or each number by the shortest text that float64 reads back."""
    if isinstance(data, Categories):
        codes = data.codes[data.codes >= 0]
        return Counts.of(data.values, np.bincount(codes, minlength=len(data.values)), limit)
    values = np.asarray(data, np.float64)
    found, counts = np.unique(values[~np.isnan(values)] + 0.0, return_counts=True)  # so that -0.0 is 0.0
    if len(found) > limit:
        return Counts(limit, {}, exceeded=True)
    return Counts.of([repr(value) for value in found.tolist()], counts, limit)


def _is_absent(data: ColumnData) -> NDArray[np.bool_]:
    absent: NDArray[np.bool_] = data.codes < 0 if isinstance(data, Categories) else np.isnan(np.asarray(data, np.float64))
    return absent


class SimpleImputer(Transform):
    """A value in place of absent ones.

    Args:
        columns: names; None: all that the strategy can fill in.
        strategy: `mean` or `median` of numbers, which are those of the training rows (median: see `QuantileBinner`); `most_frequent`
            value of numbers or categories, the least one of several; or `constant`.
        fill_value: of `constant`: a number for numeric columns, or a text for categorical ones.
        indicator: add the column `NAME_missing` for each column: 1 where the value was absent, else 0.
    """

    step = "impute"

    statistics_: list[float | str]
    """Per column: what absent values become."""

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        *,
        strategy: Strategy = "mean",
        fill_value: float | str | None = None,
        indicator: bool = False,
    ) -> None:
        super().__init__(columns)
        self.strategy: Strategy = _choice(strategy, Strategy, "impute: strategy")
        if (self.strategy == "constant") != (fill_value is not None):
            what = "fill_value is missing" if fill_value is None else f"fill_value = {fill_value!r} is for strategy 'constant'"
            raise JobError(f"impute: {what}", remedy='write strategy = "constant" and fill_value, a number or a text')
        given: Any = fill_value
        is_number = isinstance(given, numbers.Real) and given is not True and given is not False
        if is_number and math.isfinite(float(given)):
            given = float(given)
        elif given is not None and not isinstance(given, str):
            raise JobError(f"impute: fill_value = {given!r} is neither a finite number nor a text")
        self.fill_value: float | str | None = given
        self.indicator = bool(indicator)
        if self.strategy == "most_frequent":
            self.kinds = ("numeric", "categorical")
        elif isinstance(given, str):
            self.kinds = ("categorical",)

    def bind(self, schema: Sequence[Column]) -> None:
        super().bind(schema)
        names = {column.name for column in schema}
        for name in self._indicators():
            if name in names:
                raise JobError(f"impute: there is a column {name} already", remedy="rename it, or leave indicator out")

    def _indicators(self) -> list[str]:
        return [name + MISSING for name in self.feature_names_in_] if self.indicator else []

    def changed_columns(self) -> set[str]:
        return {*self.feature_names_in_, *self._indicators()}

    def observe(self, rows: Rows) -> dict[str, Statistic]:
        if self.strategy == "most_frequent":
            return {name: _texts_of(rows[name], _MOST_VALUES) for name in self.feature_names_in_}
        if self.strategy == "constant":
            return {}
        taken = Moments if self.strategy == "mean" else Histogram
        return {name: taken.of(np.asarray(rows[name], np.float64)) for name in self.feature_names_in_}

    def conclude(self, found: Mapping[str, Any]) -> None:
        if self.fill_value is not None:
            self.statistics_ = [self.fill_value] * len(self.feature_names_in_)
            return
        kinds = {column.name: column.kind for column in self.schema_in_}
        self.statistics_ = [self._value(name, found[name], kinds[name]) for name in self.feature_names_in_]

    def _value(self, name: str, found: Any, kind: str) -> float | str:
        if isinstance(found, Counts):
            if found.exceeded:
                raise JobError(f"impute: column {name} has more than {found.limit:,} values", remedy="use another strategy for it")
            most = max(found.counts.values(), default=0)
            texts = [text for text, count in found.counts.items() if count == most]
            value = (min(texts) if kind == "categorical" else min(map(float, texts))) if texts else math.nan
        elif isinstance(found, Moments):
            if found.infinite:
                raise JobError(f"impute: column {name} has {found.infinite} infinite values")
            value = found.mean
        else:
            value = float(found.quantiles([0.5])[0])
        if value != value:
            raise JobError(
                f"impute: column {name} has no value in the training rows", remedy='set it to "ignore", or use strategy = "constant" for it'
            )
        return value

    def fitted(self) -> dict[str, Any]:
        return {"statistics_": list(self.statistics_)}

    def restore(self, fitted: Mapping[str, Any]) -> None:
        self.statistics_ = list(fitted["statistics_"])

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        out, added = dict(rows), dict[str, ColumnData]()
        for name, value in zip(self.feature_names_in_, self.statistics_, strict=True):
            data, absent = rows[name], _is_absent(rows[name])
            if self.indicator:
                added[name + MISSING] = absent.astype(np.float64)
            if isinstance(data, Categories):
                texts = list(data.values)
                if value not in texts:
                    texts.append(str(value))
                out[name] = Categories(np.where(absent, texts.index(str(value)), data.codes), texts)
            else:
                out[name] = np.where(absent, float(value), np.asarray(data, np.float64))
        return out | added

    def schema_out(self) -> tuple[Column, ...]:
        return (*self.schema_in_, *(Column(name=name, kind="numeric", dtype="float64") for name in self._indicators()))


class DropMissing(Transform):
    """Rows that lack a value are left out.

    Args:
        columns: names; None: all numeric and categorical columns.
    """

    step = "drop_missing"
    kinds = ("numeric", "categorical")

    n_dropped_: int
    """Training rows that were dropped."""

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        super().__init__(columns)

    def changed_columns(self) -> set[str]:
        return set()

    def kept(self, rows: Rows) -> NDArray[np.bool_]:
        absent = np.zeros(length_of(rows), bool)
        for name in self.feature_names_in_:
            absent |= _is_absent(rows[name])
        return ~absent

    def observe(self, rows: Rows) -> dict[str, Statistic]:
        kept = self.kept(rows)
        return {"rows": Counts.of(["kept", "dropped"], [int(kept.sum()), int((~kept).sum())], 2)}

    def conclude(self, found: Mapping[str, Any]) -> None:
        counts = found["rows"].counts
        self.n_dropped_ = counts.get("dropped", 0)
        if self.n_dropped_ and not counts.get("kept"):
            raise JobError(
                f"drop_missing: each of the {self.n_dropped_} training rows lacks a value of {', '.join(self.feature_names_in_)}",
                remedy="name the columns that rows must have, or impute some first",
            )

    def fitted(self) -> dict[str, Any]:
        return {"n_dropped_": self.n_dropped_}

    def restore(self, fitted: Mapping[str, Any]) -> None:
        self.n_dropped_ = fitted["n_dropped_"]

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        return dict(rows)

    def schema_out(self) -> tuple[Column, ...]:
        return self.schema_in_


class _CategoryStep(Transform):
    """A step that replaces categories, each by a place among those of the training rows."""

    kinds = ("categorical",)
    most: int
    """Categories that a column may have, at most."""

    categories_: list[list[str]]
    """Per column, ascending."""

    def __init__(self, columns: Sequence[str] | None, handle_unknown: HandleUnknown, min_frequency: int, limit: int) -> None:
        super().__init__(columns)
        self.handle_unknown: HandleUnknown = _choice(handle_unknown, HandleUnknown, f"{self.step}: handle_unknown")
        self.min_frequency, self.limit = (whole(min_frequency, f"{self.step}: min_frequency"), whole(limit, f"{self.step}: limit"))
        if self.min_frequency < 1:
            raise JobError(f"{self.step}: min_frequency = {min_frequency} is below 1")
        if not 1 <= self.limit <= self.most:
            raise JobError(f"{self.step}: limit = {limit} should be from 1 to {self.most}")

    def observe(self, rows: Rows) -> dict[str, Statistic]:
        return {name: _texts_of(rows[name], self.limit) for name in self.feature_names_in_}

    def conclude(self, found: Mapping[str, Any]) -> None:
        made = []
        for name in self.feature_names_in_:
            seen: Counts = found[name]
            if seen.exceeded:
                raise JobError(
                    f"{self.step}: column {name} has more than {self.limit:,} categories",
                    remedy=f"raise limit, hash the column{', use ordinal' if self.step == 'one_hot' else ''}, or leave it out",
                )
            kept = sorted(text for text, count in seen.counts.items() if count >= self.min_frequency)
            if not kept:
                rare = f" with {self.min_frequency} rows" if seen.counts else ""
                raise JobError(f"{self.step}: column {name} has no category{rare} in the training rows", remedy="leave it out")
            made.append(kept)
        self.categories_ = made

    def fitted(self) -> dict[str, Any]:
        return {"categories_": [list(one) for one in self.categories_]}

    def restore(self, fitted: Mapping[str, Any]) -> None:
        self.categories_ = [list(one) for one in fitted["categories_"]]

    def apply(self, rows: Rows) -> dict[str, ColumnData]:
        out = dict(rows)
        for name, categories in zip(self.feature_names_in_, self.categories_, strict=True):
            data = rows[name]
            assert isinstance(data, Categories)
            place_of = {text: n for n, text in enumerate(categories)}
            places = np.array([*(place_of.get(text, -1) for text in data.values), -1], np.int64)[data.codes]
            if self.handle_unknown == "error":
                unknown = np.flatnonzero((places < 0) & (data.codes >= 0))
                if len(unknown):
                    raise NotRepresentable(
                        step=self.step,
                        column=name,
                        rows=unknown.tolist(),
                        reason=f"{data.values[data.codes[unknown[0]]]!r} is no category of the training rows",
                        remedy='mend it, or set handle_unknown = "ignore"',
                    )
            out[name] = self._encoded(places, len(categories))
        return out

    @abstractmethod
    def _encoded(self, places: NDArray[np.int64], size: int) -> NDArray[Any]:
        """What rows become by the places of their categories; -1: absent or not known."""

    @abstractmethod
    def _column(self, name: str, size: int) -> Column:
        """What the column of so many categories becomes."""

    def schema_out(self) -> tuple[Column, ...]:
        found = getattr(self, "categories_", [[""]] * len(self.feature_names_in_))  # widths follow from the fit
        made = {name: self._column(name, len(one)) for name, one in zip(self.feature_names_in_, found, strict=True)}
        return tuple(made.get(column.name, column) for column in self.schema_in_)


class OneHotEncoder(_CategoryStep):
    """A vector for each category column: 1 at the place of the row's category, else 0. Absent and unknown ones are zeros throughout.

    Args:
        columns: names; None: all categorical columns.
        handle_unknown: of rows whose category no training row has: `ignore`, or `error`, which refuses them as invalid.
        min_frequency: training rows that a category needs; others count as unknown.
        limit: most categories of a column.
    """

    step = "one_hot"
    most = 10_000

    def __init__(
        self, columns: Sequence[str] | None = None, *, handle_unknown: HandleUnknown = "ignore", min_frequency: int = 1, limit: int = 1000
    ) -> None:
        super().__init__(columns, handle_unknown, min_frequency, limit)

    def _encoded(self, places: NDArray[np.int64], size: int) -> NDArray[Any]:
        made = np.zeros((len(places), size), np.float32)
        known = np.flatnonzero(places >= 0)
        made[known, places[known]] = 1
        return made

    def _column(self, name: str, size: int) -> Column:
        return Column(name=name, kind="vector", dtype="float32", width=size)


class OrdinalEncoder(_CategoryStep):
    """A whole number for each category, for embeddings: 1 for the first of the column, 0 for absent and unknown ones.

    `Pipeline.sizes_` has the numbers of codes, 0 included.

    Args:
        columns: names; None: all categorical columns.
        handle_unknown: see `OneHotEncoder`.
        min_frequency: training rows that a category needs; others count as unknown, so that their code is trained.
        limit: most categories of a column.
    """

    step = "ordinal"
    most = 1 << 20

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        *,
        handle_unknown: HandleUnknown = "ignore",
        min_frequency: int = 1,
        limit: int = 100_000,
    ) -> None:
        super().__init__(columns, handle_unknown, min_frequency, limit)

    def _encoded(self, places: NDArray[np.int64], size: int) -> NDArray[Any]:
        return places + 1

    def _column(self, name: str, size: int) -> Column:
        return Column(name=name, kind="ordinal", dtype="int32", width=size + 1)


# -- arithmetic of columns ----------------------------------------------------------------------------------------


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
