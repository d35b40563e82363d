"""Pipelines: transforms that are fitted together once and then applied anywhere, also without ephemeron's functions.

    pipeline = Pipeline([StandardScaler(), FeatureHasher()]).fit(train)
    prepared = pipeline.transform(train, out="prepared/train")      # over functions: a dataset
    pipeline.transform({"age": [31.0], "site": ["a"]})              # here: a mapping, a table or an array, like its argument
    pipeline.save("pipeline.json"); Pipeline.load("pipeline.json")

A fit reads the data once for all steps whose statistics do not depend on the result of another step that is not fitted yet: scaling of
numbers and hashing of categories take one pass, hashing of quantile bins takes two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ephemeron.config.paths import AnyPath
from ephemeron.config.typed import build, near, plain
from ephemeron.data.tables import TableDataset
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError, NotRepresentable
from ephemeron.preparation.columns import ColumnData, Presented, Rows, length_of, presented, taken
from ephemeron.preparation.hashing import HashSplit
from ephemeron.preparation.statistics import Statistic
from ephemeron.preparation.transforms import (
    DropMissing,
    FeatureHasher,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    QuantileBinner,
    SimpleImputer,
    StandardScaler,
    Transform,
)

if TYPE_CHECKING:
    from typing import Self

    from ephemeron.preparation.load_plan import OnError
    from ephemeron.preparation.stages import Runner

FORMAT = 2
"""2: categories that are no text have the canonical text of `preparation.values`."""
STEPS: dict[str, type[Transform]] = {
    kind.step: kind
    for kind in (SimpleImputer, DropMissing, StandardScaler, MinMaxScaler, QuantileBinner, OneHotEncoder, OrdinalEncoder, FeatureHasher)
}


def make_step(name: str, options: Mapping[str, Any], *, where: str) -> Transform:
    """A transform by name.

    Args:
        name: its `step`.
        options: arguments.
        where: prefix of messages.

    Raises:
        JobError: no such step, or an option is unknown or wrong.
    """
    if name not in STEPS:
        raise JobError(f"{where}: step {name!r} is not known", remedy=near(name, STEPS, what="steps"))
    try:
        return STEPS[name](**options)
    except TypeError:
        known = STEPS[name](columns=None).options()
        wrong = [key for key in options if key not in known]
        if wrong:
            raise JobError(f"{where}: {name} has no option {wrong[0]}", remedy=near(wrong[0], known, what="options")) from None
        raise JobError(f"{where}: an option of {name} has a wrong type: {dict(options)}") from None


class Applied(NamedTuple):
    """Changed rows."""

    rows: dict[str, ColumnData]
    numbers: NDArray[np.int64]
    """Of the rows that are left, among those that were given."""
    refused: dict[int, tuple[str, str]]
    """Numbers of rows that a step refuses, with column and reason. Rows that are in neither were dropped."""


class Pipeline:
    """Transforms in order.

    Args:
        steps: unfitted ones.
    """

    def __init__(self, steps: Sequence[Transform]) -> None:
        if not steps:
            raise JobError("a pipeline has no steps", remedy="give at least one transform")
        self.steps = list(steps)
        self.schema_in_: tuple[Column, ...] = ()
        """Columns for which it was fitted."""
        self.fitted_ = 0
        """Steps that are fitted."""

    @classmethod
    def of_fitted(cls, steps: Sequence[Transform]) -> Pipeline:
        """A pipeline of transforms that were fitted together, in this order.

        Raises:
            JobError: the first one is not fitted.
        """
        made = cls(steps)
        made.schema_in_ = getattr(steps[0], "schema_in_", ())
        made.fitted_ = len(made.steps) if made.schema_in_ else 0
        made._check_fitted()
        return made

    # -- fitting -------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        *,
        label: str | None = None,
        split: HashSplit | None = None,
        pool: Runner | None = None,
        state: AnyPath | None = None,
        on_error: OnError = "fail",
    ) -> Self:
        """Fits all steps.

        Args:
            data: a `TableDataset`, a `pyarrow.Table` or `RecordBatch`, a pandas data frame, a mapping from names to columns, or an array
                [rows, columns].
            label: column that no step changes unless it names it; datasets know theirs.
            split: with a dataset: only its training rows are used.
            pool: a `FunctionExecutor`, for datasets. None: functions of this machine, if there is more than one partition.
            state: folder or URL for what is known so far, from which an interrupted fit goes on; for datasets.
            on_error: with a dataset: what to do with rows that a step refuses before another one is fitted; see `apply_to_dataset`.

        Raises:
            JobError: a column is unknown or of another kind, or has infinite values; or the split leaves no row for training.
            NotRepresentable: a step would make a number infinite, or 0 though it is not.
            TaskFailed: a function could not read its partition.
        """
        if isinstance(data, TableDataset):
            from ephemeron.preparation.fitting import observe_dataset

            self.bind(data.schema)
            for end in self.passes():
                found = observe_dataset(self, end, data, split=split, pool=pool, state=state, on_error=on_error)
                self.conclude(end, found)
            return self
        shown = presented(data, None)
        self.bind([replace(c, kind="label", dtype="float64") if c.name == label else c for c in shown.columns])
        for end in self.passes():
            self.conclude(end, self.observe(shown.rows, end))
        return self

    def bind(self, schema: Sequence[Column]) -> None:
        """Checks the steps against a schema; nothing is fitted afterwards.

        Raises:
            JobError: a column is unknown, or of a kind that a step cannot change.
        """
        self.schema_in_, self.fitted_ = tuple(schema), 0
        columns = self.schema_in_
        for step in self.steps:
            step.bind(columns)
            columns = step.schema_out()

    def observe(self, rows: Rows, end: int) -> dict[str, Statistic]:
        """Statistics of rows for the steps from the first that is not fitted up to `end`."""
        rows = self.apply(rows, self.fitted_)
        found = {}
        for at in range(self.fitted_, end):
            found.update({f"{at}/{name}": one for name, one in self.steps[at].observe(rows).items()})
            kept = self.steps[at].kept(rows)
            rows = rows if kept is None else taken(rows, kept)
        return found

    def passes(self) -> Iterator[int]:
        """Ends of the groups of steps that are fitted by one pass over the data each."""
        while self.fitted_ < len(self.steps):
            end, changed = self.fitted_, set[str]()
            while end < len(self.steps) and not self.steps[end].observed_columns() & changed:
                changed |= self.steps[end].changed_columns()
                end += 1
            yield end

    def conclude(self, end: int, found: Mapping[str, Statistic]) -> None:
        """Fits the steps up to `end` from the statistics of all rows."""
        for at in range(self.fitted_, end):
            prefix = f"{at}/"
            self.steps[at].conclude({k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)})
            self._bind_next(at)
        self.fitted_ = end

    def _bind_next(self, at: int) -> None:
        """Tells the next step the columns of one that is fitted now, whose width was not known before."""
        if at + 1 < len(self.steps):
            self.steps[at + 1].bind(self.steps[at].schema_out())

    # -- application ---------------------------------------------------------------------------------------

    @property
    def schema_out_(self) -> tuple[Column, ...]:
        """Columns of what `transform` returns."""
        return self.steps[-1].schema_out()

    @property
    def sizes_(self) -> dict[str, int]:
        """Numbers of codes of ordinal columns, such as `nn.Embedding` needs, and of entries of vectors and sparse columns, by name."""
        return {column.name: column.width for column in self.schema_out_ if column.kind in ("ordinal", "vector", "sparse")}

    def transform(self, data: Any, *, out: AnyPath | None = None, pool: Runner | None = None, **options: Any) -> Any:
        """Applies the fitted steps.

        Args:
            data: as for `fit`. Columns that no step changes may be missing, such as the label; an array has only those that are changed.
            out: with a dataset: folder or URL of the new one.
            pool: with a dataset: as for `fit`.
            options: with a dataset: those of `apply_to_dataset`.

        Returns:
            A `TableDataset` with a dataset. Else what `data` is: a table or record batch; a data frame with the same index; an array; or a
            mapping from names to arrays, whose sparse columns are `SparseRows` and whose categorical ones are lists. A sparse column of
            a table or data frame is two, `NAME.indices` and `NAME.values`, which have a list or array per row; a one-hot column has one,
            and is an array [rows, categories] in a mapping. Rows that `drop_missing` drops are left out, also of a frame's index.

        Raises:
            JobError: a column is missing, a value is not of its kind, or the pipeline is not fitted.
            NotRepresentable: see `fit`.
        """
        self._check_fitted()
        if isinstance(data, TableDataset):
            from ephemeron.preparation.applying import apply_to_dataset

            if out is None:
                raise JobError("a dataset is transformed into another one", remedy="name its folder: out=…")
            return apply_to_dataset(self, data, out, pool=pool, **options)
        shown: Presented = presented(data, self.schema_in_, self._needed())
        rows, left, _ = self._applied(shown.rows, None, refuses=True)
        return shown.returned(rows, self.schema_out_, left)

    def fit_transform(self, data: Any, **options: Any) -> Any:
        """`fit`, then `transform`."""
        return self.fit(data, pool=options.get("pool")).transform(data, **options)

    def apply(self, rows: Rows, end: int | None = None) -> dict[str, ColumnData]:
        """Rows changed by all steps, or by the first ones up to `end`.

        Raises:
            NotRepresentable: see `fit`.
        """
        return self._applied(rows, end, refuses=True).rows

    def apply_valid(self, rows: Rows, end: int | None = None) -> Applied:
        """What `apply` makes of the rows that no step refuses; and which ones are refused."""
        return self._applied(rows, end, refuses=False)

    def _applied(self, rows: Rows, end: int | None, *, refuses: bool) -> Applied:
        numbers, refused = np.arange(length_of(rows)), dict[int, tuple[str, str]]()
        for step in self.steps[:end]:
            kept = step.kept(rows)
            if kept is not None and not kept.all():
                rows, numbers = taken(rows, kept), numbers[kept]
            while True:
                try:
                    rows = step.apply(rows)
                    break
                except NotRepresentable as e:
                    if refuses:
                        raise
                    refused.update({int(numbers[row]): (e.column, e.reason) for row in e.rows})
                    valid = np.isin(np.arange(len(numbers)), e.rows, invert=True)
                    rows, numbers = taken(rows, valid), numbers[valid]
        return Applied(dict(rows), numbers, refused)

    def _needed(self) -> set[str]:
        """Columns without which the steps cannot be applied."""
        given = {column.name for column in self.schema_in_}
        return {name for step in self.steps for name in step.feature_names_in_ if name in given}

    def _check_fitted(self) -> None:
        if self.fitted_ < len(self.steps):
            raise JobError("the pipeline is not fitted", remedy="call fit first")

    # -- documents -----------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """As JSON, also if only its first steps are fitted."""
        steps = [
            {"step": step.step, "options": step.options(), "fitted": step.fitted() if n < self.fitted_ else None}
            for n, step in enumerate(self.steps)
        ]
        return {"format": FORMAT, "columns": plain(self.schema_in_), "steps": steps}

    @classmethod
    def from_document(cls, raw: Any, *, where: str = "pipeline") -> Pipeline:
        """The inverse of `document`.

        Raises:
            JobError: it is no pipeline of this format.
        """
        try:
            if raw["format"] != FORMAT:
                raise JobError(
                    f"{where} has format {raw['format']}, and this version reads {FORMAT}",
                    remedy="fit it again" if raw["format"] < FORMAT else "update ephemeron",
                )
            columns = [build(Column, column, where=where) for column in raw["columns"]]
            made = cls([make_step(one["step"], one["options"], where=where) for one in raw["steps"]])
            made.bind(columns)
            for step, one in zip(made.steps, raw["steps"], strict=True):
                if one["fitted"] is None:
                    break
                step.restore(one["fitted"])
                made._bind_next(made.fitted_)
                made.fitted_ += 1
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise JobError(f"{where} is no pipeline: {type(e).__name__}: {e}") from None
        return made

    def to_bytes(self) -> bytes:
        """As a file; equal pipelines have equal bytes.

        Raises:
            JobError: it is not fitted, or an attribute that somebody set is no JSON.
        """
        self._check_fitted()
        try:
            return json.dumps(self.document(), indent=1, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as e:
            raise JobError(f"the pipeline cannot be saved: {e}") from None

    @property
    def version_(self) -> str:
        """Digest of steps and fitted attributes."""
        return xxhash.xxh3_128_hexdigest(self.to_bytes())

    def save(self, path: str | Path) -> None:
        """Writes it as JSON.

        Raises:
            JobError: it is not fitted.
        """
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, source: str | Path | TableDataset) -> Pipeline:
        """Reads a file that `save` wrote, or the pipeline that made a dataset.

        Raises:
            JobError: it is no pipeline.
        """
        if isinstance(source, TableDataset):
            data, where = source.pipeline_bytes(), source.url
            if data is None:
                raise JobError(f"{where} was made by no pipeline")
        else:
            where = str(source)
            try:
                data = Path(source).read_bytes()
            except OSError as e:
                raise JobError(f"pipeline {where} cannot be read: {e.strerror}") from None
        try:
            raw = json.loads(data)
        except ValueError as e:
            raise JobError(f"{where} is no pipeline: {e}") from None
        return cls.from_document(raw, where=where)

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(step.step for step in self.steps)}])"
