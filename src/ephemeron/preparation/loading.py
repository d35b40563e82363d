"""Loading of files into prepared datasets, over functions.

    files ──cut at equal distances──▶ parts ──a function each──▶ partitions and receipts ──▶ dataset.json

A function reads the records that begin in its part, so no function needs a whole file. Of CSV, it reads them at once where the part has
no quotes; else it only says what its quotes mean for every state at its beginning, and reads in a second round, when the states are known
(`records`). All objects are created once, and a part with a receipt is not read again: a load that was interrupted, at any place, goes on
when it is called again, and every row is in the dataset once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ephemeron.config.paths import AnyPath, located
from ephemeron.config.typed import build, plain
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.formats.lines import mark_of
from ephemeron.data.formats.records import resolve
from ephemeron.data.tables import TableDataset, TableWriter
from ephemeron.data.tables.dataset import check_stored, encode_table
from ephemeron.data.tables.manifest import Column, SourceFile
from ephemeron.errors import DatasetNotFound, JobError
from ephemeron.preparation import text_rows
from ephemeron.preparation.applying import PARTITION_MB
from ephemeron.preparation.load_part import Receipt, load_text
from ephemeron.preparation.load_plan import LabelKind, Layout, LoadPlan, OnError, equal_parts, label_column, listed, prefix_of
from ephemeron.preparation.parquet import load_parquet_parts, parquet_plan
from ephemeron.preparation.stages import Runner, State, runner
from ephemeron.preparation.text_rows import FEATURES, LABEL, LARGEST_WIDTH, LibsvmParser

AGAIN = "again"
"""Variant of a partition that was read anew, since its part was within quotes."""


def load_csv(
    path: AnyPath,
    *,
    out: AnyPath,
    partition_mb: float = PARTITION_MB,
    layout: Layout | None = None,
    on_error: OnError = "fail",
    pool: Runner | None = None,
    name: str | None = None,
    **columns: Any,
) -> TableDataset:
    """Loads CSV files.

    Args:
        path: a file, a glob, a folder, or a URL of these; UTF-8, RFC 4180. All files have the same columns.
        out: folder or URL of the dataset.
        partition_mb: size of a partition.
        layout: columns, label and dialect; or give its fields by name: `label="click"`.
        on_error: what to do with invalid rows: refuse the load, naming the first; leave them out; or leave them out and write them,
            with the reasons, to `rejected.jsonl` beside the dataset.
        pool: a `FunctionExecutor`. None: functions of this machine, if there is more than one part.
        name: of the dataset; None: that of the folder.

    Raises:
        JobError: no or empty files, an unknown column, an invalid row, or `out` holds something else.
        DatasetDamaged: a partition is absent after all.
        MissingExtra: pyarrow is not installed.
        TaskFailed: a function failed in every try. A file has other columns, or has changed.
    """
    plan = csv_plan(path, layout or build(Layout, columns, where="load_csv"), partition_mb, on_error)
    return load(plan, out, pool=pool, name=name)


def csv_plan(path: AnyPath, layout: Layout, partition_mb: float, on_error: OnError) -> LoadPlan:
    """The plan of `load_csv`."""
    sources = listed(path, endings=(".csv", ".tsv", ".txt"))
    sample = sources[0].read(0, text_rows.SAMPLE_BYTES)
    names = text_rows.csv_names(sample, layout, where=sources[0].name)
    rows = text_rows.csv_sample(sample, layout, where=sources[0].name)
    columns_ = layout.schema(names, text_rows.numeric_columns(rows, names, layout), where=sources[0].name)
    parsed = text_rows.CsvParser(layout, names, columns_).parse(rows)
    total = sum(source.nbytes for source in sources)
    count = _parts(total, len(rows), parsed.table, columns_, partition_mb)
    return LoadPlan(
        format="csv",
        sources=tuple(sources),
        columns=columns_,
        parts=equal_parts([s.nbytes for s in sources], count),
        on_error=on_error,
        layout=layout,
        names=tuple(names),
    )


def load_libsvm(
    path: AnyPath,
    *,
    out: AnyPath,
    partition_mb: float = PARTITION_MB,
    label_kind: LabelKind = "binary",
    zero_based: bool = False,
    n_features: int | None = None,
    on_error: OnError = "fail",
    pool: Runner | None = None,
    name: str | None = None,
) -> TableDataset:
    """Loads LIBSVM files: lines `LABEL INDEX:VALUE …` with rising indices. The dataset has the columns `label` and `features`.

    Args:
        label_kind: `binary` (0 and 1, or -1 and 1), `class` or `real`.
        zero_based: whether indices begin at 0.
        n_features: number of features; None: what the greatest index needs.
        path, out, partition_mb, on_error, pool, name: as for `load_csv`; it raises the same.
    """
    plan = libsvm_plan(path, label_kind, partition_mb, on_error, zero_based=zero_based, n_features=n_features)
    return load(plan, out, pool=pool, name=name)


def libsvm_plan(
    path: AnyPath, label_kind: LabelKind, partition_mb: float, on_error: OnError, *, zero_based: bool = False, n_features: int | None = None
) -> LoadPlan:
    """The plan of `load_libsvm`."""
    sources = listed(path, endings=(".svm", ".libsvm", ".txt"))
    sample = sources[0].read(0, text_rows.SAMPLE_BYTES)
    whole = len(sample) == sources[0].nbytes
    rows = sample[mark_of(sample, sources[0].name) : len(sample) if whole else sample.rfind(b"\n") + 1]
    if n_features is not None and not 1 <= n_features <= LARGEST_WIDTH:
        raise JobError(f"n_features = {n_features} should be from 1 to {LARGEST_WIDTH}")
    parsed = LibsvmParser(label_kind, zero_based=zero_based, n_features=n_features).parse(rows)
    features = Column(name=FEATURES, kind="sparse", dtype="float32", width=n_features or LARGEST_WIDTH)
    columns = (label_column(LABEL, label_kind), features)
    count = _parts(sum(s.nbytes for s in sources), len(rows), parsed.table, columns, partition_mb)
    return LoadPlan(
        format="libsvm",
        sources=tuple(sources),
        columns=columns,
        parts=equal_parts([s.nbytes for s in sources], count),
        on_error=on_error,
        label_kind=label_kind,
        zero_based=zero_based,
        n_features=n_features,
    )


def load_parquet(
    path: AnyPath,
    *,
    out: AnyPath,
    partition_mb: float = PARTITION_MB,
    layout: Layout | None = None,
    on_error: OnError = "fail",
    pool: Runner | None = None,
    name: str | None = None,
    **columns: Any,
) -> TableDataset:
    """Loads Parquet files with columns of numbers and texts, by their row groups.

    Args:
        path, out, partition_mb, layout, on_error, pool, name, columns: as for `load_csv`; it raises the same.
    """
    layout = layout or build(Layout, columns, where="load_parquet")
    return load(parquet_plan(listed(path, endings=(".parquet",)), layout, partition_mb, on_error), out, pool=pool, name=name)


def load(plan: LoadPlan, out: AnyPath, *, pool: Runner | None = None, name: str | None = None) -> TableDataset:
    """Carries out a plan, or what is left of it; see `load_csv`."""
    out = located(out)
    state = State(out)
    attempt = _attempt_of(plan, state)
    try:
        found = TableDataset.open(out)
    except DatasetNotFound:
        pass
    else:
        if state.read("finished") == attempt:
            return found.check()
        raise JobError(
            f"{out} was loaded from other files, which may have changed since, or with other options",
            remedy="delete it, or name another folder",
        )
    prefix = prefix_of(attempt)
    known = {**state.read_all(f"{prefix}scanned/"), **state.read_all(f"{prefix}loaded/")}
    receipts = {int(key.removesuffix(AGAIN)): build(Receipt, known[key], where="receipt") for key in sorted(known)}
    _load_missing(plan, out, attempt, receipts, pool)
    if plan.format != "parquet":
        states = _states(plan, receipts)
        wrong = [n for n in receipts if receipts[n].partition is None or [p.state for p in receipts[n].pieces] != states[n]]
        _load_again(plan, out, attempt, receipts, {n: states[n] for n in wrong}, pool)
    return _finish(plan, out, attempt, receipts, name)


def _attempt_of(plan: LoadPlan, state: State) -> int:
    """Number of a plan among those by which a dataset was begun: one that was given up, say for an invalid row, leaves its objects."""
    document, attempt = plain(plan), 1
    while state.create("plan" if attempt == 1 else f"plan-{attempt}", document) != document:
        attempt += 1
    return attempt


def _load_missing(plan: LoadPlan, out: str, attempt: int, receipts: dict[int, Receipt], pool: Runner | None) -> None:
    missing = [n for n in range(len(plan.parts)) if n not in receipts]
    if plan.format == "parquet":
        grouped: dict[tuple[int, int], list[int]] = {}
        for n in missing:
            grouped.setdefault((plan.parts[n][0].file, plan.parts[n][0].group), []).append(n)
        items = [
            {"plan": plain(plan.of_parts(indices)), "out": out, "attempt": attempt, "indices": indices} for indices in grouped.values()
        ]
        with runner(pool, items) as run_:
            for item, found in zip(items, run_.map(load_parquet_parts, items), strict=True):
                for n, raw in zip(item["indices"], found, strict=True):
                    receipts[n] = build(Receipt, raw, where="receipt")
                    _refuse_invalid(plan, receipts, n)
        return
    items = [
        {
            "plan": plain(plan.of_parts([n])),
            "out": out,
            "attempt": attempt,
            "index": n,
            "variant": "",
            "states": [None] * len(plan.parts[n]),
        }
        for n in missing
    ]
    with runner(pool, items) as run_:
        for item, raw in zip(items, run_.map(load_text, items), strict=True):
            n = item["index"]
            receipts[n] = build(Receipt, raw, where="receipt")
            if receipts[n].refused or (receipts[n].rejected and _states(plan, receipts).get(n) == [p.state for p in receipts[n].pieces]):
                _refuse_invalid(plan, receipts, n)


def _load_again(
    plan: LoadPlan, out: str, attempt: int, receipts: dict[int, Receipt], states: Mapping[int, Sequence[str]], pool: Runner | None
) -> None:
    """Parts whose state was not known, or assumed wrongly."""
    items = [
        {
            "plan": plain(plan.of_parts([n])),
            "out": out,
            "attempt": attempt,
            "index": n,
            "states": list(known),
            "variant": "" if receipts[n].partition is None else AGAIN,
        }
        for n, known in sorted(states.items())
    ]
    with runner(pool, items) as run_:
        for item, raw in zip(items, run_.map(load_text, items), strict=True):
            receipts[item["index"]] = build(Receipt, raw, where="receipt")
            _refuse_invalid(plan, receipts, item["index"])


def _states(plan: LoadPlan, receipts: Mapping[int, Receipt]) -> dict[int, list[Any]]:
    """States at the beginnings of all pieces of the parts from the first one on that have receipts."""
    by_file: dict[int, list[Any]] = {}
    known = [n for n in range(len(plan.parts)) if n in receipts]
    known = [n for at, n in enumerate(known) if at == n]  # up to the first gap
    for n in known:
        for piece, found in zip(plan.parts[n], receipts[n].pieces, strict=True):
            by_file.setdefault(piece.file, []).append(found.ends)
    states = {file: iter(resolve(ends)) for file, ends in by_file.items()}
    return {n: [next(states[piece.file]) for piece in plan.parts[n]] for n in known}


def _refuse_invalid(plan: LoadPlan, receipts: Mapping[int, Receipt], n: int) -> None:
    """Raises for the first invalid row of a part, if that is an error."""
    if receipts[n].refused:
        raise JobError(receipts[n].refused)
    if receipts[n].unclosed:
        piece, line, _, reason = receipts[n].first[0]
        raise JobError(f"{place_of(plan, receipts, n, piece, line)}: {reason}", remedy="close it, or double it")
    if not receipts[n].rejected or plan.on_error != "fail":
        return
    piece, line, column, reason = receipts[n].first[0]
    raise JobError(
        f"{place_of(plan, receipts, n, piece, line)}{f', column {column}' if column else ''}: {reason}",
        remedy="mend it, or set on_error to skip or quarantine",
    )


def place_of(plan: LoadPlan, receipts: Mapping[int, Receipt], n: int, piece: int, line: int) -> str:
    """File and line, or row, of a line of a piece."""
    at = plan.parts[n][piece]
    name = plan.sources[at.file].name
    return f"{name}, {'row' if plan.format == 'parquet' else 'line'} {number_of(plan, receipts, n, piece, line)}"


def number_of(plan: LoadPlan, receipts: Mapping[int, Receipt], n: int, piece: int, line: int) -> int:
    """Number of a line of a file, or of a row of a Parquet file, from 1."""
    at = plan.parts[n][piece]
    if plan.format == "parquet":
        return plan.group_rows[at.file][at.group] + at.begin + line + 1
    before = 0
    for part in range(n + 1):
        for k, other in enumerate(plan.parts[part]):
            if other.file == at.file and other.begin < at.begin:
                before += receipts[part].pieces[k].newlines
    return before + line + 1


def _finish(plan: LoadPlan, out: str, attempt: int, receipts: Mapping[int, Receipt], name: str | None) -> TableDataset:
    parts = []
    for n in range(len(plan.parts)):
        partition = receipts[n].partition
        assert partition is not None
        parts.append(partition)
    rejected = sum(receipt.rejected for receipt in receipts.values())
    if not sum(part.rows for part in parts):
        raise JobError(f"{plan.sources[0].name} has no rows" + (f": all {rejected} are invalid" if rejected else ""))
    if rejected and plan.on_error == "quarantine":
        _write_rejected(plan, out, attempt, receipts)
    columns: Sequence[Column] = plan.columns
    if plan.format == "libsvm" and plan.n_features is None:
        width = max(receipt.width for receipt in receipts.values())
        columns = (plan.columns[0], Column(name=FEATURES, kind="sparse", dtype="float32", width=width))
    source = [SourceFile(url=s.url, nbytes=s.nbytes, identity=s.identity) for s in plan.sources]
    folder = open_files(out).url.rstrip("/").rpartition("/")[2]
    check_stored(open_files(out), name or folder, parts)
    if State(out).create("finished", attempt) != attempt:
        raise JobError(f"{out} is loaded by another preparation", remedy="name another folder")
    layout = plan.layout
    return TableWriter(out, columns).finish(
        name or folder, parts, source=source, rejected=rejected, delimiter=layout.delimiter, missing=layout.missing
    )


def _write_rejected(plan: LoadPlan, out: str, attempt: int, receipts: Mapping[int, Receipt]) -> None:
    """Puts the invalid rows of all parts into one file, with their lines in the files."""
    files = open_files(out)
    rows = []
    for n in sorted(receipts):
        if not receipts[n].rejected:
            continue
        again = receipts[n].partition is not None and AGAIN in receipts[n].partition.file  # type: ignore[union-attr]
        (data,) = run(files.fetch([FileRange(f"state/{prefix_of(attempt)}rejected/{n:05d}{AGAIN if again else ''}.jsonl")]))
        for raw in map(json.loads, data.splitlines()):
            piece, line = raw.pop("piece"), raw.pop("line")
            file = plan.sources[plan.parts[n][piece].file].name
            rows.append(json.dumps({"file": file, "line": number_of(plan, receipts, n, piece, line), **raw}).encode() + b"\n")
    run(files.create("rejected.jsonl" if attempt == 1 else f"rejected-{attempt}.jsonl", b"".join(rows)))


def _parts(total: int, sampled: int, table: Any, columns: Sequence[Column], partition_mb: float) -> int:
    """How many partitions of a size text makes, by a sample of it."""
    if partition_mb <= 0:
        raise JobError(f"partition_mb = {partition_mb} is not above 0")
    from ephemeron.data.tables.arrow import schema_of

    nbytes = len(encode_table(table.cast(schema_of(columns)), columns)) if sampled else 0
    return max(1, round(total * nbytes / max(1, sampled) / (partition_mb * 1e6)))


Format = Literal["csv", "libsvm", "parquet"]
