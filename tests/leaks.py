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
from typing import TypeAlias

import psutil
import pytest

import warm_processes
from ephemeron.functions import cgroups

END_S = float(os.environ.get("LEAKS_END_S", "30"))
"""In which what is ending has to end: a daemon stays for two seconds after its last client, one whose client was killed for longer."""
OTHER_PROCESSES = ("from multiprocessing.resource_tracker import main", "lithops.scripts.cleaner", "wandb-core", warm_processes.NAME)
"""Of libraries: one for each process that uses them; and fork servers of tests, which end with their processes."""
OTHERS = re.compile(r"ray|tmp\w+wandb-\w+|wandb-[\d-]+|torchinductor_\w+|pymp-\w+|SB3-.*|lithops-\w+|ephemeron-\w{8}|eph-\w{8}")
"""Folders that libraries keep for all their sessions, and those of functions that were killed, which are lost with a machine."""
SHARED_MEMORY = Path("/dev/shm")


Things: TypeAlias = dict[str, set[str]]
"""Names by kind."""


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
        self._before: Things = {}
        self._wide: set[pytest.FixtureDef[object]] = set()
        """Fixtures of classes, modules and packages that are set up."""
        self._tests: list[str] = []
        """Those after which nothing was looked for yet."""
        self._share = False

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
            self._before.setdefault(kind, set()).update(things - before[kind])

    def after(self, nodeid: str, *, shares: bool) -> str:
        """What is left, in words; empty: nothing. To be called after each test.

        Args:
            nodeid: of the test.
            shares: it has used a service of a folder of tests, which starts processes as it likes, and ends with the lane.
        """
        self._tests.append(nodeid)
        self._share |= shares
        if self._wide:
            return ""
        tests, self._tests, shared, self._share = self._tests, [], self._share, False
        if shared:
            self._before = self._there()
            return ""
        left, there = self._left()
        if left:
            gc.collect()  # an exception holds the frames in which it was raised, and what is to be removed with its owner
            end = time.monotonic() + END_S
            while left and time.monotonic() < end:
                time.sleep(0.05)
                left, there = self._left()
        if not left:
            self._before = there
            return ""
        found = [f"{kind} {described}" for kind, things in left.items() for described in things.values()]
        for pid in left.get("process", ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for kind, folder in (("file", self._folder / "tmp"), ("shared memory", SHARED_MEMORY)):
            for path in (folder / name for name in left.get(kind, ())):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self._before = self._there()
        return "\n".join([f"left behind: {len(found)} things", *found, "by one of:" if len(tests) > 1 else "by", *tests])

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

    def _left(self) -> tuple[dict[str, dict[str, str]], Things]:
        """What is new and a leak, described, by kind and name; and all that there is."""
        there = self._there()
        judges = {
            "process": living,
            "socket": _listening,
            "shared memory": _unused,
            "control group": self._lost_group,
            "file": lambda names: {name: name for name in names if not OTHERS.fullmatch(name)},
        }
        new = {kind: names - self._before.get(kind, set()) for kind, names in there.items()}
        left = {kind: judges[kind](names) for kind, names in new.items() if names}
        return {kind: names for kind, names in left.items() if names}, there

    def _there(self) -> Things:
        parents = self._groups.parents
        return {
            "process": set() if self._procs is None else set(self._procs.read_text().split()),
            "socket": _sockets(),
            "shared memory": set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set(),
            "control group": {str(group) for parent in parents for group in parent.glob("ephemeron-*-*")},
            "file": set(os.listdir(self._folder / "tmp")),
        }

    def _lost_group(self, groups: set[str]) -> dict[str, str]:
        """Of a dead host, and the next host would not remove it."""
        if dead := [group for group in groups if _is_dead(Path(group))]:
            self._groups.clean()
        return {group: group for group in dead if Path(group).exists()}


def living(pids: set[str]) -> dict[str, str]:
    """Processes that are neither this one nor those of libraries and of the suite, described."""
    kept, found = {os.getpid(), *warm_processes.own_servers()}, {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            command = " ".join(process.cmdline())
            if process.pid in kept or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not any(word in command for word in OTHER_PROCESSES):
                found[pid] = f"{pid}: {command[:300]}"
    return found


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found.add(target[8:-1])
    return found


def _listening(inodes: set[str]) -> dict[str, str]:
    """Servers of this process."""
    found = {}
    for kind, listens, number in (("tcp", "0A", 9), ("tcp6", "0A", 9), ("unix", "00010000", 6)):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == listens and fields[number] in inodes:
                found[fields[number]] = " ".join(fields[7:] if kind == "unix" else fields[1:2])
    return found


def _unused(names: set[str]) -> dict[str, str]:
    """Shared memory that no process has. Semaphores of killed processes (sem.*) are left out."""
    names = {name for name in names if not name.startswith("sem.")}
    for process in psutil.process_iter() if names else ():
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return {name: name for name in names}


def _is_dead(group: Path) -> bool:
    match = cgroups._OURS.fullmatch(group.name)
    return match is not None and not psutil.pid_exists(int(match[1]))
