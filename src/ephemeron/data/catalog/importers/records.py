"""Kinds with many samples in a file, all of one size: CIFAR, MNIST's IDX, NumPy's .npz."""

from __future__ import annotations

import io
import math
import posixpath
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ephemeron.config.typed import near
from ephemeron.data.catalog.importers.base import FoundFiles, Importer, ImportRequest
from ephemeron.data.catalog.importers.source import ImportSource, enter
from ephemeron.data.catalog.meta import DataRef, SampleMeta
from ephemeron.data.catalog.unpack import CELL_TYPES, parquet_file
from ephemeron.data.formats import cifar
from ephemeron.data.formats.idx import idx_files, parse_idx
from ephemeron.data.formats.lines import one_line
from ephemeron.data.formats.records import CsvRecords, cells_of, check_names, header_of, kind_of
from ephemeron.data.samples import Array
from ephemeron.data.tables.arrow import is_index
from ephemeron.errors import JobError


def _cifar(kind: str, request: ImportRequest) -> dict[str, FoundFiles]:
    """Both published forms; in the pickled form each sample is a byte range of the pixels inside the pickle."""
    source = request.source
    names = {name for form in cifar.FORMS[kind] for name in form.names}
    by_name: dict[str, str] = {}
    for path in source.entries:
        name = posixpath.basename(path)
        if name in names and by_name.setdefault(name, path) != path:
            raise source.wrong(path, f"exists beside {by_name[name]}", "give one folder of the two")
    labels = cifar.labels_of(kind, request.options.get("labels", ""))
    form = cifar.find_form(kind, by_name, source.url)
    if form is None:
        forms = " or ".join(f.folder for f in cifar.FORMS[kind])
        raise JobError(f"{source.url} is not {kind}", remedy=f"give the unpacked folder {forms}")

    def samples(names: Sequence[str]) -> Iterator[SampleMeta]:
        for name in names:
            path = by_name[name]
            batch = cifar.read_batch(f"{source.url}: {path}", source.read(path), form, labels)
            packed = source.packed(path, "cifar-python") if form.pickled else source.entries[path]
            head = 0 if form.pickled else form.label_bytes
            for i, label in enumerate(batch.targets.tolist()):
                ref = packed.within(i * (head + cifar.PIXELS) + head, cifar.PIXELS)
                yield SampleMeta(key=f"{name}[{i}]", data={"image": ref}, target=label)

    def found(names: Sequence[str]) -> FoundFiles:
        decoder = {"decoder": "array", "dtype": "|u1", "shape": [3, 32, 32]}
        return FoundFiles(samples=samples(names), decoders={"image": decoder}, info={"classes": labels.classes})

    return request.split({"train": partial(found, form.train), "test": partial(found, (form.test,))})


def _idx(request: ImportRequest) -> dict[str, FoundFiles]:
    """train-images-idx3-ubyte etc., optionally with .gz. Images get a channel axis."""
    source = request.source
    found = idx_files(source.entries)
    parts = {name: part for name, part in (("train", "train"), ("test", "t10k")) if any(p == part for p, _ in found)}
    if not parts:
        raise JobError(f"{source.url} has no train-images-idx3-ubyte and no t10k-…", remedy="give a folder with them")
    for part in parts.values():
        for kind in ("images", "labels"):
            if (part, kind) not in found:
                raise JobError(f"{source.url} has no {part}-{kind}", remedy="fetch the data set again")
    return request.split({name: partial(_idx_pair, source, found[part, "images"], found[part, "labels"]) for name, part in parts.items()})


def _idx_pair(source: ImportSource, images: str, labels: str) -> FoundFiles:
    data, ref = source.contents(images)
    inputs, start = parse_idx(data, f"{source.url}: {images}")
    targets, _ = parse_idx(source.contents(labels)[0], f"{source.url}: {labels}")
    if targets.ndim != 1 or inputs.ndim == 0 or len(inputs) != len(targets):
        raise source.wrong(images, f"has shape {inputs.shape}, but {labels} has {targets.shape}", "give a pair")
    shape = [1, *inputs.shape[1:]] if inputs.ndim == 3 else list(inputs.shape[1:])
    return FoundFiles(
        samples=_rows("image", ref, start, inputs, targets.tolist(), images),
        decoders={"image": {"decoder": "array", "dtype": inputs.dtype.newbyteorder(">").str, "shape": shape}},
        total=len(inputs),
    )


def _rows(part: str, ref: DataRef, start: int, array: Array, targets: Sequence[Any], name: str) -> Iterator[SampleMeta]:
    size = math.prod(array.shape[1:]) * array.itemsize
    for i, target in enumerate(targets):
        yield SampleMeta(key=f"{name}[{i}]", data={part: ref.within(start + i * size, size)}, target=target)


def _npz(request: ImportRequest) -> dict[str, FoundFiles]:
    """An .npz with an array of inputs and one of targets; targets of several numbers per sample stay in the file."""
    source = request.source
    (name, *others) = source.only([".npz"], what=".npz file")
    if others:
        raise source.wrong(others[0], f"exists beside {name}", "give the URL of one file")
    inside = enter(source, name)
    x, y = (_member(inside, request.options[option], option) for option in ("inputs", "targets"))
    if not x.shape or not y.shape or x.shape[0] != y.shape[0]:
        raise source.wrong(name, f"has inputs of shape {x.shape} and targets of {y.shape}", "one target per input")
    targets: list[Any] | None = y.values(inside).tolist() if len(y.shape) == 1 else None

    def samples() -> Iterator[SampleMeta]:
        for i in range(x.shape[0]):
            data = {"input": x.row(i)}
            if targets is not None:
                yield SampleMeta(key=f"{x.name}[{i}]", data=data, target=targets[i])
            else:
                yield SampleMeta(key=f"{x.name}[{i}]", data=data, target_at=y.row(i))

    decoders = {"input": x.decoder()} | ({} if targets is not None else {"target": y.decoder()})
    return request.single(FoundFiles(samples=samples(), decoders=decoders, total=x.shape[0]))


class _Member:
    """An array in an .npz: its header, and the location of its rows."""

    def __init__(self, name: str, ref: DataRef, header: tuple[Any, ...], start: int, path: str) -> None:
        self.name, self._ref, self._start, self._path = name, ref, start, path
        self.shape, self._fortran, self._dtype = header
        self._size = math.prod(self.shape[1:]) * self._dtype.itemsize

    def row(self, i: int) -> DataRef:
        return self._ref.within(self._start + i * self._size, self._size)

    def decoder(self) -> dict[str, object]:
        return {"decoder": "array", "dtype": self._dtype.str, "shape": list(self.shape[1:])}

    def values(self, source: ImportSource) -> Array:
        return np.frombuffer(source.read(self._path), self._dtype, offset=self._start).reshape(self.shape)


def _member(source: ImportSource, name: str, option: str) -> _Member:
    path = f"{name}.npy"
    if path not in source.entries:
        known = ", ".join(p.removesuffix(".npy") for p in source.entries)
        raise JobError(f"{source.url} has no array {name!r}, only {known}", remedy=f"-o {option}=NAME")
    ref = source.entries[path]
    opened = source.stream(path) if ref.unpack is None else io.BytesIO(source.read(path))
    try:
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(opened))
        if header is None:
            raise ValueError("an unknown version of the format")
        shape, fortran, dtype = header(opened)
    except ValueError as e:
        raise source.wrong(path, f"is not an array: {one_line(e)}") from None
    if dtype.hasobject or (fortran and len(shape) > 1) or dtype.kind not in "biufc":
        raise source.wrong(path, f"holds {dtype} in order {'F' if fortran else 'C'}", "save numbers in C order")
    return _Member(name, ref, (shape, fortran, dtype), opened.tell(), path)


IMPORTERS = (
    Importer(kind="cifar10", find=partial(_cifar, "cifar10")),
    Importer(kind="cifar100", find=partial(_cifar, "cifar100"), options={"labels": "fine"}),
    Importer(kind="idx", find=_idx),
    Importer(kind="npz", find=_npz, options={"inputs": "x", "targets": "y"}),
)


# -- kinds with a row for every sample: CSV and Parquet -----------------------------------------------------------


def _csv(request: ImportRequest) -> dict[str, FoundFiles]:
    """Files with a header line. A sample is a record's bytes; a column has numbers where all its cells are such (`formats.records`)."""
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
            names = [name for name in file.schema_arrow.names if not is_index(name)]
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


TABLE_IMPORTERS = (
    Importer(kind="csv", find=_csv, options={"target": "", "delimiter": ""}),
    Importer(kind="parquet", find=_parquet, options={"target": "", "data": "", "decoder": "image"}),
)
