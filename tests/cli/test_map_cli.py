"""`ephemeron map` and `ephemeron predict`: files in, files out, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.executor.predict import predict
from ephemeron.executor.prediction_files import check_inputs, check_out, read_inputs, write_outputs
from ephemeron.maps.outputs import RowFile
from ephemeron.runs import folders
from ephemeron.runs.status import status_of

MODULE = """
import time

def twice(x):
    return 2 * x

def no_two(x):
    if x == 2:
        raise ValueError("there is no two")
    return x

def a_set(x):
    return {x}

def slow(x):
    time.sleep(0.2)
    return x
"""
SIMULATED = ["--platform", "simulated", "--max-workers", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    (tmp_path / "mapped_items.py").write_text(MODULE)
    (tmp_path / "items.jsonl").write_text("1\n2\n\n3\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mapped_items", None)


def invoke(*arguments):
    return CliRunner().invoke(main, ["map", *arguments, "--out", "out.jsonl", *SIMULATED])


def results():
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_line_n_is_the_result_of_item_n():
    ran = invoke("mapped_items:twice", "--items", "items.jsonl", "--json")
    assert ran.exit_code == 0, ran.output
    assert results() == [2, 4, 6]
    summary = json.loads(ran.stdout)
    assert (summary["items"], summary["written"], summary["failed"], summary["stopped"]) == (3, 3, [], "")
    assert summary["cost_usd"] > 0


@pytest.mark.parametrize("stdin", [False, True])
def test_lines_end_in_line_feeds_alone(here, stdin):
    texts = ["a\u2028b\x85c", "d\u2029"]
    data = b"\xef\xbb\xbf" + "\r\n".join(json.dumps(text, ensure_ascii=False) for text in texts).encode()
    (here / "items.jsonl").write_bytes(data)
    arguments = ["map", "mapped_items:twice", "--items", "-" if stdin else "items.jsonl", "--out", "out.jsonl", *SIMULATED]
    ran = CliRunner().invoke(main, arguments, input=data if stdin else None)
    assert ran.exit_code == 0, ran.output
    assert results() == [2 * text for text in texts]


def test_a_failed_item_is_null_and_its_traceback_is_told():
    ran = invoke("mapped_items:no_two", "--items", "items.jsonl", "--json", "--retries", "1")
    assert ran.exit_code == 1
    assert results() == [1, None, 3]
    assert "item 2: ValueError: there is no two" in ran.stderr
    assert 'raise ValueError("there is no two")' in ran.stderr
    [failed] = json.loads(ran.stdout)["failed"]
    assert (failed["item"], failed["tries"]) == (2, 2)


def test_a_result_that_is_no_json_is_told():
    ran = invoke("mapped_items:a_set", "--items", "items.jsonl")
    assert ran.exit_code == 1
    assert "item 1: the result is no JSON" in ran.stderr


def test_data_beside_the_module_stay_here(here, caplog):
    (here / "reads.py").write_text(
        "from pathlib import Path\n\ndef names(_):\n    place = Path(__file__).parent\n"
        "    Path('lookup.csv')\n    return sorted(p.name for p in place.rglob('*') if p.is_file() and p.suffix != '.pyc')\n"
    )
    for name, size in (("lookup.csv", 10), ("sales.parquet", 40_000_000), ("L.npy", 30_000_000), ("notes.txt", 10)):
        (here / name).write_bytes(bytes(size))
    options = ["--platform", "local", "--max-workers", "1"]
    (here / "one.jsonl").write_text("1\n")
    ran = CliRunner().invoke(
        main, ["map", "reads:names", "--items", "one.jsonl", "--out", "out.jsonl", *options, "--code-exclude", "notes.txt"]
    )
    assert ran.exit_code == 0, ran.output
    assert results() == [["lookup.csv", "mapped_items.py", "reads.py"]]
    ran = CliRunner().invoke(
        main, ["map", "reads:names", "--items", "one.jsonl", "--out", "out.jsonl", *options, "--code-include", "L.npy"]
    )
    assert "L.npy" in results()[0]


def test_a_pattern_to_include_is_for_all_folders_together(here):
    more = here / "more"
    more.mkdir()
    (more / "lookup.csv").write_text("1")
    items = ["--items", "items.jsonl", "--code", "more"]
    ran = invoke("mapped_items:twice", *items, "--code-include", "lookup.csv")
    assert ran.exit_code == 0, ran.output
    ran = invoke("mapped_items:twice", *items, "--code-include", "lookup.csv", "--code-include", "absent.csv")
    assert ran.exit_code == 2
    assert "code_include has 'absent.csv', and no file in" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mapped_items:twice", "--items", "absent.jsonl"), "there is no file absent.jsonl"),
        (("mapped_items:twice", "--items", "items.jsonl", "--chunksize", "2"), "--chunksize is no option any more"),
        (("mapped_items:twice", "--items", "bad.jsonl"), "bad.jsonl, line 2 is no JSON"),
        (("mapped_items:twice", "--items", "wide.jsonl"), "wide.jsonl is UTF-16, and only UTF-8 is read"),
        (("mapped_items:twice", "--items", "latin.jsonl"), "latin.jsonl, line 2 is not UTF-8"),
        (("mapped_items:twice", "--items", "empty.jsonl"), "empty.jsonl has no items"),
        (("mapped_items:nothing", "--items", "items.jsonl"), "has no name 'nothing'"),
        (("mapped_items", "--items", "items.jsonl"), "is not of the form module:name"),
        (("mapped_items.py:twice", "--items", "items.jsonl"), "write e.g. 'mapped_items:twice'"),
        (("no_such_module:f", "--items", "items.jsonl"), "no module 'no_such_module'"),
        (("mapped_items:twice", "--items", "items.jsonl", "--memory-mb", "5"), "memory_mb = 5"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_begins(here, arguments, said):
    (here / "bad.jsonl").write_text("1\n{\n")
    (here / "empty.jsonl").write_text("\n")
    (here / "wide.jsonl").write_bytes("1\n".encode("utf-16"))
    (here / "latin.jsonl").write_bytes(b'1\n"caf\xe9"\n')
    ran = invoke(*arguments)
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr
    assert folders.all_runs() == []


@pytest.mark.slow
def test_ctrl_c_cancels_and_says_what_is_done(here):
    (here / "items.jsonl").write_text("".join(f"{n}\n" for n in range(400)))
    program = "from ephemeron.cli.main import main; main()"
    command = [sys.executable, "-c", program, "map", "mapped_items:slow", "--items", "items.jsonl", "--out", "out.jsonl"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = here / "out.jsonl.results" / "rows"
    ends_at = time.monotonic() + 120
    while not (rows.exists() and list(rows.iterdir())):
        assert process.poll() is None
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    written = results()
    assert len(written) == 400
    done = [value for value in written if value is not None]
    assert 3 <= len(done) < 400
    assert all(value in (None, n) for n, value in enumerate(written))
    assert f"interrupted; {len(done)} of 400 items have results in out.jsonl: the same command goes on" in told
    [folder] = folders.all_runs()
    assert (status_of(folder), folder.objects.exists()) == ("stopped", False)


# -- predict ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("torch", reason="predictions need a model")
    from ephemeron.training.driver import configure, train
    from tiny_job import SHORT

    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("trained")
        patch.setenv("EPHEMERON_HOME", str(home))
        c = configure(SHORT, platform="simulated", channel="memory", workers=1, aggregators=1, batch_size=1440)
        result = train(SHORT, c)
    return result, home


def expected(result, x):
    import torch

    with torch.no_grad():
        return result.model()(torch.from_numpy(x)).numpy()


def test_predictions_are_those_of_the_trained_model(trained, monkeypatch):
    result, home = trained
    monkeypatch.setenv("EPHEMERON_HOME", str(home))
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    np.savez("x.npz", x=x)
    for out in ("y.npz", "y.npy", "y.jsonl"):
        command = ["predict", "last", "--data", "x.npz", "--out", out, "--batch-size", "16", "--json", *SIMULATED]
        ran = CliRunner().invoke(main, command)
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.stdout)["samples"] == 50
    lines = [json.loads(line) for line in Path("y.jsonl").read_text().splitlines()]
    for y in (np.load("y.npz")["y"], np.load("y.npy"), np.array(lines)):
        np.testing.assert_allclose(y, expected(result, x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_predictions_by_functions_that_have_no_code_of_their_own(trained, monkeypatch):
    result, home = trained
    monkeypatch.setenv("EPHEMERON_HOME", str(home))
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    outputs, bill = predict(result, {"x": x}, batch_size=10, max_workers=2)
    np.testing.assert_allclose(outputs["y"], expected(result, x), rtol=1e-4, atol=1e-5)
    assert bill.tasks == 4


def test_wrong_predictions_are_refused_before_anything_begins(trained, monkeypatch, tmp_path):
    _, home = trained
    monkeypatch.setenv("EPHEMERON_HOME", str(home))
    np.save("x.npy", np.zeros((3, 64), dtype=np.float32))
    Path("items.csv").write_text("a\n1\n")
    for arguments, said in (
        (("last", "--data", "absent.npy", "--out", "y.npy"), "absent.npy cannot be read"),
        (("last", "--data", "x.txt", "--out", "y.npy"), "x.txt is of no known kind"),
        (("last", "--data", "x.csv", "--out", "y.npy"), "y.npy is no table, and x.csv is one"),
        (("last", "--data", "items.csv", "--out", "y.csv"), "was not trained on a prepared table, so columns of a table say nothing to it"),
        (("last", "--data", "x.npy", "--out", "y.csv"), "y.csv is of no known kind"),
        (("last", "--data", "x.npy", "--out", "nowhere/y.npy"), "there is no folder"),
        (("another", "--data", "x.npy", "--out", "y.npy"), "run 'another' is not in"),
    ):
        ran = CliRunner().invoke(main, ["predict", *arguments, *SIMULATED])
        assert ran.exit_code == 2, ran.output
        assert said in ran.stderr
    np.save("wide.npy", np.zeros((3, 65), dtype=np.float32))
    ran = CliRunner().invoke(main, ["predict", "last", "--data", "wide.npy", "--out", "y.npy", *SIMULATED])
    assert ran.exit_code == 2
    assert "the model raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in ran.stderr


def test_inputs_and_outputs_as_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2], "mask": [1, 0]}\n{"ids": [3, 4], "mask": [1, 1]}\n')
    named = read_inputs(tmp_path / "a.jsonl")
    assert named["ids"].tolist() == [[1, 2], [3, 4]]
    assert check_inputs(named) == 2
    (tmp_path / "b.jsonl").write_text("[0.5, 1]\n[2, 3]\n")
    assert read_inputs(tmp_path / "b.jsonl")["x"].dtype == np.float32
    (tmp_path / "c.jsonl").write_bytes('\ufeff{"a\u2028b\x85": 1.5}\r\n{"a\u2028b\x85": 2.5}'.encode())
    assert read_inputs(tmp_path / "c.jsonl")["a\u2028b\x85"].tolist() == [1.5, 2.5]
    with pytest.raises(JobError, match="differ in length: a has 2, b has 3"):
        check_inputs({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(JobError, match="there are no inputs"):
        check_inputs({"x": np.zeros((0, 3))})
    two = {"y0": np.array([1, 2]), "y1": np.array([[3], [4]])}
    with pytest.raises(JobError, match="has outputs y0, y1"):
        check_out(tmp_path / "y.npy", two)
    write_outputs(tmp_path / "y.jsonl", two)
    assert [json.loads(line) for line in (tmp_path / "y.jsonl").read_text().splitlines()] == [{"y0": 1, "y1": [3]}, {"y0": 2, "y1": [4]}]


def test_rows_of_tables_are_items_and_results(here):
    pa = pytest.importorskip("pyarrow", reason="Parquet")
    from pyarrow import parquet

    (here / "rows_of_tables.py").write_text(
        "def one(row):\n"
        "    if row['zip'] == 'bad':\n        raise ValueError('a bad row')\n"
        "    return {'zip': row['zip'], 'twice': 2 * float(row['x']), 'is': True}\n"
        "def code(row):\n    return row['zip']\n"
        "def nested(row):\n    return {'zip': [row['zip']]}\n"
    )
    (here / "z.csv").write_bytes(b'\xef\xbb\xbfzip,x,note\r\nbad,0,\r\n00501,1.5,"a,\r\nb"\r\n"00""7",2,NA\r\n')

    def run(function, items, out, code=0):
        ran = CliRunner().invoke(main, ["map", function, "--items", items, "--out", out, "--retries", "0", *SIMULATED])
        assert ran.exit_code == code, ran.output
        return ran.stderr

    assert "item 1: ValueError: a bad row" in run("rows_of_tables:one", "z.csv", "o.csv", 1)
    assert Path("o.csv").read_text() == 'zip,twice,is\n,,\n00501,3.0,true\n"00""7",4.0,true\n'
    run("rows_of_tables:one", "z.csv", "o.parquet", 1)
    want = [(None, None, None), ("00501", 3.0, True), ('00"7', 4.0, True)]
    assert [tuple(row.values()) for row in parquet.read_table("o.parquet").to_pylist()] == want
    parquet.write_table(pa.table({"zip": [501, None], "x": [1.0, 2.0]}), "z.parquet")
    run("rows_of_tables:code", "z.parquet", "codes.tsv")
    assert Path("codes.tsv").read_text() == 'result\n501\n""\n'
    assert "zip of the result is a list, which a table has not: write *.jsonl" in run("rows_of_tables:nested", "z.parquet", "n.csv", 1)
    (here / "short.csv").write_text("zip,x\n1,2\n3\n")
    assert "short.csv, line 3: has 1 fields instead of 2" in run("rows_of_tables:code", "short.csv", "short-out.csv", 2)


def test_the_columns_of_results_are_those_of_the_first_one(tmp_path):
    file = RowFile(tmp_path / "o.parquet")
    assert file.refusal({}) == "the result is an empty dict, which is no row of a table"
    assert not any(map(file.refusal, (None, {"a": 1, "b": None}, {"b": "x", "a": 2.5})))
    assert file.refusal({"a": 1}) == "the result has the columns a, and those before have a, b"
    assert "a of the result is text, 'x', and was a number before" in file.refusal({"a": "x", "b": None})
    assert "which a column of Parquet has not" in file.refusal({"a": 2**63, "b": None})
    assert "is in a column of integers beyond 2^53 and fractions" in file.refusal({"a": 2**53 + 1, "b": None})
    assert not file.refusal({"a": 2**53, "b": "\r"})
    assert "'\\ud800' of the result has half a surrogate pair" in file.refusal({"a": 1, "b": "\ud800"})


def test_a_refused_result_leaves_the_others(tmp_path):
    file = RowFile(tmp_path / "o.csv")
    with file.opened():
        assert file.write_texts(['{"a": 1}', '{"b": 1}', None]) == [(1, "the result has the columns b, and those before have a")]
        assert not (tmp_path / "o.csv").exists()
        assert file.write_texts(['{"a": "l\\rm"}']) == []
    assert (tmp_path / "o.csv").read_bytes() == b'a\n1\n""\n""\n"l\rm"\n'


@pytest.mark.parametrize(
    "command",
    [
        ("map", "mapped_items:twice", "--items", "", "--out", "o.jsonl"),
        ("map", "mapped_items:twice", "--items", "items.jsonl", "--out", ""),
        ("map", "mapped_items:twice", "--items", "items.jsonl", "--out", "o.jsonl", "--results", ""),
        ("map-partitions", "mapped_items:twice", "--data", "", "--out", "o"),
        ("map-partitions", "mapped_items:twice", "--data", "t.parquet", "--out", ""),
        ("fit-groups", "t.parquet", "--by", "x", "--fit", "mapped_items:twice", "--out", ""),
        ("fit-groups", "", "--by", "x", "--fit", "mapped_items:twice", "--out", "m"),
    ],
)
def test_an_empty_path_is_not_the_working_folder(here, command):
    pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
    from pyarrow import parquet, table

    parquet.write_table(table({"x": [1]}), "t.parquet")
    before = sorted(path.name for path in here.iterdir())
    ran = CliRunner().invoke(main, [*command, *SIMULATED])
    assert (ran.exit_code, ran.stderr) == (2, "error: a path that was given is empty; name a file or a folder; the working folder is .\n")
    assert [name for name in sorted(path.name for path in here.iterdir()) if name not in ("home", "__pycache__")] == before


@pytest.mark.parametrize(
    "command",
    [
        ("map", "mapped_items:twice", "--items", "items.jsonl", "--out", "items.jsonl/"),
        ("map", "mapped_items:twice", "--items", "items.jsonl", "--out", "o.jsonl", "--results", "items.jsonl/of"),
        ("map-partitions", "mapped_items:twice", "--data", "t.parquet", "--out", "items.jsonl/of"),
        ("fit-groups", "t.parquet", "--by", "x", "--fit", "mapped_items:twice", "--out", "items.jsonl/of"),
    ],
)
def test_results_that_have_no_place_are_refused(here, command):
    pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
    from pyarrow import parquet, table

    parquet.write_table(table({"x": [1], "y": [1]}), "t.parquet")
    ran = CliRunner().invoke(main, [*command, *SIMULATED])
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "items.jsonl is no folder; name another --out or --results" in ran.stderr


def test_a_dry_run_leaves_no_table(here):
    ran = CliRunner().invoke(main, ["map", "mapped_items:twice", "--items", "items.jsonl", "--out", "o.jsonl", "--dry-run", *SIMULATED])
    assert ran.exit_code == 0, ran.stderr
    assert not (here / "o.jsonl.results").exists()
