"""Functions forked from a process that has made their imports: they are what fresh ones are, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from ephemeron.communication.channels import open_channel
from ephemeron.events import Event, Note
from ephemeron.functions.base import Call, Limits, Outcome
from ephemeron.functions.cgroups import detect
from ephemeron.functions.fork_server import Forks
from ephemeron.functions.local import LocalPlatform
from running import until_async

HERE = Path(__file__).parent
ENV = {"EPHEMERON_PRELOAD": "fork_entries", "EPHEMERON_ENTRIES": "test=fork_entries:dispatch", "PYTHONPATH": str(HERE)}
LIMITS = Limits(memory_max_mb=4096)

Scenario: TypeAlias = Callable[[LocalPlatform], Coroutine[Any, Any, None]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold_start,
    pytest.mark.skipif(sys.platform != "linux", reason="functions are forked on Linux only"),
]
needs_cgroups = pytest.mark.skipif(detect().kind == "none", reason="no writable control groups here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_cold_functions_are_forked_from_one_process_and_are_children_of_the_host(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        seen = [(await outcome(platform, "whoami", memory_mb=256 + 64 * n)).value for n in range(3)]
        (server,) = await servers(platform)
        assert [v["imported_by"] for v in seen] == [server] * 3
        assert [v["parent"] for v in seen] == [platform.host_pid] * 3
        assert [v["cold"] for v in seen] == [True] * 3
        assert len({v["pid"] for v in seen}) == 3
        assert psutil.Process(server).children() == [], "nor zombies"

    run(folder, scenario)
    assert (folder / "host.log").read_text() == ""


def test_a_forked_function_sees_what_a_fresh_one_sees(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    async def scenario(platform: LocalPlatform) -> None:
        value = (await outcome(platform, "state")).value
        assert (value["imported_by"] == value["pid"]) == (await servers(platform) == [])
        own = ("pid", "parent", "imported_by")
        text = json.dumps({k: v for k, v in value.items() if k not in own}).replace(str(platform.run_dir), "RUN")
        # Numbers of sockets and pipes, and names of invocations, differ anyway.
        text = re.sub(r"(socket|pipe):\[\d+\]", r"\1", re.sub(r"/(scratch|logs)/[0-9a-f]{12}", r"/\1/ID", text))
        text = re.sub(r"/proc/\d+", "/proc/PID", text)
        seen.append(json.loads(text))
        seen[-1]["descriptors"].sort()

    run(tmp_path / "forked", scenario)
    run(tmp_path / "fresh", scenario, forks=False)
    assert seen[0] == seen[1]
    assert seen[0]["leads"] == [True, True]


def test_random_states_are_a_functions_own_and_pytorch_computes(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        values = [(await outcome(platform, "draw", memory_mb=512 + 64 * n)).value for n in range(3)]
        (server,) = await servers(platform)
        assert {v["imported_by"] for v in values} == {server}
        assert len({number for v in values for number in v["drawn"]}) == 9
        assert {(v["threads"], v["sum"]) for v in values} == {(1, 512.0**3)}

    run(folder, scenario, env={**ENV, "EPHEMERON_PRELOAD": "fork_entries,numpy.random,torch"})


def test_functions_share_no_descriptors(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        held = [await platform.invoke(call(platform, "sockets", rank=n)) for n in range(3)]
        said = [e.text.split() for e in await events(platform, 3) if isinstance(e, Note)]
        assert all(said)
        assert len({name for names in said for name in names}) == sum(map(len, said))
        async with open_channel("folder", base=platform.channel_base) as channel:
            await channel.put("go", [b""])
        assert [(await h.wait()).status for h in held] == ["ok"] * 3

    run(folder, scenario)


def test_a_killed_fork_server_is_replaced_and_takes_no_function_along(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        held = await platform.invoke(call(platform, "sockets"))
        await events(platform, 1)
        (first,) = await servers(platform)
        os.kill(first, signal.SIGKILL)
        after = await asyncio.gather(*(outcome(platform, "whoami", rank=n) for n in range(1, 4)))
        (second,) = await servers(platform)
        assert second != first
        assert {o.value["imported_by"] for o in after} == {second}
        async with open_channel("folder", base=platform.channel_base) as channel:
            await channel.put("go", [b""])
        ended = await held.wait()
        assert (ended.status, ended.value["imported_by"]) == ("ok", first)

    run(folder, scenario)
    assert set(logged(folder)) == {"a fork server was killed or did not answer; another one is started"}


def test_a_fork_server_killed_in_the_midst_of_its_imports_is_replaced(folder: Path, tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    arrived.mkdir()

    async def scenario(platform: LocalPlatform) -> None:
        running = [await platform.invoke(call(platform, "whoami", rank=n)) for n in range(2)]
        await until_async(lambda: len(os.listdir(arrived)) == 1)
        os.kill(int(os.listdir(arrived)[0]), signal.SIGKILL)
        await until_async(lambda: len(os.listdir(arrived)) == 2)
        (arrived / "go").touch()
        outcomes = [await r.wait() for r in running]
        assert [o.status for o in outcomes] == ["ok", "ok"], outcomes
        assert [o.value["imported_by"] for o in outcomes] == await servers(platform) * 2

    run(folder, scenario, env={**ENV, "IMPORT_ARRIVED": str(arrived)})


def test_a_function_is_cancelled_while_the_fork_server_imports(folder: Path, tmp_path: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        running = await platform.invoke(call(platform, "whoami"))
        await until_async(lambda: bool(os.listdir(tmp_path / "arrived")))
        await running.cancel()
        assert (await running.wait()).status == "cancelled"

    (tmp_path / "arrived").mkdir()
    run(folder, scenario, env={**ENV, "IMPORT_ARRIVED": str(tmp_path / "arrived")})
    assert all(gone(int(pid)) for pid in os.listdir(tmp_path / "arrived"))


def test_imports_that_start_threads_are_not_forked(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        for n in range(2):
            value = (await outcome(platform, "whoami", memory_mb=256 + 64 * n)).value
            assert value["imported_by"] == value["pid"]

    run(folder, scenario, env={**ENV, "IMPORT_THREAD": "1"})
    assert logged(folder) == ["functions get fresh processes, forking does not work: imports have started 1 threads"]


def test_imports_that_fail_are_not_tried_again_by_a_fork_server(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        for n in range(2):
            failed = await outcome(platform, "whoami", attempt=n)
            assert (failed.status, failed.error.splitlines()[0]) == ("error", "OSError: nothing to import here")

    run(folder, scenario, env={**ENV, "IMPORT_FAILS": "nothing to import here"})
    assert logged(folder) == ["functions get fresh processes, forking does not work: OSError: nothing to import here"]


def test_nothing_of_a_killed_host_lives_on(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        await platform.invoke(call(platform, "sockets"))
        await events(platform, 1)
        status = await platform.status()
        os.kill(platform.host_pid, signal.SIGKILL)
        await until_async(lambda: all(gone(pid) for pid in (*status.fork_servers, *status.running.values())))

    run(folder, scenario)


@needs_cgroups
def test_what_was_imported_counts_towards_the_memory_quota(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        fits = await outcome(platform, "allocate", memory_mb=256, mb=50)
        assert fits.status == "ok", fits.error
        assert fits.peak_memory_mb > 150
        beyond = await outcome(platform, "allocate", memory_mb=256, mb=180, attempt=1)
        assert beyond.status == "out_of_memory"
        too_small = await outcome(platform, "whoami", memory_mb=128)
        assert too_small.status == "ok", "100 MB of it and Python fit"
        shares = (await outcome(platform, "memory", memory_mb=320)).value
        assert shares["imported_by"] in await servers(platform)
        assert shares["private"] > 100
        assert shares["shared"] < 5

    run(folder, scenario, env={**ENV, "IMPORT_MB": "100"})


@needs_cgroups
def test_imports_beyond_the_memory_quota_kill_the_function_and_not_the_fork_server(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        beyond = await outcome(platform, "whoami", memory_mb=128)
        assert (beyond.status, "128 MB" in beyond.error) == ("out_of_memory", True)
        assert (await outcome(platform, "whoami", memory_mb=320)).value["imported_by"] in await servers(platform)

    run(folder, scenario, env={**ENV, "IMPORT_MB": "200"})


def test_code_that_comes_with_a_call_is_that_calls(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        for n, quota in enumerate((256, 320, 320)):  # two cold starts and a warm one
            assert (await outcome(platform, "use_code", memory_mb=quota, code=f"VALUE = {n}")).value["value"] == n

    run(folder, scenario)


def test_children_whose_parents_have_ended_are_reaped(folder: Path) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        orphan = (await outcome(platform, "leave_orphan")).value["orphan"]
        await until_async(lambda: not psutil.pid_exists(orphan))

    run(folder, scenario)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_forking_can_be_switched_off(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        value = (await outcome(platform, "whoami")).value
        assert value["imported_by"] == value["pid"]
        assert await servers(platform) == []

    if how == "variable":
        monkeypatch.setenv("EPHEMERON_FORKS", "0")
    run(folder, scenario, forks=how != "option")


def test_other_systems_get_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "darwin")
        assert Forks.make(tmp_path) is None
    monkeypatch.delattr("os.pidfd_open")
    assert Forks.make(tmp_path) is None


_SILENT = """
import asyncio, os, signal, socket, sys
from pathlib import Path
from ephemeron.functions import fork_server
from ephemeron.functions.fork_server import Forks

async def main(logs):
    forks = Forks.make(logs)
    env = {**os.environ, "EPHEMERON_PRELOAD": ""}

    async def start():
        ours, theirs = socket.socketpair()
        with ours, theirs, open(logs / "out.txt", "ab") as out:
            return await forks.fork(env, theirs, out)

    first = await start()
    (server,) = forks.pids
    os.kill(server, signal.SIGSTOP)
    fork_server._ANSWER_S = 0.2
    starting = asyncio.create_task(start())
    while server in forks.pids:
        await asyncio.sleep(0.01)
    fork_server._ANSWER_S = 60.0  # of the other one
    second = await starting
    assert second is not None and forks.pids not in ([], [server]), forks.pids
    print(await first.wait(), await second.wait())  # nobody holds the other end of their connections
    await forks.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_fork_server_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    env = {**os.environ, "EPHEMERON_PRELOAD": ""}
    done = subprocess.run([sys.executable, "-c", _SILENT, str(tmp_path)], env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout, done.returncode) == ("-9 -9\n", 0), done.stderr


def run(folder: Path, scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        platform = await LocalPlatform.start(folder, **{"env": ENV, "limits": LIMITS, **options})
        try:
            await scenario(platform)
        finally:
            await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


def logged(folder: Path) -> list[str]:
    """Messages that the daemon has logged."""
    lines = (folder / "host.log").read_text().splitlines()
    return [line.partition(" ephemeron.functions.fork_server: ")[2].partition(" [run=")[0] for line in lines]


def call(platform: LocalPlatform, entry: str, **changes: Any) -> Call:
    fields: dict[str, Any] = {"rank": 0, "attempt": 0, "memory_mb": 256, "lifetime_s": 60.0, "channel": "folder"}
    given = {key: changes.pop(key, value) for key, value in fields.items()}
    return Call(run="a run", origin=time.time(), entry="test", request={"function": entry, **changes}, **given)


async def outcome(platform: LocalPlatform, entry: str, **changes: Any) -> Outcome:
    return await (await platform.invoke(call(platform, entry, **changes))).wait()


async def servers(platform: LocalPlatform) -> list[int]:
    found: list[int] = list((await platform.status()).fork_servers)
    return found


async def events(platform: LocalPlatform, notes: int) -> list[Event]:
    """Up to so many notes."""
    out: list[Event] = []
    async for event in platform.events("a run"):
        out.append(event)
        if sum(isinstance(e, Note) for e in out) == notes:
            break
    return out


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
