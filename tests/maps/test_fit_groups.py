"""`fit_groups`: models by group equal those of pandas; what has changed is fitted again, and nothing else; what is refused."""

from __future__ import annotations

import datetime
import decimal
import json
import pickle
from pathlib import Path

import group_models
import numpy as np
import pytest

import ephemeron
from ephemeron.errors import DamagedObject, JobError, MissingExtra
from ephemeron.maps import GroupModels, MapResult, parquet_rows
from ephemeron.maps.groups import fitting, group_rows, models
from ephemeron.runs import folders

pa = pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
pd = pytest.importorskip("pandas", reason="pandas to compare with")
from pyarrow import parquet  # noqa: E402


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sales(rows: int = 3000, groups: int = 40, *, seed: int = 0) -> pd.DataFrame:
    """Rows of very unequal groups: by Zipf's law."""
    rng = np.random.default_rng(seed)
    store = rng.zipf(1.3, rows) % groups
    return pd.DataFrame(
        {
            "store": [f"store {n}" for n in store],
            "sku": rng.integers(0, 3, rows),
            "t": rng.uniform(size=rows),
            "y": rng.standard_normal(rows),
        }
    )


def fit(function, data, *, by=("store", "sku"), out="models", **options) -> MapResult:
    return ephemeron.fit_groups(function, data, by=by, out=out, platform="simulated", **{"retries": 0, **options})


def test_models_are_those_of_pandas(here):
    frame = sales()
    frame.to_parquet("sales.parquet")
    result = fit(group_models.line_and_metrics, "sales.parquet")
    expected = frame.groupby(["store", "sku"]).apply(group_models.line)
    assert (result.items, result.computed, result.failed, result.missing) == (len(expected), len(expected), 0, 0)
    assert frame.groupby(["store", "sku"]).size().max() > 50 * frame.groupby(["store", "sku"]).size().min(), "they are unequal"
    found = GroupModels.open("models")
    assert len(found) == len(expected)
    for key, line in expected.items():
        np.testing.assert_allclose(found[key].weights, line.weights, rtol=1e-12)
    sizes = frame.groupby(["store", "sku"]).size()
    for row in found.rows():
        key = tuple(row["key"])
        assert row["rows"] == row["metrics"]["rows"] == sizes[key]
        assert row["metrics"]["mean"] == pytest.approx(frame.groupby(["store", "sku"]).y.mean()[key])
        assert row["metrics"]["key"] == [repr(key[0]), repr(int(key[1]))]
        assert row["nbytes"] == len(pickle.dumps(found[key], protocol=5))


def test_the_largest_group_is_begun_first():
    frame = sales()
    result = fit(group_models.line_and_metrics, frame)
    rows = [json.loads(text)["rows"] for part in result.parts(("result",)) for text in part.column(0).to_pylist()]
    assert rows == sorted(rows, reverse=True)


def test_the_table_of_results_is_read_by_pandas(here):
    fit(group_models.line_and_metrics, sales(200), by=["store"])
    [shard] = (here / "models" / "rows").iterdir()
    rows = pd.read_parquet(shard)
    assert set(rows.status) == {"ok"}
    assert sum(json.loads(text)["rows"] for text in rows.result) == 200
    assert pickle.loads(rows.data[0]).weights.shape == (2,)
    assert set(rows.key) == {json.dumps([store]) for store in sales(200).store}


@pytest.mark.parametrize("source", ["folder", "wildcard", "pandas", "arrow", "polars", "dict", "csv"])
def test_the_same_rows_from_elsewhere_are_the_same_groups(here, source):
    frame = sales(400)
    (here / "parts").mkdir()
    for n, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
        frame.iloc[part].to_parquet(f"parts/{n}.parquet", index=False)
    fit(group_models.line, "parts/*.parquet")
    data: object = {"folder": "parts", "wildcard": "parts/[0-9].parquet", "csv": "sales.csv"}.get(source)
    if source == "polars":
        data = pytest.importorskip("polars", reason="Polars").from_arrow(pa.Table.from_pandas(frame))
    elif source == "csv":
        frame.to_csv("sales.csv", index=False)
    elif data is None:
        data = {"pandas": frame, "arrow": pa.Table.from_pandas(frame), "dict": {name: frame[name].to_numpy() for name in frame}}[source]
    again = fit(group_models.line, data)
    if source == "csv":  # its by-columns are text
        assert again.computed == again.items
        assert again.items == len(frame.groupby(["store", "sku"]))
        key = next(iter(GroupModels.open("models")))
        assert isinstance(json.loads(key)[1], str)
    else:
        assert (again.computed, again.recorded) == (0, again.items)


def test_only_changed_groups_are_fitted_again(here):
    frame = sales()
    frame.to_parquet("sales.parquet")
    first = fit(group_models.line, "sales.parquet")
    assert fit(group_models.line, "sales.parquet").computed == 0
    frame.loc[17, "y"] += 1e-12
    frame.to_parquet("sales.parquet")
    assert fit(group_models.line, "sales.parquet").computed == 1
    more = pd.concat([frame, pd.DataFrame({"store": ["new", "new"], "sku": [0, 0], "t": [0.0, 1.0], "y": [1.0, 3.0]})], ignore_index=True)
    more.to_parquet("sales.parquet")
    assert fit(group_models.line, "sales.parquet").computed == 1
    found = GroupModels.open("models")
    assert len(found) == first.items + 1
    np.testing.assert_allclose(found[("new", 0)].weights, [1.0, 2.0])
    np.testing.assert_allclose(
        found[(frame.store[17], frame.sku[17])].weights,
        group_models.line(frame[(frame.store == frame.store[17]) & (frame.sku == frame.sku[17])]).weights,
    )
    frame[frame.store != frame.store[17]].to_parquet("sales.parquet")  # groups that are gone have no model any more
    assert fit(group_models.line, "sales.parquet").computed == 0
    assert (frame.store[17], 0) not in GroupModels.open("models")


@pytest.mark.slow
def test_another_order_of_files_and_parts_changes_nothing_in_a_group(here):
    frame = sales(500)
    frame.to_parquet("a.parquet")
    first = fit(group_models.line, "a.parquet")
    stable = frame.sort_values(["sku", "store"], kind="stable")  # rows of a group stay in order
    parquet.write_table(pa.Table.from_pandas(stable, preserve_index=False), "b.parquet", row_group_size=7)
    assert (fit(group_models.line, "b.parquet").recorded, first.items) == (first.items, first.items)
    fit(group_models.line, frame.iloc[::-1])
    assert GroupModels.open("models").table.known(code=None).ids.size > first.items, "the order of rows is part of a group"


@pytest.mark.slow
def test_other_code_fits_all_again(here):
    frame = sales(200)
    (here / "fits_of_groups.py").write_text("def fit(group):\n    return 1\n")
    assert fit("fits_of_groups:fit", frame).computed > 0
    (here / "fits_of_groups.py").write_text("def fit(group):\n    # a comment\n    return 1\n")
    assert fit("fits_of_groups:fit", frame).computed == 0
    assert fit("fits_of_groups:fit", frame, frame="arrow").computed > 0, "what it is given is part of the version"
    assert fit("fits_of_groups:fit", frame, code_version="a").computed > 0
    assert fit("fits_of_groups:fit", frame, code_version="b", ignore_code_changes=True).computed == 0
    assert GroupModels.open("models")[(frame.store[0], frame.sku[0].item())] == 1


def test_nulls_are_keys_and_types_stay(here):
    table = pa.table(
        {
            "store": ["a", None, "007", "", "a/b", "Zürich", "7"],
            "n": pa.array([1, None, 3, 4, 5, 6, None], pa.int16()),
            "day": [datetime.date(2024, 1, n + 1) for n in range(7)],
            "price": [decimal.Decimal(f"{n}.50") for n in range(7)],
            "is": [True, False, None, True, True, True, True],
            "x": [0.0, -0.0, 1.5, None, 2.0, 3.0, 4.0],
            "t": np.arange(7.0),
            "y": np.arange(7.0),
        }
    )
    fit(group_models.line_and_metrics, table, by=["store", "n", "day", "price", "is", "x"])
    found = {tuple(row["key"]): row["metrics"]["key"] for row in GroupModels.open("models").rows()}
    assert found[("a", 1, "2024-01-01", "0.50", True, 0.0)] == ["'a'", "1", "datetime.date(2024, 1, 1)", "Decimal('0.50')", "True", "0.0"]
    assert found[(None, None, "2024-01-02", "1.50", False, 0.0)][:2] == ["None", "None"]
    assert {key[0] for key in found} == {"a", None, "007", "", "a/b", "Zürich", "7"}
    by_x = fit(group_models.line, table, by="x", out="by_x")
    assert by_x.items == 6, "-0.0 is 0.0"


@pytest.mark.parametrize("named", [None, "pandas", "polars", "arrow", "numpy"])
def test_a_function_is_given_what_it_wants(named):
    if named == "polars":
        pytest.importorskip("polars", reason="Polars")
    fit(group_models.kind, sales(100), frame=named)
    row = next(GroupModels.open("models").rows())
    wanted = {
        None: "pandas.DataFrame",
        "pandas": "pandas.DataFrame",
        "polars": "polars.DataFrame",
        "arrow": "pyarrow.Table",
        "numpy": "builtins.dict",
    }
    assert row["metrics"] == {"type": wanted[named], "names": ["t", "y"]}, "by-columns are no part of a group"
    if named is None:
        fit(group_models.of_arrays, sales(100), out="annotated")
        assert next(GroupModels.open("annotated").rows())["metrics"]["type"] == "builtins.dict"


def test_types_of_a_group_are_those_of_the_whole_column():
    frame = pd.DataFrame({"g": ["a", "a", "b", "b"], "n": [1, 2, 3, None], "b": [True, False, True, None], "text": ["x", "y", "z", None]})
    table = pa.table(
        {"g": frame.g, "n": pa.array([1, 2, 3, None], pa.int64()), "b": pa.array([True, False, True, None]), "text": frame.text}
    )
    fit(group_models.types, table, by="g")
    found = [row["metrics"] for row in GroupModels.open("models").rows()]
    assert found[0] == found[1]
    assert (found[0]["n"], found[0]["b"]) == ("float64", "object")
    expected = {name: str(dtype) for name, dtype in table.to_pandas().dtypes.items() if name != "g"}
    assert found[0] == expected


def test_csv_columns_are_numbers_where_all_cells_are(here):
    (here / "sales.csv").write_text("g,n,x,code,empty\n01,1,1.5,007,\n01,2,2,1,\n1,,3,2,\n")
    fit(group_models.types, "sales.csv", by="g")
    metrics = [row["metrics"] for row in GroupModels.open("models").rows()]
    assert len(metrics) == 2, "01 and 1 are two keys"
    assert metrics[0]["n"] == metrics[0]["x"] == "float64"
    assert metrics[0]["code"] == metrics[0]["empty"] == str(pd.Series(["x"]).dtype)


def test_errors_are_rows_and_are_retried_when_that_is_wanted():
    frame = sales(300)
    frame.loc[frame.index[:30], "store"] = "bad"
    told = []
    result = fit(group_models.not_of_bad, frame, by=["store"], on_failure=told.append)
    assert (result.failed, [failure.key for failure in told]) == (1, ['["bad"]'])
    assert told[0].error == "ValueError: there is no line of the bad"
    assert "maps/groups" not in told[0].traceback, "it is the traceback of the user's code"
    found = GroupModels.open("models")
    assert "bad" not in found
    with pytest.raises(KeyError, match="there is no line of the bad"):
        found["bad"]
    assert [row["error"] for row in found.rows() if row["error"]] == ["ValueError: there is no line of the bad"]
    assert fit(group_models.not_of_bad, frame, by=["store"]).computed == 0
    assert fit(group_models.not_of_bad, frame, by=["store"], retry_failed=True).computed == 1


def test_one_group_alone_is_fitted(here):
    frame = sales(200)
    result = fit(group_models.line, frame, by=["store"], only=["store 1"])
    assert (result.computed, list(GroupModels.open("models"))) == (1, ['["store 1"]'])
    assert result.missing == result.items - 1
    with pytest.raises(JobError, match=r'there is no group stroe 1; did you mean \["store 1"\]'):
        fit(group_models.line, frame, by=["store"], only=["stroe 1"])
    assert fit(group_models.line, frame, by=["sku"], out="skus", only=["1"]).computed == 1
    assert list(GroupModels.open("skus")) == ["[1]"]


def test_the_models_of_the_last_whole_fit_count_until_the_next_one_is(here):
    frame = sales(300)
    fit(group_models.line, frame, by=["store"])
    before = list(GroupModels.open("models"))
    frame["y"] += 1
    fit(group_models.line, frame, by=["store"], only=["store 1"])
    assert list(GroupModels.open("models")) == before
    fit(group_models.line, frame, by=["store"])
    assert len(GroupModels.open("models")) == len(before)
    names = {path.name.partition(".")[0] for path in (here / "models" / "groups").iterdir()}
    assert len(names) == 1, "groups that are needed no more are gone"


@pytest.mark.slow
def test_groups_are_divided_once(here, monkeypatch):
    sales(200).to_parquet("sales.parquet")
    notes = []
    fit(group_models.line, "sales.parquet", on_note=notes.append)
    assert "200 rows of sales.parquet in" in notes[0]
    fit(group_models.kind, "sales.parquet", out="models2", on_note=notes.append)
    assert len(notes) == 2, "beside other models they are divided again"
    fit(group_models.line, "sales.parquet", on_note=notes.append, code_version="2")
    assert len(notes) == 2
    for path in (here / "models" / "groups").glob("*.00000.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    fit(group_models.line, "sales.parquet", on_note=notes.append, code_version="3")
    assert len(notes) == 3, "a file that is not whole is made again"


def test_damaged_rows_are_an_error_that_names_the_group_and_the_file(here):
    frame = sales(200)
    fit(group_models.line, frame, by=["store"], only=["store 1"])
    [path] = (here / "models" / "groups").glob("*.00000.parquet")
    data = bytearray(path.read_bytes())
    for at in range(4, len(data) // 2):
        data[at] ^= 255
    path.write_bytes(data)
    for held in (parquet_rows._open, group_rows._held):  # of this process, in which simulated functions are
        held.clear()
    told = []
    fit(group_models.line, frame, by=["store"], on_failure=told.append)
    assert told
    assert all("the rows of group" in failure.error and failure.key in failure.error and path.name in failure.error for failure in told)


def test_models_of_all_kinds(here):
    frame = sales(60)
    fit(group_models.a_function, frame, by=["sku"])
    found = GroupModels.open("models")
    assert found[0](np.zeros(3)).tolist() == [frame[frame.sku == 0].y.mean()] * 3
    fit(group_models.large, frame, by=["sku"], out="large")
    objects = list((here / "large" / "models").iterdir())
    assert len(objects) == 3
    large = GroupModels.open("large")
    assert large[1].shape == (10_000,)
    place = here / "large" / json.loads(next(iter(large.table.scan(("result",)))).column(0)[0].as_py())["object"]
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedObject, match=r"the model of group \[\d\] is damaged"):
        [large[key] for key in large]
    place.unlink()
    with pytest.raises(DamagedObject, match=r"the model of group \[\d\] is gone"):
        [large[key] for key in large]
    for function, said in ((group_models.nothing, "returned None, which is no model"), (group_models.a_generator, "cannot be pickled")):
        result = fit(function, frame, by=["sku"], out=f"bad-{function.__name__}")
        assert (result.failed, result.items) == (3, 3)
        assert said in result.failures[0].error


def test_what_is_random_is_of_the_seed_and_the_group_alone():
    frame = sales(200)
    fit(group_models.random, frame, by=["store"], seed=1)
    first = {key: GroupModels.open("models")[key] for key in GroupModels.open("models")}
    fit(group_models.random, frame, by=["store"], out="again", seed=1, max_workers=5)
    again = GroupModels.open("again")
    assert {key: again[key] for key in again} == first
    assert len(set(first.values())) == len(first)
    fit(group_models.random, frame, by=["store"], out="other", seed=2)
    assert GroupModels.open("other")["store 1"] != first['["store 1"]']


def test_a_group_that_is_too_large_is_refused_before_anything_is_paid_for(monkeypatch):
    frame = sales(4000)
    monkeypatch.setattr(fitting, "MEMORY_TIMES", 400_000)
    with pytest.raises(JobError, match=r'group \["store 1",\d\] has [\d,]+ rows of .* needs about [\d,]+ MB.*; use --memory-mb \d+'):
        fit(group_models.line, frame, memory_mb=512)
    assert folders.all_runs() == []
    result = fit(group_models.streamed, frame, memory_mb=512, stream=True)
    assert result.failed == 0
    expected = frame.groupby(["store", "sku"]).y.sum()
    found = GroupModels.open("models")
    assert all(found[key] == pytest.approx(total) for key, total in expected.items())


def test_a_large_group_is_streamed_in_parts():
    frame = pd.DataFrame({"g": ["a"] * 150_000 + ["b"] * 10, "y": np.ones(150_010)})
    fit(group_models.streamed, frame, by="g", stream=True)
    rows = {row["key"][0]: row["metrics"] for row in GroupModels.open("models").rows()}
    assert rows["a"] == {"parts": 3, "rows": 150_000}
    assert rows["b"] == {"parts": 1, "rows": 10}


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (group_models.line, {"by": ["stoer"]}, "the table has no column 'stoer'; did you mean store?"),
        (group_models.line, {"by": ["store", "store"]}, "by-column 'store' is named twice"),
        (group_models.line, {"by": []}, "no by-columns are named"),
        (group_models.line, {"by": ["store", "sku", "t", "y"]}, "has no column beside store, sku, t, y"),
        (group_models.line, {"frame": "excel"}, "rows cannot be given as 'excel'; use one of pandas, polars, arrow, numpy"),
        (group_models.line, {"key": "store"}, "no option 'key'"),
        (group_models.line, {"retires": 3}, "no option 'retires'; did you mean retries"),
        (group_models.line, {"out": "redis://host:1/x"}, "neither a folder nor a bucket"),
        (group_models.line, {"max_concurrent": 0}, "max_concurrent = 0 is below 1"),
        ("group_models:lien", {}, "has no name 'lien'; did you mean line"),
        ("no_such_module:f", {}, "no module 'no_such_module'"),
        (group_models.without_group, {}, "takes 0 arguments"),
        (group_models.with_more, {}, "has an argument 'horizon' without a default"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_begins(here, function, options, said):
    with pytest.raises(JobError, match="(?s)" + said.replace("?", r"\?").replace("(", r"\(")):
        fit(function, sales(50), **options)
    assert folders.all_runs() == []
    assert not (here / "models" / "rows").exists()


def test_wrong_tables_are_refused(here):
    with pytest.raises(JobError, match=r"row 3: nan of by-column 'x' is no key; make it null"):
        fit(group_models.line, pa.table({"x": [1.0, 2.0, float("nan")], "y": [1, 2, 3]}), by="x")
    with pytest.raises(JobError, match=r"by-column x is list<.*>, which tells no groups apart"):
        fit(group_models.line, pa.table({"x": [[1]], "y": [1]}), by="x")
    with pytest.raises(JobError, match="the table has no rows"):
        fit(group_models.line, pa.table({"x": pa.array([], pa.int64()), "y": pa.array([], pa.int64())}), by="x")
    with pytest.raises(JobError, match="which is no table"):
        fit(group_models.line, 3, by="x")
    with pytest.raises(JobError, match=r"there is no file absent\.parquet"):
        fit(group_models.line, "absent.parquet", by="x")
    (here / "mixed").mkdir()
    for name in ("a.csv", "b.parquet"):
        (here / "mixed" / name).touch()
    with pytest.raises(JobError, match="not tables of one kind"):
        fit(group_models.line, "mixed", by="x")
    parquet.write_table(pa.table({"x": [1], "y": [1]}), "a.parquet")
    parquet.write_table(pa.table({"x": ["a"], "y": [1]}), "b.parquet")
    with pytest.raises(JobError, match=r"b.parquet: column x is string, and was int64 before"):
        fit(group_models.line, "[ab].parquet", by="x")
    parquet.write_table(pa.table({"x": [1], "z": [1]}), "b.parquet")
    with pytest.raises(JobError, match=r"b.parquet differs from .*a.parquet in its columns: y, z"):
        fit(group_models.line, "[ab].parquet", by="x")
    assert folders.all_runs() == []
    with pytest.raises(JobError, match="there are no models in nowhere; run: ephemeron fit-groups"):
        GroupModels.open("nowhere")


def test_a_table_of_other_models_is_refused():
    fit(group_models.line, sales(50))
    with pytest.raises(JobError, match=r"holds the results of group_models\.line, and this is group_models\.kind"):
        fit(group_models.kind, sales(50))


def test_what_the_index_of_pandas_is(here):
    frame = sales(50).iloc[::-1]
    frame.to_parquet("unnamed.parquet")
    fit(group_models.kind, "unnamed.parquet")
    assert next(GroupModels.open("models").rows())["metrics"]["names"] == ["t", "y"]
    frame.set_index(pd.Index([n % 7 for n in range(50)], name="week")).to_parquet("named.parquet")
    fit(group_models.kind, "named.parquet", out="named")
    assert next(GroupModels.open("named").rows())["metrics"]["names"] == ["t", "y", "week"]


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    from ephemeron.maps.groups import table_data

    def absent(extra):
        raise MissingExtra("pyarrow", extra)

    for module in (fitting, models, table_data):
        monkeypatch.setattr(module, "pyarrow", absent)
    for call in (lambda: fit(group_models.line, "x.parquet"), lambda: GroupModels.open("x")):
        with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[maps\]'"):
            call()


def test_a_dry_run_predicts_and_starts_nothing(here):
    job = fitting.open_fit_groups(
        group_models.line,
        sales(500),
        by=["store"],
        out="models",
        options=fitting.split_options({})[0],
        executor={"platform": "simulated", "memory_mb": 1024},
    )
    found = job.predict()
    assert found.seconds > 0
    assert found.cost_usd > 0
    assert 0 < found.memory_mb < 1024
    assert folders.all_runs() == []
    assert not (here / "models" / "rows").exists()


@pytest.mark.slow
def test_functions_of_this_machine_import_no_pytorch(here):
    """The process that calls the function imports pandas, and not PyTorch."""
    (here / "looks.py").write_text(Path(group_models.__file__).read_text())
    sales(200).to_parquet("sales.parquet")
    result = ephemeron.fit_groups("looks:has_torch", "sales.parquet", by="store", out="models", max_workers=1)
    assert result.failed == 0
    assert all(row["metrics"] == {"torch": False} for row in GroupModels.open("models").rows())
