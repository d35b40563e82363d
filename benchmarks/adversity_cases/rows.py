"""Texts that are not numbers, rows that get lost, paths that mean another folder."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.adversity_cases import case
from ephemeron.data.catalog import DatasetReader, DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.formats.lines import text_lines
from ephemeron.data.formats.records import header_of
from ephemeron.data.tables import TableDataset
from ephemeron.errors import DatasetDamaged, JobError
from ephemeron.executor.prediction_files import read_inputs
from ephemeron.functions.passed_on import daemon_environment
from ephemeron.preparation import InProcess, Pipeline, StandardScaler, load_csv
from ephemeron.preparation.load_plan import listed

NAMES, LOST, PATHS = "text becomes numbers", "rows lost", "a relative path means another folder"


def folder() -> Path:
    """A new one."""
    return Path(tempfile.mkdtemp(prefix="rows-"))


def columns_of(dataset: TableDataset) -> dict[str, list[Any]]:
    """All rows by column."""
    table = pa.concat_tables(list(dataset.tables()))
    return {name: table.column(name).to_pylist() for name in table.column_names}


def prepared(text: str | bytes, **options: Any) -> dict[str, list[Any]]:
    """What `load_csv` makes of a text."""
    place = folder()
    (place / "in.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return columns_of(load_csv(place / "in.csv", out=place / "out", pool=InProcess(), **options))


def imported(text: str | bytes, target: str = "", **options: Any) -> list[tuple[Any, Any]]:
    """What `data import csv` makes of it."""
    place = folder()
    (place / "s").mkdir()
    (place / "s/in.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    store = DatasetStore.open(place / "store")
    import_dataset("csv", place / "s", "me/t", store, options={"target": target}, **options)
    return [(sample.value, sample.target) for sample in DatasetReader.open("me/t", "train", store=store)]


def refused(run: Callable[[], Any], *words: str) -> None:
    """Checks that something is refused in one line with these words."""
    try:
        found = run()
    except (JobError, DatasetDamaged) as e:
        said = str(e)
    else:
        raise AssertionError(f"gave {found!r}, instead of a refusal")
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in: {said}"
    assert "\n" not in said, said


# -- text becomes numbers ---------------------------------------------------------------------------------------

for header in (
    "NA,K",
    "null,b",
    "nan,b",
    "007,7",
    "1e3,1.50",
    "true,True",
    "2020-01-01,b",
    "0,00",
    " a ,a",
    "N/A,NaN",
    "123456789012345678901,x",
):

    @case(NAMES, f"header {header}")
    def _(header: str = header) -> None:
        assert header_of(f"{header}\n1,2\n".encode(), ",", "f")[0] == header.split(",")
        assert list(prepared(f"{header}\n1,2\n3,4\n")) == header.split(",")
        assert list(imported(f"{header}\n1,2\n3,4\n")[0][0]) == header.split(",")


for texts in (["100_1", "1001"], ["00501", "02134"], ["007", "7"], ["1e3", "1000"], ["٣", "٤"], ["9007199254740993.5", "9007199254740993"]):

    @case(NAMES, f"identifiers {' and '.join(texts)}")
    def _(texts: list[str] = texts) -> None:
        table = "id,y\n" + "".join(f"{text},{n}\n" for n, text in enumerate(texts))
        assert prepared(table, label="y")["id"] == texts
        assert [target for _, target in imported(table, "id")] == texts
        assert [value["id"] for value, _ in imported(table, "y")] == texts


@case(NAMES, "identifiers above 2^53")
def _() -> None:
    table = "id,y\n9007199254740993,0\n9007199254740992,1\n"
    assert prepared(table, label="y")["id"] == ["9007199254740993", "9007199254740992"]
    assert [target for _, target in imported(table, "id")] == [9007199254740993, 9007199254740992]


@case(NAMES, "words nan and Infinity as names")
def _() -> None:
    assert [target for _, target in imported("name,y\nnan,0\nInfinity,1\n", "name")] == ["nan", "Infinity"]


@case(NAMES, "numbers as they are usually written stay numbers")
def _() -> None:
    texts = ["1.50", "1e-3", "+5", " 7", "-0", ".5", "5.", "1.5e3"]
    table = "x,y\n" + "".join(f"{text},0\n" for text in texts)
    expected = [float(text) for text in texts]
    assert prepared(table, label="y")["x"] == [target for _, target in imported(table, "x")] == expected


@case(NAMES, "an identifier after the sample is told with its line")
def _() -> None:
    table = "x,y\n" + "".join(f"{n},0\n" for n in range(200_000)) + "00501,1\n"
    refused(lambda: prepared(table, label="y"), "line 200002, column x: '00501' would be read as 501.0", '"categorical"')


@case(NAMES, "what the recipe calls a number is one")
def _() -> None:
    assert prepared("id,y\n00501,0\n1e3,1\n", label="y", columns={"id": "numeric"})["id"] == [501.0, 1000.0]


@case(NAMES, "a name that two columns have")
def _() -> None:
    refused(lambda: prepared("a,a,y\n1,2,0\n"), "has two columns 'a'")
    refused(lambda: imported("a,a,y\n1,2,0\n", on_defect="skip"), "has two columns 'a'")


# -- rows lost --------------------------------------------------------------------------------------------------

for policy in ("fail", "skip", "quarantine"):

    @case(LOST, f"a quote that is not closed, {policy}")
    def _(policy: Any = policy) -> None:
        table = 'x,s,y\n1,a,0\n2,"b,1\n' + "3,c,0\n" * 1000
        refused(lambda: prepared(table, label="y", on_error=policy), "line 3: a quote is not closed")
        refused(lambda: imported(table, "y", on_defect=policy), "line 3: a quote is not closed")


for partition_mb in (10.0, 0.01, 0.0005):

    @case(LOST, f"a quote that is not closed, partitions of {partition_mb} MB")
    def _(partition_mb: float = partition_mb) -> None:
        table = "x,s,y\n" + "1,a,0\n" * 3000 + '2,"b,1\n' + "3,c,0\n" * 1000
        refused(lambda: prepared(table, label="y", partition_mb=partition_mb), "line 3002: a quote is not closed")


@case(LOST, "inch marks in plain cells")
def _() -> None:
    table = 's,y\n5" pipe,0\nb,1\nc,0\n6" pipe,1\nd,1\n'
    expected = ['5" pipe', "b", "c", '6" pipe', "d"]
    assert prepared(table, label="y")["s"] == [value["s"] for value, _ in imported(table, "y")] == expected


for name, data, words in (
    ("header ends in CR, rows in LF", b"x,y\r1,0\n2,1\n", "carriage return"),
    ("CR alone ends all lines", b"x,y\r1,0\r2,1\r", "carriage return"),
    ("CR in a plain cell", b"x,y\n1,0\r2,1\n3,0\n", "line 2"),
    ("CR in a table of one column", b"x\n1\r2\n3\n", "line 2"),
    ("UTF-16", "x,y\n1,0\n".encode("utf-16"), "UTF-16"),
    ("UTF-16 without a mark", "x,y\n1,0\n".encode("utf-16-le"), "bytes of 0"),
    ("header of another encoding", "x,pr\xe9nom\n1,0\n".encode("latin-1"), "not UTF-8"),
    ("cell of another encoding", "x,y\n1,caf\xe9\n".encode("latin-1"), "not UTF-8"),
    ("blank line before the header", b"\nx,y\n1,0\n", "blank line"),
    ("nothing but a mark of the byte order", b"\xef\xbb\xbf", "no header line"),
    ("header alone", b"x,y\n", "no "),
    ("Ctrl-Z at the end", b"x,y\n1,0\n\x1a", "line 3"),
):

    @case(LOST, name)
    def _(data: bytes = data, words: str = words) -> None:
        refused(lambda: prepared(data), words)
        refused(lambda: imported(data), words)


@case(LOST, "U+2028, NEL, form feed and NUL in cells")
def _() -> None:
    texts = ["a\u2028b", "c\x85d", "e\x0cf", "g\0h", "i"]
    table = "s,y\r\n" + "".join(f"{text},{n}\r\n" for n, text in enumerate(texts))
    assert prepared(table)["s"] == [value["s"] for value, _ in imported(table, "y")] == texts


@case(LOST, "U+2028 and NEL in lines of JSON")
def _() -> None:
    place = folder()
    data = b"\xef\xbb\xbf" + '{"a\u2028b\x85": 1.5}\r\n{"a\u2028b\x85": 2.5}'.encode()
    (place / "a.jsonl").write_bytes(data)
    assert [json.loads(line) for _, line in text_lines(data, "a")] == [{"a\u2028b\x85": 1.5}, {"a\u2028b\x85": 2.5}]
    assert read_inputs(place / "a.jsonl")["a\u2028b\x85"].tolist() == [1.5, 2.5]


@case(LOST, "hidden files, wildcards, brackets in names")
def _() -> None:
    place = folder()
    for file in ("a.csv", "data1.csv", "data[1].csv", "._a.csv", ".ipynb_checkpoints/a.csv", "sub/b.csv", "[DE]/c 1.csv"):
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_text("x,y\n1,0\n")

    def names(pattern: str) -> list[str]:
        return [str(Path(source.name).relative_to(place)) for source in listed(place / pattern, endings=(".csv",))]

    top = ["a.csv", "data1.csv", "data[1].csv"]
    assert names("") == names("**/*.csv") == ["[DE]/c 1.csv", *top, "sub/b.csv"]
    assert names("*.csv") == top
    assert names("data[1].csv") == ["data[1].csv"]
    assert names("[DE]") == names("[DE]/c 1.csv") == ["[DE]/c 1.csv"]


# -- paths ------------------------------------------------------------------------------------------------------


class Elsewhere(InProcess):
    """Functions with another working folder than the client."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        """Results in order."""
        with contextlib.chdir(folder()):
            return iter(list(super().map(fn, *iterables)))


@case(PATHS, "load and transform with relative folders, several partitions")
def _() -> None:
    place = folder()
    (place / "a.csv").write_text("x,y\n" + "".join(f"{n},{n % 2}\n" for n in range(2000)))
    with contextlib.chdir(place):
        raw = load_csv("a.csv", out="out/raw", label="y", partition_mb=0.005, pool=Elsewhere())
        pipeline = Pipeline([StandardScaler()]).fit(raw, pool=InProcess())
        train = pipeline.transform(raw, out="out/train", partition_mb=0.005, pool=Elsewhere())
        by_path = load_csv(Path("a.csv"), out=Path("again"), label="y", partition_mb=0.005, pool=Elsewhere())
    assert len(raw.partitions) > 1
    assert columns_of(raw)["x"] == [float(n) for n in range(2000)]
    assert len(columns_of(train)["x"]) == 2000
    assert by_path.version == raw.version


@case(PATHS, "processes of functions, a relative folder")
def _() -> None:
    place = folder()
    (place / "a.csv").write_text("x,y\n" + "".join(f"{n},{n % 2}\n" for n in range(2000)))
    with contextlib.chdir(place):
        raw = load_csv("a.csv", out="out", label="y", partition_mb=0.008)
    assert len(raw.partitions) > 1
    assert columns_of(raw)["x"] == [float(n) for n in range(2000)]


@case(PATHS, "a partition that is not there at the end")
def _() -> None:
    place = folder()
    (place / "a.csv").write_text("x,y\n" + "".join(f"{n},{n % 2}\n" for n in range(2000)))

    class Losing(InProcess):
        def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
            found = list(super().map(fn, *iterables))
            (place / "out/part-00001.arrow").unlink(missing_ok=True)
            return iter(found)

    refused(
        lambda: load_csv(place / "a.csv", out=place / "out", label="y", partition_mb=0.005, pool=Losing()),
        "part-00001.arrow: it is absent",
        "prepare again",
    )
    assert not (place / "out/dataset.json").exists()
    assert not (place / "out/state/finished.json").exists()


@case(PATHS, "functions know the client's store of datasets")
def _() -> None:
    assert Path(daemon_environment({})["EPHEMERON_DATASETS_STORE"]).is_absolute()
