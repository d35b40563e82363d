"""What each test costs: a plugin that writes duration, CPU seconds, processes and memory of every test as JSON.

    make test-times                       both lanes, into tests/times/fast.json and tests/times/slow.json
    pytest --times=FILE ...               any selection

CPU seconds are those of the test's process and of all its descendants, living or not: every process of a lane is in a control
group for accounting (`cpuacct`), which its children inherit. Processes are counted, and their memory is summed, by looking into
these groups 10 times a second, so a process that lives for less may be missed. Without such groups (version 2 alone, no root) CPU
seconds are those of the process and of the children that it waited for; processes and memory are null.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leaks
from quarantine import quarantined


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="write duration, CPU seconds, processes and memory of each test")
    parser.addoption("--begin-until", type=float, metavar="SECONDS", help="skip what has not begun by this time, in seconds since 1970")
    parser.addoption("--fail-leaks", action="store_true", help="a test that leaves processes, servers or files behind fails")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--begin-until")
    if until is not None and time.time() > until:
        pytest.skip("NOT RUN: the time of this lane was over (--begin-until)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measuring(config), "costs of tests")


ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
LOOK_S = 0.1
PAGE = os.sysconf("SC_PAGE_SIZE")


def account_of(config: pytest.Config) -> Path:
    """The control group of this process of the lane."""
    run = getattr(config, "workerinput", {}).get("testrunuid") or str(os.getpid())
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    return ACCOUNTS / f"ephemeron-tests-{run}" / worker


class Account:
    """CPU seconds of this process and of its descendants."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            self.usage = folder / "cpuacct.usage"
            self.usage.read_text()
        except OSError:
            self.folder = None

    def cpu_s(self) -> float:
        if self.folder is not None:
            return int(self.usage.read_text()) / 1e9
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Looker:
    """Looks into the groups of a lane: which processes there are, and how much memory they have, at which time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, list[tuple[float, frozenset[int], int]]] = defaultdict(list)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def between(self, worker: str, start: float, stop: float) -> tuple[int, float] | None:
        """Processes that began between two times, and the most memory, MiB; drops what is older."""
        seen = self._seen[worker]
        before, within = [look for look in seen if look[0] < start], [look for look in seen if start <= look[0] <= stop]
        del seen[: max(0, len(before) - 1)]
        if not seen:
            return None
        old = before[-1][1] if before else frozenset()
        began = frozenset().union(*(pids for _, pids, _ in within)) - old
        return len(began), max((memory for _, _, memory in within), default=0) / 2**20

    def left_over(self) -> int:
        """Processes of the lane that do not end with it."""
        end = time.monotonic() + 10
        while True:
            living = leaks.living({pid for procs in self._folder.glob("*/cgroup.procs") for pid in procs.read_text().split()})
            if not living or time.monotonic() > end:
                return len(living)
            time.sleep(0.05)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(LOOK_S):
            for procs in self._folder.glob("*/cgroup.procs"):
                with contextlib.suppress(OSError):
                    pids = frozenset(map(int, procs.read_text().split()))
                    memory = sum(map(_private_bytes, pids))
                    self._seen[procs.parent.name].append((time.time(), pids, memory))


def _is_shared(fixture: pytest.FixtureDef[object]) -> bool:
    """A fixture of the whole lane that is defined for a folder of tests."""
    return fixture.scope == "session" and fixture.baseid.startswith("tests/")


def _reason(report: Any) -> str:
    """Why a test was skipped, without its place."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def _private_bytes(pid: int) -> int:
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE


class Measuring:
    """The plugin: each process measures its tests, the controlling one collects and writes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.account = Account(account_of(config))
        self.is_worker = hasattr(config, "workerinput")
        self.target: str | None = None if self.is_worker else config.getoption("--times")
        self.began = time.time()
        self.left_over = 0
        self.tests: dict[str, dict[str, Any]] = {}
        self.leaks = None if self._has_workers() else leaks.Leaks(self.account.folder and self.account.folder / "cgroup.procs")
        self.fails_leaks = self.leaks is not None and config.getoption("--fail-leaks")
        parent = self.account.folder and self.account.folder.parent
        self.looker = Looker(parent) if self.target and parent and not self._has_workers() else None

    def _has_workers(self) -> bool:
        return bool(getattr(self.config.option, "numprocesses", None))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """The lane's groups are named by xdist, in the first process it makes."""
        if self.looker is None and self.account.folder is not None:
            self.looker = Looker(ACCOUNTS / f"ephemeron-tests-{node.workerinput['testrunuid']}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        if self.fails_leaks:
            self.leaks.begin()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._cpu, self._start = self.account.cpu_s(), time.time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        if not self.fails_leaks or fixturedef.scope == "function":
            return (yield)
        with self.leaks.allowed(fixturedef):
            return (yield)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        if self.fails_leaks:
            self.leaks.ended(fixturedef)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when != "teardown":
            self._shares = any(map(_is_shared, item._request._fixture_defs.values()))  # type: ignore[attr-defined]
        else:
            left = self.leaks.after(item.nodeid, shares=self._shares) if self.fails_leaks else ""
            if left and report.passed:
                report.outcome, report.longrepr = "failed", left
            report.cost = {"start": self._start, "wall_s": time.time() - self._start, "cpu_s": self.account.cpu_s() - self._cpu}
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.is_worker:
            return
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "reruns": 0})
        if report.outcome == "rerun":
            test["reruns"] += 1
        elif report.outcome != "passed":
            test["outcome"] = report.outcome
        cost = getattr(report, "cost", None)
        if cost:
            start, worker = cost.pop("start"), getattr(report, "worker_id", "main")
            found = self.looker and self.looker.between(worker, start, start + cost["wall_s"])
            cost |= dict(zip(("processes", "peak_mb"), found or (None, None), strict=True)) | {"worker": worker}
            test |= {
                name: round(value, 2 if name.endswith("_s") else 0) if isinstance(value, float) else value for name, value in cost.items()
            }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.looker:
            self.looker.close()
        if not self.is_worker and self.looker:
            self.left_over = self.looker.left_over()
        if self.leaks:
            self.leaks.close()
        if self.account.folder is not None and not self.is_worker:
            _leave(self.account.folder, self.looker and self.looker._folder)
        if self.target:
            self._write(Path(self.target))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What a lane has skipped, tried again and left, and what took longest."""
        tell, ran = terminalreporter.write_line, [t for t in self.tests.items() if "wall_s" in t[1]]
        if not self._has_workers() and not self.target:
            return
        terminalreporter.section("this lane")
        reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
        tell(f"skipped: {sum(reasons.values())} tests, for {len(reasons)} reasons")
        for reason, n in reasons.most_common():
            tell(f"  {n:4d}  {reason}")
        again = [name for name, test in self.tests.items() if test["reruns"]]
        tell(f"second tries: {len(again)}, quarantined: {len(quarantined())}")
        for name, entry in quarantined().items():
            tell(f"  {name} since {entry.date} ({entry.owner}): {entry.reason}{' - TRIED AGAIN' if name in again else ''}")
        tell("slowest ten, seconds and CPU seconds:")
        for name, test in sorted(ran, key=lambda t: -t[1]["wall_s"])[:10]:
            tell(f"  {test['wall_s']:6.1f} {test['cpu_s']:6.1f}  {name}")
        tell(f"CPU seconds of all tests: {sum(test['cpu_s'] for _, test in ran):.0f}, processes left over: {self.left_over}")

    def _write(self, target: Path) -> None:
        ran = {name: test for name, test in sorted(self.tests.items()) if "wall_s" in test}
        whole = {
            "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "load_at_start": round(os.getloadavg()[2], 2),
            "processes_of_pytest": getattr(self.config.option, "numprocesses", None) or 1,
            "wall_s": round(time.time() - self.began, 1),
            "cpu_s": round(sum(test["cpu_s"] for test in ran.values()), 1),
            "tests": len(ran),
            "reruns": sum(test["reruns"] for test in ran.values()),
            "failed": sum(test["outcome"] == "failed" for test in ran.values()),
        }
        fields = ("wall_s", "cpu_s", "processes", "peak_mb")
        lines = [f"{json.dumps(name)}: {json.dumps([test[f] for f in fields])}" for name, test in ran.items()]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'{{"lane": {json.dumps(whole)},\n "fields": {json.dumps(fields)},\n "each": {{\n' + ",\n".join(lines) + "\n}}\n")


def _leave(*folders: Path | None) -> None:
    """Back to the group of all, and the lane's groups away; one that still has processes stays."""
    with contextlib.suppress(OSError):
        (ACCOUNTS / "cgroup.procs").write_text(str(os.getpid()))
    for folder in folders:
        if folder is None:
            continue
        lane = folder.parent if folder.parent != ACCOUNTS else folder
        for each in [*lane.glob("*/"), lane]:
            with contextlib.suppress(OSError):
                each.rmdir()
