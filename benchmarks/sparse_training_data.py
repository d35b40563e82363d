"""A prepared data set of the shape of Criteo's for benchmarks: 13 numbers and 26 hashed categories, and a label that can be learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import SEED
from ephemeron.data.tables import Column, TableDataset, TableWriter

NUMERIC, CATEGORIES = 13, 26
FEATURES = 1 << 20
ROWS_PER_PARTITION = 20_000
"""About 10 MB."""


def prepared(folder: Path, *, rows: int, first_partition: int = 0) -> TableDataset:
    """Writes a data set. The same partitions have the same rows.

    Args:
        folder: where to write it.
        rows: of all partitions.
        first_partition: number of the first one; others for the test data.
    """
    columns = [Column(name="x", kind="sparse", dtype="float32", width=FEATURES), Column(name="y", kind="label", dtype="int32")]
    writer, parts = TableWriter(str(folder), columns), []
    for index, start in enumerate(range(0, rows, ROWS_PER_PARTITION)):
        parts.append(writer.write(index, _table(first_partition + index, min(ROWS_PER_PARTITION, rows - start))))
    return writer.finish("clicks", parts)


def _table(number: int, rows: int) -> pa.Table:
    dice = np.random.default_rng([SEED, number])
    truth = np.random.default_rng(SEED).normal(0, 0.35, FEATURES)
    sizes = np.geomspace(3, 100_000, CATEGORIES).astype(int)
    codes = np.floor(np.exp(dice.random((rows, CATEGORIES)) * np.log(sizes + 1))).astype(np.int64) - 1  # a power law
    hashed = (codes * 2_654_435_761 + np.arange(CATEGORIES) * 40_503_001) % (FEATURES - NUMERIC) + NUMERIC
    indices = np.hstack([np.broadcast_to(np.arange(NUMERIC), (rows, NUMERIC)), np.sort(hashed, axis=1)])
    values = np.hstack([dice.normal(0, 1, (rows, NUMERIC)), np.ones((rows, CATEGORIES))]).astype(np.float32)
    fresh = np.diff(indices, axis=1, prepend=-1) != 0  # two categories of a row may have one feature
    scores = np.where(fresh, values * truth[indices], 0).sum(axis=1) - 1
    labels = (dice.random(rows) < 1 / (1 + np.exp(-scores))).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(fresh.sum(axis=1))]).astype(np.int32)
    lists = [pa.ListArray.from_arrays(offsets, flat[fresh]) for flat in (indices, values)]
    return pa.table({"x.indices": lists[0], "x.values": lists[1], "y": labels})
