"""Kinds with a row for every sample: CSV and Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from ephemeron.config.typed import near
from ephemeron.data.catalog.importers.base import FoundFiles, Importer, ImportRequest
from ephemeron.data.catalog.importers.source import ImportSource
from ephemeron.data.catalog.meta import DataRef, SampleMeta
from ephemeron.data.catalog.unpack import parquet_file
from ephemeron.errors import JobError

_KINDS: tuple[tuple[str, Any], ...] = (("int", int), ("float", float), ("text", str))


def _csv(request: ImportRequest) -> dict[str, FoundFiles]:
    """Files with a header line. A sample is a record's bytes; the type of a column is that of all its cells."""
    source, delimiter = request.source, request.options["delimiter"]
    paths = source.only([".csv", ".tsv", ".csv.gz", ".tsv.gz"], what="tables")
    rows: list[tuple[str, DataRef, list[str]]] = []
    columns: list[str] = []
    for path in paths:
        split = delimiter or ("\t" if ".tsv" in path else ",")
        try:
            data, ref = source.contents(path)
            found = _header(source, path, data, split)
            if columns and found != columns:
                raise source.wrong(path, f"has columns {found}, but {paths[0]} has {columns}", "one header for all")
        except JobError as e:
            request.defects.caught(e, source, path, ref=source.entries[path])
            continue
        columns = found
        line, counted = 1, 0
        for i, (start, size) in enumerate(_records(data)):
            line, counted = line + data.count(b"\n", counted, start), start
            if i == 0:
                continue
            try:
                cells = _cells(source, path, i, data[start : start + size], split)
                if len(cells) != len(columns):
                    raise source.wrong(path, f"has {len(cells)} cells in record {i}, but {len(columns)} columns")
            except JobError as e:
                request.defects.caught(e, source, path, at=f"line {line}", ref=ref.within(start, size))
                continue
            rows.append((f"{path}[{i - 1}]", ref.within(start, size), cells))
    target = _column(source, request.options["target"], columns)
    at = columns.index(target) if target else -1
    types: list[str | None] = [_type(cells[c] for _, _, cells in rows) for c in range(len(columns))]
    convert: Any = dict(_KINDS)[types[at] or "text"] if target else None

    def samples() -> Iterator[SampleMeta]:
        for key, ref, cells in rows:
            yield SampleMeta(key=key, data={"row": ref}, target=convert(cells[at]) if convert else None)

    kept = [None if i == at else kind for i, kind in enumerate(types)]
    split = delimiter or ("\t" if ".tsv" in paths[0] else ",")
    decoder = {"decoder": "csv", "columns": columns, "types": kept, "delimiter": split}
    info = {"columns": [c for c in columns if c != target], "target": target}
    return request.single(FoundFiles(samples=samples(), decoders={"row": decoder}, total=len(rows), info=info))


def _header(source: ImportSource, path: str, data: bytes, delimiter: str) -> list[str]:
    for start, size in _records(data):
        return _cells(source, path, 0, data[start : start + size], delimiter)
    return []


def _records(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and size of each record: a line, or several where a quoted cell has line breaks in it (RFC 4180)."""
    start = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    at = start
    while at < len(data):
        end = data.find(b"\n", at) + 1 or len(data)
        at = end
        if data.count(b'"', start, end) % 2 and end < len(data):
            continue
        if data[start:end].strip():
            yield start, end - start
        start = end


def _cells(source: ImportSource, path: str, i: int, record: bytes, delimiter: str) -> list[str]:
    try:
        (cells,) = csv.reader(io.StringIO(record.decode().rstrip("\r\n"), newline=""), delimiter=delimiter, strict=True)
    except (csv.Error, UnicodeDecodeError, ValueError, TypeError) as e:
        raise source.wrong(path, f"has a record {i} that cannot be read: {e}") from None
    return cells


def _type(cells: Iterator[str]) -> str:
    possible = list(_KINDS)
    for cell in cells:
        while True:
            try:
                possible[0][1](cell)
                break
            except ValueError:
                possible.pop(0)
    return possible[0][0]


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
                    ref = DataRef(path=source.entries[path].path, length=source.entries[path].length, unpack="parquet",
                                  row=(group, row), column=data or None)  # fmt: skip
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
