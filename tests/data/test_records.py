"""Records of CSV that was cut anywhere, compared with a reader that goes character by character."""

from __future__ import annotations

import csv
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.formats.records import STATES, CsvRecords, CsvRows, LineRecords, cells_of, resolve

TEXT = st.text(alphabet='ab",\n\r', max_size=40).map(str.encode)
CUTS = st.lists(st.integers(0, 40), max_size=5)


def one_by_one(data, state="record"):
    """States before each character and at the end."""
    states = [state]
    for at in range(len(data)):
        c = data[at : at + 1]
        if state == "quoted":
            state = "quote" if c == b'"' else "quoted"
        elif state == "quote" and c == b'"':
            state = "quoted"
        elif c == b"\n":
            state = "record"
        elif c == b",":
            state = "field"
        elif c == b'"' and state in ("record", "field"):
            state = "quoted"
        else:
            state = "plain"
        states.append(state)
    return states


@given(TEXT, st.sampled_from(STATES))
def test_states_and_beginnings_of_records(data, state):
    states = one_by_one(data, state)
    records = CsvRecords()
    assert records.end(data, state) == states[-1]
    assert records.ends(data)[state] == states[-1]
    beginnings = [at for at, one in enumerate(states) if one == "record" and (at or state == "record")]
    assert records.next_record(data, state) == (beginnings[0] if beginnings else None)


@given(TEXT, CUTS)
def test_states_at_cuts_follow_from_the_parts_alone(data, cuts):
    ends = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(ends)]
    states = one_by_one(data)
    assert resolve([CsvRecords().ends(part) for part in parts]) == [states[a] for a in ends[:-1]]


@given(TEXT)
def test_spans_are_the_records(data):
    beginnings = [at for at, one in enumerate(one_by_one(data)) if one == "record" and at < len(data)]
    assert [begin for begin, _ in CsvRecords().spans(data)] == beginnings
    assert [end for _, end in CsvRecords().spans(data)] == [*beginnings[1:], len(data)][: len(beginnings)]


@given(st.lists(st.lists(st.text(alphabet='ab",;\n\r é', max_size=6), min_size=2, max_size=4), max_size=6))
def test_what_csv_writes_is_cut_into_its_rows(rows):
    text = io.StringIO(newline="")
    CsvRows(text, ";").rows(rows)
    data = text.getvalue().encode()
    assert [cells_of(data[a:b], ";") for a, b in CsvRecords(";").spans(data)] == rows
    assert list(csv.reader(io.StringIO(text.getvalue(), newline=""), delimiter=";")) == rows


@pytest.mark.parametrize("data", [b"", b"a", b"a\n", b"a\n\nb", b"\n"])
def test_lines(data):
    records = LineRecords()
    assert [data[a:b] for a, b in records.spans(data)] == data.splitlines(keepends=True)
    assert records.end(data, "plain") == ("plain" if not data.endswith(b"\n") else "record")
    assert records.next_record(data, "plain") == (data.index(b"\n") + 1 if b"\n" in data else None)
