"""Loading of CSV, LIBSVM and Parquet: every row once, in order, whatever the partitioning; invalid rows named."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.data.formats.records import is_name_of_digits
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import DatasetDamaged, JobError
from ephemeron.preparation import InProcess, Pipeline, StandardScaler, load_csv, load_libsvm, load_parquet, loading
from ephemeron.preparation.load_plan import equal_parts, listed

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")

HERE = InProcess()


def write_csv(path, rows, header=("click", "age", "site"), **options):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n", **options)
        if header:
            writer.writerow(header)
        writer.writerows(rows)


def rows_of(dataset):
    return [tuple(row.values()) for row in pa.concat_tables(dataset.tables()).to_pylist()]


TEXTS = st.text(alphabet='ab", \né;', min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 1), st.floats(-1e9, 1e9), TEXTS), min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_csv_with_quotes_and_line_ends_in_any_number_of_parts(files, count):
    folder = Path(tempfile.mkdtemp())
    try:
        for n, rows in enumerate(files):
            write_csv(folder / f"{n}.csv", rows)
        before, loading._parts = loading._parts, lambda *_: count
        try:
            dataset = load_csv(
                str(folder), out=str(folder / "out"), label="click", columns={"age": "numeric", "site": "categorical"}, pool=HERE
            )
        finally:
            loading._parts = before
        assert rows_of(dataset) == [row for rows in files for row in rows]
        assert len(dataset) == sum(map(len, files))
    finally:
        shutil.rmtree(folder)


def test_a_part_that_is_within_quotes_is_read_anew(tmp_path):
    text = "\n".join(["line of a long text, without a quote"] * 400)
    write_csv(tmp_path / "a.csv", [(1, 0.5, "x"), (0, 1.5, text), (1, 2.5, "y")])
    dataset = load_csv(str(tmp_path / "a.csv"), out=str(tmp_path / "out"), partition_mb=0.001, label="click", on_error="skip", pool=HERE)
    assert rows_of(dataset) == [(1, 0.5, "x"), (0, 1.5, text), (1, 2.5, "y")]
    assert any("again" in part.file for part in dataset.partitions)
    assert len(dataset.partitions) > 8
    assert dataset.manifest.rejected == 0


def test_partitions_are_alike_in_size(tmp_path):
    rng = np.random.default_rng(0)
    for n, count in enumerate((2000, 10, 3000)):
        write_csv(tmp_path / f"{n}.csv", [(i % 2, rng.normal(), f"s{rng.integers(99)}") for i in range(count)])
    dataset = load_csv(str(tmp_path / "*.csv"), out=str(tmp_path / "out"), partition_mb=0.02, label="click", pool=HERE)
    sizes = [part.nbytes for part in dataset.partitions]
    assert len(sizes) > 4
    assert max(sizes) < 1.1 * min(sizes)
    assert 0.7 < np.mean(sizes) / 20_000 < 1.3
    assert len(dataset) == 5010
    again = load_csv(str(tmp_path / "*.csv"), out=str(tmp_path / "many"), partition_mb=0.0005, label="click", pool=HERE)
    assert len(again.partitions) > 100
    assert not any("again" in part.file for part in again.partitions), "a part without quotes is read once"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 40))
def test_files_are_cut_into_equal_parts(sizes, count):
    parts = equal_parts(sizes, count)
    lengths = [sum(piece.end - piece.begin for piece in part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    at = [(piece.file, byte) for part in parts for piece in part for byte in range(piece.begin, piece.end)]
    assert at == [(file, byte) for file, size in enumerate(sizes) for byte in range(size)]


def test_absent_values_headers_and_dialects(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfage;site;day\r\n1;;x\r\n\r\nNA;b;y\r\n")
    dataset = load_csv(str(tmp_path / "a.csv"), out=str(tmp_path / "out"), delimiter=";", columns={"day": "ignore"}, pool=HERE)
    assert [c.name for c in dataset.schema] == ["age", "site"]
    assert rows_of(dataset) == [(1.0, None), (None, "b")]
    (tmp_path / "b.csv").write_text("1,a\n2,b\n")
    other = load_csv(str(tmp_path / "b.csv"), out=str(tmp_path / "o2"), header=False, names=["n", "t"], pool=HERE)
    assert rows_of(other) == [(1.0, "a"), (2.0, "b")]


BAD = 'click,age,site\n1,2.5,a\n0,abc,b\n1,3.5\n7,1.5,"c\nd"\n0,inf,e\n,1,f\n0,9.5,g\n'
WRONG = [
    (3, "age", "'abc' is not a number"),
    (4, "", "has 2 fields instead of 3"),
    (5, "click", "7 is no binary label: 0 or 1"),
    (7, "age", "is infinite"),
    (8, "click", "is absent, and every row needs a label"),
]


def bad(tmp_path, on_error, count=1, monkeypatch=None):
    (tmp_path / "in.csv").write_text(BAD)
    monkeypatch.setattr(loading, "_parts", lambda *_: count)
    return load_csv(
        str(tmp_path / "in.csv"),
        out=str(tmp_path / f"{on_error}{count}"),
        label="click",
        columns={"age": "numeric"},
        on_error=on_error,
        pool=HERE,
    )


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_invalid_rows_are_named_left_out_or_kept_apart(tmp_path, count, monkeypatch):
    with pytest.raises(JobError, match=r"in\.csv, line 3, column age: 'abc' is not a number; mend it, or set on_error"):
        bad(tmp_path, "fail", count, monkeypatch)
    skipped = bad(tmp_path, "skip", count, monkeypatch)
    assert rows_of(skipped) == [(1, 2.5, "a"), (0, 9.5, "g")]
    assert skipped.manifest.rejected == 5
    kept = bad(tmp_path, "quarantine", count, monkeypatch)
    assert rows_of(kept) == rows_of(skipped)
    rows = [json.loads(line) for line in (tmp_path / f"quarantine{count}/rejected.jsonl").read_text().splitlines()]
    assert [(r["line"], r["column"], r["reason"]) for r in rows] == WRONG
    assert rows[0]["file"] == str(tmp_path / "in.csv")
    assert [r["text"] for r in rows][2] == '7,1.5,"c\nd"'


def test_a_column_of_mostly_numbers_has_mixed_types_where_it_has_text(tmp_path):
    write_csv(tmp_path / "a.csv", [(i % 2, i if i != 37 else "unknown", "s") for i in range(100)])
    with pytest.raises(JobError, match=r"a\.csv, line 39, column age: 'unknown' is not a number"):
        load_csv(str(tmp_path / "a.csv"), out=str(tmp_path / "out"), label="click", pool=HERE)


def test_wrong_inputs_are_one_line_each(tmp_path):
    good, empty, header = tmp_path / "a.csv", tmp_path / "empty.csv", tmp_path / "header.csv"
    write_csv(good, [(1, 2.0, "a")])
    empty.touch()
    header.write_text("click,age\n")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "a.csv.gz").write_bytes(b"x")

    def refused(path, text, **options):
        with pytest.raises(JobError, match=text) as e:
            load_csv(str(path), out=str(tmp_path / "out"), pool=HERE, **options)
        assert "\n" not in str(e.value)

    refused(empty, r"empty\.csv is empty")
    refused(header, r"header\.csv has no rows")
    refused(tmp_path / "none.csv", r"none\.csv names no file")
    refused(tmp_path / "a.csv.gz", "is compressed")
    refused(tmp_path / "twice.csv", "has two columns 'a'")
    refused(good, r"has no column 'klick'; did you mean click", label="klick")
    refused(good, r"has no column 'sight'; did you mean site", columns={"sight": "numeric"})
    refused(good, r"columns\.age = 'number' is not known", columns={"age": "number"})
    refused(good, "unknown key labl", labl="click")
    refused(good, "delimiter = '--' should be one character", delimiter="--")
    refused(good, "partition_mb = 0 is not above 0", partition_mb=0)
    refused(good, "need the names of their columns", header=False)


def loaded(folder, text, **options):
    """Rows of a text as a dictionary of columns, in one process."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "in.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    table = pa.concat_tables(load_csv(folder / "in.csv", out=folder / "out", pool=HERE, **options).tables())
    return {name: table.column(name).to_pylist() for name in table.column_names}


@pytest.mark.parametrize(
    "texts",
    [
        ["00501", "02134"],
        ["007", "7"],
        ["1e3", "1000"],
        ["1_000", "1000"],
        ["٣", "٤"],
        ["9007199254740993", "9007199254740992"],
        ["0.5", "007"],
        ["1" * 30, "1" * 30 + ".5"],
    ],
)
def test_what_would_become_another_text_stays_text(tmp_path, texts):
    pandas = pytest.importorskip("pandas")
    text = "id,y\n" + "".join(f"{one},{n}\n" for n, one in enumerate(texts))
    found = loaded(tmp_path, text, label="y")
    assert found["id"] == texts == pandas.read_csv(io.StringIO(text), dtype=str)["id"].tolist()
    if all(one.isascii() and "_" not in one for one in texts):  # what is said is done
        numbers = loaded(tmp_path, text, columns={"id": "numeric"}, on_error="skip")["id"]
        assert numbers == [float(one) for one in texts]


@given(st.lists(st.text(alphabet="0159+-.eE ", max_size=5), min_size=1, max_size=6))
def test_the_quick_look_at_digits_overlooks_nothing(texts):
    from ephemeron.preparation.text_rows import _digits_alone

    chunks = [pa.array([None, *texts, None, ""][n:]).cast(pa.string()) for n in range(2)]
    if _digits_alone(pa.chunked_array(chunks)) and _digits_alone(pa.chunked_array([chunks[0].slice(1)])):
        assert not any(is_name_of_digits(text) for text in texts)
    assert _digits_alone(pa.chunked_array([["0", "10", "-0.5", "+7.", ".5", "100.05", ""]]))


def test_numbers_are_numbers(tmp_path):
    texts = ["1.50", "1e-3", "+5", " 7", "-0", ".5", "5.", "1.5e3", "9007199254740992"]
    assert loaded(tmp_path, "x,y\n" + "".join(f"{t},0\n" for t in texts), label="y")["x"] == [float(t) for t in texts]


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ("00501", '\'00501\' would be read as 501.0; set the kind of the column: "categorical" or "numeric"'),
        ("1e3", "'1e3' would be read as 1000.0"),
        ("9007199254740993", "'9007199254740993' would be read as 9007199254740992.0"),
        ("NAN", "is not a number"),
        ("1_0", "'1_0' is not a number"),
    ],
)
def test_what_comes_after_the_sample_is_told(tmp_path, monkeypatch, late, reason, count):
    monkeypatch.setattr("ephemeron.preparation.text_rows.SAMPLE_BYTES", 100)
    monkeypatch.setattr(loading, "_parts", lambda *_: count)
    text = "x,y\n" + "".join(f"{n},0\n" for n in range(100)) + f"{late},1\n5,1\n"
    with pytest.raises(JobError, match=f"in.csv, line 102, column x: {re.escape(reason)}"):
        loaded(tmp_path, text, label="y")
    assert loaded(tmp_path, text, label="y", on_error="skip")["x"] == [*range(100), 5]


@pytest.mark.parametrize("columns", [{}, {"x": "numeric"}])
def test_numbers_that_a_float_does_not_hold_are_told(tmp_path, columns):
    for number, reason in (("1e-400", "'1e-400' is too small for float64"), ("1.5e400", "is infinite")):
        with pytest.raises(JobError, match=f"line 12, column x: {reason}"):
            loaded(tmp_path, "x\n" + "0.0e-9\n" * 10 + f"{number}\n", columns=columns)


@pytest.mark.parametrize("names", ["NA,K,y", "null,007,y", "nan,7,y", "1e3,1000,y", "true,True,y", " a ,a,y"])
def test_names_of_columns_are_text(tmp_path, names):
    assert list(loaded(tmp_path, f"{names}\n1,2,0\n3,4,1\n", label="y")) == names.split(",")
    assert names.split(",")[0] in loaded(tmp_path, f"{names}\n1,2,0\n", label=names.split(",")[0])


@pytest.mark.parametrize(("count", "on_error"), [(1, "fail"), (2, "skip"), (5, "quarantine"), (50, "fail"), (80, "skip")])
def test_an_open_quote_swallows_no_rows(tmp_path, monkeypatch, count, on_error):
    """Also where there are more parts than rows."""
    monkeypatch.setattr(loading, "_parts", lambda *_: count)
    rows = [f'{n},"s{n}\n",0' for n in range(20)] + [f"{n},t,0" for n in range(40)]
    for at in (20, 21, 50, 60):
        line = "\n".join(["x,s,y", *rows[:at]]).count("\n") + 2
        text = "\n".join(["x,s,y", *rows[:at], '5,"open,0', *rows[at:], ""])
        with pytest.raises(JobError, match=f"in.csv, line {line}: a quote is not closed; close it, or double it"):
            loaded(tmp_path, text, label="y", on_error=on_error)


@pytest.mark.parametrize("count", [1, 4])
def test_a_row_without_end_is_not_read_into_memory(tmp_path, monkeypatch, count):
    monkeypatch.setattr(loading, "_parts", lambda *_: count)
    monkeypatch.setattr("ephemeron.preparation.load_part.LARGEST_RECORD", 1 << 17)
    text = 'x,s\n1,a\n2,"' + "b\n" * 400_000
    with pytest.raises(JobError, match=r"in\.csv, line 3: (a row goes on for more than 0 MB|a quote is not closed)"):
        loaded(tmp_path, text)


TEXTS_OF_CELLS = ['5" pipe', "6'", 'a"b"c', 'x ""y""', '"quoted, text"', '"two""quotes"', "a\u2028b", "a\x85b", "a\x0cb", "a\x00b"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("count", [1, 3, 30])
def test_cells_are_those_of_pandas(tmp_path, monkeypatch, end, count):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(loading, "_parts", lambda *_: count)
    text = "\ufeffs,n" + end + "".join(f"{cell},{n}{end}" for n, cell in enumerate(TEXTS_OF_CELLS)) + end + '"x\ry",99'
    found = loaded(tmp_path, text)
    expected = pandas.read_csv(io.BytesIO(text.encode()), dtype={"s": str})
    assert found == {"s": expected["s"].tolist(), "n": expected["n"].tolist()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"x,y\r1,0\n2,1\n", "its header has a carriage return that is not quoted"),
        (b"x,y\r1,0\r2,1\r", "its header has a carriage return that is not quoted"),
        (b"x,y\n1,0\r2,1\n3,0\n", "line 2: has a carriage return that is not quoted"),
        (b"x\n1\r2\n3\n", "line 2: has a carriage return that is not quoted"),
        (b"\nx,y\n1,0\n", "begins with a blank line, where its header should be"),
        (b"x,y\n1,0\n\x1a", "line 3: has 1 fields instead of 2"),
        ("x,y\n1,0\n".encode("utf-16"), "is UTF-16, and only UTF-8 is read; iconv"),
        ("x,pr\xe9nom\n1,0\n".encode("latin-1"), "its header is not UTF-8"),
        ("x,y\n1,caf\xe9\n".encode("latin-1"), "line 2, column y: is not UTF-8"),
        (b"\xef\xbb\xbf", "has no header line"),
    ],
)
def test_texts_of_other_forms_are_refused(tmp_path, text, message):
    with pytest.raises(JobError, match=rf"in\.csv:?,? {message}"):
        loaded(tmp_path, text)


def test_an_existing_path_is_that_file_and_hidden_files_are_none(tmp_path):
    for name in ("data[1].csv", "data1.csv", "[DE]/data [1].csv", ".ipynb_checkpoints/x.csv", "._a.csv", "sub/x.csv", ".h/x.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_csv(tmp_path / name, [(0, 1.0, name)])
    load_csv(tmp_path / "data1.csv", out=tmp_path / "sub/prepared", pool=HERE)
    (tmp_path / "sub/prepared/x.csv").write_text("no data\n")

    def names(place):
        return [source.path for source in listed(place, endings=(".csv",))]

    for place in (tmp_path / "data[1].csv", tmp_path / "[DE]/data [1].csv", (tmp_path / "data[1].csv").as_uri()):
        assert names(place) == [Path(place).name.replace("%5B", "[").replace("%5D", "]")]
    assert names(tmp_path) == ["[DE]/data [1].csv", "data1.csv", "data[1].csv", "sub/x.csv"]
    assert names(f"{tmp_path}/*.csv") == ["data1.csv", "data[1].csv"]
    assert names(f"{tmp_path}/**/*.csv") == names(tmp_path)
    assert names(f"{tmp_path}/data[12].csv") == ["data1.csv"]
    assert names(f"{tmp_path}/.h/*.csv") == ["x.csv"]
    with pytest.raises(JobError, match=r"data\[3\]\.csv names no file"):
        names(tmp_path / "data[3].csv")


def test_files_with_other_columns_are_named(tmp_path):
    write_csv(tmp_path / "a.csv", [(1, 2.0, "a")])
    write_csv(tmp_path / "b.csv", [(1, 2.0, "a")], header=("click", "page", "site"))
    with pytest.raises(JobError, match=r"b\.csv has other columns than the first file: 'page' instead of 'age'"):
        load_csv(str(tmp_path / "*.csv"), out=str(tmp_path / "out"), pool=HERE)


def test_an_interrupted_load_goes_on_and_a_finished_one_is_returned(tmp_path):
    write_csv(tmp_path / "a.csv", [(i % 2, i, f's"{i}\n') for i in range(6000)])
    options = {"out": str(tmp_path / "out"), "label": "click", "partition_mb": 0.005}

    class Interrupted(InProcess):
        left = 9

        def map(self, fn, *items):
            for result in super().map(fn, *items):
                if not self.left:
                    raise KeyboardInterrupt
                Interrupted.left -= 1
                yield result

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            load_csv(str(tmp_path / "a.csv"), pool=Interrupted(), **options)
        Interrupted.left = 9
    stored = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.arrow")}
    dataset = load_csv(str(tmp_path / "a.csv"), pool=HERE, **options)
    assert rows_of(dataset) == [(i % 2, i, f's"{i}\n') for i in range(6000)]
    assert len(dataset.partitions) > 27
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in stored} == stored
    assert load_csv(str(tmp_path / "a.csv"), pool=None, **options).version == dataset.version
    whole = load_csv(str(tmp_path / "a.csv"), pool=HERE, **{**options, "out": str(tmp_path / "whole")})
    assert whole.version == dataset.version
    with pytest.raises(JobError, match="or with other options; delete it, or name another folder"):
        load_csv(str(tmp_path / "a.csv"), pool=HERE, **{**options, "on_error": "skip"})
    (tmp_path / "a.csv").write_text("click,age,site\n1,2,a\n")
    with pytest.raises(JobError, match="was loaded from other files, which may have changed since"):
        load_csv(str(tmp_path / "a.csv"), pool=HERE, **options)


def test_what_was_given_up_is_loaded_anew_with_other_options(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_parts", lambda *_: 4)
    (tmp_path / "in.csv").write_text(BAD)
    options = {"out": str(tmp_path / "out"), "label": "click", "columns": {"age": "numeric"}, "pool": HERE}
    with pytest.raises(JobError, match="line 3"):
        load_csv(str(tmp_path / "in.csv"), **options)
    kept = load_csv(str(tmp_path / "in.csv"), on_error="quarantine", **options)
    assert rows_of(kept) == [(1, 2.5, "a"), (0, 9.5, "g")]
    assert len((tmp_path / "out/rejected-2.jsonl").read_text().splitlines()) == 5
    assert load_csv(str(tmp_path / "in.csv"), on_error="quarantine", **options).version == kept.version


class Elsewhere(InProcess):
    """Functions have another working folder than the client."""

    def __init__(self, scratch):
        self.scratch = scratch

    def map(self, fn, *items):
        with contextlib.chdir(self.scratch):
            return iter(list(super().map(fn, *items)))


def test_relative_paths_are_those_of_the_client(tmp_path, monkeypatch):
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a.csv", [(i % 2, i, f"s{i}") for i in range(500)])
    options = {"label": "click", "partition_mb": 0.005, "pool": Elsewhere(scratch)}
    raw = load_csv("a.csv", out="prepared/raw", **options)
    assert len(raw.partitions) > 1
    assert rows_of(raw) == [(i % 2, float(i), f"s{i}") for i in range(500)]
    pipeline = Pipeline([StandardScaler()]).fit(raw, state=Path("fits"))
    made = pipeline.transform(raw, out=Path("prepared/train"), partition_mb=0.005, pool=Elsewhere(scratch))
    assert len(rows_of(made)) == 500
    assert not list(scratch.iterdir())
    by_path = load_csv(Path("a.csv"), out=Path("by-path"), **options)
    assert by_path.version == raw.version


def test_a_load_reads_back_what_it_lists(tmp_path):
    write_csv(tmp_path / "a.csv", [(i % 2, i, f"s{i}") for i in range(500)])
    options = {"out": str(tmp_path / "out"), "label": "click", "partition_mb": 0.005}

    class Losing(InProcess):
        def map(self, fn, *items):
            found = list(super().map(fn, *items))
            (tmp_path / "out/part-00001.arrow").unlink(missing_ok=True)
            return iter(found)

    with pytest.raises(DatasetDamaged, match=r"part-00001\.arrow: it is absent; delete .* and prepare again"):
        load_csv(tmp_path / "a.csv", pool=Losing(), **options)
    assert not (tmp_path / "out/dataset.json").exists()
    assert not (tmp_path / "out/state/finished.json").exists()
    shutil.rmtree(tmp_path / "out")
    raw = load_csv(tmp_path / "a.csv", pool=HERE, **options)
    scaler = Pipeline([StandardScaler()]).fit(raw, pool=HERE)
    train = scaler.transform(raw, out=tmp_path / "train", pool=HERE)
    assert scaler.transform(raw, out=tmp_path / "train", pool=HERE).version == train.version
    again = {
        "train": lambda: scaler.transform(raw, out=tmp_path / "train", pool=HERE),
        "out": lambda: load_csv(tmp_path / "a.csv", pool=HERE, **options),
    }
    for folder, call in again.items():  # a finished one is returned only while it is whole
        file = tmp_path / folder / "part-00000.arrow"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(DatasetDamaged, match=r"part-00000\.arrow: it has \d+ bytes, and \d+ were written"):
            call()


def test_a_file_that_changes_during_a_load_is_named(tmp_path):
    write_csv(tmp_path / "a.csv", [(i % 2, i, "s") for i in range(500)])

    class Changing(InProcess):
        def map(self, fn, *items):
            write_csv(tmp_path / "a.csv", [(i % 2, i + 1, "t") for i in range(500)])
            return super().map(fn, *items)

    with pytest.raises(JobError, match="has changed since the preparation began"):
        load_csv(str(tmp_path / "a.csv"), out=str(tmp_path / "out"), label="click", partition_mb=0.005, pool=Changing())


# -- LIBSVM -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_libsvm_equals_scikit_learn(tmp_path, count, monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets", reason="the reader to compare with")
    rng = np.random.default_rng(0)
    dense = np.where(rng.random((300, 40)) < 0.2, rng.normal(size=(300, 40)), 0)
    labels = rng.integers(0, 2, 300) * 2 - 1
    datasets.dump_svmlight_file(dense, labels, str(tmp_path / "a.svm"), zero_based=False, comment="made\nby a test")
    monkeypatch.setattr(loading, "_parts", lambda *_: count)
    dataset = load_libsvm(str(tmp_path / "a.svm"), out=str(tmp_path / "out"), pool=HERE)
    batch = csr_batch(pa.concat_tables(dataset.tables()).combine_chunks())
    made = np.zeros((300, dataset.schema[1].width), np.float32)
    made[np.repeat(np.arange(300), np.diff(batch.indptr)), batch.indices] = batch.values
    np.testing.assert_allclose(made, dense[:, : made.shape[1]], rtol=1e-6)
    assert np.array_equal(batch.labels, labels > 0)
    assert len(dataset.partitions) == count


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("x 1:2", "column label: 'x' is not a number"),
        ("2 1:2", "column label: 2 is no binary label: 0 or 1, or -1 or 1"),
        ("1 3:1 2:1", "column features: index 2 comes after 3: indices should rise"),
        ("1 0:1", "column features: index 0 is below 1"),
        ("1 9:1", "column features: index 9 is above 8"),
        ("1 2:x", "column features: 'x' is not a number"),
        ("1 2:inf", "column features: 'inf' is not a number"),
        ("1 2:1:3 4", "column features: '1:3' is not a number"),
        ("1 2.5:1", "column features: '2.5:1' is no INDEX:VALUE"),
        ("1 2:٣", "column features: '٣' is not a number"),
        ("1 2:3\u2028", "column features: '3\\u2028' is not a number"),
        ("1 qid", "column features: 'qid' is no INDEX:VALUE"),
        ("1:2", "column label: '1:2' is not a number"),
    ],
)
def test_invalid_lines_of_libsvm(tmp_path, line, reason):
    (tmp_path / "a.svm").write_text(f"1 1:0.5 3:2\n\n# a comment\n0\n{line}\n-1 8:1 # behind\n")
    options = {"n_features": 8, "pool": HERE}
    with pytest.raises(JobError) as e:
        load_libsvm(str(tmp_path / "a.svm"), out=str(tmp_path / "out"), **options)
    assert f"a.svm, line 5, {reason}" in str(e.value)
    good = load_libsvm(str(tmp_path / "a.svm"), out=str(tmp_path / "o2"), on_error="skip", **options)
    assert [(row[0], row[1]) for row in rows_of(good)] == [(1, [0, 2]), (0, []), (0, [7])]


def test_a_mark_of_the_byte_order_is_no_label(tmp_path):
    for name, text in (("a", "\ufeff1 1:0.5\r\n0 2:1\r\n"), ("b", "\ufeff-1 1:2")):
        (tmp_path / f"{name}.svm").write_bytes(text.encode())
    found = load_libsvm(tmp_path, out=tmp_path / "out", pool=HERE)
    assert [row[0] for row in rows_of(found)] == [1, 0, 0]
    (tmp_path / "c.svm").write_bytes("1 1:1\n".encode("utf-16"))
    with pytest.raises(JobError, match=r"c\.svm is UTF-16, and only UTF-8 is read"):
        load_libsvm(tmp_path, out=tmp_path / "o2", pool=HERE)


# -- Parquet ----------------------------------------------------------------------------------------------------


def write_parquet(path, rows, per_group=100, **more):
    from pyarrow import parquet

    table = pa.table(
        {
            "click": pa.array([n % 2 for n in rows], pa.int8()),
            "age": [n / 3 for n in rows],
            "site": pa.array([f"s{n % 7}" for n in rows]).dictionary_encode(),
            **more,
        }
    )
    parquet.write_table(table, path, row_group_size=per_group)


@pytest.mark.parametrize("partition_mb", [0.001, 0.004, 1])
def test_parquet_by_row_groups(tmp_path, partition_mb):
    write_parquet(tmp_path / "a.parquet", range(250))
    write_parquet(tmp_path / "b.parquet", range(250, 1000), per_group=33)
    dataset = load_parquet(str(tmp_path), out=str(tmp_path / "out"), partition_mb=partition_mb, label="click", pool=HERE)
    assert rows_of(dataset) == [(n % 2, n / 3, f"s{n % 7}") for n in range(1000)]
    sizes = [part.rows for part in dataset.partitions]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) > 3 or partition_mb == 1


def test_invalid_rows_and_columns_of_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(250), score=[1.0 if n != 203 else float("inf") for n in range(250)])
    with pytest.raises(JobError, match=r"a\.parquet, row 204, column score: is infinite"):
        load_parquet(str(tmp_path / "a.parquet"), out=str(tmp_path / "out"), partition_mb=0.003, label="click", pool=HERE)
    kept = load_parquet(
        str(tmp_path / "a.parquet"), out=str(tmp_path / "o2"), partition_mb=0.003, label="click", on_error="quarantine", pool=HERE
    )
    assert len(kept) == 249
    assert json.loads((tmp_path / "o2/rejected.jsonl").read_text())["line"] == 204
    write_parquet(tmp_path / "b.parquet", range(5), score=["x"] * 5)
    with pytest.raises(JobError, match=r"b\.parquet has string as column score, which is double in"):
        load_parquet(str(tmp_path / "*.parquet"), out=str(tmp_path / "o3"), pool=HERE)
    write_parquet(tmp_path / "c.parquet", range(5), lists=[[1]] * 5)
    with pytest.raises(JobError, match=r"column lists is list.*neither numbers nor text"):
        load_parquet(str(tmp_path / "c.parquet"), out=str(tmp_path / "o4"), pool=HERE)
    (tmp_path / "d.parquet").write_text("no parquet")
    with pytest.raises(JobError, match=r"d\.parquet is no Parquet file"):
        load_parquet(str(tmp_path / "d.parquet"), out=str(tmp_path / "o5"), pool=HERE)


def test_the_dataset_is_found_again(tmp_path):
    write_csv(tmp_path / "a.csv", [(1, 2.0, "a")])
    made = load_csv(str(tmp_path / "a.csv"), out=str(tmp_path / "clicks"), label="click", pool=None)
    found = TableDataset.open(str(tmp_path / "clicks"))
    assert (found.version, found.manifest.name) == (made.version, "clicks")
    assert found.manifest.source[0].url.endswith("a.csv")
