"""A daemon that is started before its run: its functions are what others are, and it ends with a client that starts no run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from ephemeron.communication.channels import open_channel
from ephemeron.functions import early_daemon as early
from ephemeron.functions.base import Call, Limits, Outcome
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.daemon_messages import EARLY, short_folder
from ephemeron.functions.early_daemon import early_daemon, want_functions
from ephemeron.functions.function_process import FunctionProcess, WarmPool
from ephemeron.functions.local import LocalPlatform, sweep
from ephemeron.functions.passed_on import daemon_environment
from running import until

HERE = Path(__file__).parent
LIMITS = Limits(memory_max_mb=4096)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="functions are forked on Linux only")]


@pytest.fixture
def env() -> dict[str, str]:
    """Variables of a daemon, with a mark of this test."""
    return {
        "EPHEMERON_PRELOAD": "fork_entries",
        "EPHEMERON_ENTRIES": "test=fork_entries:dispatch",
        "PYTHONPATH": str(HERE),
        "EPHEMERON_CHANNEL_MARK": secrets.token_hex(8),
    }


def test_fork_server_and_functions_are_there_before_the_run_and_serve_it(tmp_path: Path, env: Mapping[str, str]) -> None:
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    env = {**env, "IMPORT_ARRIVED": str(arrived)}
    with early_daemon(daemon_environment(env)):
        want_functions(memory_mb=256, count=2, limits=LIMITS)
        until(lambda: len(os.listdir(arrived)) == 1)  # it makes the imports
        (arrived / "go").touch()
        server = next(name for name in os.listdir(arrived) if name != "go")
        until(lambda: len(functions_of(env)) == 3)
        begun = set(functions_of(env)) - {int(server)}

        async def scenario(platform: LocalPlatform) -> None:
            status = await platform.status()
            assert (status.fork_servers, status.warm) == ((int(server),), 2)
            seen = await outcomes(platform, "whoami", count=3)
            assert [v["imported_by"] for v in seen] == [int(server)] * 3
            assert [v["parent"] for v in seen] == [platform.host_pid] * 3
            assert [v["cold"] for v in seen] == [True] * 3
            assert begun < {v["pid"] for v in seen}, "the third one was not begun"

        run(tmp_path / "run", scenario, env)
    assert {"1.txt", "2.txt", "3.txt", "fork-server-1.txt"} < set(os.listdir(tmp_path / "run" / "logs"))
    assert functions_of(env) == []
    until(lambda: nothing_left(env))


def test_a_function_that_was_begun_sees_what_others_see(tmp_path: Path, env: Mapping[str, str]) -> None:
    seen: list[dict[str, Any]] = []

    async def scenario(platform: LocalPlatform) -> None:
        own = ("pid", "parent", "imported_by", "descriptors")
        (value,) = await outcomes(platform, "state", count=1)
        folder = value["variables"]["HOME"]
        told = {k: str(v).replace(folder, "SCRATCH") for k, v in value.items() if k not in own}
        seen.append({**told, "scratch": str(platform.run_dir) in folder, "open": len(value["descriptors"])})

    with early_daemon(daemon_environment(env)):
        want_functions(memory_mb=256, count=1, limits=LIMITS)
        run(tmp_path / "early", scenario, env)
    run(tmp_path / "usual", scenario, env)
    assert seen[0] == seen[1]
    assert seen[0]["scratch"]


def test_the_last_wish_counts(tmp_path: Path, env: Mapping[str, str]) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        assert (await platform.status()).warm == 1
        (value,) = await outcomes(platform, "whoami", count=1, memory_mb=320)
        assert (await platform.status()).warm == 1, "the one that was begun is warm now"
        assert value["cold"]

    with early_daemon(daemon_environment(env)):
        want_functions(memory_mb=256, count=2, limits=LIMITS)
        want_functions(memory_mb=320, count=1, limits=LIMITS)
        run(tmp_path / "run", scenario, env)
    assert functions_of(env) == []
    until(lambda: nothing_left(env))


def test_other_variables_get_another_daemon(tmp_path: Path, env: Mapping[str, str]) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        assert [v["cold"] for v in await outcomes(platform, "whoami", count=1)] == [True]
        assert daemons_of(env), "the early one waits"

    with early_daemon(daemon_environment(env)):
        run(tmp_path / "run", scenario, {**env, "EPHEMERON_CHANNEL_MARK": "another"})
    until(lambda: nothing_left(env))


def test_an_enclosing_early_daemon_is_the_one(env: Mapping[str, str]) -> None:
    with early_daemon(daemon_environment(env)):
        with early_daemon(daemon_environment(env)):
            assert len(early._waiting) == 1
        assert len(early._waiting) == 1
    assert early._waiting == []
    until(lambda: nothing_left(env))


def test_it_ends_with_a_client_that_starts_no_run(env: Mapping[str, str]) -> None:
    with early_daemon(daemon_environment(env)):
        want_functions(memory_mb=256, count=2, limits=LIMITS)
        until(lambda: len(functions_of(env)) == 3)
    until(lambda: nothing_left(env))


_CLIENT = """
import json, os, sys, time
from ephemeron.functions.base import Limits
from ephemeron.functions.early_daemon import early_daemon, want_functions

with early_daemon(json.loads(sys.argv[1])):
    want_functions(memory_mb=256, count=1, limits=Limits())
    print("ready", flush=True)
    time.sleep(600)
"""


def test_it_ends_with_a_client_that_is_killed(env: Mapping[str, str]) -> None:
    import json

    command = [sys.executable, "-c", _CLIENT, json.dumps(daemon_environment(env))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        until(lambda: len(functions_of(env)) == 2)
        client.kill()
    until(lambda: nothing_left(env))


def test_where_it_was_killed_the_run_gets_another_one_and_its_folder_is_removed(tmp_path: Path, env: Mapping[str, str]) -> None:
    async def scenario(platform: LocalPlatform) -> None:
        assert [v["cold"] for v in await outcomes(platform, "whoami", count=1)] == [True]

    with early_daemon(daemon_environment(env)):
        until(lambda: bool(functions_of(env)))
        (pid,) = daemons_of(env)
        assert folders_of(pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid))
        run(tmp_path / "run", scenario, env)
    sweep(tmp_path)
    assert folders_of(pid) == []


def test_the_folder_of_a_living_one_stays(tmp_path: Path, env: Mapping[str, str]) -> None:
    with early_daemon(daemon_environment(env)):
        until(lambda: bool(functions_of(env)))
        (pid,) = daemons_of(env)
        sweep(tmp_path)
        assert len(folders_of(pid)) == 1


def test_without_forks_there_is_none(env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_FORKS", "0")
    with early_daemon(daemon_environment(env)):
        want_functions(memory_mb=256, count=1, limits=LIMITS)
        assert early._waiting == []


def test_a_spare_process_is_ready_while_functions_run(tmp_path: Path, env: Mapping[str, str]) -> None:
    async def main() -> None:
        platform = await LocalPlatform.start(tmp_path / "run", env=env, limits=LIMITS, spare=True, idle_s=0.1)
        try:
            held = await platform.invoke(call("sockets", rank=0))
            await until_warm(platform, 1)
            first = await outcomes(platform, "whoami", count=1)
            assert [v["cold"] for v in first] == [True], "nothing has run in it"
            await until_warm(platform, 1)  # the process of the first call, or another spare one
            other = await outcomes(platform, "whoami", count=1, memory_mb=320)
            assert other[0]["cold"], "of another quota"
            async with open_channel("folder", base=platform.channel_base) as channel:
                await channel.put("go", [b""])
            assert (await held.wait()).status == "ok"
            await until_warm(platform, 0)  # nothing runs any more
        finally:
            await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))
    assert functions_of(env) == []


def test_a_spare_process_that_dies_is_not_begun_again(env: Mapping[str, str]) -> None:
    async def main() -> None:
        made: list[FunctionProcess] = []

        def make(memory_mb: int, variables: Mapping[str, str]) -> FunctionProcess:
            made.append(
                FunctionProcess(
                    Enforcement(kind="none"), len(made) + 1, memory_mb=memory_mb, vcpus=1.0, env=variables, folder=Path("/nowhere")
                )
            )
            return made[-1]

        pool = WarmPool(make, idle_s=60)
        for _ in range(3):
            pool.prepare(256, env)  # its log cannot be opened
            with contextlib.suppress(OSError):
                await made[0].start()
            await pool.expire(keep=[(256, env)])
        assert (len(made), len(pool)) == (1, 0)
        assert pool.take(256, env) is made[1], "a function that is asked for tries itself"

    asyncio.run(main())


async def until_warm(platform: LocalPlatform, count: int) -> None:
    end = time.monotonic() + 240
    while (await platform.status()).warm != count:
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)


def run(folder: Path, scenario: Callable[[LocalPlatform], Coroutine[Any, Any, None]], env: Mapping[str, str]) -> None:
    async def main() -> None:
        platform = await LocalPlatform.start(folder, env=env, limits=LIMITS)
        try:
            await scenario(platform)
        finally:
            await platform.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


def call(function: str, *, rank: int, memory_mb: int = 256, held: bool = False) -> Call:
    return Call(
        run="a run",
        rank=rank,
        attempt=0,
        memory_mb=memory_mb,
        lifetime_s=60.0,
        channel="folder",
        origin=time.time(),
        entry="test",
        request={"function": function, "held": held},
    )


async def outcomes(platform: LocalPlatform, function: str, *, count: int, memory_mb: int = 256) -> list[dict[str, Any]]:
    """Values of so many calls at once: none ends before the last one has begun."""
    calls = [call(function, rank=rank, memory_mb=memory_mb, held=count > 1) for rank in range(count)]
    invocations = [await platform.invoke(each) for each in calls]
    if count > 1:
        async with open_channel("folder", base=platform.channel_base) as channel:
            await channel.put("go", [b""])
    ended: list[Outcome] = [await i.wait() for i in invocations]
    assert [o.status for o in ended] == ["ok"] * count, ended
    return [dict(o.value) for o in ended]


def marked(env: Mapping[str, str], module: str) -> list[int]:
    """Processes of a module with the mark of a test."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            ours = module in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
            if ours and process.environ().get("EPHEMERON_CHANNEL_MARK") == env["EPHEMERON_CHANNEL_MARK"]:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def functions_of(env: Mapping[str, str]) -> list[int]:
    """Function processes and fork servers."""
    return marked(env, "ephemeron.functions.function_main")


def daemons_of(env: Mapping[str, str]) -> list[int]:
    return marked(env, "ephemeron.functions.daemon_process")


def folders_of(pid: int) -> list[Path]:
    return list(Path(short_folder()).glob(f"{EARLY}{pid}-*"))


def nothing_left(env: Mapping[str, str]) -> bool:
    return not functions_of(env) and not daemons_of(env)
