"""Durable maps through their doors, `map_items` and `ephemeron map`: every item is computed once, whatever is given again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.maps import map_items
from ephemeron.maps.result_table import ResultTable
from ephemeron.runs import folders
from ephemeron.runs.status import status_of

pytest.importorskip("pyarrow", reason="results are kept as Parquet")

MODULE = """
import pathlib, time

CALLS = pathlib.Path(__file__).with_name("calls.txt")

def _called(x):
    with CALLS.open("a") as file:
        file.write(f"{x}\\n")

def twice(x):
    _called(x)
    return 2 * x

def odd(x):
    _called(x)
    if x % 2 == 0 and not CALLS.with_name("mended").exists():
        raise ValueError(f"{x} is even")
    return x

def by_name(store, sales, rng, factor=10):
    return [store, factor * float(sales), rng.random()]

def not_finite(x):
    return {"a": float("nan"), "b": [1.0, -float("inf")]}

def picture(x):
    return f"<{x}>".encode()
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    (tmp_path / "durable_items.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("durable_items", None)


def run(function, items, **options):
    """A map on simulated functions: their code runs here."""
    told = []
    options = {"out": "out.jsonl", "platform": "simulated", "max_workers": 2, "progress": False, **options}
    result = map_items(f"durable_items:{function}", items, on_failure=told.append, **options)
    return result, told


def calls(here):
    """Items that the function was called with since the last look."""
    path = here / "calls.txt"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(found)


def edit(here, before, after):
    source = (here / "durable_items.py").read_text()
    assert before in source
    (here / "durable_items.py").write_text(source.replace(before, after))
    later = os.stat(here / "durable_items.py").st_mtime + 10 * len(list(here.glob("edited*")))
    os.utime(here / "durable_items.py", (later + 10, later + 10))  # byte code is recognised by whole seconds
    (here / f"edited{later}").touch()
    sys.modules.pop("durable_items", None)


def lines():
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_given_again_only_what_has_no_result_is_computed(here):
    result, _ = run("twice", [1, 2, 3, 2])
    assert (result.items, result.computed, result.recorded, result.missing) == (4, 3, 0, 0)
    assert (lines(), list(result), calls(here)) == ([2, 4, 6, 4], [2, 4, 6, 4], ["1", "2", "3"])
    result, _ = run("twice", [1, 2, 3, 2])
    assert (result.computed, result.run, result.bill, list(result)) == (0, "", None, [2, 4, 6, 4])
    result, _ = run("twice", [5, 3, 1])
    assert (result.computed, result.recorded, lines(), calls(here)) == (1, 2, [10, 6, 2], ["5"])
    assert len(folders.all_runs()) == 2


def test_another_version_of_the_function_has_other_results(here):
    run("twice", [1, 2])
    calls(here)
    edit(here, "def twice", "# a remark\ndef twice")
    assert run("twice", [1, 2])[0].computed == 0
    edit(here, "return 2 * x", "return 3 * x")
    assert run("twice", [1, 2, 4], ignore_code_changes=True)[0].computed == 1
    assert lines() == [2, 4, 12]
    assert run("twice", [1, 2, 4])[0].computed == 2
    assert (lines(), calls(here)) == ([3, 6, 12], ["1", "2", "4"])
    edit(here, "return 3 * x", "return 4 * x")
    assert run("twice", [1, 2], code_version="v1")[0].computed == 2
    edit(here, "return 4 * x", "return 5 * x")
    assert run("twice", [1, 2], code_version="v1")[0].computed == 0
    assert lines() == [4, 8]


def table_rows():
    return sum(shard.rows for shard in ResultTable.open(Path("out.jsonl.results").absolute().as_uri()).state.shards)


def test_superseded_rows_stay_until_they_are_to_be_forgotten(here):
    items = [{"name": "a", "x": 1}, {"name": "b", "x": 2}]
    named = {"key": "name", "seed": 1}
    edit(here, "def twice(x):\n    _called(x)\n    return 2 * x", "def twice(row):\n    return 2 * row['x']")
    run("twice", items, **named)
    run("twice", [*items, {"name": "c", "x": 7}], **named)
    run("twice", [{"name": "a", "x": 5}, items[1]], **named)
    edit(here, "return 2 * row", "return 3 * row")
    run("twice", items, **named)
    edit(here, "return 3 * row", "return 2 * row")
    assert run("twice", items, **named)[0].computed == 0, "going back to an earlier version finds its results"
    assert table_rows() == 6
    told = []
    result, _ = run("twice", [*items, {"name": "d", "x": 4}], only=["a"], forget_superseded=True, on_note=told.append, **named)
    assert (result.forgotten, told) == (0, ["nothing is forgotten: not all items have results"])
    told = []
    result, _ = run("twice", items, forget_superseded=True, on_note=told.append, **named)
    assert (result.computed, result.forgotten, list(result)) == (0, 3, [2, 4])
    assert told[0].startswith("3 superseded rows forgotten, ")
    assert table_rows() == 3, "the last row of an item that this call has not stays"
    again, _ = run("twice", items, forget_superseded=True, **named)
    assert (again.computed, again.forgotten, lines()) == (0, 0, [2, 4])
    assert run("twice", [{"name": "c", "x": 7}], **named)[0].computed == 0
    edit(here, "return 2 * row", "return 3 * row")
    assert run("twice", items, **named)[0].computed == 2, "what was forgotten is computed again"


def test_failures_are_rows_and_are_tried_again_when_that_is_wanted(here):
    result, told = run("odd", [1, 2, 3, 4], retries=0)
    assert (result.failed, result.computed, lines()) == (2, 4, [1, None, 3, None])
    assert {(one.item, one.error) for one in told} == {(2, "ValueError: 2 is even"), (4, "ValueError: 4 is even")}
    [row] = [row for row in result.rows() if row["error"] == "ValueError: 2 is even"]
    assert (row["status"], row["attempts"], row["result"]) == ("failed", 1, None)
    assert "raise ValueError" in row["traceback"]
    assert run("odd", [1, 2, 3, 4], retries=0)[0].computed == 0
    calls(here)
    (here / "mended").touch()
    result, told = run("odd", [1, 2, 3, 4], retries=0, retry_failed=True)
    assert (result.computed, result.failed, lines(), calls(here), told) == (2, 0, [1, 2, 3, 4], ["2", "4"], [])


@pytest.mark.parametrize(("limit", "failed"), [(3, 4), ("10%", 3), (0, 1)])
def test_too_many_failures_end_it(here, limit, failed):
    result, _ = run("odd", list(range(20)), retries=0, max_failures=limit, max_workers=1)
    assert result.cause == "failures"
    assert f"{failed} item" in result.stopped
    assert result.missing > 0
    assert run("odd", list(range(20)), retries=0)[0].missing == 0
    with pytest.raises(JobError, match="max_failures = '7x' is no limit"):
        run("odd", [1], max_failures="7x")


def test_parts_of_items_are_arguments_and_a_result_depends_on_its_key_alone(here):
    rows = [{"store": f"s{n}", "sales": str(n), "more": 1} for n in range(5)]
    result, _ = run("by_name", rows, key="store")
    first = lines()
    assert [value[:2] for value in first] == [[f"s{n}", 10.0 * n] for n in range(5)]
    assert len({value[2] for value in first}) == 5
    assert [row["key"] for row in result.rows()] == [row["store"] for row in rows]
    run("by_name", rows[::-1], key="store", out="other.jsonl", max_workers=1)
    assert [json.loads(line) for line in Path("other.jsonl").read_text().splitlines()] == first[::-1]
    assert run("by_name", rows, key="store", seed=1)[0].computed == 5
    assert lines()[0][2] != first[0][2]
    with pytest.raises(JobError, match="item 1 has no 'sales': the function wants it as an argument"):
        run("by_name", [{"store": "s"}])


def test_numbers_that_json_has_not_are_null_and_told(here):
    result, _ = run("not_finite", [1, 2])
    assert lines() == [{"a": None, "b": [1.0, None]}] * 2
    assert result.replaced == 4


def test_an_object_per_item(here):
    (here / "scans").mkdir()
    for name in ("a", "b"):
        (here / "scans" / f"{name}.tiff").touch()
    result, _ = run("picture", "scans/*.tiff", out="thumbs/{key}.png")
    assert result.computed == 2
    assert (here / "thumbs" / "a.tiff.png").read_bytes() == f"<{here}/scans/a.tiff>".encode()
    assert list(result) == [str(here / "thumbs" / f"{name}.tiff.png") for name in "ab"]
    assert run("picture", "scans/*.tiff", out="thumbs/{key}.png")[0].computed == 0
    _, [failed] = run("picture", ["x"], out="o.jsonl")
    assert "the result is bytes" in failed.error
    assert list(run("picture", ["x"], out="folder/")[0]) == [b"<x>"]


def test_only_some_items(here):
    rows = [{"id": f"i{n}", "x": n} for n in range(4)]

    result, _ = run("not_finite", rows, key="id", only=["i1", "i3"])
    assert (result.computed, result.missing) == (2, 2)
    assert run("not_finite", rows, key="id")[0].computed == 2
    with pytest.raises(JobError, match="no item has the key 'i9'"):
        run("not_finite", rows, key="id", only=["i9"])


def test_expensive_items_begin_first(here):
    rows = [{"x": n, "cost": cost} for n, cost in enumerate([1, 5, 3, 4, 2])]
    run("not_finite", rows, cost_column="cost", max_workers=1)
    table = ResultTable.open((here / "out.jsonl.results").as_uri())
    assert table.state.whole == ()  # of values of Python no fingerprint is known
    with pytest.raises(JobError, match="'x' of 'cost' is no cost"):
        run("not_finite", [{"cost": "x"}], cost_column="cost")


def test_a_table_belongs_to_one_function(here):
    run("twice", [1])
    with pytest.raises(JobError, match=r"holds the results of durable_items:twice, and this is durable_items:odd"):
        run("odd", [1])
    with pytest.raises(JobError, match=r"no option 'max_worker'.*max_workers"):
        run("twice", [1], max_worker=2)
    with pytest.raises(JobError, match=r"write \{key\} once"):
        run("twice", [1], out="o/{name}.png")


def test_a_source_that_is_whole_is_not_read_again(here, monkeypatch):
    (here / "items.jsonl").write_text("".join(f"{n}\n" for n in range(50)))
    assert run("twice", "items.jsonl")[0].computed == 50
    from ephemeron.maps import durable

    def read(source):
        raise AssertionError("the items are read")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "scan", read)
        result, _ = run("twice", "items.jsonl")
    assert (result.items, result.recorded, result.computed) == (50, 50, 0)
    (here / "out.jsonl").unlink()
    assert (run("twice", "items.jsonl")[0].computed, len(lines())) == (0, 50)


def test_a_deadline_chooses_the_functions(here):
    (here / "items.jsonl").write_text("".join(f"{n}\n" for n in range(40)))
    notes = []
    result = map_items(
        "durable_items:twice", "items.jsonl", out="o.jsonl", platform="simulated", max_workers=4, deadline_s=1000, on_note=notes.append
    )
    assert result.computed == 40
    assert notes[0].startswith("1 function of ")
    with pytest.raises(PlanInfeasible, match=r"no number of functions up to 4 meets the deadline"):
        map_items("durable_items:twice", [1, 2], out="p.jsonl", platform="simulated", max_workers=4, deadline_s=1e-6)


def test_the_command_says_what_was_recorded(here):
    (here / "items.jsonl").write_text("1\n2\n")
    command = ["map", "durable_items:odd", "--items", "items.jsonl", "--out", "o.jsonl", "--platform", "simulated", "--retries", "0"]
    ran = CliRunner().invoke(main, command)
    assert (ran.exit_code, "item 2: ValueError: 2 is even" in ran.stderr) == (1, True)
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 1
    assert "1 results in o.jsonl, 2 of them recorded before; no function was needed" in ran.stderr
    assert "1 item failed before; --retry-failed computes them again" in ran.stderr
    (here / "mended").touch()
    ran = CliRunner().invoke(main, [*command, "--retry-failed", "--json"])
    told = json.loads(ran.stdout)
    assert (ran.exit_code, told["computed"], told["recorded"], told["written"]) == (0, 1, 2, 2)
    ran = CliRunner().invoke(main, [*command, "--dry-run"])
    assert (ran.exit_code, "all items have results" in ran.stderr) == (2, True)


def test_another_client_waits_for_the_one_that_works(here, monkeypatch):
    from ephemeron.maps import durable
    from ephemeron.maps.result_table import Client

    run("twice", [1])
    table = ResultTable.open((here / "out.jsonl.results").as_uri())
    table.flush(client=Client(run="elsewhere", host="another", seen_at=time.time()))
    notes = []

    def ends(seconds):
        table.flush(client=Client())

    monkeypatch.setattr(durable.time, "sleep", ends)
    result = map_items("durable_items:twice", [1, 2], out="out.jsonl", platform="simulated", on_note=notes.append)
    assert result.computed == 1
    assert notes == ["elsewhere on another works on it: this call waits for it, and goes on if it ends early"]
    table.refresh()
    table.flush(client=Client(run="elsewhere", host="another", seen_at=1.0))  # it was seen long ago
    assert map_items("durable_items:twice", [3], out="out.jsonl", platform="simulated", on_note=notes.append).computed == 1
    assert len(notes) == 1


# -- processes --------------------------------------------------------------------------------------------

SLOW = "import time\n\ndef slow(x):\n    time.sleep(0.2)\n    with open(LOG, 'a') as file:\n        file.write(f'{x}\\n')\n    return x\n"


def started(here, *more):
    command = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "map", "slow_items:slow", "--items", "items.jsonl"]
    return subprocess.Popen([*command, "--out", "out.jsonl", "--max-workers", "2", *more], stderr=subprocess.PIPE, text=True)


def until(condition, process=None):
    ends_at = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@pytest.fixture
def slow(here):
    (here / "slow_items.py").write_text(SLOW.replace("LOG", repr(str(here / "log.txt"))))
    (here / "items.jsonl").write_text("".join(f"{n}\n" for n in range(60)))
    return here


@pytest.mark.slow
@pytest.mark.parametrize("again", ["map", "attach"])
def test_a_killed_client_costs_nothing_twice(slow, again):
    process = started(slow)
    until(lambda: (slow / "out.jsonl.results" / "rows").exists(), process)
    process.kill()
    process.communicate()
    [folder] = folders.all_runs()
    if again == "map":
        process = started(slow)
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
        assert "60 results in out.jsonl" in told
    else:
        ran = subprocess.run([sys.executable, "-c", "from ephemeron.cli.main import main; main()", "attach", folder.run_id], timeout=120)
        assert ran.returncode == 0
    assert lines() == list(range(60))
    assert sorted(map(int, (slow / "log.txt").read_text().split())) == list(range(60))  # each was computed once
    assert [(each.run_id, status_of(each)) for each in folders.all_runs()] == [(folder.run_id, "finished")]


@pytest.mark.slow
def test_results_that_come_before_their_items_are_submitted_are_kept(slow, monkeypatch):
    from ephemeron.maps import computing, durable

    def computed():
        return len((slow / "log.txt").read_text().split())

    process = started(slow)
    until(lambda: (slow / "out.jsonl.results" / "rows").exists(), process)
    process.kill()
    process.communicate()
    usual = durable.open_items

    def late(*given):
        """Most items are submitted when functions, which go on, have computed some of them."""
        before = computed()
        for n, item in enumerate(usual(*given)):
            if n == 1:
                until(lambda: computed() > before + 6)
            yield item

    monkeypatch.setattr(durable, "open_items", late)
    monkeypatch.setattr(computing, "_WINDOW", 4)
    monkeypatch.setattr(computing, "_WINDOW_PER_FUNCTION", 0)
    ran = CliRunner().invoke(main, ["map", "slow_items:slow", "--items", "items.jsonl", "--out", "out.jsonl", "--max-workers", "2"])
    assert ran.exit_code == 0, ran.output
    assert lines() == list(range(60))
    assert sorted(map(int, (slow / "log.txt").read_text().split())) == list(range(60))  # each was computed once


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(slow):
    process = started(slow)
    until(lambda: (slow / "out.jsonl.results" / "rows").exists(), process)
    [folder] = folders.all_runs()
    ran = CliRunner().invoke(main, ["stop", folder.run_id])
    assert ran.exit_code == 0, ran.output
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "items have results in out.jsonl: the same command goes on" in told
    ran = CliRunner().invoke(main, ["resume", folder.run_id])
    assert ran.exit_code == 0, ran.output
    assert lines() == list(range(60))
    assert status_of(folder) == "finished"


@pytest.mark.slow
def test_what_kills_a_function_is_named_and_more_memory_is_tried(here):
    (here / "deadly.py").write_text(
        "import ctypes\ndef f(x):\n    if x == 1:\n        ctypes.string_at(0)\n"
        "    if x == 2:\n        return len(bytearray(600 * 2**20))\n    return x\n"
    )
    notes, told = [], []
    result = map_items(
        "deadly:f", [0, 1, 2, 3], out="o.jsonl", memory_mb=512, max_workers=2, progress=False, on_note=notes.append, on_failure=told.append
    )
    sys.modules.pop("deadly", None)
    [failed] = told
    assert (failed.item, failed.error.endswith("(lastly killed by SIGSEGV)")) == (2, True)
    assert list(result) == [0, None, 600 * 2**20, 3]
    assert notes[0].endswith("needed more memory: once more with 1024 MB")


@pytest.mark.slow
def test_the_slowest_task_gets_a_copy(here):
    (here / "late.py").write_text(
        "import os, time\n\ndef f(x):\n    if x == 40:\n"
        "        try:\n            os.close(os.open('" + str(here / "first") + "', os.O_CREAT | os.O_EXCL))\n"
        "            time.sleep(600)\n        except FileExistsError:\n            pass\n    return x\n"
    )
    result = map_items("late:f", list(range(41)), out="o.jsonl", max_workers=3, progress=False, backup=True)
    sys.modules.pop("late", None)
    assert list(result) == list(range(41))
    assert result.backups > 0


def test_a_simulation_ends_when_its_mean_is_known(here):
    (here / "dice.py").write_text("def throw(n, rng=None):\n    return {'eyes': int(rng.integers(1, 7)), 'n': n}\n")
    options = {"out": "dice.jsonl", "platform": "simulated", "max_workers": 2, "progress": False, "estimate": "eyes"}
    result = map_items("dice:throw", range(20_000), stop_when=0.5, **options)
    assert (result.cause, result.stopped) == ("enough", "")
    eyes = [value["eyes"] for value in result if value is not None]
    assert result.estimate.count == len(eyes) == result.computed < 20_000
    assert result.estimate.mean == pytest.approx(np.mean(eyes))
    assert result.estimate.width == pytest.approx(2 * 1.959964 * np.std(eyes, ddof=1) / len(eyes) ** 0.5)
    assert result.estimate.width <= 0.5
    again = map_items("dice:throw", range(20_000), stop_when=0.5, **options)
    assert (again.computed, again.estimate.count, again.cause) == (0, len(eyes), "enough")
    more = map_items("dice:throw", range(20_000), stop_when="4%", **options)
    assert more.computed > 0
    assert more.estimate.width <= 0.04 * more.estimate.mean
    seen = []
    decided = map_items(
        "dice:throw", range(20_000), stop_when=lambda e: seen.append(e.count) or e.count == 40, **{**options, "out": "d.jsonl"}
    )
    assert (decided.cause, seen[:11]) == ("enough", list(range(30, 41)))
    assert 40 <= decided.computed < 20_000
    (here / "n.jsonl").write_text("1\n")
    for option, said in (("--stop-when", "stop_when = 'x' is no width"), ("--until-width", "it is --stop-when")):
        ran = CliRunner().invoke(main, ["map", "dice:throw", "--items", "n.jsonl", "--out", "o.jsonl", option, "x"])
        assert (ran.exit_code, said in ran.stderr) == (2, True)
    with pytest.raises(JobError, match="the results that are recorded have no estimate: the result has no 'eye', which is to be estimated"):
        map_items("dice:throw", range(20_000), stop_when=0.5, **{**options, "estimate": "eye"})
    with pytest.raises(JobError, match="it is stop_when"):
        map_items("dice:throw", range(5), until_width=1, **options)
    wrong = map_items("dice:throw", range(5), stop_when=1, **{**options, "out": "w.jsonl", "estimate": "eye"})
    assert wrong.failed == 5
    assert "has no 'eye', which is to be estimated" in wrong.failures[0].error
    wrong = map_items("dice:throw", range(20_000), stop_when=1, **{**options, "out": "x.jsonl", "estimate": "eye"})
    assert wrong.stopped.startswith("30 results and none to be estimated: the result has no 'eye'")
    assert wrong.failed < 20_000, "it is not paid for"
    sys.modules.pop("dice", None)
