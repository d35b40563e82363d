"""Programs on local functions: same bits as NumPy's kernels in order, whatever dies; nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import scipy.linalg
import tiled_programs

from ephemeron.communication.channels import open_channel
from ephemeron.errors import TaskFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg import clean, matmul
from ephemeron.linalg.execution.run import run_program
from ephemeron.linalg.matrices.big_matrix import BigMatrix

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "matrices").as_uri()


def definite(n: int) -> np.ndarray:
    g = np.random.default_rng(7).standard_normal((n, n))
    return g @ g.T + n * np.eye(n)


def pool(**options):
    return FunctionExecutor("local", progress=False, max_workers=options.pop("max_workers", 2), **options)


def factorised(a, store, executor, *, tile=16):
    big = BigMatrix.from_numpy(a, tile=tile, store=store)
    outputs = {"L": dataclasses.replace(big.stored, structure="lower")}
    made, report = run_program(
        tiled_programs.tiled_cholesky, {"n": big.stored.tiles[0]}, inputs={"A": big.stored}, outputs=outputs, executor=executor
    )
    return BigMatrix(made["L"], report)


def objects(store: str) -> set[str]:
    folder = Path(store.removeprefix("file://"))
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def until(condition, process):
    ends_at = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def with_variable(name, value):
    """Processes, other than this one, whose environment has a variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def test_a_factorisation(store):
    a = definite(72)
    with pool() as executor:
        found = factorised(a, store, executor)
    np.testing.assert_allclose(found.to_numpy(), np.linalg.cholesky(a), rtol=1e-12, atol=1e-12)
    report = found.report
    assert report is not None
    assert report.tasks == 5 + 10 + 20
    assert report.bytes_written > 35 * 8 * 8 * 8
    assert report.cost_usd > 0
    assert all(re.fullmatch(r"[\w-]+/(([0-9a-f]{16}\.)?\d+\.\d+|matrix\.json)", key) for key in objects(store)), "temporary tiles are gone"


@pytest.fixture(params=["folder", "cache"])
def queue(request) -> str:
    """Address of the channel of tasks. In a cache executors begin with tasks before they are leased."""
    if request.param == "folder":
        return "folder"
    return request.getfixturevalue("valkey_server").address[:-1] + "4"


def left_in(address: str) -> list[str]:
    """Keys of a cache."""

    async def keys() -> list[str]:
        async with open_channel(address) as channel:
            return await channel.list("")

    return [] if address == "folder" else asyncio.run(keys())


def test_bits_do_not_depend_on_functions_or_deaths(store, queue, tmp_path, monkeypatch):
    a, marks = definite(72), tmp_path / "marks"
    marks.mkdir()
    with pool(max_workers=1) as executor:
        wanted = factorised(a, store, executor).to_numpy()
    for name in ("factor", "divide", "update"):
        (marks / name).touch()
    monkeypatch.setenv("LC_MARKS", str(marks))
    again = f"{store}-again"
    with pool(channel=queue) as executor:
        found = factorised(a, again, executor).to_numpy()
    assert not list(marks.iterdir()), "a function was killed in each kernel"
    assert found.tobytes() == wanted.tobytes()
    assert not [key for key in objects(again) if "temporary" in key]
    assert left_in(queue) == []


def test_functions_that_are_killed_at_any_moment_change_no_bit(store, queue, tmp_path, monkeypatch):
    a, rng = definite(160), random.Random(11)
    with pool(max_workers=1) as executor:
        wanted = factorised(a, store, executor).to_numpy()
    monkeypatch.setenv("LC_MARKS", str(tmp_path))
    (tmp_path / "halt").touch()  # it does not end before the first kill
    again, kills, is_over = f"{store}-again", [], threading.Event()

    def killing():
        while len(kills) < 3 and not is_over.wait(rng.uniform(0.05, 0.3)):
            with contextlib.suppress(psutil.Error):
                running = [p for p in with_variable("LC_MARKS", str(tmp_path)) if len(p.threads()) > 4]
                if running and [key for key in objects(again) if "-L/" in key]:
                    victim = rng.choice(running)
                    victim.kill()
                    kills.append(victim)
                    (tmp_path / "halt").unlink(missing_ok=True)

    with pool(channel=queue) as executor:
        killer = threading.Thread(target=killing)
        killer.start()
        try:
            found = factorised(a, again, executor).to_numpy()
        finally:
            is_over.set()
            killer.join()
    assert kills
    assert found.tobytes() == wanted.tobytes()
    assert not [key for key in objects(again) if "temporary" in key]
    assert left_in(queue) == []


def test_a_frozen_function_that_wakes_changes_nothing(store, queue, tmp_path, monkeypatch):
    a, marks = definite(72), tmp_path / "marks"
    marks.mkdir()
    (marks / "freeze").touch()  # the first task, on which all others depend
    (marks / "halt").touch()
    monkeypatch.setenv("LC_MARKS", str(marks))
    woken = []

    def wake():
        ends_at = time.monotonic() + 120
        while not [key for key in objects(store) if "-L/" in key]:  # its lease has expired, and the task was taken over
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        [frozen] = marks.glob("frozen-*")
        woken.append(int(frozen.name.partition("-")[2]))
        os.kill(woken[0], signal.SIGCONT)
        (marks / "halt").unlink()

    with pool(channel=queue) as executor:
        waking = threading.Thread(target=wake)
        waking.start()
        found = factorised(a, store, executor)
        waking.join()
        wanted = factorised(a, f"{store}-again", executor).to_numpy()
    assert woken
    assert found.to_numpy().tobytes() == wanted.tobytes()
    assert not [key for key in objects(store) if "temporary" in key]


@pytest.mark.parametrize("kind", ["cache", "folder"])
def test_tiles_and_queue_in_one_store(kind, store, request):
    a, address = definite(72), store
    if kind == "cache":  # a database of its own: other tests leave queues in theirs
        address = request.getfixturevalue("valkey_server").address[:-1] + "5"
    with pool(channel=address) as executor:
        big = BigMatrix.from_numpy(a, tile=16, store=address)
        found = factorised(a, address, executor)
        product = matmul(big, big, executor=executor)
    np.testing.assert_allclose(found.to_numpy(), np.linalg.cholesky(a), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(product.to_numpy(), a @ a, rtol=1e-12, atol=1e-12)
    assert found.report.tasks == 35

    async def remaining():
        async with open_channel(address) as channel:
            return await channel.list("")

    keys = asyncio.run(remaining())
    assert any(key.startswith(found.stored.name) for key in keys)
    strange = [key for key in keys if not re.fullmatch(r"[\w-]+/(([0-9a-f]{16}\.)?\d+\.\d+|matrix\.json)", key)]
    assert not strange, f"left beside {len(keys) - len(strange)} objects of matrices, by temporary tiles or by the queue"


def test_a_run_of_which_everything_was_killed_goes_on_from_its_tiles(store, tmp_path, monkeypatch):
    script = tmp_path / "client.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import dataclasses, tiled_programs
import numpy as np
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg import clean, matmul
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.execution.run import run_program
big = BigMatrix.open({store!r}, "a")
with FunctionExecutor("local", progress=False, max_workers=2) as executor:
    outputs = {{"L": dataclasses.replace(big.stored, structure="lower")}}
    made, report = run_program(tiled_programs.tiled_cholesky, {{"n": 10}}, inputs={{"A": big.stored}}, outputs=outputs, executor=executor)
print(made["L"].name, report.resumed, report.tasks)
"""
    )
    a = definite(160)
    BigMatrix.from_numpy(a, tile=16, store=store, name="a")
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "halt").touch()
    monkeypatch.setenv("LC_MARKS", str(marks))
    first = subprocess.Popen([sys.executable, str(script)])
    try:
        until(lambda: sum("-L/" in key for key in objects(store)) == 10, first)
        [seen] = clean(store, lease_s=0.1)  # the reason is its client, or tasks that its functions have at this moment
        assert seen.running
        assert [claim.process for claim in seen.claims] == [first.pid]
    finally:
        first.kill()
        first.wait()
        left = with_variable("LC_MARKS", str(marks))
        for process in left:  # functions go on without a client, and end with their host
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=60)
    (marks / "halt").unlink()
    [found] = clean(store, dry_run=False, lease_s=1.0)
    assert (found.running, found.unfinished) == ("", 10)
    assert found.queued > 10
    [emptied] = clean(store)
    assert (emptied.queued, emptied.claims, emptied.unfinished) == (0, (), 10)
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout.split()
    name, resumed, tasks = done
    assert (resumed, tasks) == ("10", "220")
    np.testing.assert_allclose(BigMatrix.open(store, name).to_numpy(), np.linalg.cholesky(a), rtol=1e-12, atol=1e-12)
    assert not [key for key in objects(store) if "temporary" in key]


def test_a_view_and_kernels_with_two_outputs(store):
    a = np.random.default_rng(1).standard_normal((50, 70)).astype("float32")
    big = BigMatrix.from_numpy(a, tile=(20, 30), store=store)
    view = big.T[30:, :]
    with pool() as executor:
        made, _ = run_program(
            tiled_programs.halves_of_a_view,
            {"m": 2, "n": 3},
            inputs={"A": view.stored},
            outputs={"B": dataclasses.replace(view.stored, first_row=0, first_column=0, transposed=False)},
            executor=executor,
        )
    assert (BigMatrix(made["B"]).to_numpy() == a.T[30:, :]).all()


def test_a_task_that_fails_ends_the_computation_with_its_own_traceback(store):
    a = definite(48)
    a[40, 40] = -1
    with pool(retries=0) as executor:
        with pytest.raises(TaskFailed, match="LinAlgError") as caught:
            factorised(a, store, executor)
        assert "scipy.linalg.cholesky(a, lower=True)" in caught.value.traceback
        assert caught.value.tries == 1
        found = factorised(definite(48), store, executor)  # the executor can be used again
    assert np.allclose(found.to_numpy(), scipy.linalg.cholesky(definite(48), lower=True))
