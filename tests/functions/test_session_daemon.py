"""One local daemon for several runs: they share warm processes, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import test_local
from test_local import ENV, LIMITS, gone, platform_channel

from ephemeron.errors import DaemonGone
from ephemeron.events import Ended, Event, Invoked, Note, from_json
from ephemeron.functions.base import Call, Outcome
from ephemeron.functions.local import LocalPlatform, is_hosted
from running import until_async

pytestmark = pytest.mark.slow


def together(tmp_path: Path, scenario: Callable[..., Coroutine[Any, Any, None]], *names: str, **env: str) -> None:
    """Runs a scenario with a platform for each run; all have one daemon."""

    async def main() -> None:
        session = tmp_path / "session"
        host = await LocalPlatform.start(session, limits=LIMITS)
        runs = [
            await LocalPlatform.start(
                tmp_path / "runs" / name,
                env={**ENV, **({"OF": env[name]} if name in env else {})},
                limits=LIMITS,
                session=session,
                restart=True,
            )
            for name in names
        ]
        try:
            await scenario(host, *runs)
        finally:
            for run in (*runs, host):
                if not run._closed:
                    await run.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))


def call(platform: LocalPlatform, entry: str, **changes: Any) -> Call:
    return dataclasses.replace(test_local.call(platform, entry, **changes), run=platform.run_dir.name)


async def outcome(platform: LocalPlatform, entry: str, **changes: Any) -> Outcome:
    return await (await platform.invoke(call(platform, entry, **changes))).wait()


def written(platform: LocalPlatform) -> list[Event]:
    return [from_json(line) for line in (platform.run_dir / "events.jsonl").read_text().splitlines()]


def test_runs_share_a_warm_process_that_remembers_nothing(tmp_path: Path) -> None:
    async def scenario(host: LocalPlatform, a: LocalPlatform, b: LocalPlatform) -> None:
        assert a.host_pid == b.host_pid == host.host_pid
        first, second = (await outcome(a, "litter")).value, (await outcome(b, "find_litter")).value
        assert (first["cold"], second["cold"]) == (True, False)
        assert first["pid"] == second["pid"]
        assert second["found"] == [False, False, False]
        assert Path(second["scratch"]).is_relative_to(b.run_dir)
        for run in (a, b):
            assert [type(event) for event in written(run)] == [Invoked, Ended]
            assert len(list((run.run_dir / "logs").glob("*.txt"))) == 1

    together(tmp_path, scenario, "a", "b")


def test_variables_of_a_run_are_not_seen_by_functions_of_another(tmp_path: Path) -> None:
    async def scenario(_: LocalPlatform, a: LocalPlatform, b: LocalPlatform, c: LocalPlatform) -> None:
        seen = [(await outcome(run, "whoami", variables=["OF"])).value for run in (a, b, c, a, b)]
        assert [each["env"]["OF"] for each in seen] == ["secret of a", "secret of b", None, "secret of a", "secret of b"]
        assert [each["cold"] for each in seen] == [True, True, True, False, False]

    together(tmp_path, scenario, "a", "b", "c", a="secret of a", b="secret of b")


def test_to_cancel_or_leave_one_run_leaves_the_others_alone(tmp_path: Path) -> None:
    async def scenario(_: LocalPlatform, a: LocalPlatform, b: LocalPlatform) -> None:
        held = [await run.invoke(call(run, "hold")) for run in (a, b)]
        assert [len((await run.status()).running) for run in (a, b)] == [1, 1]
        await a.cancel_all("a")
        assert (await held[0].wait()).status == "cancelled"
        await a.shutdown()
        assert not is_hosted(a.run_dir)
        assert is_hosted(b.run_dir)
        with pytest.raises(DaemonGone):
            await LocalPlatform.attach(a.run_dir)
        await platform_channel(b).put("go", [b""])
        assert (await held[1].wait()).status == "ok"

    together(tmp_path, scenario, "a", "b")


def test_functions_go_on_without_their_clients_and_another_one_attaches(tmp_path: Path) -> None:
    async def scenario(host: LocalPlatform, a: LocalPlatform) -> None:
        await a.invoke(call(a, "hold"))
        await until_async(lambda: any(isinstance(event, Note) for event in written(a)))
        for client in (a, host):
            await client.close()
        again = await LocalPlatform.attach(a.run_dir)
        assert len((await again.status()).running) == 1
        await platform_channel(a).put("go", [b""])
        await until_async(lambda: any(isinstance(event, Ended) for event in written(a)))
        await again.close()
        await until_async(lambda: gone(host.host_pid))  # no client is connected, and nothing runs
        assert not is_hosted(a.run_dir)
        assert not (a.run_dir / "host.json").exists()

    async def main() -> None:
        session = tmp_path / "session"
        host = await LocalPlatform.start(session, limits=LIMITS)
        await scenario(host, await LocalPlatform.start(tmp_path / "runs" / "a", env=ENV, limits=LIMITS, session=session))

    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_killed_daemon_is_replaced_by_one_for_all_its_runs(tmp_path: Path) -> None:
    async def scenario(host: LocalPlatform, a: LocalPlatform, b: LocalPlatform) -> None:
        dead = host.host_pid
        held = [await run.invoke(call(run, "hold")) for run in (a, b)]
        os.kill(dead, signal.SIGKILL)
        assert [(await each.wait()).status for each in held] == ["lost", "lost"]
        await until_async(lambda: a.host_pid != dead and b.host_pid != dead)
        assert a.host_pid == b.host_pid
        assert [(await outcome(run, "whoami")).status for run in (a, b)] == ["ok", "ok"]
        for run in (a, b):
            ends = [event.status for event in written(run) if isinstance(event, Ended)]
            assert ends == ["lost", "ok"]

    together(tmp_path, scenario, "a", "b")
