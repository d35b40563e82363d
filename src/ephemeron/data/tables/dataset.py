"""Reading of prepared datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from ephemeron.config.paths import AnyPath
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables.arrow import pyarrow, schema_of
from ephemeron.data.tables.manifest import MANIFEST, PIPELINE, Column, Manifest, Partition, SourceFile, decode, encode, manifest_of
from ephemeron.errors import DatasetDamaged, DatasetNotFound, JobError


def check_stored(files: Files, name: str, partitions: Sequence[Partition]) -> None:
    """Compares a listing of a dataset with its partitions.

    Args:
        files: of the dataset.
        name: of the dataset, for errors.
        partitions: what should be there.

    Raises:
        DatasetDamaged: a partition is absent, or of another length.
        DatasetUnreachable: the store fails.
    """
    sizes = run(files.tree(""))
    for part in partitions:
        if (found := sizes.get(part.file)) != part.nbytes:
            what = "it is absent" if found is None else f"it has {found} bytes, and {part.nbytes} were written"
            raise DatasetDamaged(f"{what}; delete {files.url}, and prepare again", dataset=name, file=f"{files.url}/{part.file}")


class TableDataset:
    """A prepared dataset. Usually made with `open`. Safe to use from several threads; picklable by its URL.

    Args:
        files: of the dataset.
        manifest: of the dataset.
    """

    def __init__(self, files: Files, manifest: Manifest) -> None:
        self._files, self.manifest = files, manifest
        self.requests = self.nbytes_read = 0
        """Requests to an object store for partitions, and bytes that they brought; of a folder: none."""

    @classmethod
    def open(cls, url: AnyPath) -> TableDataset:
        """Opens a folder (a path or `file:///path`), `s3://bucket/prefix`, `gs://…` or `az://…`.

        Raises:
            DatasetNotFound: there is no prepared dataset.
            DatasetDamaged: its manifest cannot be read.
            DatasetUnreachable: the store fails.
        """
        files = open_files(url)
        try:
            (data,) = run(files.fetch([FileRange(MANIFEST)]))
        except FileNotFoundError:
            raise DatasetNotFound(f"{url} has no {MANIFEST}: it is no prepared dataset, or not a finished one") from None
        return cls(files, decode(data, where=f"{files.url}/{MANIFEST}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return TableDataset, (self._files, self.manifest)

    def __len__(self) -> int:
        return self.manifest.rows

    def __repr__(self) -> str:
        return f"TableDataset({self.url!r}: {len(self)} rows, {len(self.partitions)} partitions)"

    @property
    def url(self) -> str:
        """URL of the folder or prefix."""
        return self._files.url

    @property
    def schema(self) -> tuple[Column, ...]:
        """Columns, in order."""
        return self.manifest.schema

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """Objects of rows, in order."""
        return self.manifest.partitions

    @property
    def version(self) -> str:
        """Digest of the content."""
        return self.manifest.version

    def read(self, index: int, columns: list[str] | None = None) -> Any:
        """Rows of a partition, after its digest is checked.

        Args:
            index: number of the partition.
            columns: fields of the table, in the order wanted; None: all.

        Returns:
            A `pyarrow.Table`.

        Raises:
            DatasetDamaged: it is absent, or not what the manifest says.
            DatasetUnreachable: the store fails.
            KeyError: no such column.
            IndexError: no such partition.
        """
        pa = pyarrow()
        table = pa.ipc.open_file(pa.BufferReader(self.read_bytes(index))).read_all()
        return table if columns is None else table.select(columns)

    def read_bytes(self, index: int) -> bytes:
        """The object of a partition, after its digest is checked. Raises as `read` does."""
        part = self.partitions[index]
        try:
            (data,) = run(self._files.fetch([FileRange(part.file)]))
        except FileNotFoundError:
            raise DatasetDamaged("it is absent", dataset=self.manifest.name, file=f"{self.url}/{part.file}") from None
        if not self._files.local:
            self.requests, self.nbytes_read = self.requests + 1, self.nbytes_read + len(data)
        if xxhash.xxh3_64_hexdigest(data) != part.xxh3:
            raise DatasetDamaged(
                f"its content is not what was written: {len(data)} bytes, {part.nbytes} were written",
                dataset=self.manifest.name,
                version=self.version,
                file=f"{self.url}/{part.file}",
            )
        return data

    def tables(self) -> Iterator[Any]:
        """Rows of all partitions, one `pyarrow.Table` after the other."""
        return (self.read(index) for index in range(len(self.partitions)))

    def check(self) -> TableDataset:
        """This dataset, after a listing has shown that all its partitions are there; raises as `check_stored` does."""
        check_stored(self._files, self.manifest.name, self.partitions)
        return self

    def pipeline_bytes(self) -> bytes | None:
        """The file of the pipeline that made it; None: there is none."""
        if self.manifest.pipeline is None:
            return None
        (data,) = run(self._files.fetch([FileRange(self.manifest.pipeline)]))
        return data


# -- writing of prepared datasets ---------------------------------------------------------------------------------


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
        dropped: int = 0,
        delimiter: str = ",",
        missing: tuple[str, ...] | None = None,
    ) -> TableDataset:
        """Publishes the dataset, once all its partitions are there: stores its manifest, after its pipeline.

        Args:
            name: of the dataset, for people.
            partitions: all of them, in order.
            source: files that were loaded.
            pipeline: content of `pipeline.json`.
            rejected: rows that were left out.
            dropped: rows that a step drops.
            delimiter, missing: of the CSV that was loaded.

        Raises:
            JobError: another dataset is stored there.
            DatasetDamaged: a partition is absent, or of another length.
            DatasetUnreachable: the store fails.
        """
        check_stored(self._files, name, partitions)
        made = manifest_of(
            name,
            self.columns,
            partitions,
            source=source,
            pipeline=pipeline,
            rejected=rejected,
            dropped=dropped,
            delimiter=delimiter,
            missing=missing,
        )
        if pipeline is not None:
            run(self._files.create(PIPELINE, pipeline))
        if not run(self._files.create(MANIFEST, encode(made))):
            found = TableDataset.open(self._files.url)
            if found.version != made.version:
                raise JobError(f"{self._files.url} holds another dataset", remedy="name another folder")
            return found
        return TableDataset(self._files, made)
