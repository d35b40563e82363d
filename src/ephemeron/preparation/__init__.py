"""From raw data to prepared datasets, over functions: loading, scaling, hashing, splitting (Cirrus, survey 2.1 and 2.2).

    import ephemeron.preparation as prep

    raw = prep.load_csv("clicks-*.csv", out="prepared/raw", label="click")
    pipeline = prep.Pipeline([prep.StandardScaler(), prep.FeatureHasher()]).fit(raw)
    train = pipeline.transform(raw, out="prepared/train")

    loading, load_plan, load_part      files to partitions: `sources`, `csv_text`, `libsvm_text`, `parquet_plan`
    moments, histogram, occupancy      statistics that merge exactly
    transforms, hashing, pipeline      what changes rows, fitted once; `columns`, `values`: rows in memory
    fitting, applying                  a pipeline over the partitions of a dataset
    recipe                             `ephemeron prepare`

Formats are in `ephemeron.data.tables`; `docs/preparation.md` says how to use it and what is guaranteed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.data.tables import TableDataset
    from ephemeron.preparation.columns import SparseRows
    from ephemeron.preparation.hashing import HashSplit
    from ephemeron.preparation.load_plan import Layout
    from ephemeron.preparation.loading import load_csv, load_libsvm, load_parquet
    from ephemeron.preparation.pipeline import Pipeline
    from ephemeron.preparation.stages import InProcess
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

_MODULES = {
    "TableDataset": "ephemeron.data.tables",
    "SparseRows": "ephemeron.preparation.columns",
    "DropMissing": "ephemeron.preparation.transforms",
    "OneHotEncoder": "ephemeron.preparation.transforms",
    "OrdinalEncoder": "ephemeron.preparation.transforms",
    "SimpleImputer": "ephemeron.preparation.transforms",
    "FeatureHasher": "ephemeron.preparation.transforms",
    "HashSplit": "ephemeron.preparation.hashing",
    "Layout": "ephemeron.preparation.load_plan",
    "load_csv": "ephemeron.preparation.loading",
    "load_libsvm": "ephemeron.preparation.loading",
    "load_parquet": "ephemeron.preparation.loading",
    "Pipeline": "ephemeron.preparation.pipeline",
    "InProcess": "ephemeron.preparation.stages",
    "MinMaxScaler": "ephemeron.preparation.transforms",
    "QuantileBinner": "ephemeron.preparation.transforms",
    "StandardScaler": "ephemeron.preparation.transforms",
    "Transform": "ephemeron.preparation.transforms",
}

__all__ = [
    "DropMissing",
    "FeatureHasher",
    "HashSplit",
    "InProcess",
    "Layout",
    "MinMaxScaler",
    "OneHotEncoder",
    "OrdinalEncoder",
    "Pipeline",
    "QuantileBinner",
    "SimpleImputer",
    "SparseRows",
    "StandardScaler",
    "TableDataset",
    "Transform",
    "load_csv",
    "load_libsvm",
    "load_parquet",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_MODULES[name]), name)
