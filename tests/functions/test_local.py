"""The local platform: its contract, and what only real processes can do."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from ephemeron.communication.channels import open_channel
from ephemeron.errors import DaemonGone, PlatformError
from ephemeron.events import Ended, Event, Invoked, Note
from ephemeron.functions.base import Call, Limits, Outcome, Platform
from ephemeron.functions.cgroups import PERIOD_US, detect
from ephemeron.functions.daemon_messages import InvocationParams
from ephemeron.functions.local import LocalPlatform, default_limits, default_memory_mb
from ephemeron.testing.platform_contract import PlatformConnectionContract, PlatformContract
from ephemeron.testing.platform_entries import declaration
from running import until_async

HERE = Path(__file__).parent
ENV = {"EPHEMERON_PRELOAD": "", "EPHEMERON_ENTRIES": "test=local_entries:dispatch", "PYTHONPATH": str(HERE)}
LIMITS = Limits(memory_max_mb=4096)

Scenario: TypeAlias = Callable[[LocalPlatform], Coroutine[Any, Any, None]]

needs_cgroups = pytest.mark.skipif(detect().kind == "none", reason="no writable control groups here")


class Local:
    enforce = True

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "run"

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        env = {"EPHEMERON_PRELOAD": "", "EPHEMERON_ENTRIES": declaration()}
        platform = await LocalPlatform.start(self.folder, limits=limits, env=env, enforce=self.enforce)
        try:
            yield platform
        finally:
            await platform.shutdown()


class TestContract(Local, PlatformContract):
    pass


class TestContractUnenforced(Local, PlatformConnectionContract):
    """And what else ends a call without control groups; the end by memory is below."""

    enforce = False
    test_a_function_dies_at_its_lifetime = PlatformContract.test_a_function_dies_at_its_lifetime
    test_cancel_all_ends_everything = PlatformContract.test_cancel_all_ends_everything


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a run"


def test_without_control_groups_memory_is_watched_and_it_says_so(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        assert len(platform.unenforced) == 2
        beyond = await outcome(platform, "allocate", mb=400, then_s=60)
        assert beyond.status == "out_of_memory"

    run(folder, scenario, enforce=False)


def test_a_function_that_dies_is_lost_and_one_that_ends_has_its_peak_memory(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        for entry, said in (("killed", "SIGKILL"), ("leave", "exit code 7")):
            lost = await outcome(platform, entry)
            assert lost.status == "lost"
            assert said in lost.error
            assert lost.billed_s > 0
        fits = await outcome(platform, "allocate", mb=50, then_s=0.3)
        assert fits.status == "ok", fits.error
        assert 50 < fits.peak_memory_mb < 256

    run(folder, scenario)


def test_errors_say_what_happened_and_where(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        group = await outcome(platform, "group_fails")
        assert group.error.splitlines()[0] == "RuntimeError: inside a task group"
        assert "local_entries.py" in group.error
        no_json = await outcome(platform, "no_json")
        assert no_json.status == "error"
        assert no_json.error.startswith("TypeError: Object of type set")
        channel = await (await platform.invoke(call(platform, "whoami", channel="carrier pigeon"))).wait()
        assert channel.error.startswith("JobError: channel 'carrier pigeon'")

    run(folder, scenario)


def test_a_function_that_cannot_be_imported_fails(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        failed = await outcome(platform, "whoami")
        assert failed.status == "error"
        assert failed.error.startswith("ModuleNotFoundError: No module named 'nowhere'")

    run(folder, scenario, env={**ENV, "EPHEMERON_ENTRIES": "test=nowhere:at_all"})


def test_a_warm_process_is_reused_and_remembers_nothing(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        first = (await outcome(platform, "litter")).value
        second = (await outcome(platform, "find_litter")).value
        assert first["pid"] == second["pid"]
        assert (first["cold"], second["cold"]) == (True, False)
        assert second["found"] == [False, False, False]
        assert first["scratch"] != second["scratch"]
        assert second["here"] == second["scratch"]
        assert second["left"] == []
        other_quota = (await outcome(platform, "whoami", memory_mb=320)).value
        assert (other_quota["cold"], other_quota["pid"] == first["pid"]) == (True, False)

    run(folder, scenario)


def test_a_process_that_is_not_clean_is_not_reused(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        left = {}
        for entry in ("leave_thread", "no_json", "leave_child"):
            left = dict((await outcome(platform, entry)).value)
            after = (await outcome(platform, "whoami")).value
            assert after["cold"], entry
            assert after["pid"] != left.get("pid"), entry
        await until_async(lambda: gone(left["child"]))
        if not platform.unenforced:
            await until_async(lambda: gone(left["stray"]))

    run(folder, scenario)


def test_a_thread_of_a_library_that_has_called_python_costs_no_process(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        left = await outcome(platform, "call_from_a_foreign_thread")
        assert left.status == "ok", left.error
        after = (await outcome(platform, "whoami")).value
        assert after["pid"] == left.value["pid"]

    run(folder, scenario)


def test_an_idle_process_is_given_up(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        pid = (await outcome(platform, "whoami")).value["pid"]
        await until_async(lambda: gone(pid))
        assert (await platform.status()).warm == 0
        assert (await outcome(platform, "whoami")).value["cold"]

    run(folder, scenario, idle_s=0.1)


@needs_cgroups
def test_the_cpu_share_follows_the_memory_quota_while_a_handler_runs(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        enforcement = detect()
        group = enforcement.parents[0] / f"ephemeron-{platform.host_pid}-1"
        name = "cpu.cfs_quota_us" if enforcement.kind == "v1" else "cpu.max"
        memory = enforcement.parents[-1] / group.name
        limit = memory / ("memory.limit_in_bytes" if enforcement.kind == "v1" else "memory.max")
        held = await platform.invoke(call(platform, "hold", memory_mb=512))
        await events(platform, lambda e: isinstance(e, Note))
        assert (group / name).read_text().split()[0] == str(round(512 / 1769 * PERIOD_US))
        assert limit.read_text().strip() == str(512 << 20)
        await platform_channel(platform).put("go", [b""])
        assert (await held.wait()).status == "ok"
        assert (group / name).read_text().split()[0] in ("-1", "max"), "a warm, idle process is not held back"

    run(folder, scenario)


def test_threads_follow_the_cpu_share(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        small = (await outcome(platform, "whoami", variables=["OMP_NUM_THREADS"])).value
        large = (await outcome(platform, "whoami", variables=["OMP_NUM_THREADS"], memory_mb=3600)).value
        assert (small["threads"], small["env"]["OMP_NUM_THREADS"]) == (1, "1")
        assert (large["threads"], large["env"]["OMP_NUM_THREADS"]) == (2, "2")

    run(folder, scenario)


def test_functions_see_chosen_variables_and_no_file_holds_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "correct horse")
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "battery staple")
    monkeypatch.setenv("http_proxy", "http://proxy.example")
    monkeypatch.setenv("MY_OWN", "unrelated")
    names = ["AWS_SECRET_ACCESS_KEY", "EPHEMERON_CHANNEL_PASSWORD", "http_proxy", "MY_OWN", "GIVEN", "HOME", "TMPDIR"]

    async def scenario(platform: LocalPlatform) -> None:
        seen = (await outcome(platform, "whoami", variables=names)).value
        assert seen["env"] == {
            "AWS_SECRET_ACCESS_KEY": "correct horse",
            "EPHEMERON_CHANNEL_PASSWORD": "battery staple",
            "http_proxy": None,
            "MY_OWN": None,
            "GIVEN": "wrapped gift",
            "HOME": seen["scratch"],
            "TMPDIR": seen["scratch"],
        }
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) > 2
        for secret in (b"correct horse", b"battery staple", b"wrapped gift"):
            assert [path for path in files if secret in path.read_bytes()] == []

    run(folder, scenario, env={**ENV, "GIVEN": "wrapped gift"})


def test_functions_outlive_a_killed_client_and_another_one_attaches(folder: Path) -> None:
    client = subprocess.Popen(
        [sys.executable, str(HERE / "local_client.py"), str(folder), json.dumps(ENV)], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "invoked\n"
    client.kill()
    client.wait()
    client.stdout.close()

    async def main() -> None:
        platform = await LocalPlatform.attach(folder)
        function = next(iter((await platform.status()).running.values()))
        assert psutil.pid_exists(function)
        await platform_channel(platform).put("go", [b""])
        seen = await events(platform, lambda e: isinstance(e, Ended))
        assert [e.text for e in seen if isinstance(e, Note)] == ["alive", "went on"]
        assert isinstance(seen[-1], Ended)
        assert (seen[-1].status, seen[-1].outcome) == ("ok", "finished")
        host = platform.host_pid
        await platform.close()
        # Nobody is attached, nothing runs: the host ends by itself, and takes the warm process along.
        await until_async(lambda: gone(host) and gone(function))
        with pytest.raises(DaemonGone):
            await LocalPlatform.attach(folder)

    asyncio.run(asyncio.wait_for(main(), 240))


def test_functions_do_not_outlive_their_host(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        held = await platform.invoke(call(platform, "hold"))
        await events(platform, lambda e: isinstance(e, Note))
        (function,) = (await platform.status()).running.values()
        os.kill(platform.host_pid, signal.SIGKILL)
        lost = await held.wait()
        assert lost.status == "lost"
        assert "is gone" in lost.error
        await until_async(lambda: gone(function))
        with pytest.raises(DaemonGone):
            await platform.invoke(call(platform, "whoami"))
        # The next host closes what its predecessor left open, and removes its groups.
        left = Path(json.loads((folder / "host.json").read_text())["socket"]).parent
        again = await start(folder)
        try:
            assert not left.exists()
            seen = await events(again, lambda e: isinstance(e, Ended))
            assert isinstance(seen[-1], Ended)
            assert (seen[-1].invocation, seen[-1].status) == (held.id, "lost")
            assert groups(platform.host_pid) == []
        finally:
            await again.shutdown()

    run(folder, scenario)


def test_shutdown_leaves_no_process_no_group_no_socket(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        warm = (await outcome(platform, "whoami", memory_mb=320)).value["pid"]
        for rank in range(2):
            await platform.invoke(call(platform, "hold", rank=rank))
        await events(platform, lambda e: isinstance(e, Note))
        running = list((await platform.status()).running.values())
        socket_folder = Path(json.loads((folder / "host.json").read_text())["socket"]).parent
        assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "host.json").stat().st_mode) == 0o600
        await platform.shutdown()
        await until_async(lambda: all(gone(pid) for pid in (platform.host_pid, warm, *running)))
        assert groups(platform.host_pid) == []
        assert not socket_folder.exists()
        assert not (folder / "host.json").exists()
        assert not (folder / "scratch").exists()
        ended = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [e["status"] for e in ended if e["kind"] == "ended"] == ["ok", "cancelled", "cancelled"]
        with pytest.raises(PlatformError, match="closed"):
            await platform.invoke(call(platform, "whoami"))

    run(folder, scenario)


def test_starting_twice_attaches_and_a_wrong_token_is_refused(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        second, third = await asyncio.gather(start(folder), start(folder))
        assert second.host_pid == third.host_pid == platform.host_pid
        await second.close()
        await third.close()
        assert (await outcome(platform, "whoami")).status == "ok", "closing one detaches only that one"
        known = json.loads((folder / "host.json").read_text())
        (folder / "host.json").write_text(json.dumps({**known, "token": "guessed"}))
        with pytest.raises(PlatformError, match="refuses the token"):
            await LocalPlatform.attach(folder)

    run(folder, scenario)


def test_two_that_start_at_the_same_time_share_one_host(folder: Path) -> None:
    async def main() -> None:
        platforms = await asyncio.gather(*(start(folder) for _ in range(3)))
        assert len({p.host_pid for p in platforms}) == 1
        for platform in platforms:
            await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.parametrize("when", ["host.log", "host.lock", "host.json"])
def test_a_start_that_is_interrupted_leaves_nothing_open(folder: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what other tests have left
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    async def main() -> None:
        starting = asyncio.create_task(start(folder, linger_s=0.1))
        await until_async((folder / when).exists)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():  # it was ready in the same moment
            await starting.result().shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))
    gc.collect()
    assert complaints == []


def test_a_client_that_is_busy_once_it_is_connected_keeps_its_host(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        time.sleep(1.0)  # noqa: ASYNC251 - nothing of its own runs meanwhile: as one that signs a large model
        assert (await platform.status()).pid == platform.host_pid

    run(folder, scenario, linger_s=0.1)


def test_a_host_that_cannot_start_says_why(folder: Path) -> None:
    async def main() -> None:
        folder.mkdir(parents=True)
        (folder / "events.jsonl").mkdir()
        with pytest.raises(PlatformError, match="Is a directory"):
            await start(folder)

    asyncio.run(asyncio.wait_for(main(), 240))


def test_the_log_level_of_the_client_reaches_daemon_and_functions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_LOG_LEVEL", "debug")
    monkeypatch.setenv("EPHEMERON_LOG_FORMAT", "json")
    ids: list[str] = []

    async def scenario(platform: LocalPlatform) -> None:
        invocation = await platform.invoke(call(platform, "whoami", rank=3, attempt=2))
        assert (await invocation.wait()).status == "ok"
        ids.append(invocation.id)

    run(folder, scenario)
    of_daemon = [json.loads(line) for line in (folder / "host.log").read_text().splitlines()]
    accepted = [r for r in of_daemon if "is accepted" in r["message"]]
    assert [(r["run"], r["rank"], r["attempt"], r["level"]) for r in accepted] == [("a run", 3, 2, "info")]
    of_function = [json.loads(line) for line in (folder / "logs" / f"{ids[0]}.txt").read_text().splitlines()]
    begins = [r for r in of_function if r["logger"] == "ephemeron.functions.function_main" and "begins" in r["message"]]
    assert [(r["run"], r["rank"], r["attempt"]) for r in begins] == [("a run", 3, 2)]


def test_the_end_of_a_duplicate_does_not_change_the_first(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        first = await platform.invoke(call(platform, "hold", duplicate=True))
        seen = await events(platform, lambda e: isinstance(e, Invoked) and e.reason == "duplicate")
        duplicate = seen[-1]
        assert isinstance(duplicate, Invoked)
        await platform._ask("cancel", InvocationParams(invocation=duplicate.invocation))
        assert (await platform.status()).running.keys() == {first.id}
        await platform_channel(platform).put("go", [b""])
        assert (await first.wait()).status == "ok"

    run(folder, scenario)


def test_limits_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = default_limits()
    assert limits.memory_max_mb <= psutil.virtual_memory().total >> 20
    assert limits.concurrency == 64
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [default_memory_mb(n) for n in (1, 2, 4, 100)] == [1728, 1408, 704, 512]
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert default_memory_mb(8) == 1728


async def start(folder: Path, **options: Any) -> LocalPlatform:
    return await LocalPlatform.start(folder, **{"env": ENV, "limits": LIMITS, **options})


def run(folder: Path, scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        platform = await start(folder, **options)
        try:
            await scenario(platform)
        finally:
            if not platform._closed:
                await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


def call(platform: LocalPlatform, entry: str, **changes: Any) -> Call:
    fields: dict[str, Any] = {"rank": 0, "attempt": 0, "memory_mb": 256, "lifetime_s": 60.0, "channel": "folder", "duplicate": False}
    given = {key: changes.pop(key, value) for key, value in fields.items()}
    return Call(run="a run", origin=time.time(), entry="test", request={"function": entry, **changes}, **given)


async def outcome(platform: LocalPlatform, entry: str, **changes: Any) -> Outcome:
    return await (await platform.invoke(call(platform, entry, **changes))).wait()


async def events(platform: LocalPlatform, last: Callable[[Event], bool]) -> list[Event]:
    out: list[Event] = []
    async for event in platform.events("a run"):
        out.append(event)
        if last(event):
            break
    return out


def platform_channel(platform: LocalPlatform) -> Any:
    return open_channel("folder", base=platform.channel_base)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def groups(host: int) -> list[Path]:
    return [path for parent in detect().parents for path in parent.glob(f"ephemeron-{host}-*")]
