"""Cells of CSV against Python's reader, and texts that are numbers against what number they are."""

from __future__ import annotations

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.formats.records import NUMBER, CsvRecords, cells_of, header_of, is_name_of_digits, is_number, kind_of
from ephemeron.errors import JobError

cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=6)


@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=8))
def test_cells_are_what_was_written_whatever_is_quoted(rows):
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    data = out.getvalue().encode()
    assert [tuple(cells_of(data[a:b], ",")) for a, b in CsvRecords().spans(data)] == rows


@given(st.text(alphabet='ab", ', min_size=1, max_size=20))
def test_quotes_within_a_cell_are_read_as_python_reads_them(line):
    data = line.encode() + b"\n"
    if CsvRecords().end(data, "record") == "quoted":
        with pytest.raises(ValueError, match="has a quote that is not closed"):
            cells_of(data, ",")
    else:
        assert [cells_of(data[a:b], ",") for a, b in CsvRecords().spans(data)] == list(csv.reader([line]))


NUMBERS = [
    "0",
    "-0",
    "7",
    "+5",
    "1.50",
    "0.5",
    ".5",
    "5.",
    "1e-3",
    "1E+20",
    "1.5e3",
    " 7",
    "7\t",
    "9007199254740992",
    "-9007199254740992",
    "1.7976931348623157e308",
]
NAMES = ["00501", "007", "00", "-01", "00.5", "1e3", "12E5", "100_1", "1_0.5", "٣", "9007199254740993", "123456789012345678901", "1\u00a0"]
WORDS = ["", "nan", "NaN", "inf", "-Infinity", "true", "NA", "0x1F", "1,5", "1.2.3", "2020-01-01", "12:30", "²", "½", "e5", "+", "-", "."]


def test_what_is_a_number():
    assert [text for text in NUMBERS if not is_number(text) or is_name_of_digits(text)] == []
    assert [text for text in NAMES if is_number(text) or not is_name_of_digits(text)] == []
    assert [text for text in WORDS if is_number(text) or is_name_of_digits(text)] == []


def test_numbers_that_a_float_does_not_hold_are_none():
    assert not any(map(is_number, ["1.5e400", "-1e+309", "1e-400", "0.01e-999"]))
    assert all(map(is_number, ["0e-5", "-0.0e+9", "5e-324", "0.000"]))
    assert kind_of(["1.5e400", "2.5"]) == "text"


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))
def test_numbers_as_they_are_usually_written_are_numbers(x, n):
    for text in (repr(x), f"{x:.6g}", f"{x:.17e}", f"{x:+.3f}", str(n), f"{n}.0"):
        assert is_number(text), text


@given(st.lists(st.text(alphabet="019+-._eE ", max_size=6), min_size=2, max_size=2, unique=True))
def test_different_whole_numbers_never_become_one(texts):
    """What is an identifier stays one: of two texts that are one number, one has a sign, a point, an exponent or spaces."""
    one, other = texts
    if is_number(one) and is_number(other) and float(one) == float(other):
        assert any(set(text) & set("+-. ") for text in texts)


def test_arrow_finds_the_numbers_that_python_finds():
    compute = pytest.importorskip("pyarrow.compute")
    texts = [text for text in NUMBERS + NAMES + WORDS if len(text.strip("+-")) < 16]
    found = [compute.match_substring_regex(text, NUMBER).as_py() for text in texts]
    assert found == [is_number(text) for text in texts]
    assert all(math.isfinite(float(text)) for text, number in zip(texts, found, strict=True) if number)


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-2"], "int"),
        (["1", "2.5"], "float"),
        (["1", "x"], "text"),
        (["1" * 30], "int"),
        (["1" * 30, "0.5"], "text"),
        (["1" * 5000], "text"),
    ],
)
def test_a_column_is_what_all_its_cells_are(texts, kind):
    assert kind_of(texts) == kind_of(texts[::-1]) == kind


HEADERS = [
    "NA,K,y",
    "null,b",
    "007,7",
    "1e3,1.50",
    "true,b",
    "2020-01-01,b",
    "0,00",
    " a ,b",
    ",b",
    "N/A,NaN",
    "123456789012345678901,x",
    "caf\u00e9,a\u2028b",
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_names_are_text_as_pandas_reads_it(header, end, mark):
    pandas = pytest.importorskip("pandas")
    data = (mark + header + end).encode()
    names, length = header_of(data + b"1,2,3\n" * bool(end), ",", "f")
    whole = pandas.read_csv(io.BytesIO(data), dtype=str, header=None, keep_default_na=False)
    assert names == whole.iloc[0].tolist() == header.split(",")
    assert length == len(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "f has no header line"),
        (b"\xef\xbb\xbf", "f has no header line"),
        (b"\na,b\n", "f begins with a blank line, where its header should be; put the names"),
        (b"a,b\r1,2\r", "f: its header has a carriage return that is not quoted"),
        (b"a,b\r1,2\n3,4\n", "f: its header has a carriage return that is not quoted"),
        ("a,pr\xe9nom\n".encode("latin-1"), "f: its header is not UTF-8; convert"),
        ("a,b\n".encode("utf-16"), "f is UTF-16, and only UTF-8 is read"),
        ("a,b\n".encode("utf-16-le"), "f: its header has bytes of 0"),
        (b'a,"b\n1,2\n', "f: its header has a quote that is not closed"),
    ],
)
def test_headers_that_are_none_are_refused(data, message):
    with pytest.raises(JobError, match=message):
        header_of(data, ",", "f")
