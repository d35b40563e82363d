"""What a function does in a load: it reads one part of the files, and creates a partition and its receipt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ephemeron.config.typed import Typed, build, plain
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.formats.lines import mark_of
from ephemeron.data.formats.records import Ends, State
from ephemeron.data.tables import TableWriter
from ephemeron.data.tables.arrow import pyarrow, schema_of
from ephemeron.data.tables.manifest import Partition
from ephemeron.errors import JobError
from ephemeron.preparation.load_plan import LoadPlan, Piece, Reject, prefix_of, variant_of
from ephemeron.preparation.stages import State as StateFolder
from ephemeron.preparation.text_rows import CsvParser, LibsvmParser, begin_of_rows, csv_names

SHOWN = 10
"""Rejects of a part that its receipt holds."""
LARGEST_RECORD = 1 << 26
"""Bytes of a record that goes on behind its part."""
_MORE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFound:
    """What a piece of text says about the pieces after it."""

    state: State | None
    """State at its beginning with which its rows were read; None: it is not known, and they were not read."""
    ends: Ends
    """State at its end by that at its beginning."""
    newlines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(Typed):
    """What became of a part."""

    pieces: tuple[PieceFound, ...] = ()
    """Of text."""
    partition: Partition | None = None
    """None: rows were not read, or some are invalid and that is an error."""
    rejected: int = 0
    first: tuple[tuple[int, int, str, str], ...] = ()
    """Of the first invalid rows: number of the piece, line in it from 0, column, reason."""
    unclosed: bool = False
    """Whether the first invalid row is no row: a quote in it is not closed, so that the rows behind it are not known."""
    width: int = 1
    refused: str = ""
    """Why nothing was read; empty: it was."""


def load_text(item: dict[str, Any]) -> dict[str, Any]:
    """Loads a part of text files.

    Args:
        item: `plan` of the part alone; `out`, URL of the dataset; number of the `attempt`; `index` of the part; `states` at the beginnings of its pieces, None where they are not
            known; `variant` of the partition's name.

    Returns:
        A `Receipt`. If the state at a piece is not known, and may be within quotes, no rows are stored.
    """
    try:
        return _load_text(item)
    except JobError as e:  # a mistake of the user's, which another try would repeat
        return _plain(Receipt(refused=str(e)))


def _load_text(item: dict[str, Any]) -> dict[str, Any]:
    plan = build(LoadPlan, item["plan"], where="plan")
    (pieces,) = plan.parts
    read = [_text_of(plan, piece, state) for piece, state in zip(pieces, item["states"], strict=True)]
    found = tuple(one.found for one in read)
    if any(one.state is None for one in found):
        scanned: dict[str, Any] = StateFolder(item["out"]).create(
            f"{prefix_of(item['attempt'])}scanned/{item['index']:05d}", _plain(Receipt(pieces=found))
        )
        return scanned
    parser = _parser(plan)
    tables, rejects, width = [], list[tuple[int, Reject]](), 1
    for n, one in enumerate(read):
        if one.unclosed:
            line = one.line + one.text.count(b"\n")
            return _plain(Receipt(pieces=found, rejected=1, first=((n, line, "", one.unclosed),), unclosed=True))
        parsed = parser.parse(one.text)
        tables.append(parsed.table)
        rejects += [(n, reject._replace(line=reject.line + one.line)) for reject in parsed.rejects]
        width = max(width, parsed.width)
    first = tuple((n, r.line, r.column, r.reason) for n, r in rejects[:SHOWN])
    if rejects and plan.on_error == "fail":
        return _plain(Receipt(pieces=found, rejected=len(rejects), first=first))
    for source in {plan.sources[piece.file] for piece in pieces}:
        source.check()
    table = pyarrow().concat_tables(tables).cast(schema_of(plan.columns))
    name, prefix = f"{item['index']:05d}{item['variant']}", prefix_of(item["attempt"])
    if rejects and plan.on_error == "quarantine":
        files = open_files(item["out"])
        run(files.create(f"state/{prefix}rejected/{name}.jsonl", reject_lines(rejects)))
    partition = TableWriter(item["out"], plan.columns).write(item["index"], table, variant=variant_of(item["attempt"], item["variant"]))
    receipt = Receipt(pieces=found, partition=partition, rejected=len(rejects), first=first, width=width)
    kept: dict[str, Any] = StateFolder(item["out"]).create(f"{prefix}loaded/{name}", _plain(receipt))
    return kept


@dataclass(frozen=True, slots=True)
class _Text:
    """The records that begin in a piece."""

    found: PieceFound
    text: bytes
    line: int
    """Line ends of the piece before them."""
    unclosed: str = ""
    """Why there is a record behind them that is not to be read; empty: there is none."""


def _text_of(plan: LoadPlan, piece: Piece, state: State | None) -> _Text:
    records, source = plan.records(), plan.sources[piece.file]
    before = 1 if piece.begin else 0
    data = source.read(piece.begin - before, piece.end - piece.begin + before + _MORE)
    previous, body = data[:before], data[before : before + piece.end - piece.begin]
    tail = data[before + len(body) :]
    ends: Ends = records.ends(body)
    newlines = body.count(b"\n")
    if state is None:
        if not piece.begin:
            state = "record"
        elif plan.format == "libsvm" or not (b'"' in body or previous == b'"'):
            # unless the whole piece is within quotes, which the client sees
            at_field = plan.format == "csv" and previous == plan.layout.delimiter.encode()
            state = "record" if previous == b"\n" else "field" if at_field else "plain"
        else:
            return _Text(PieceFound(state=None, ends=ends, newlines=newlines), b"", 0)
    found = PieceFound(state=state, ends=ends, newlines=newlines)
    first = records.next_record(body, state)
    if first is None or first == len(body):
        return _Text(found, b"", 0)
    text, unclosed = body[first:], ""
    if (end := records.end(text, "record")) != "record":
        rest, unclosed = _rest(plan, piece, tail, end)
        text += rest
    begin = 0 if piece.begin else _begin(plan, source.name, text)
    if unclosed:
        whole = text[begin:]
        text = text[: begin + (records.spans(whole)[-1][0] if whole else 0)]
    return _Text(found, text[begin:], body[:first].count(b"\n") + text[:begin].count(b"\n"), unclosed)


def _rest(plan: LoadPlan, piece: Piece, tail: bytes, state: State) -> tuple[bytes, str]:
    """The rest of a record that goes on behind a piece, and why it is no record, or ""."""
    records, source = plan.records(), plan.sources[piece.file]
    while True:
        if (end := records.next_record(tail, state)) is not None:
            return tail[:end], ""
        at = piece.end + len(tail)
        if at >= source.nbytes:
            return tail, "a quote is not closed" if records.end(tail, state) == "quoted" else ""
        if len(tail) > LARGEST_RECORD:
            return b"", f"a row goes on for more than {LARGEST_RECORD >> 20} MB: is a quote not closed?"
        tail += source.read(at, max(_MORE, len(tail)))


def _begin(plan: LoadPlan, name: str, text: bytes) -> int:
    """Bytes before the first row of a file; refuses a file with other columns."""
    if plan.format == "libsvm" or not plan.layout.header:
        return mark_of(text, name)
    names = csv_names(text, plan.layout, where=name)
    if tuple(names) != plan.names:
        other = next((f"{a!r} instead of {b!r}" for a, b in zip(names, plan.names, strict=False) if a != b), f"{len(names)} columns")
        raise JobError(f"{name} has other columns than the first file: {other}")
    return begin_of_rows(text, plan.layout, where=name)


def _parser(plan: LoadPlan) -> CsvParser | LibsvmParser:
    if plan.format == "csv":
        return CsvParser(plan.layout, plan.names, plan.columns)
    return LibsvmParser(plan.label_kind, zero_based=plan.zero_based, n_features=plan.n_features)


def reject_lines(rejects: Sequence[tuple[int, Reject]]) -> bytes:
    """Invalid rows of pieces as lines of JSON."""
    return b"".join(json.dumps({"piece": n, **reject._asdict()}).encode() + b"\n" for n, reject in rejects)


def _plain(receipt: Receipt) -> dict[str, Any]:
    found: dict[str, Any] = plain(receipt)
    return found
