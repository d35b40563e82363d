"""Prepared datasets: tables of typed columns in objects of equal size, dense or sparse, in a folder or an object store.

    manifest   `dataset.json`: columns, partitions, source, version
    dataset    `TableDataset`: opening, reading; `TableWriter`: partitions and manifest, each created once
    arrow      columns as types of Arrow; rows of a partition as arrays, sparse ones in compressed rows (CSR)

    URL/dataset.json         `Manifest`; it is written last, so a dataset is whole or absent
    URL/part-00000.arrow     Arrow IPC file of one record batch
    URL/pipeline.json        fitted pipeline that made it, if one did (`docs/preparation.md`)

Partitions of about 10 MB amortise the latency of an object store and are small enough for a function to keep several (Cirrus, survey 2.2).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.data.tables.arrow import csr_batch, dense_batch
    from ephemeron.data.tables.dataset import TableDataset, TableWriter
    from ephemeron.data.tables.manifest import Column, Manifest, Partition, SourceFile

_MODULES = {
    "Column": "manifest",
    "Manifest": "manifest",
    "Partition": "manifest",
    "SourceFile": "manifest",
    "TableDataset": "dataset",
    "TableWriter": "dataset",
    "csr_batch": "arrow",
    "dense_batch": "arrow",
}

__all__ = ["Column", "Manifest", "Partition", "SourceFile", "TableDataset", "TableWriter", "csr_batch", "dense_batch"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
