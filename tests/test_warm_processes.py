"""A process that was forked with its imports made is like a fresh one, to its parent and to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm_processes
from ephemeron.functions.function_process import with_threads

PROGRAM = """
import atexit, os, random, signal, sys, tempfile, threading
import ephemeron.errors  # long enough to be forked
atexit.register(print, "at exit")
threading.Timer(0.05, lambda: print("thread")).start()
print(sys.argv, sys.orig_argv[1:2], __name__, os.getcwd(), sys.path[0], sys.path.count("/extra"))
print(sorted(name for name in os.environ if name.startswith("GIVEN")), tempfile.gettempdir(), os.getppid() == int(sys.argv[1]))
print([fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 600 and os.path.exists(f"/proc/self/fd/{fd}")])
print(open("/proc/self/cmdline").read().split(chr(0))[1:], "GIVEN=1" in open("/proc/self/environ").read().split(chr(0)))
print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT), sys.stdout.line_buffering, sys.stderr.errors, sys.stdin.read())
print("to stderr", file=sys.stderr)
left_open = open("left", "w")
left_open.write("written at the end")
"""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    with warm_processes.warm():
        if not warm_processes.is_available():
            pytest.skip("this system has no warm processes")
        yield


def run(*command: str, cwd: Path, **options: object) -> tuple[int, str, str]:
    env = {**os.environ, "GIVEN": "1", "TMPDIR": str(cwd), "PYTHONPATH": "/extra"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, input="sent", capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_what_a_program_sees_is_the_same(tmp_path: Path, kind: str, session: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = {"-c": ["-c", PROGRAM], "-m": ["-m", "program"], "file": [str(tmp_path / "program.py")]}[kind]
    arguments = (*command, str(os.getpid()), "an argument")
    before = warm_processes.forked
    warm = run(*arguments, cwd=tmp_path, start_new_session=session)
    assert warm_processes.forked == before + 1
    assert (tmp_path / "left").read_text() == "written at the end"
    with warm_processes.cold():
        fresh = run(*arguments, cwd=tmp_path, start_new_session=session)
    assert warm_processes.forked == before + 1
    assert warm == fresh
    assert warm[0] == 0, warm[2]
    assert warm[1].endswith("sent\nthread\nat exit\n")


@pytest.mark.parametrize(
    "ends",
    [
        "raise SystemExit",
        "raise SystemExit(3)",
        "raise SystemExit('why')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import os; os._exit(9)",
        "import os; os.kill(os.getpid(), 9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "syntax error",
    ],
)
def test_how_a_program_ends_is_the_same(tmp_path: Path, ends: str) -> None:
    program = f"import ephemeron.errors\n{ends}"
    warm = run("-c", program, cwd=tmp_path)
    with warm_processes.cold():
        assert run("-c", program, cwd=tmp_path) == warm


def test_processes_of_warm_processes_are_warm_and_their_own_children(tmp_path: Path) -> None:
    inner = "import gc, sys, os, ephemeron.errors; print(gc.get_freeze_count() > 0, os.getppid() == int(sys.argv[1]))"
    outer = f"import os, subprocess, sys, ephemeron.errors\nsubprocess.run([sys.executable, '-c', {inner!r}, str(os.getpid())])"
    assert run("-c", outer, cwd=tmp_path)[1] == "True True\n"


BECOMES = """
import ephemeron.errors, os, sys
if len(sys.argv) == 1:
    os.execvp(sys.executable, [sys.executable, "-P", __file__, str(os.getpid()), str(os.getppid())])
import customized, gc, signal
print(sys.argv[1:] == [str(os.getpid()), str(os.getppid())], sys.argv[0] == __file__, "\\0-P\\0" in open("/proc/self/cmdline").read())
print(gc.get_freeze_count() > 0, file=sys.stderr)
"""


def test_a_program_that_becomes_another_one_stays_warm(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BECOMES)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['customized'] = sys")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "LANG": "en_US.UTF-8"}
    command = [sys.executable, "-P", str(tmp_path / "program.py")]
    warm = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    with warm_processes.cold():
        fresh = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (warm.stdout, fresh.stdout) == ("True True True\n",) * 2, warm.stderr + fresh.stderr
    assert (warm.stderr, fresh.stderr) == ("True\n", "False\n")


SUPERVISOR = """
import gc, multiprocessing, os, subprocess, sys
import ephemeron.errors

def starts():
    reading, writing = os.pipe()
    program = f"import ephemeron.errors, gc, os; os.write({writing}, str(gc.get_freeze_count() > 0).encode())"
    subprocess.run([sys.executable, "-c", program], pass_fds=[writing], check=True)
    print(os.read(reading, 9).decode(), flush=True)

opened = [open(os.devnull) for _ in range(30)]
opened.append(opened)
child = multiprocessing.get_context("fork").Process(target=starts)
child.start()
child.join()
"""


def test_a_child_of_a_supervisor_starts_processes_warm(tmp_path: Path) -> None:
    """As in Lithops' runner, which has files open by then."""
    program = tmp_path / "localhost-runner-v2.py"
    program.write_text(SUPERVISOR)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n", done.stderr


def test_a_function_whose_libraries_have_one_thread_is_warm() -> None:
    before = warm_processes.forked
    env = with_threads(os.environ, 1.0)
    subprocess.run([sys.executable, "-c", "import ephemeron.errors"], env=env, check=True)
    assert warm_processes.forked == before + 1


FIRST = """
import os, subprocess, sys, warm_processes
os.environ["OMP_NUM_THREADS"] = "3"  # as the tests' own set-up does, after that import
with warm_processes.warm():
    subprocess.run([sys.executable, "-c", "import ephemeron.errors"], check=True)
print(warm_processes.forked)
"""


@pytest.mark.slow
@pytest.mark.cold_start
def test_the_first_process_is_warm_in_the_environment_that_there_is_by_then() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_it_begins_in_the_folder_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_processes.is_available()
    monkeypatch.chdir(tmp_path)
    program = "import ephemeron.errors, os; print(os.getcwd())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path.resolve()}\n"


def test_random_numbers_are_drawn_anew(tmp_path: Path) -> None:
    program = "import ephemeron.errors, random, numpy; print(random.random(), numpy.random.rand())"
    first, second = (run("-c", program, cwd=tmp_path)[1].split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_signal_reaches_it_and_nothing_stays_when_it_is_killed(tmp_path: Path) -> None:
    program = "import ephemeron.errors, time; print('ready', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", program]
    for number in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            (server,) = psutil.Process(process.pid).children()
            process.send_signal(number)
            assert process.wait(60) == -number
        server.wait(60)


def test_a_program_beside_a_copy_of_the_package_has_the_copy(tmp_path: Path) -> None:
    (tmp_path / "ephemeron").mkdir()
    (tmp_path / "ephemeron" / "__init__.py").touch()
    program = "import ephemeron; print(ephemeron.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parents[1] == tmp_path


@pytest.mark.parametrize("change", [{"PYTHONHASHSEED": "7"}, {"OMP_NUM_THREADS": "2"}])
def test_an_environment_that_matters_at_the_start_gets_a_fresh_process(change: dict[str, str]) -> None:
    before = warm_processes.forked
    name, value = next(iter(change.items()))
    program = f"import gc, os, ephemeron.errors; print(os.environ[{name!r}], gc.get_freeze_count() > 0)"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | change, capture_output=True, text=True)
    assert (done.stdout, warm_processes.forked) == (f"{value} False\n", before)
