"""`FunctionExecutor` on processes of this machine: code by value and by name, processes that die."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ephemeron.communication.channels import open_channel
from ephemeron.errors import TaskFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.functions.local import is_hosted
from ephemeron.runs import folders
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.summary import read_summary

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def cube(x):
    return x**3


def test_functions_of_modules_closures_and_large_values(home):
    offset = 5
    with FunctionExecutor(max_workers=2) as executor:
        assert list(executor.map(cube, range(200))) == [x**3 for x in range(200)]
        assert list(executor.map(lambda x: (x + offset, os.getpid() != parent), range(3))) == [(5, True), (6, True), (7, True)]
        big = executor.submit(np.full, 300_000, 2.0).result()
        assert big.nbytes == 2_400_000
        assert executor.submit(np.sum, big).result() == 600_000.0
        assert executor.map_reduce(cube, range(50), lambda a, b: a + b, fan_in=3).result() == sum(x**3 for x in range(50))
        bill = executor.bill()
        assert bill.invocations >= 1
        assert bill.gb_seconds > 0
    [folder] = folders.all_runs()
    summary = read_summary(folder)
    assert (summary.status, summary.invocations) == ("finished", bill.invocations)
    assert summary.cost_usd >= bill.cost_usd, "functions have ended after it"
    assert not folder.objects.exists(), "nothing is left of its tasks"


def test_functions_use_the_instructions_that_the_client_has_chosen(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("UNKNOWN_TO_FUNCTIONS", "1")
    with FunctionExecutor(max_workers=1) as executor:
        seen = executor.submit(lambda: [os.environ.get(name) for name in ("MKL_CBWR", "UNKNOWN_TO_FUNCTIONS")]).result()
    assert seen == ["COMPATIBLE", None]


parent = os.getpid()


def fatal_once(x, marks):
    """Kills its own process in its first try, for some items."""
    if x % 20 == 7:
        try:
            Path(marks, f"{x}").touch(exist_ok=False)
        except FileExistsError:
            return x
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_functions_that_are_killed_lose_and_repeat_no_result(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    with FunctionExecutor(max_workers=2, retries=3) as executor:
        futures = executor.map_futures(fatal_once, range(60), [str(marks)] * 60)
        assert [f.result(timeout=240) for f in futures] == list(range(60))
        assert executor.bill().invocations >= 4, "three were killed, and one was not"
        assert executor.bill().tasks == 60
    assert {int(p.name) for p in marks.iterdir()} == {7, 27, 47}


def test_the_key_is_in_its_file_alone(tmp_path):
    def stop():
        raise SystemExit("kept")

    with FunctionExecutor(max_workers=1, retries=0) as executor:
        futures = [executor.submit(cube, 2), executor.submit(np.zeros, 100_000), executor.submit(stop)]
        assert futures[0].result() == 8
        with pytest.raises(TaskFailed, match="SystemExit: kept"):
            futures[2].result()
        secret = (executor.folder / "signing.key").read_text().strip()
        seen = [p for p in executor.folder.rglob("*") if p.is_file() and p.name != "signing.key"]
        assert any("log+" in p.name or "log" in p.parts[-2] for p in seen)
        for path in seen:
            content = path.read_bytes()
            assert secret.encode() not in content, path
            assert bytes.fromhex(secret) not in content, path
    assert (executor.folder / "events.jsonl").exists(), "what has failed can be looked at"


def test_tasks_through_a_cache(valkey_server):
    with FunctionExecutor(max_workers=2, channel=valkey_server.address) as executor:
        assert list(executor.map(cube, range(50))) == [x**3 for x in range(50)]
        assert executor.map_reduce(cube, range(20), max, fan_in=3).result() == 19**3
        assert executor.submit(np.zeros, 50_000).result().nbytes == 400_000


PROGRAM = """
import asyncio
import ephemeron

class Point:
    def __init__(self, x):
        self.x = x

def shifted(p):
    return Point(p.x + offset)

offset = 10

async def main():  # as in a notebook, whose loop is running
    with ephemeron.FunctionExecutor(max_workers=1) as pool:
        print([p.x for p in pool.map(shifted, [Point(1), Point(2)])])
        global offset
        offset = 20
        print(pool.submit(shifted, Point(3)).result().x)

asyncio.run(main())
"""


def test_a_program_without_a_file_and_with_a_running_loop(home):
    ran = subprocess.run([sys.executable, "-"], input=PROGRAM, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[11, 12]", "23"]


LEFT = """
import pathlib, sys
import ephemeron

pool = ephemeron.FunctionExecutor(max_workers=1)
pool.submit(abs, 1).result()
pool.submit(pathlib.Path(sys.argv[1]).touch)
pool.shutdown(wait=False)
del pool
"""


def test_a_program_ends_after_the_tasks_of_an_executor_that_it_does_not_wait_for(home, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-", str(tmp_path / "mark")], input=LEFT, capture_output=True, text=True, check=False, timeout=200
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "mark").exists()
    [folder] = folders.all_runs()
    assert read_summary(folder).status == "finished"
    assert not folder.objects.exists()


KILLED = """
import os, signal, sys
import ephemeron

pool = ephemeron.FunctionExecutor(max_workers=1, channel=sys.argv[1])
assert pool.submit(abs, -1).result() == 1
print(pool.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_executor_removes_what_a_killed_client_has_left(home, valkey_server):
    ran = subprocess.run(
        [sys.executable, "-", valkey_server.address], input=KILLED, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    folder = Path(ran.stdout.strip())
    assert folder.is_dir()

    async def objects():
        async with open_channel(valkey_server.address) as channel:
            return await channel.list(f"{folder.name}.")

    assert asyncio.run(objects())
    while is_hosted(folder):  # its functions end when they find no task for a while
        time.sleep(0.2)
    with FunctionExecutor(max_workers=1) as executor:
        assert executor.submit(abs, -2).result() == 2
    assert asyncio.run(objects()) == []
    summary = read_summary(RunFolder(folder))
    assert (summary.status, summary.causes) == ("interrupted", ("its client was killed",))
    assert summary.invocations == 1


MODULE = """
class Shifted:
    def __init__(self, x, by):
        self.x, self.by = x, by

    def value(self):
        return self.x + self.by
"""


def test_modules_of_which_only_arguments_have_classes_are_sent(tmp_path, monkeypatch):
    (tmp_path / "mods").mkdir()
    (tmp_path / "mods" / "only_in_arguments.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "mods"))
    from only_in_arguments import Shifted

    asked = operator.methodcaller("value")  # of a module of Python, which is not sent
    with FunctionExecutor(max_workers=1, retries=0) as executor:
        assert list(executor.map(asked, [Shifted(n, 10) for n in range(3)])) == [10, 11, 12]
        assert executor.submit(list, [Shifted(1, 1)]).result()[0].value() == 2
        assert executor.map_reduce(asked, [Shifted(n, 0) for n in range(10)], max, fan_in=3).result() == 9
