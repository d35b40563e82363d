"""CPU share and memory quota of a process tree, enforced by Linux control groups.

A local function gets the CPU time and the memory of a cloud function with the same quota: CPU time is in proportion
to memory, and a function above its quota is killed. Control groups do both, of version 1 (two hierarchies, `cpu` and
`memory`) and of version 2 (one), since machines of both kinds are in use. The CPU period is 20 ms instead
of the kernel's 100 ms: the share is the same (within 1 %), the longest pause a quarter, which matters where
functions wait for each other every iteration.

Groups are made at the top of the hierarchy, unless this process is itself limited: then
below its own group, so that its limit also holds for functions. Under version 2 they are made below the nearest ancestor of
its group that may have limited children (a group with processes of its own may not).

Not for isolation: a function can leave its group if it runs as root. Where no group can be made, memory is
watched by the owner of the process, and `Enforcement.unenforced` says so.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ephemeron.errors import PlatformError
from ephemeron.units import MIB

PERIOD_US = 20_000
"""CPU quota is handed out once per period."""

_LEAST_QUOTA_US = 1_000
"""The kernel refuses less."""
_UNLIMITED = 1 << 60
_probes = itertools.count(1)
_OURS = re.compile(r"ephemeron-(\d+)-\w+")

Kind = Literal["v1", "v2", "none"]

UNENFORCED = (
    "The CPU share of a function is not enforced here: it takes what CPU time it can get.",
    "The memory quota of a function is watched rather than enforced here: it is killed a moment after passing it.",
)
"""Notes for machines without control groups."""


class ControlGroup:
    """Limits of one function's processes. Made by `Enforcement.group`."""

    def __init__(self, kind: Kind, folders: tuple[Path, ...]) -> None:
        self.kind = kind
        self.folders = folders

    def add(self, pid: int) -> None:
        """Moves a process in; its later children follow, its memory so far stays on the old account."""
        for folder in self.folders:
            _write(folder / "cgroup.procs", str(pid))

    def set_cpu(self, vcpus: float | None) -> None:
        """Grants a share of the CPU, in cores; None for as much as there is."""
        quota = None if vcpus is None else max(_LEAST_QUOTA_US, round(vcpus * PERIOD_US))
        if self.kind == "v1":
            _write(self.folders[0] / "cpu.cfs_quota_us", str(-1 if quota is None else quota))
        elif self.kind == "v2":
            _write(self.folders[0] / "cpu.max", f"{'max' if quota is None else quota} {PERIOD_US}")

    def oom_killed(self) -> bool:
        """Whether the kernel killed anything in here for want of memory."""
        if self.kind == "v1":
            return _counter(self.folders[1] / "memory.oom_control", "oom_kill") > 0
        return self.kind == "v2" and _counter(self.folders[0] / "memory.events", "oom_kill") > 0

    def peak_mb(self) -> float:
        """Most memory ever charged, MiB, cached file pages included (so rather an upper bound); 0 if unknown."""
        if self.kind == "none":
            return 0.0
        v1 = self.kind == "v1"
        try:
            text = (self.folders[-1] / ("memory.max_usage_in_bytes" if v1 else "memory.peak")).read_text()
        except OSError:
            return 0.0  # memory.peak is younger than version 2 itself
        return int(text) / MIB

    def kill(self) -> None:
        """SIGKILL to every process inside, also to those that left the function's process group."""
        if self.folders:
            _kill_all(self.folders[0])

    def remove(self) -> bool:
        """Removes the group; False while processes linger in it, call again then."""
        left = [folder for folder in self.folders if not _remove(folder)]
        return not left


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """Enforcement of quotas on this machine."""

    kind: Kind
    parents: tuple[Path, ...] = ()
    """v1: folders in the cpu and the memory hierarchy; v2: one folder."""
    unenforced: tuple[str, ...] = field(default=())
    """Sentences for people."""

    def group(self, owner: int, n: int, *, memory_mb: int) -> ControlGroup:
        """Makes a group `ephemeron-<owner>-<n>` with a memory quota and, at first, all the CPU it can get.

        Raises:
            PlatformError: the kernel refuses, although it did not at detection.
        """
        group = ControlGroup(self.kind, tuple(parent / f"ephemeron-{owner}-{n}" for parent in self.parents))
        try:
            _limit(group, memory_mb)
        except OSError as e:
            group.remove()
            raise PlatformError(f"cannot make a control group for a function of {memory_mb} MB: {e}") from e
        return group

    def clean(self) -> None:
        """Removes what hosts left behind that are dead, and kills what still runs in it."""
        for parent in self.parents:
            for folder in parent.glob("ephemeron-*"):
                match = _OURS.fullmatch(folder.name)
                if match and not _alive(int(match[1])):
                    _kill_all(folder)
                    _remove_soon(folder)


def detect(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Enforcement:
    """Finds a way by trying it: a group is made, limited and removed again.

    Args:
        root: where control groups are mounted.
        own: file with the groups of this process.
    """
    groups = _own_groups(own)
    for kind, choices in (("v1", _v1_parents(root, groups)), ("v2", _v2_parents(root, groups))):
        for parents in choices:
            found = Enforcement(kind="v1" if kind == "v1" else "v2", parents=parents)
            if _works(found):
                return found
    return Enforcement(kind="none", unenforced=UNENFORCED)


def _works(enforcement: Enforcement) -> bool:
    try:
        if enforcement.kind == "v2":
            _delegate(enforcement.parents[0])
        number = next(_probes)  # other threads may try, too
        group = ControlGroup(enforcement.kind, tuple(p / f"ephemeron-{os.getpid()}-probe{number}" for p in enforcement.parents))
        try:
            _limit(group, 64)
            group.set_cpu(0.5)
        finally:
            group.remove()
    except OSError:
        return False
    return True


def _limit(group: ControlGroup, memory_mb: int) -> None:
    if group.kind == "none":
        return
    for folder in group.folders:
        folder.mkdir(exist_ok=True)
    memory = group.folders[-1]
    nbytes = str(memory_mb * MIB)
    if group.kind == "v1":
        _write(group.folders[0] / "cpu.cfs_period_us", str(PERIOD_US))
        _write(memory / "memory.limit_in_bytes", nbytes)
        _write_if_there(memory / "memory.memsw.limit_in_bytes", nbytes)
    elif group.kind == "v2":
        _write(memory / "memory.max", nbytes)
        _write_if_there(memory / "memory.swap.max", "0")
    group.set_cpu(None)


def _own_groups(own: Path) -> dict[str, str]:
    """Controller to path; version 2 has the empty name."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return {}
    out: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        out.update(dict.fromkeys(controllers.split(","), path))
    return out


def _v1_parents(root: Path, groups: dict[str, str]) -> list[tuple[Path, ...]]:
    cpu, memory = root / "cpu", root / "memory"
    if not (cpu / "cgroup.procs").exists() or not (memory / "cgroup.procs").exists():
        return []
    # A container may show the path outside but mount only the inside: then the mount is the own group.
    own_cpu, own_memory = (own if (own := _below(top, groups.get(top.name, "/"))).is_dir() else top for top in (cpu, memory))
    limited = (
        _counter(own_memory / "memory.stat", "hierarchical_memory_limit", _UNLIMITED) < _UNLIMITED
        or _number(own_cpu / "cpu.cfs_quota_us") > 0
    )
    return [(own_cpu, own_memory)] if limited else [(cpu, memory), (own_cpu, own_memory)]


def _v2_parents(root: Path, groups: dict[str, str]) -> list[tuple[Path, ...]]:
    out: list[tuple[Path, ...]] = []
    for top in (root, root / "unified"):
        if (top / "cgroup.controllers").exists():
            own = _below(top, groups.get("", "/"))
            out += [(p,) for p in (own, *own.parents) if p.is_relative_to(top) and p.is_dir()]
    # Moving a process from this one's group below an ancestor takes write access to the ancestor's list.
    return [(p,) for (p,) in out if os.access(p / "cgroup.procs", os.W_OK)]


def _delegate(parent: Path) -> None:
    """Lets children have CPU and memory limits; fails with OSError where the kernel forbids it."""
    wanted = {"cpu", "memory"}
    if not wanted <= set((parent / "cgroup.controllers").read_text().split()):
        raise FileNotFoundError("no cpu and memory controllers here")
    if not wanted <= set((parent / "cgroup.subtree_control").read_text().split()):
        _write(parent / "cgroup.subtree_control", "+cpu +memory")


def _below(top: Path, path: str) -> Path:
    return top / path.lstrip("/")


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _write_if_there(path: Path, text: str) -> None:
    """Swap accounting is optional in the kernel; without it there is no swap quota to close."""
    try:
        path.write_text(text)
    except OSError:
        pass


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _counter(path: Path, name: str, default: int = 0) -> int:
    """One line of a flat keyed file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return default
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), default)


def _kill_all(folder: Path) -> None:
    try:
        pids = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return
    for pid in pids:
        if pid > 0:  # 0 means a process outside this process namespace
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _remove(folder: Path) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_soon(folder: Path) -> None:
    """Killed processes take a moment to leave."""
    for _ in range(50):
        if _remove(folder):
            return
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not, since its parent may never reap it."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user, or hidden
