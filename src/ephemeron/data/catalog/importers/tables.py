"""Kinds with a row for every sample: CSV and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ephemeron.config.typed import near
from ephemeron.data.catalog.decoders import CELL_TYPES
from ephemeron.data.catalog.importers.base import FoundFiles, Importer, ImportRequest
from ephemeron.data.catalog.importers.source import ImportSource
from ephemeron.data.catalog.meta import DataRef, SampleMeta
from ephemeron.data.catalog.unpack import parquet_file
from ephemeron.data.formats.cells import cells_of, check_names, header_of, kind_of
from ephemeron.data.formats.records import CsvRecords
from ephemeron.errors import JobError


def _csv(request: ImportRequest) -> dict[str, FoundFiles]:
    """Files with a header line. A sample is a record's bytes; a column has numbers where all its cells are such (`formats.cells`)."""
    source, delimiter = request.source, request.options["delimiter"]
    paths = source.only([".csv", ".tsv", ".csv.gz", ".tsv.gz"], what="tables")
    rows: list[tuple[str, DataRef, list[str]]] = []
    columns: list[str] = []
    splits = {delimiter or ("\t" if ".tsv" in path else ",") for path in paths}
    if len(splits) > 1:
        raise JobError(f"{source.url} has .csv and .tsv files", remedy="import each kind by itself")
    (split,) = splits
    for path in paths:
        where = f"{source.url}: {path}"
        try:
            data, ref = source.contents(path)
            found, begin = header_of(data, split, where)
            if columns and found != columns:
                raise source.wrong(path, f"has columns {found}, but {paths[0]} has {columns}", "one header for all")
        except JobError as e:
            request.defects.caught(e, source, path, ref=source.entries[path])
            continue
        check_names(found, where)
        columns = found
        line, counted, number, records = 1, 0, -1, CsvRecords(split)
        for start, stop in records.spans(data[begin:]):
            start, size = begin + start, stop - start
            line, counted = line + data.count(b"\n", counted, start), start
            record = data[start : start + size]
            if start + size == len(data) and records.end(record, "record") == "quoted":
                raise JobError(f"{where}, line {line}: a quote is not closed", remedy="close it, or double it")
            if not record.strip(b"\r\n"):
                continue
            number += 1
            try:
                cells = _cells(source, path, line, record, split)
                if len(cells) != len(columns):
                    raise source.wrong(path, f"has {len(cells)} cells in line {line}, but {len(columns)} columns")
            except JobError as e:
                request.defects.caught(e, source, path, at=f"line {line}", ref=ref.within(start, size))
                continue
            rows.append((f"{path}[{number}]", ref.within(start, size), cells))
    target = _column(source, request.options["target"], columns)
    at = columns.index(target) if target else -1
    types: list[str | None] = [kind_of([cells[c] for _, _, cells in rows]) for c in range(len(columns))]
    convert: Any = CELL_TYPES[types[at] or "text"] if target else None

    def samples() -> Iterator[SampleMeta]:
        for key, ref, cells in rows:
            yield SampleMeta(key=key, data={"row": ref}, target=convert(cells[at]) if convert else None)

    kept = [None if i == at else kind for i, kind in enumerate(types)]
    decoder = {"decoder": "csv", "columns": columns, "types": kept, "delimiter": split}
    info = {"columns": [c for c in columns if c != target], "target": target}
    return request.single(FoundFiles(samples=samples(), decoders={"row": decoder}, total=len(rows), info=info))


def _cells(source: ImportSource, path: str, line: int, record: bytes, delimiter: str) -> list[str]:
    try:
        return cells_of(record, delimiter)
    except ValueError as e:
        raise source.wrong(path, f"has a record in line {line} that {e}") from None


def _column(source: ImportSource, name: str, columns: list[str]) -> str:
    if name and name not in columns:
        raise JobError(f"{source.url} has no column {name!r}", remedy=near(name, columns, what="it has"))
    return name


def _parquet(request: ImportRequest) -> dict[str, FoundFiles]:
    """Parquet files of one schema. A sample is a row, or one column of it with a decoder of its own."""
    source, options = request.source, request.options
    paths = source.only([".parquet"], what="Parquet files")
    opened, columns = {}, None
    for path in paths:
        ref = source.entries[path]
        if ref.offset is not None or ref.unpack is not None:
            raise source.wrong(path, "is inside an archive", "unpack the archive")
        try:
            try:
                file = parquet_file(source.files, ref.path, ref.length or 0)
            except ValueError as e:
                raise source.wrong(path, f"is not a Parquet file: {e}") from None
            names = file.schema_arrow.names
            check_names(names, f"{source.url}: {path}")
            if columns not in (None, names):
                raise source.wrong(path, f"has columns {names}, but {paths[0]} has {columns}", "one schema for all")
        except JobError as e:
            request.defects.caught(e, source, path, ref=ref)
            continue
        opened[path], columns = file, names
    columns = columns or []
    target = _column(source, options["target"], columns)
    data = options["data"]
    _column(source, data.partition(".")[0], columns)

    def samples() -> Iterator[SampleMeta]:
        for path, file in opened.items():
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                targets = _targets(request, path, file, group, target) if target else [None] * count
                for row, value in enumerate(targets):
                    if value is _NO_TARGET:
                        continue
                    ref = DataRef(
                        path=source.entries[path].path,
                        length=source.entries[path].length,
                        unpack="parquet",
                        row=(group, row),
                        column=data or None,
                    )
                    yield SampleMeta(key=f"{path}[{group}][{row}]", data={data or "row": ref}, target=value)

    kept = [c for c in columns if c != target]
    decoder = {"decoder": options["decoder"]} if data else {"decoder": "row", "columns": kept}
    total = sum(file.metadata.num_rows for file in opened.values())
    info = {"columns": [data] if data else kept, "target": target}
    return request.single(FoundFiles(samples=samples(), decoders={data or "row": decoder}, total=total, info=info))


_NO_TARGET = object()


def _targets(request: ImportRequest, path: str, file: Any, group: int, column: str) -> list[Any]:
    """Targets of the rows of a group; `_NO_TARGET` for rows without one."""
    values: list[Any] = file.read_row_group(group, columns=[column]).column(0).to_pylist()
    for row, value in enumerate(values):
        if not isinstance(value, (bool, int, float, str, list, dict)):
            what = f"{type(value).__name__} in column {column!r}, row {row} of row group {group}"
            remedy = "use whole numbers, numbers, text or lists"
            wrong = request.source.wrong(path, f"has {what}, which is not a target", remedy)
            request.defects.caught(wrong, request.source, path, at=f"row {row} of row group {group}")
            values[row] = _NO_TARGET
    return values


IMPORTERS = (
    Importer(kind="csv", find=_csv, options={"target": "", "delimiter": ""}),
    Importer(kind="parquet", find=_parquet, options={"target": "", "data": "", "decoder": "image"}),
)
