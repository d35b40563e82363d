"""What the platform of MicroVMs does beyond the contract, on the local service."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

pytest.importorskip("boto3", "1.44", reason="no AWS client that knows MicroVMs; pip install 'ephemeron[aws]'")

from microvm_entries import ENTRIES
from microvm_world import deployed, opened

from ephemeron.errors import InvocationRefused
from ephemeron.events import Ended, Suspended, Woken, from_json
from ephemeron.functions.async_invoke import call_tracker
from ephemeron.functions.aws_microvm import platform as microvm_platform
from ephemeron.functions.aws_microvm.handler import HOOKS
from ephemeron.functions.aws_microvm.platform import AwsMicrovmPlatform
from ephemeron.functions.aws_microvm.preflight import inspect
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings
from ephemeron.functions.base import Call, Limits
from ephemeron.testing.microvm_service import MicrovmService

LIMITS = Limits(memory_max_mb=2048, lifetime_s=60.0, concurrency=8, payload_bytes=16_000_000)
Scenario: TypeAlias = Callable[[AwsMicrovmPlatform], Coroutine[Any, Any, None]]


def call(platform: AwsMicrovmPlatform, entry: str, *, rank: int = 0, **request: Any) -> Call:
    address = (platform.run_dir / "objects").as_uri()
    return Call(run="run", rank=rank, attempt=0, memory_mb=512, lifetime_s=30.0, channel=address, entry=entry, request=request)


def run(settings: AwsMicrovmSettings, folder: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), opened(settings, folder, limits=LIMITS) as platform:
            await scenario(platform)

    asyncio.run(main())


@pytest.mark.slow
def test_a_call_beyond_the_payload_goes_through_the_store(service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsMicrovmPlatform) -> None:
        say = "x" * 20_000
        outcome = await (await platform.invoke(call(platform, "echo", say=say))).wait()
        assert outcome.value["said"] == say
        assert any(path.name.startswith("payload.") for path in (tmp_path / "objects").rglob("*"))
        assert len(service.requests()[-1]["runHookPayload"]) <= 4096

    run(settings, tmp_path, scenario)
    left = [path.name for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert left == ["cancel"], "what was sent through the store goes with the run"


@pytest.mark.slow
def test_secrets_reach_the_function_and_nothing_that_is_kept(
    service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "hush-hush")

    async def scenario(platform: AwsMicrovmPlatform) -> None:
        wanted = ("EPHEMERON_CHANNEL_PASSWORD", "EPHEMERON_CHANNEL_USER")
        outcome = await (await platform.invoke(call(platform, "has", variables=wanted))).wait()
        assert outcome.value["has"] == [True, False]
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or b"hush-hush" not in path.read_bytes(), path

    run(settings, tmp_path, scenario)
    assert "hush-hush" in service.requests()[-1]["runHookPayload"]
    version = service.images.by_arn[next(iter(service.images.by_arn))].versions[-1]
    assert "hush-hush" not in json.dumps(dict(version.request))
    assert not any("hush-hush" in line for line in service.output)


@pytest.mark.slow
def test_copies_of_a_snapshot_draw_different_numbers(settings: AwsMicrovmSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsMicrovmPlatform) -> None:
        invocations = [await platform.invoke(call(platform, "drawn", rank=rank)) for rank in range(2)]
        values = [(await invocation.wait()).value for invocation in invocations]
        assert len({value["drawn"] for value in values} | {values[0]["seeded"]}) == 3

    run(settings, tmp_path, scenario)


def test_a_microvm_ends_itself_and_is_billed_by_the_second(service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsMicrovmPlatform) -> None:
        outcome = await (await platform.invoke(call(platform, "echo"))).wait()
        assert outcome.billed_s == int(outcome.billed_s) >= 1.0
        while service.microvms():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)

    run(settings, tmp_path, scenario)


@pytest.mark.slow
def test_one_that_may_not_end_itself_is_ended_by_the_client(
    service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microvm_platform, "LEFT_S", 0.5)
    service.guard.denied = {"ASIALOCALMICROVM": {"lambda:TerminateMicrovm"}}

    async def scenario(platform: AwsMicrovmPlatform) -> None:
        waiting = await platform.invoke(call(platform, "forever", rank=1))  # while a call is open, states are read
        assert (await (await platform.invoke(call(platform, "echo"))).wait()).status == "ok"
        while len(service.microvms()) > 1:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        await waiting.cancel()

    try:
        run(settings, tmp_path, scenario)
        assert service.microvms() == []
    finally:
        service.guard.denied = {}


@pytest.mark.slow
def test_a_microvm_that_is_lost_is_noticed_and_billed(service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsMicrovmPlatform) -> None:
        invocation = await platform.invoke(call(platform, "forever"))
        while not any(microvm.state == "RUNNING" for microvm in service.microvms()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        service.lose(service.microvms()[0].id)
        outcome = await invocation.wait()
        assert outcome.status == "lost"
        assert "its MicroVM ended: The application exited" in outcome.error
        assert outcome.billed_s >= 1.0
        async for event in platform.events("run"):
            if isinstance(event, Ended):
                assert (event.status, event.billed_s) == ("lost", outcome.billed_s)
                break

    run(settings, tmp_path, scenario)


@pytest.mark.slow
def test_hooks_are_taken_from_lambda_only_and_a_call_only_once(
    service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path
) -> None:
    async def scenario(platform: AwsMicrovmPlatform) -> None:
        invocation = await platform.invoke(call(platform, "forever"))
        while not any(microvm.state == "RUNNING" for microvm in service.microvms()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (microvm,) = [m for m in service.fleet.all.values() if m.state == "RUNNING"]
        again = await asyncio.to_thread(_post, microvm.port, {"Host": "localhost"})
        assert again == 409
        foreign = {"Host": "x.lambda-microvm.us-east-1.on.aws", "x-amzn-requestid": "1"}
        assert await asyncio.to_thread(_post, microvm.port, foreign) == 403
        assert await asyncio.to_thread(_post, microvm.port, {"Host": "localhost", "x-amzn-requestid": "1"}) == 403
        await invocation.cancel()

    run(settings, tmp_path, scenario)


def _post(port: int, headers: dict[str, str]) -> int:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{HOOKS}/run", data=b"{}", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code


@pytest.mark.slow
def test_calls_of_several_sizes_run_in_microvms_of_their_size(service: MicrovmService, tmp_path: Path) -> None:
    where = deployed(service, entries=ENTRIES, preload="microvm_entries", folder=Path(__file__).parent, image="sized", sizes_mb=(512, 1024))

    async def scenario(platform: AwsMicrovmPlatform) -> None:
        for size, said in ((1024, "large"), (512, "small")):
            wanted = replace(call(platform, "echo", say=said), memory_mb=size)
            outcome = await (await platform.invoke(wanted)).wait()
            assert (outcome.value["said"], outcome.gb_seconds) == (said, size / 1024 * outcome.billed_s)
            assert str(service.requests()[-1]["imageIdentifier"]).endswith("sized-1024" if size == 1024 else ":sized")
        with pytest.raises(InvocationRefused, match="no function of 2048 MB is deployed, only of 512, 1024 MB"):
            await platform.invoke(replace(call(platform, "echo"), memory_mb=2048))

    async def main() -> None:
        async with opened(where, tmp_path, limits=inspect(where.located()).limits) as platform:
            await scenario(platform)

    asyncio.run(main())


@pytest.mark.slow
def test_functions_are_suspended_and_go_on(service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsMicrovmPlatform) -> None:
        invocations = [await platform.invoke(call(platform, "forever", rank=rank)) for rank in range(2)]
        while sum(microvm.state == "RUNNING" for microvm in service.microvms()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert await platform.suspend("run") == 2
        assert {microvm.state for microvm in service.microvms()} == {"SUSPENDED"}
        processes = [psutil.Process(microvm.pid) for microvm in service.microvms()]
        while {process.status() for process in processes} != {psutil.STATUS_STOPPED}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a process stops when it is next scheduled
        assert await platform.suspend("run") == 0, "they are suspended already"
        assert await platform.wake("run") == 2
        assert {microvm.state for microvm in service.microvms()} == {"RUNNING"}
        assert await platform.wake("run") == 0
        for invocation in invocations:
            await invocation.cancel()
            assert (await invocation.wait()).status == "cancelled"
        events = [from_json(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        (suspended,) = [e for e in events if isinstance(e, Suspended)]
        (woken,) = [e for e in events if isinstance(e, Woken)]
        assert (suspended.functions, suspended.gb) == (woken.functions, woken.gb) == (2, 1.0)
        assert woken.seconds == pytest.approx(woken.t - suspended.t)

    run(settings, tmp_path, scenario)


@pytest.mark.slow
def test_a_suspended_function_is_not_taken_for_lost(
    service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_tracker, "LATE_S", 3.0)

    async def scenario(platform: AwsMicrovmPlatform) -> None:
        clock = asyncio.get_running_loop().time
        wanted = replace(call(platform, "forever"), lifetime_s=5.0)
        invoked = clock()
        invocation = await platform.invoke(wanted)
        while not any(microvm.state == "RUNNING" for microvm in service.microvms()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await platform.suspend("run")
        began = clock()
        while clock() < began + 10.0:  # noqa: ASYNC110 - longer than its lifetime and what it may be late
            await asyncio.sleep(0.5)
        suspended = clock() - began
        assert await platform.wake("run") == 1, "it is still there"
        outcome = await invocation.wait()
        assert outcome.status == "timed_out", "by its own clock, which stood still"
        assert outcome.billed_s <= clock() - invoked - suspended + 1, "by the second begun"

    run(settings, tmp_path, scenario)
