"""What a test leaves behind fails it, and what tests cost is written: tests of the suite's own plugin, on a suite of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import asyncio, socket, subprocess, sys, tempfile, threading
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
import pytest

LASTS = [sys.executable, "-c", "input()"]
kept = []

def test_clean():
    with subprocess.Popen(LASTS, stdin=subprocess.PIPE) as process:
        process.communicate(b"\\n")
    asyncio.run(asyncio.sleep(0))
    socket.create_server(("127.0.0.1", 0)).close()
    sum(range(3_000_000))

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.Popen({LASTS!r}, start_new_session=True)"], stdin=subprocess.PIPE))
    kept[-1].wait()

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_shared_memory():
    memory = SharedMemory(create=True, size=10)
    resource_tracker.unregister(memory._name, "shared_memory")
    memory.close()

def test_file():
    tempfile.mkstemp()

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(LASTS, stdin=subprocess.PIPE) as process:
        yield process
        process.communicate(b"\\n")

def test_of_a_wider_scope(server):
    assert server.poll() is None

def test_of_the_same_scope(server):
    assert server.poll() is None
"""


def test_what_is_left_behind_fails_the_test_and_costs_are_written(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    times = tmp_path / "times.json"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "LEAKS_END_S": "0.5"}
    command = [sys.executable, "-m", "pytest", "-p", "measuring", "--fail-leaks", "--times", str(times), "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    left = {"process", "socket", "shared_memory", "file"}
    if not Path("/sys/fs/cgroup/cpuacct/cgroup.procs").exists():
        left.discard("process")
    failed = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR test_suite.py")}
    assert failed == {f"test_{kind}" for kind in left}, done.stdout
    found = json.loads(times.read_text())
    assert (found["lane"]["tests"], found["lane"]["failed"]) == (7, len(left))
    wall_s, cpu_s, processes, peak_mb = found["each"]["test_suite.py::test_clean"]
    assert cpu_s > 0
    assert wall_s > 0
    assert processes is None or processes >= 0
    assert peak_mb is None or peak_mb > 1


@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpuacct/cgroup.procs").exists(), reason="no control groups for accounting")
def test_cpu_seconds_include_those_of_detached_descendants(tmp_path: Path) -> None:
    burns = "import time\nwhile time.process_time() < 0.6: pass"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burns!r}], start_new_session=True)"
    test = f"import subprocess, sys\ndef test_it(): subprocess.run([sys.executable, '-c', {starts!r}], check=True)\n"
    (tmp_path / "test_suite.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    times = tmp_path / "times.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "measuring", "--fail-leaks", "--times", str(times), "."]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout  # what is just ending has time for it
    (cost,) = json.loads(times.read_text())["each"].values()
    assert cost[1] >= 0.6


def test_what_a_lane_has_no_time_for_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text("import time\ndef test_a(): pass\ndef test_b(): raise ValueError\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "measuring", "--begin-until", "1", "--times", str(tmp_path / "times.json"), "."]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "     2  NOT RUN: the time of this lane was over" in done.stdout
