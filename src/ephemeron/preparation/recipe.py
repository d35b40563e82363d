"""Recipes of `ephemeron prepare`: a TOML file that names source, columns, steps and split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import Count, Positive, build
from ephemeron.errors import JobError
from ephemeron.preparation.hashing import HashSplit
from ephemeron.preparation.load_plan import LabelKind, Layout, LoadPlan, OnError
from ephemeron.preparation.pipeline import Pipeline, make_step

FORMATS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".svm": "libsvm", ".libsvm": "libsvm", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSpec:
    """The label."""

    column: str = ""
    """Of CSV and Parquet; LIBSVM's is the first word of a line."""
    kind: LabelKind = "binary"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSpec:
    """Training and test rows."""

    test_fraction: Positive = 0.2
    key: tuple[str, ...] | None = None
    """Columns whose values decide; None: all but the label."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LibsvmSpec:
    """How LIBSVM files are read."""

    zero_based: bool = False
    n_features: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvSpec:
    """How CSV files are read; see `Layout`."""

    delimiter: str = ","
    header: bool = True
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Where functions run; see `FunctionExecutor`."""

    platform: str = "local"
    channel: str = "folder"
    max_workers: Count | None = None
    memory_mb: Count | None = None
    function_timeout_s: Positive | None = None
    budget_usd: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How raw data becomes datasets."""

    source: str
    """A file, a glob, a folder, or a URL of these; relative to the recipe."""
    out: str
    """Folder or URL of the datasets; relative to the recipe."""
    name: str = ""
    """For people; empty: that of the recipe's file."""
    format: Literal["csv", "libsvm", "parquet"] | None = None
    """None: by the ending of the source."""
    partition_mb: Positive = 10.0
    """Size of a partition."""
    on_error: OnError = "fail"
    """What to do with invalid rows."""
    label: LabelSpec = field(default_factory=LabelSpec)
    columns: Mapping[str, Literal["numeric", "categorical", "ignore"]] = field(default_factory=dict)
    csv: CsvSpec = field(default_factory=CsvSpec)
    libsvm: LibsvmSpec = field(default_factory=LibsvmSpec)
    steps: tuple[Mapping[str, object], ...] = ()
    """Transforms in order: `step` and its options."""
    split: SplitSpec | None = None
    """None: all rows are for training."""
    run: RunSpec = field(default_factory=RunSpec)

    def plan(self) -> LoadPlan:
        """The plan of the load; reads a sample.

        Raises:
            JobError: see `load_csv`.
        """
        from ephemeron.preparation import loading
        from ephemeron.preparation.load_plan import listed
        from ephemeron.preparation.parquet import parquet_plan

        kind = self.format or FORMATS.get(Path(self.source).suffix)
        if kind is None:
            raise JobError(f"source = {self.source!r} does not tell its format", remedy="set format to csv, libsvm or parquet")
        if kind == "libsvm":
            return loading.libsvm_plan(
                self.source,
                self.label.kind,
                self.partition_mb,
                self.on_error,
                zero_based=self.libsvm.zero_based,
                n_features=self.libsvm.n_features,
            )
        given = {f.name: getattr(self.csv, f.name) for f in fields(self.csv) if getattr(self.csv, f.name) is not None}
        layout = Layout(label=self.label.column or None, label_kind=self.label.kind, columns=self.columns, **given)
        if kind == "csv":
            return loading.csv_plan(self.source, layout, self.partition_mb, self.on_error)
        return parquet_plan(listed(self.source, endings=(".parquet",)), layout, self.partition_mb, self.on_error)

    def pipeline(self) -> Pipeline | None:
        """The steps, not fitted; None: there are none.

        Raises:
            JobError: no such step or option.
        """
        made = []
        for n, raw in enumerate(self.steps):
            options: dict[str, Any] = dict(raw)
            name = options.pop("step", None)
            if not isinstance(name, str):
                raise JobError(f"steps[{n}] has no step", remedy='write step = "standardise"')
            made.append(make_step(name, options, where=f"steps[{n}]"))
        return Pipeline(made) if made else None

    def hash_split(self) -> HashSplit | None:
        """The split; None: there is none."""
        if self.split is None:
            return None
        return HashSplit(self.split.test_fraction, key=self.split.key, seed=self.split.seed)


def load_recipe(path: str | Path) -> Recipe:
    """Reads a recipe. Relative paths in it are relative to it.

    Raises:
        JobError: the file is absent or malformed, or has an unknown key, a wrong type or a value out of bounds.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise JobError(f"recipe {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"recipe {path} cannot be read: {e}") from None
    recipe = build(Recipe, parse_toml(text, where=str(path)), where=str(path))
    folder = path.resolve().parent

    def located(place: str) -> str:
        return place if "://" in place else str(folder / place)

    return replace(recipe, source=located(recipe.source), out=located(recipe.out), name=recipe.name or path.stem)
