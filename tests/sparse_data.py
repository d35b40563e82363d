"""Prepared datasets with sparse features, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from ephemeron.data.tables import Column, TableDataset, TableWriter

FEATURES = 60


def prepared(folder: Path | str, *, rows: int = 3000, partitions: int = 3, positive: int = 1, seed: int = 0) -> TableDataset:
    """Six categories of ten values; the label, 0 or `positive`, depends on them."""
    columns = [Column(name="x", kind="sparse", dtype="float32", width=FEATURES), Column(name="y", kind="label", dtype="int32")]
    writer, dice = TableWriter(str(folder), columns), np.random.default_rng(seed)
    truth = np.random.default_rng(9).normal(0, 1, FEATURES)
    parts = []
    for index, count in enumerate(np.diff(np.linspace(0, rows, partitions + 1).astype(int))):
        x = dice.integers(10, size=(count, 6)) + 10 * np.arange(6)
        y = (dice.random(count) < 1 / (1 + np.exp(-truth[x].sum(axis=1)))).astype(np.int32) * positive
        table = pa.table({"x.indices": list(x), "x.values": [[1.0] * 6] * count, "y": y})
        parts.append(writer.write(index, table))
    return writer.finish("test", parts)
