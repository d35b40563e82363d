"""Writing of prepared datasets. Every object is created once: of several writers of a partition, one has effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from ephemeron.config.paths import AnyPath
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables.arrow import pyarrow, schema_of
from ephemeron.data.tables.dataset import TableDataset, check_stored
from ephemeron.data.tables.manifest import MANIFEST, PIPELINE, Column, Partition, SourceFile, encode, manifest_of
from ephemeron.errors import JobError


def encode_table(table: Any, columns: Sequence[Column]) -> bytes:
    """Rows as an Arrow IPC file of one record batch. The same rows give the same bytes.

    Args:
        table: `pyarrow.Table` with the fields of the columns.
        columns: of the dataset.

    Raises:
        ValueError: the fields are others, or of other types.
    """
    pa = pyarrow()
    schema = schema_of(columns)
    table = table.select(schema.names).cast(schema).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


class TableWriter:
    """Writes a prepared dataset; any number of processes may each write some of its partitions.

    Args:
        url: folder or prefix.
        columns: of the dataset.
    """

    def __init__(self, url: AnyPath, columns: Sequence[Column]) -> None:
        self._files, self.columns = open_files(url), tuple(columns)

    def write(self, index: int, table: Any, *, variant: str = "") -> Partition:
        """Stores rows as a partition. What is stored under its name already stays.

        Args:
            index: number of the partition.
            table: `pyarrow.Table` with the fields of the columns (`arrow.schema_of`).
            variant: part of the name, where rows may have to be written anew; letters and digits.

        Returns:
            What is stored now, by this writer or another one.

        Raises:
            ValueError: the table has other fields.
            DatasetUnreachable: the store fails.
        """
        data = encode_table(table, self.columns)
        name = f"part-{index:05d}{'-' + variant if variant else ''}.arrow"
        rows = table.num_rows
        if not run(self._files.create(name, data)):
            (data,) = run(self._files.fetch([FileRange(name)]))
            rows = pyarrow().ipc.open_file(pyarrow().BufferReader(data)).read_all().num_rows
        return Partition(file=name, rows=rows, nbytes=len(data), xxh3=xxhash.xxh3_64_hexdigest(data))

    def finish(
        self,
        name: str,
        partitions: Sequence[Partition],
        *,
        source: Sequence[SourceFile] = (),
        pipeline: bytes | None = None,
        rejected: int = 0,
    ) -> TableDataset:
        """Publishes the dataset, once all its partitions are there: stores its manifest, after its pipeline.

        Args:
            name: of the dataset, for people.
            partitions: all of them, in order.
            source: files that were loaded.
            pipeline: content of `pipeline.json`.
            rejected: rows that were left out.

        Raises:
            JobError: another dataset is stored there.
            DatasetDamaged: a partition is absent, or of another length.
            DatasetUnreachable: the store fails.
        """
        check_stored(self._files, name, partitions)
        made = manifest_of(name, self.columns, partitions, source=source, pipeline=pipeline, rejected=rejected)
        if pipeline is not None:
            run(self._files.create(PIPELINE, pipeline))
        if not run(self._files.create(MANIFEST, encode(made))):
            found = TableDataset.open(self._files.url)
            if found.version != made.version:
                raise JobError(f"{self._files.url} holds another dataset", remedy="name another folder")
            return found
        return TableDataset(self._files, made)
