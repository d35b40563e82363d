"""`map_partitions` and `ephemeron map-partitions`: one table of Parquet files from another, every partition computed once; what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ephemeron
from ephemeron.cli.main import main
from ephemeron.data.catalog.files import FileRange
from ephemeron.errors import JobError
from ephemeron.runs import folders
from ephemeron.runs.status import status_of

pa = pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
pd = pytest.importorskip("pandas", reason="frames; pip install 'ephemeron[pandas]'")
from pyarrow import dataset, parquet  # noqa: E402

MODULE = """
import pathlib, time
import numpy as np

CALLS = pathlib.Path(HERE) / "calls.txt"

def _called(key):
    with CALLS.open("a") as file:
        file.write(f"{key}\\n")

def doubled(partition, key):
    _called(key)
    return partition.assign(y=2 * partition.x)

def positive(partition):
    return partition[partition.x > 0]

def totals(partition):
    return partition.groupby("s").agg(total=("x", "sum"))

def odd(partition, key):
    _called(key)
    if key.startswith("1.") and not CALLS.with_name("mended").exists():
        raise ValueError("there is something about one")
    return partition[["x"]]

def kinds(partition, key):
    kind = {"0": float, "1": int, "2": str}[key[0]]
    return partition[["x"]].astype(kind) if "x" in partition else None

def maybe_null(partition, key):
    value = {"0": None, "1": "text", "2": None}[key[0]]
    return {"n": [len(partition)], "name": [value], "tags": [[] if value is None else [value]]}

def decimals(partition, key):
    import decimal
    return {"d": [decimal.Decimal({"0": "1.25", "1": "1234.5", "2": "-0.125"}[key[0]])]}

def other_order(partition, key):
    return partition[["x", "s"]] if key[0] == "0" else partition[["s", "x"]]

def more_columns(partition, key):
    return partition if key[0] != "2" else partition.assign(more=1)

def nothing(partition, key):
    import pandas
    return pandas.DataFrame() if key[0] == "1" else partition.iloc[:0]

def about(partition):
    columns = partition if isinstance(partition, dict) else None
    names = list(columns or getattr(partition, "column_names", None) or partition.columns)
    return {"kind": [f"{type(partition).__module__.partition('.')[0]}.{type(partition).__name__}"], "names": [",".join(names)]}

def types(partition):
    return {"types": [",".join(f"{name} {kind}" for name, kind in partition.dtypes.items())]}

def sampled(partition, rng):
    return {"u": rng.uniform(size=3)}

def a_list(partition):
    return [1, 2]

def mixed(partition):
    import pandas
    return pandas.DataFrame({"m": [1, "a"]})

def slow(partition, key):
    time.sleep(0.3)
    _called(key)
    return partition
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    (tmp_path / "of_partitions.py").write_text(MODULE.replace("HERE", repr(str(tmp_path))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("of_partitions", None)


def day(n: int, rows: int = 100) -> pd.DataFrame:
    rng = np.random.default_rng(n)
    return pd.DataFrame({"x": rng.normal(size=rows), "s": rng.choice(["a", "b"], rows), "i": np.arange(rows)})


def write(*numbers: int, folder: str = "days", **options) -> pd.DataFrame:
    """Files of days; all rows."""
    Path(folder).mkdir(exist_ok=True)
    for n in numbers:
        day(n).to_parquet(f"{folder}/{n}.parquet", **options)
    return pd.concat([day(n) for n in numbers], ignore_index=True)


def run(function, data="days", **options):
    told, notes = [], []
    options = {"out": "out", "platform": "simulated", "max_workers": 2, "retries": 0, **options}
    result = ephemeron.map_partitions(f"of_partitions:{function}", data, on_failure=told.append, on_note=notes.append, **options)
    return result, [each.error for each in told], notes


def calls(here):
    """Partitions that the function was called with since the last look."""
    path = here / "calls.txt"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(found)


def edit(here, before, after):
    path = here / "of_partitions.py"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    os.utime(path, (later := os.stat(path).st_mtime + 10, later))  # byte code is recognised by whole seconds
    sys.modules.pop("of_partitions", None)


def rows(out="out") -> pd.DataFrame:
    return pd.read_parquet(out).reset_index(drop=True)


OF_DASK = """
import dask.dataframe as dd
import of_partitions

for name in ("positive", "totals"):
    dd.read_parquet("days").map_partitions(getattr(of_partitions, name)).compute().to_parquet(f"{name}.parquet")
    dd.read_parquet(name).compute().reset_index(drop=True).to_parquet(f"read-{name}.parquet")
"""


@pytest.mark.slow
def test_the_rows_are_those_of_dask_which_reads_them_too(here):
    if importlib.util.find_spec("dask") is None:
        pytest.skip("dask to compare with; pip install 'dask[dataframe]'")
    write(0, 1, 2)
    for name in ("positive", "totals"):
        run(name, out=name)
    ran = subprocess.run(
        [sys.executable, "-c", OF_DASK], cwd=here, capture_output=True, text=True, timeout=100
    )  # the tests have a folder `sparse`
    assert ran.returncode == 0, ran.stderr
    for name in ("positive", "totals"):
        expected = pd.read_parquet(f"{name}.parquet").reset_index(drop=name == "positive")
        pd.testing.assert_frame_equal(rows(name), expected, check_dtype=False)
        pd.testing.assert_frame_equal(pd.read_parquet(f"read-{name}.parquet"), expected, check_dtype=False)


def test_readers_take_the_folder_as_one_table():
    frame = write(0, 1, 2)
    run("doubled")
    expected = frame.assign(y=2 * frame.x)
    pd.testing.assert_frame_equal(rows(), expected, check_dtype=False)
    pd.testing.assert_frame_equal(dataset.dataset("out").to_table().to_pandas(), expected, check_dtype=False)
    if importlib.util.find_spec("polars") is not None:
        import polars

        assert polars.read_parquet("out").to_dict(as_series=False) == expected.to_dict("list")
    assert {path.suffix for path in Path("out").iterdir()} == {".parquet"}


def test_row_groups_are_put_together_and_divided():
    frame = pd.DataFrame({"x": np.arange(1_000_000.0)})
    frame.to_parquet("small.parquet", row_group_size=10_000)
    frame.to_parquet("large.parquet", row_group_size=1_000_000)
    for name in ("small", "large"):
        result, _, _ = run("doubled", f"{name}.parquet", out=f"of-{name}", partition_mb=1)
        written = [row["result"] for row in result.rows()]
        assert 8 <= len(written) <= 10
        assert max(json.loads(each)["rows"] for each in written) <= 2**17
        np.testing.assert_array_equal(rows(f"of-{name}").y, 2 * frame.x)


def test_text_that_repeats_is_as_large_as_it_is_in_memory():
    pd.DataFrame({"x": 1.0, "s": ["the same text" * 10] * 50_000}).to_parquet("texts.parquet", row_group_size=5_000)
    assert os.stat("texts.parquet").st_size < 50_000
    assert run("positive", "texts.parquet", partition_mb=1)[0].items == 10


def test_given_again_only_what_has_changed_is_computed(here):
    write(0, 1, 2)
    first, _, _ = run("doubled")
    assert (first.computed, first.items) == (3, 3)
    assert calls(here) == ["0.parquet:0-100", "1.parquet:0-100", "2.parquet:0-100"]
    os.utime("days/1.parquet")  # the same content
    assert run("doubled")[0].computed == 0
    changed = day(1, 120)
    changed.to_parquet("days/1.parquet")
    write(3)
    result, _, notes = run("doubled")
    assert (result.computed, result.recorded) == (2, 2)
    assert calls(here) == ["1.parquet:0-120", "3.parquet:0-100"]
    assert notes == ["1 file of results that do not count any more is deleted"]
    expected = pd.concat([day(0), changed, day(2), day(3)], ignore_index=True)
    pd.testing.assert_series_equal(rows().x, expected.x)
    Path("days/0.parquet").unlink()
    assert run("doubled")[0].computed == 0
    assert len(rows()) == 320
    next(Path("out").glob("2.*")).unlink()  # a result that is gone is computed again
    assert run("doubled")[0].computed == 1
    assert calls(here) == ["2.parquet:0-100"]
    [path] = Path("out").glob("3.*")  # so is one that is damaged
    path.write_bytes(path.read_bytes()[:-20])
    assert run("doubled")[0].computed == 1
    assert calls(here) == ["3.parquet:0-100"]
    parquet.write_table(parquet.read_table(path), path, compression="none")  # and one with the same rows is not
    assert run("doubled")[0].computed == 0
    assert len(rows()) == 320


def test_other_columns_that_change_do_not_count(here):
    write(0)
    run("doubled", columns=["x"])
    day(0).assign(i=7, more="m").to_parquet("days/0.parquet")
    assert run("doubled", columns=["x"])[0].computed == 0
    assert run("about", columns=["i", "x"], out="about")[0].computed == 1
    assert rows("about").names[0] == "i,x"


def test_other_code_computes_all_again_and_replaces_the_files(here):
    write(0, 1, 2)
    run("doubled")
    edit(here, "y=2 *", "y=3 *")
    result, _, notes = run("doubled")
    assert result.computed == 3
    assert notes == ["3 files of results that do not count any more are deleted"]
    assert len(list(Path("out").iterdir())) == 3
    assert rows().y.equals(3 * rows().x)
    edit(here, "y=3 *", "y=2 *")
    assert run("doubled", ignore_code_changes=True)[0].computed == 0
    assert rows().y.equals(3 * rows().x)


def test_other_code_can_be_tried_with_some_partitions(here):
    write(0, 1, 2)
    run("doubled")
    edit(here, "y=2 *", "y=3 *")
    result, _, _ = run("doubled", only=["1.parquet:0-100"])
    assert (result.computed, result.missing) == (1, 2)
    assert [round(y / x) for x, y in rows().iloc[::100][["x", "y"]].to_numpy()] == [2, 3, 2]
    assert run("doubled")[0].computed == 2
    assert rows().y.equals(3 * rows().x)


def test_what_a_killed_function_leaves_is_deleted(here):
    write(0)
    run("doubled")
    [name] = (path.name for path in Path("out").iterdir())
    left = here / "out" / f".{name}.0123456789ab.part"
    left.touch()
    other = here / "out" / name.replace("0.0", "7.0")
    other.touch()
    write(1)
    run("doubled")
    assert (left.exists(), other.exists()) == (False, False)


def test_failed_partitions_are_rows_and_are_tried_again(here):
    write(0, 1, 2)
    result, told, _ = run("odd")
    assert (result.failed, told) == (1, ["ValueError: there is something about one"])
    assert len(rows()) == 200
    calls(here)
    (here / "mended").touch()
    assert run("odd")[0].computed == 0
    assert run("odd", retry_failed=True)[0].computed == 1
    assert calls(here) == ["1.parquet:0-100"]
    assert len(rows()) == 300
    assert run("odd", only=["2.parquet:0-100"])[0].computed == 0
    with pytest.raises(JobError, match=r"no item has the key '2.parquet:0-99'"):
        run("odd", only=["2.parquet:0-99"])


def test_partitions_of_another_type_are_errors():
    write(0)
    run("kinds")
    write(1, 2)
    result, told, _ = run("kinds")
    assert sorted(told) == [
        "column 'x' of the result is int64, and double in the results before: return the same type for all partitions",
        "column 'x' of the result is string, and double in the results before: return the same type for all partitions",
    ]
    assert (result.failed, len(list(Path("out").iterdir()))) == (2, 1)
    run("more_columns", "days/[01].parquet", out="more")
    _, told, _ = run("more_columns", "days/*.parquet", out="more")
    assert told == ["the result has a column 'more' of int64, which the results before have not"]


def test_columns_without_values_get_the_type_that_they_have_elsewhere():
    write(0, 1, 2)
    assert run("maybe_null", max_workers=1)[1] == []
    found = dataset.dataset("out").to_table()
    assert found.column("name").to_pylist() == [None, "text", None]
    assert found.column("tags").to_pylist() == [[], ["text"], []]
    assert {str(parquet.read_schema(path)) for path in Path("out").iterdir()} == {str(found.schema)}
    assert run("maybe_null")[0].computed == 0
    assert run("other_order", max_workers=1, out="order")[1] == []
    assert len({tuple(parquet.read_schema(path).names) for path in Path("order").iterdir()}) == 1


def test_decimals_have_the_digits_that_all_values_need():
    write(0, 1, 2)
    assert run("decimals")[1] == []
    found = dataset.dataset("out").to_table()
    assert found.column("d").to_pylist() == [Decimal("1.250"), Decimal("1234.500"), Decimal("-0.125")]
    assert {str(parquet.read_schema(path)) for path in Path("out").iterdir()} == {str(found.schema)}
    assert run("decimals")[0].computed == 0


def test_partitions_without_rows():
    write(0, 1, 2)
    result, told, _ = run("nothing")
    assert (result.failed, told) == (0, [])
    assert [each["rows"] for each in result] == [0, 0, 0]
    assert [each["file"] is None for each in result] == [False, True, False]
    assert (len(rows()), list(rows())) == (0, ["x", "s", "i"])
    assert run("nothing")[0].computed == 0
    day(0).iloc[:0].to_parquet("days/1.parquet")  # a file without rows has no partition
    assert run("positive", out="some")[0].items == 2
    with pytest.raises(JobError, match="has no rows"):
        run("positive", "days/1.parquet", out="none")


@pytest.mark.parametrize(
    ("frame", "kind"),
    [("pandas", "pandas.DataFrame"), ("polars", "polars.DataFrame"), ("arrow", "pyarrow.Table"), ("numpy", "builtins.dict")],
)
def test_a_partition_is_the_frame_that_is_wanted(frame, kind):
    pytest.importorskip(frame if frame in ("pandas", "polars") else "pyarrow")
    write(0)
    run("about", frame=frame)
    assert rows().kind[0] == kind


def test_a_column_has_one_type_in_all_partitions(here):
    write(0, 1)
    run("types")
    assert "i int64" in rows().types[0]
    day(1).assign(i=[None, *range(99)]).to_parquet("days/1.parquet")
    assert run("types")[0].computed == 2, "what the function is given has changed for both"
    assert all("i float64" in each for each in rows().types)


def test_what_rows_and_columns_may_be(here):
    """Odd names, nested columns, categories, decimals, nulls, an index."""
    frame = pd.DataFrame(
        {
            "a b/ü": ["x", None],
            "a.b": [1.5, 2.5],
            "": [True, False],
            "list": [[1, 2], []],
            "struct": [{"k": 1}, {"k": None}],
            "kind": pd.Categorical(["u", "v"]),
            "at": pd.to_datetime(["2024-01-01", None]).tz_localize("Europe/Berlin"),
        },
        index=pd.Index([7, 8], name="id"),
    )
    frame.to_parquet("odd name #1 [x].parquet")
    (here / "of_partitions.py").write_text("def same(partition):\n    return partition\n")
    run("same", "odd name #1 [x].parquet")
    found = dataset.dataset("out").to_table()
    expected = pa.Table.from_pandas(frame).set_column(5, "kind", pa.array(["u", "v"])).select(found.column_names)
    assert set(found.column_names) == {*frame.columns, "id"}
    assert found.to_pylist() == expected.to_pylist()
    assert str(found.schema.field("at").type) == "timestamp[us, tz=Europe/Berlin]"
    run("same", "odd name #1 [x].parquet", columns=["a.b", ""], out="some", frame="arrow")
    assert dataset.dataset("some").schema.names == ["a.b", ""]


def test_random_numbers_are_of_the_partition_alone():
    write(0, 1)
    run("sampled", seed=3)
    run("sampled", seed=3, out="again", max_workers=1)
    assert rows().equals(rows("again"))
    assert rows().u.nunique() == 6
    assert run("sampled", seed=4)[0].computed == 2


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (
            "a_list",
            r"the function returned a list, which is no frame: return a pandas or Polars frame, an Arrow table, or a dict of arrays",
        ),
        ("mixed", r"which is no table: .*Conversion failed for column m"),
    ],
)
def test_what_is_no_frame_is_a_failure(function, match):
    write(0)
    result, [told], _ = run(function)
    assert result.failed == 1
    assert re.search(match, told)


def test_files_of_mixed_types_are_given_as_one_and_unlike_ones_are_refused():
    write(0)
    day(1).assign(i=0.5).to_parquet("days/1.parquet")
    day(2).assign(s=None).to_parquet("days/2.parquet")
    run("types")
    assert set(rows().types) == {"x float64,s str,i float64"} or set(rows().types) == {"x float64,s object,i float64"}
    day(3).assign(s=1.0).to_parquet("days/3.parquet")
    with pytest.raises(JobError, match=r"column 's' of 3.parquet is double, and string in files before; convert it, or leave it out"):
        run("types", out="b")
    assert run("types", columns=["x", "i"], out="c")[0].computed == 4
    day(3)[["x", "i"]].to_parquet("days/3.parquet")
    with pytest.raises(JobError, match=r"3.parquet differs from 0.parquet in its columns: s; name columns that all files have"):
        run("types", out="b")


def test_what_is_refused_before_anything_begins(here):
    write(0, 1)
    (here / "days" / "_SUCCESS").touch()  # what Spark leaves
    run("positive")
    cases = [
        ({"columns": ["x", "z"]}, r"days/0.parquet has no column 'z'"),
        ({"data": "nights"}, "there is no file nights"),
        ({"data": "of_partitions.py"}, "is no Parquet file, or is damaged"),
        ({"data": "home"}, "there is no file home|has no file"),
        ({"out": "days/out"}, "is in the folder that is read"),
        ({"data": "days/*.parquet", "out": "days"}, "is a file of --out days, and is read"),
        ({"out": "of_partitions.py"}, "--out of_partitions.py is a file; name a folder"),
        ({"out": "of{key}"}, "has a brace"),
        ({"frame": "excel"}, "rows cannot be given as 'excel'"),
        ({"partition_mb": 0}, "partition_mb = 0 is below 1"),
        ({"stop_when": 1}, "no option 'stop_when'"),
        ({"memory_mb": 128}, r"partition 0.parquet:0-100 of .* needs about 1\d\d MB, .* use --memory-mb"),
    ]
    for options, match in cases:
        with pytest.raises(JobError, match=match):
            run("positive", **{"data": "days", **options})
    with pytest.raises(JobError, match=r"holds the results of of_partitions:positive, and this is of_partitions:totals"):
        run("totals")
    write(7, folder="other")
    with pytest.raises(JobError, match=r"--out out has rows of other files, such as 0.0000.*, and none of other; name another --out"):
        run("positive", "other")
    assert len(rows()) > 0
    (here / "out" / "mine.parquet").touch()
    with pytest.raises(JobError, match=r"--out out has a file mine.parquet, which is none of this map's"):
        run("positive")
    (here / "out" / "mine.parquet").rename(here / "out" / "_mine")
    assert run("positive")[0].computed == 0
    (here / "out.results").rename(here / "elsewhere")
    with pytest.raises(JobError, match=r"has files of results, .* whose table is gone"):
        run("positive")
    data = (here / "days" / "1.parquet").read_bytes()
    (here / "days" / "1.parquet").write_bytes(data[:-10])
    with pytest.raises(JobError, match=r"days/1.parquet is no Parquet file, or is damaged"):
        run("positive", out="b")


def test_damaged_rows_are_an_error_of_their_partition(here):
    write(0, 1, 2, compression="none", use_dictionary=False)
    data = bytearray((here / "days" / "1.parquet").read_bytes())
    data[4:60] = bytes(56)
    (here / "days" / "1.parquet").write_bytes(data)
    result, [told], _ = run("positive")
    assert (result.failed, len(list(Path("out").iterdir()))) == (1, 2)
    assert "days/1.parquet cannot be read" in told


def test_the_command(here):
    write(0, 1)
    command = ["map-partitions", "of_partitions:positive", "--data", "days", "--out", "out", "--columns", "x,i", "--platform", "simulated"]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    assert "2 partitions with rows in out" in ran.stderr
    assert list(rows()) == ["x", "i"]
    ran = CliRunner().invoke(main, [*command, "--json"])
    assert json.loads(ran.stdout.splitlines()[-1])["recorded"] == 2
    ran = CliRunner().invoke(main, [*command, "--dry-run"])
    assert ran.exit_code == 2
    assert "all partitions have results" in ran.stderr
    ran = CliRunner().invoke(main, [*command[:-4], "--columns", "y", "--platform", "simulated"])
    assert (ran.exit_code, "days/0.parquet has no column 'y'" in ran.stderr) == (2, True)


@pytest.mark.slow
def test_a_dry_run_writes_nothing(here):
    write(0, 1)
    command = ["map-partitions", "of_partitions:positive", "--data", "days", "--out", "out", "--dry-run", "--json"]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["cost_usd"] > 0
    assert not list(here.glob("out/*"))


@pytest.mark.slow
@pytest.mark.cold_start
def test_functions_drive_it(here):
    write(0, 1, 2)
    command = ["map-partitions", "of_partitions:slow", "--data", "days", "--out", "out", "--max-workers", "1", "--detach", "--json"]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    (here / "of_partitions.py").unlink()
    result = ephemeron.attach(json.loads(ran.stdout.splitlines()[-1])["run_id"])
    assert (result.summary.status, result.summary.tasks) == ("finished", 3)
    assert len(rows()) == 300


@pytest.mark.slow
def test_tables_in_a_bucket(here, s3):
    from ephemeron.data.catalog.loop import run as wait
    from ephemeron.data.catalog.open_files import open_files

    frame = write(0, 1)
    files = open_files(s3)
    for n in (0, 1):
        assert wait(files.create(f"in/{n}.parquet", Path(f"days/{n}.parquet")))
    for place in (f"{s3}/in/", f"{s3}/in/*.parquet"):
        result, told, _ = run("positive", place, out=f"{s3}/out", platform="local", max_workers=1)
        assert (result.failed, told) == (0, [])
    assert result.computed == 0
    found = []
    for name in wait(files.tree("out")):
        [data] = wait(files.fetch([FileRange(f"out/{name.rpartition('/')[2]}")]))
        found.append(parquet.read_table(pa.BufferReader(data)).to_pandas())
    pd.testing.assert_frame_equal(pd.concat(found).reset_index(drop=True), frame[frame.x > 0].reset_index(drop=True))
    with pytest.raises(JobError, match="is in the folder that is read"):
        run("positive", f"{s3}/in/", out=f"{s3}/in/out")
    edit(here, "partition.x > 0", "partition.x > 1")
    assert run("positive", f"{s3}/in/", out=f"{s3}/out", platform="simulated")[0].computed == 2
    assert len(wait(files.tree("out"))) == 2


@pytest.mark.slow
def test_a_killed_client_costs_nothing_twice(here):
    write(*range(10))
    command = [
        sys.executable,
        "-c",
        "from ephemeron.cli.main import main; main()",
        "map-partitions",
        "of_partitions:slow",
        "--data",
        "days",
    ]
    command += ["--out", "out", "--max-workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    ends_at = time.monotonic() + 120
    while not list(here.glob("out/*.parquet")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    process.kill()
    process.communicate()
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert calls(here) == sorted(f"{n}.parquet:0-100" for n in range(10)), "each was computed once"
    assert len(rows()) == 1000
    assert [status_of(each) for each in folders.all_runs()] == ["finished"]


@pytest.mark.parametrize("function", ["a_list", "mixed"])
def test_an_error_of_what_was_returned_has_no_traceback_of_ours(function):
    write(0)
    failures = []
    ephemeron.map_partitions(
        f"of_partitions:{function}", "days", out="out", platform="simulated", retries=0, max_workers=1, on_failure=failures.append
    )
    assert failures[0].error.startswith("the function returned a ")
    assert failures[0].traceback == ""


def test_a_traceback_has_files_as_the_user_knows_them():
    write(0, 1)
    failures = []
    ephemeron.map_partitions("of_partitions:odd", "days", out="out", platform="local", retries=0, max_workers=1, on_failure=failures.append)
    assert 'File "of_partitions.py", line' in failures[0].traceback
