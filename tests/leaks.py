"""What a test leaves behind fails it: processes, sockets, shared memory, control groups, and files outside its folder.

Processes are those of the test process's control group for accounting (`measuring`), which they cannot leave: not by a session of
their own, nor by the end of their parents. Looked at after the teardown of a test, or, while a fixture of a class or a module is set up, after the teardown
of the last test that has it; what such a fixture starts while it is set up may stay as long as it lives. What is just ending has
some time for it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm_processes
from ephemeron.functions import cgroups

END_S = float(os.environ.get("LEAKS_END_S", "30"))
"""In which what is ending has to end: a daemon stays for two seconds after its last client, one whose client was killed for longer."""
OTHER_PROCESSES = ("from multiprocessing.resource_tracker import main", "lithops.scripts.cleaner", "wandb-core")
"""Of libraries: one for each process that uses them."""
OTHERS = re.compile(
    r"ray|tmp\w+wandb-\w+|wandb-[\d-]+|torchinductor_\w+|pymp-\w+|SB3-.*|lithops-\w+|ephemeron-\w{8}|eph-\w{8}"
)
"""Folders that libraries keep for all their sessions, and those of functions that were killed, which are lost with a machine."""
SHARED_MEMORY = Path("/dev/shm")


class Leaks:
    """Compares what there is after tests with what there was before them.

    Args:
        procs: the file that lists the processes of this test process; None: processes are not looked at.
    """

    def __init__(self, procs: Path | None) -> None:
        self._procs = procs
        self._folder = Path(tempfile.mkdtemp(prefix="e-"))
        """Temporary files of this process and of its descendants."""
        self._outer = {name: os.environ.get(name) for name in ("TMPDIR", "EPHEMERON_HOME")}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # for the folders of the tests themselves
        (self._folder / "tmp").mkdir()
        os.environ |= {"TMPDIR": str(self._folder / "tmp"), "EPHEMERON_HOME": str(self._folder / "home")}
        tempfile.tempdir = None
        self._groups = cgroups.detect()
        self._before: dict[str, set[object]] = {}
        self._wide: set[pytest.FixtureDef[object]] = set()
        """Fixtures of classes, modules and packages that are set up."""
        self._tests: list[str] = []
        self.waited_s = 0.0
        self.left = 0

    def begin(self) -> None:
        """What is there now is not of tests."""
        self._before = self._there()

    @contextlib.contextmanager
    def allowed(self, fixture: pytest.FixtureDef[object]) -> Iterator[None]:
        """What a fixture of a wider scope starts, and opens, may stay."""
        if fixture.scope != "session":
            self._wide.add(fixture)
        before = self._there()
        yield
        for kind, things in self._there().items():
            self._before[kind] |= things - before[kind]

    def after(self, nodeid: str, *, shares: bool) -> str:
        """What is left, in words; empty: nothing. To be called after each test.

        Args:
            nodeid: of the test.
            shares: it has used a service of a folder of tests, which starts processes as it likes, and ends with the lane.
        """
        self._tests.append(nodeid)
        if self._wide:
            return ""
        if shares:
            self._tests, self._before = [], self._there()
            return ""
        tests, self._tests = self._tests, []
        left = self._left()
        end = time.monotonic() + END_S
        if any(left.values()):
            gc.collect()  # an exception holds the frames in which it was raised, and what is to be removed with its owner
        while any((left := self._left()).values()) and time.monotonic() < end:
            self.waited_s += 0.05
            time.sleep(0.05)
        found = [f"{kind} {thing}" for kind, things in left.items() for thing in self._described(kind, things)]
        for pid in left["process"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for path in (
            *((self._folder / "tmp" / str(n)) for n in left["file"]),
            *((SHARED_MEMORY / str(n)) for n in left["shared memory"]),
        ):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self._before = self._there()
        self.left += len(found)
        if not found:
            return ""
        return "\n".join(
            [f"left behind: {len(found)} things", *found, "by one of:" if len(tests) > 1 else "by", *tests]
        )

    def ended(self, fixture: pytest.FixtureDef[object]) -> None:
        """A fixture is torn down."""
        self._wide.discard(fixture)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._outer.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None

    def _left(self) -> dict[str, set[object]]:
        there = self._there()
        return {kind: things - self._before[kind] for kind, things in there.items()}

    def _there(self) -> dict[str, set[object]]:
        return {
            "process": set(self._processes()), "socket": set(_sockets()), "shared memory": set(_segments()),
            "control group": set(self._dead_groups()), "file": {path.name for path in (self._folder / "tmp").glob("*") if not OTHERS.fullmatch(path.name)},
        }  # fmt: skip

    def _processes(self) -> Iterator[int]:
        if self._procs is None:
            return
        kept = warm_processes.own_servers()
        for pid in map(int, self._procs.read_text().split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if pid == os.getpid() or pid in kept or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if not any(word in " ".join(process.cmdline()) for word in OTHER_PROCESSES):
                    yield pid

    def _dead_groups(self) -> Iterator[str]:
        """Control groups of dead hosts that the next host would not remove."""
        dead = [g for parent in self._groups.parents for g in parent.glob("ephemeron-*-*") if _is_dead(g)]
        if dead:
            self._groups.clean()
        yield from (str(group) for group in dead if group.exists())

    def _described(self, kind: str, things: set[object]) -> Iterator[str]:
        for thing in things:
            if kind == "process":
                with contextlib.suppress(psutil.Error):
                    yield f"{thing}: {' '.join(psutil.Process(int(str(thing))).cmdline())[:300]}"
            else:
                yield str(thing)


def _sockets() -> Iterator[str]:
    """Sockets of this process that listen: servers."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found[target[8:-1]] = fd
    for kind, field, listening, inode in (("tcp", 3, "0A", 9), ("tcp6", 3, "0A", 9), ("unix", 3, "00010000", 6)):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:] if found else ():
            fields = line.split()
            if fields[field] == listening and fields[inode] in found:
                yield f"{' '.join(fields[1:2] if kind != 'unix' else fields[7:])} (descriptor {found[fields[inode]]})"


def _segments() -> Iterator[str]:
    """Shared memory that no process has. Semaphores of killed processes (sem.*) stay, whoever made them."""
    names = {path.name for path in SHARED_MEMORY.glob("*") if not path.name.startswith("sem.")}
    if names:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                names = {name for name in names if f"/dev/shm/{name}" not in maps}
    yield from names


def _is_dead(group: Path) -> bool:
    match = cgroups._OURS.fullmatch(group.name)
    return match is not None and not psutil.pid_exists(int(match[1]))
