"""Control groups: what is written where, on imagined machines of both kinds and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ephemeron.errors import PlatformError
from ephemeron.functions import cgroups
from ephemeron.functions.cgroups import UNENFORCED, Enforcement, detect

UNLIMITED = 9223372036854771712
DEAD = 2_000_000_000
"""No process has this number."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the kernel's file system a group's folder holds files and can be removed all the same."""
    real_rmdir = os.rmdir

    def rmdir(path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)
        if any(p.is_dir() for p in path.iterdir()):
            raise OSError("has children")
        for file in path.iterdir():
            file.unlink()
        real_rmdir(path)

    monkeypatch.setattr(cgroups.os, "rmdir", rmdir)
    return tmp_path / "cgroup"


def make(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".", 1)).write_text(text)
    return folder


def v1(root: Path, *, memory_limit: int = UNLIMITED) -> Path:
    for top in ("cpu", "memory"):
        make(root / top, cgroup__procs="")
        make(root / top / "us", cgroup__procs="1\n", cpu__cfs_quota_us="-1\n")
    make(root / "memory" / "us", memory__stat=f"cache 0\nhierarchical_memory_limit {memory_limit}\n")
    own = root / "own"
    own.write_text("4:memory:/us\n3:cpuacct:/\n1:cpu,x:/us\n0::/\n")
    return own


def v2(root: Path, *, children: str = "", controllers: str = "cpuset cpu io memory pids") -> Path:
    for folder in (root, root / "a.slice", root / "a.slice" / "us.scope"):
        make(folder, cgroup__controllers=controllers, cgroup__subtree_control=children, cgroup__procs="")
    own = root / "own"
    own.write_text("0::/a.slice/us.scope\n")
    return own


def read(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def test_v1_limits_in_both_hierarchies(root: Path) -> None:
    own = v1(root)
    enforcement = detect(root, own)
    assert (enforcement.kind, enforcement.parents) == ("v1", (root / "cpu", root / "memory"))
    assert enforcement.unenforced == ()
    group = enforcement.group(12, 3, memory_mb=512)
    cpu, memory = root / "cpu" / "ephemeron-12-3", root / "memory" / "ephemeron-12-3"
    assert read(cpu, "cpu.cfs_period_us") == "20000"
    assert read(cpu, "cpu.cfs_quota_us") == "-1", "no CPU quota yet: imports come first"
    assert read(memory, "memory.limit_in_bytes") == read(memory, "memory.memsw.limit_in_bytes") == str(512 << 20)
    group.set_cpu(0.3)
    assert read(cpu, "cpu.cfs_quota_us") == "6000"
    group.set_cpu(0.001)
    assert read(cpu, "cpu.cfs_quota_us") == "1000", "the kernel refuses less"
    group.set_cpu(None)
    assert read(cpu, "cpu.cfs_quota_us") == "-1"
    group.add(4321)
    assert read(cpu, "cgroup.procs") == read(memory, "cgroup.procs") == "4321"
    make(memory, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    assert not group.oom_killed()
    make(memory, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.oom_killed()
    make(memory, memory__max_usage_in_bytes=f"{100 << 20}\n")
    assert group.peak_mb() == 100
    assert group.remove()
    assert not cpu.exists()
    assert not memory.exists()
    assert group.remove(), "removing twice is harmless"


def test_v1_stays_below_a_group_that_is_itself_limited(root: Path) -> None:
    enforcement = detect(root, v1(root, memory_limit=1 << 30))
    assert enforcement.parents == (root / "cpu" / "us", root / "memory" / "us")


def test_v1_takes_the_mount_where_the_own_path_is_that_of_outside(root: Path) -> None:
    v1(root)
    own = root / "own"
    own.write_text("4:memory:/docker/abc\n1:cpu:/docker/abc\n")
    assert detect(root, own).parents == (root / "cpu", root / "memory")


def test_v2_limits_in_one_folder(root: Path) -> None:
    own = v2(root, children="cpu memory")
    enforcement = detect(root, own)
    assert (enforcement.kind, enforcement.parents) == ("v2", (root / "a.slice" / "us.scope",))
    group = enforcement.group(12, 3, memory_mb=512)
    folder = root / "a.slice" / "us.scope" / "ephemeron-12-3"
    assert read(folder, "cpu.max") == "max 20000"
    assert read(folder, "memory.max") == str(512 << 20)
    assert read(folder, "memory.swap.max") == "0"
    group.set_cpu(0.3)
    assert read(folder, "cpu.max") == "6000 20000"
    group.add(4321)
    assert read(folder, "cgroup.procs") == "4321"
    assert not group.oom_killed()
    make(folder, memory__events="low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert group.oom_killed()
    assert group.peak_mb() == 0, "memory.peak is younger than version 2"
    make(folder, memory__peak=f"{50 << 20}\n")
    assert group.peak_mb() == 50
    assert group.remove()
    assert not folder.exists()


def test_v2_enables_the_controllers_at_the_nearest_ancestor_that_lets_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = v2(root)
    write = cgroups._write

    def busy(path: Path, text: str) -> None:
        if path == root / "a.slice" / "us.scope" / "cgroup.subtree_control":
            raise OSError("a group with processes of its own has no limited children")
        write(path, text)

    monkeypatch.setattr(cgroups, "_write", busy)
    assert detect(root, own).parents == (root / "a.slice",)
    assert read(root / "a.slice", "cgroup.subtree_control") == "+cpu +memory"


def test_two_threads_that_try_at_once_do_not_disturb_each_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, limit = v1(root), cgroups._limit

    def another_meanwhile(group: cgroups.ControlGroup, memory_mb: int) -> None:
        monkeypatch.setattr(cgroups, "_limit", limit)
        limit(group, memory_mb)
        assert detect(root, own).kind == "v1"

    monkeypatch.setattr(cgroups, "_limit", another_meanwhile)
    assert detect(root, own).kind == "v1"


@pytest.mark.parametrize("kind", ["no v2 controllers", "hybrid without controllers", "nothing", "no permission"])
def test_what_cannot_be_enforced_is_said(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = root / "own"
    if kind == "no v2 controllers":
        own = v2(root, controllers="hugetlb")
    elif kind == "hybrid without controllers":
        own = v2(root / "unified", controllers="")
    elif kind == "no permission":
        own = v1(root)

        def refused(path: Path, text: str) -> None:
            raise PermissionError(path)

        monkeypatch.setattr(cgroups, "_write", refused)
    enforcement = detect(root, own)
    assert (enforcement.kind, enforcement.unenforced) == ("none", UNENFORCED)
    assert [sentence for sentence in UNENFORCED if "CPU" in sentence or "watched" in sentence] == list(UNENFORCED)
    group = enforcement.group(1, 1, memory_mb=128)
    group.add(os.getpid())
    group.set_cpu(0.5)
    assert not group.oom_killed()
    assert group.peak_mb() == 0
    group.kill()
    assert group.remove()


def test_a_kernel_that_changes_its_mind_is_an_error_that_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enforcement = detect(root, v1(root))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cgroups, "_write", full)
    with pytest.raises(PlatformError, match=r"512 MB.*No space left"):
        enforcement.group(12, 3, memory_mb=512)
    assert not (root / "cpu" / "ephemeron-12-3").exists()


def test_groups_of_dead_hosts_are_removed_and_nobody_elses(root: Path) -> None:
    enforcement = detect(root, v1(root))
    names = [f"ephemeron-{DEAD}-1", f"ephemeron-{DEAD}-probe", f"ephemeron-{os.getpid()}-1", "ephemeron-x", "other"]
    for name in names:
        make(root / "cpu" / name)
    enforcement.clean()
    assert [(root / "cpu" / name).exists() for name in names] == [False, False, True, True, True]


@pytest.fixture(scope="module")
def real() -> Enforcement:
    enforcement = detect()
    if enforcement.kind == "none":
        pytest.skip("no writable control groups here")
    return enforcement


def test_detection_leaves_nothing_behind(real: Enforcement) -> None:
    assert [p for parent in real.parents for p in parent.glob(f"ephemeron-{os.getpid()}-*")] == []


def test_the_kernel_kills_beyond_the_memory_quota(real: Enforcement) -> None:
    group = real.group(os.getpid(), 1, memory_mb=64)
    code = "import sys; sys.stdin.read(1); kept = [bytes([1]) * 2**20 for _ in range(400)]"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        group.add(child.pid)
        group.set_cpu(0.5)
        child.communicate(b"x", timeout=60)
        assert child.returncode == -9
        assert group.oom_killed()
        # Two limits may each stop it, and the counter of the peak may lag behind by a page or two.
        assert 0 <= group.peak_mb() <= 65
    finally:
        child.kill()
        child.wait()
        assert group.remove()


def test_a_group_kills_whoever_is_in_it(real: Enforcement) -> None:
    group = real.group(os.getpid(), 2, memory_mb=64)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        group.add(child.pid)
        assert not group.remove(), "a group in use stays"
        group.kill()
        assert child.wait(timeout=60) == -9
        assert not group.oom_killed()
    finally:
        child.kill()
        child.wait()
        assert group.remove()
