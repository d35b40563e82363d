"""What the AWS platform does beyond the contract, on the local service."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import opened, settings_of

from ephemeron.communication.channels import open_channel
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import InvocationRefused
from ephemeron.events import Ended, Note
from ephemeron.functions.async_invoke.records import RecordKeys, calls_prefix
from ephemeron.functions.aws.platform import AwsPlatform
from ephemeron.functions.aws.preflight import inspect
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.validation import check_call
from ephemeron.testing.lambda_service import LambdaService

LIMITS = Limits(memory_max_mb=2048, lifetime_s=60.0, concurrency=8, payload_bytes=16_000_000)
Scenario: TypeAlias = Callable[[AwsPlatform], Coroutine[Any, Any, None]]


def call(platform: AwsPlatform, entry: str, **options: Any) -> Call:
    fields = {name: options.pop(name) for name in ("rank", "attempt", "lifetime_s") if name in options}
    address = (platform.run_dir / "objects").as_uri()
    known = {"rank": 0, "attempt": 0, "lifetime_s": 30.0}
    return Call(run="run", memory_mb=256, channel=address, entry=entry, request=options, **{**known, **fields})


def run(settings: AwsSettings, folder: Path, scenario: Scenario, **more: Any) -> None:
    async def main() -> None:
        async with opened(settings, folder, limits=LIMITS, **more) as platform:
            await scenario(platform)

    asyncio.run(main())


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def everything(folder: Path) -> bytes:
    """Contents of all files of a run folder, the channel's among them."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def in_store(platform: AwsPlatform) -> list[str]:
    async with open_channel((platform.run_dir / "objects").as_uri()) as channel:
        return await channel.list("")


def test_a_call_beyond_lambdas_own_limit_goes_through_the_store(settings: AwsSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsPlatform) -> None:
        say = "x" * 1_200_000
        key = SigningKey.new().text
        signed = dataclasses.replace(call(platform, "echo", say=say), key=key)
        outcome = await (await platform.invoke(signed)).wait()
        assert outcome.value["said"] == say
        assert any(".calls/payload." in name for name in await in_store(platform))
        assert key.encode() not in everything(platform.run_dir), "the key is in the request that Lambda delivers only"

    run(settings, tmp_path, scenario)
    left = [path.name for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert left == ["cancel"], "what was sent through the store goes with the run"


def test_a_function_that_leaves_a_thread_behind_is_not_used_again(settings: AwsSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsPlatform) -> None:
        left = await (await platform.invoke(call(platform, "leave_thread"))).wait()
        assert left.status == "ok", left.error
        after = await (await platform.invoke(call(platform, "whoami", attempt=1))).wait()
        assert after.value["pid"] != left.value["pid"]

    run(settings, tmp_path, scenario)


def test_no_credential_reaches_a_record_an_event_or_an_object(settings: AwsSettings, tmp_path: Path, service: LambdaService) -> None:
    async def scenario(platform: AwsPlatform) -> None:
        names = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
        outcome = await (await platform.invoke(call(platform, "has", variables=names))).wait()
        assert outcome.value["has"] == [True, True], "the function has its role's"

    run(settings, tmp_path, scenario)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"ASIALOCAL" not in path.read_bytes()


@pytest.mark.slow
def test_without_permission_to_read_logs_bills_are_measured_and_it_says_so(
    settings: AwsSettings, tmp_path: Path, service: LambdaService
) -> None:
    service.guard.denied = {"*": {"logs:FilterLogEvents"}}

    async def scenario(platform: AwsPlatform) -> None:
        outcome = await (await platform.invoke(call(platform, "timed"))).wait()
        assert outcome.billed_s >= outcome.value["took_s"]
        notes = []
        async for event in platform.events("run"):
            notes += [event.text] if isinstance(event, Note) else []
            if isinstance(event, Ended):
                break
        assert any("these credentials may not logs:FilterLogEvents" in text for text in notes)
        assert any("billed as its handler measured it" in text for text in notes)

    try:
        run(settings, tmp_path, scenario)
    finally:
        service.guard.denied = {}
    assert [r["billed_by"] for r in kept(tmp_path) if r["record"] == "final"] == ["handler"]


def test_what_another_client_sees_and_ends(settings: AwsSettings, tmp_path: Path) -> None:
    """Two clients on one run: one collects, both know; what one starts the other can end."""

    async def scenario(first: AwsPlatform) -> None:
        invocation = await first.invoke(call(first, "forever"))
        address = (tmp_path / "objects").as_uri()
        second = await AwsPlatform.open(tmp_path, settings, channel=address, run="run", limits=LIMITS)
        async for event in second.events("run"):
            if isinstance(event, Note):
                break
        await second.cancel_all("run")
        assert (await invocation.wait()).status == "cancelled"
        assert (await second.outcome(invocation.id)).status == "cancelled"
        mine = await second.invoke(call(second, "echo", attempt=1, say="from the second"))
        assert (await mine.wait()).value["said"] == "from the second"
        assert (await first.outcome(mine.id)).value["said"] == "from the second"
        await second.close()

    run(settings, tmp_path, scenario)
    ended = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"kind":"ended"' in line]
    assert len(ended) == 2, "each end once"


def test_a_client_that_comes_later_knows_what_was_and_collects_what_is_left(settings: AwsSettings, tmp_path: Path) -> None:
    address = (tmp_path / "objects").as_uri()

    async def main() -> None:
        first = await AwsPlatform.open(tmp_path, settings, channel=address, run="run", limits=LIMITS)
        before = await first.invoke(call(first, "echo", say="before"))
        await before.wait()
        left = await first.invoke(call(first, "talk", events=50, attempt=1))
        await first.close()  # the function goes on
        second = await AwsPlatform.open(tmp_path, settings, channel=address, run="run", limits=LIMITS)
        assert (await second.outcome(before.id)).value["said"] == "before"
        assert (await second.outcome(left.id)).status == "ok"
        await second.shutdown()

    asyncio.run(main())
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["text"] for e in lines if e["kind"] == "note"] == [f"event {n}" for n in range(50)]
    assert [e["kind"] for e in lines if e["kind"] in ("invoked", "ended")].count("ended") == 2


def test_records_do_not_pile_up(settings: AwsSettings, tmp_path: Path) -> None:
    async def scenario(platform: AwsPlatform) -> None:
        for attempt in range(12):
            await (await platform.invoke(call(platform, "talk", events=30, attempt=attempt))).wait()
        names = RecordKeys(calls_prefix("run"))

        keys = [key for key in await in_store(platform) if key.startswith(names.all)]
        while len(keys) > 12:  # the last words of the last one may still lie there
            await asyncio.sleep(0.05)
            keys = [key for key in await in_store(platform) if key.startswith(names.all)]
        parsed = [names.parse(key) for key in keys]
        assert {at[2] for at in parsed if at} == {0}, "one claim for each call, until it cannot be delivered again"

    run(settings, tmp_path, scenario)


def test_a_delivery_after_the_end_has_nothing_to_do(settings: AwsSettings, tmp_path: Path, service: LambdaService) -> None:
    sent: list[Any] = []

    async def scenario(platform: AwsPlatform) -> None:
        invoke = platform._sender.request

        async def watched(event: bytes, call: Call) -> str:
            sent.append(event)
            return await invoke(event, call)

        platform._sender.request = watched  # type: ignore[method-assign]
        await (await platform.invoke(call(platform, "echo"))).wait()

    run(settings, tmp_path, scenario)
    answer = client(settings, "lambda").invoke(FunctionName="ephemeron", Payload=sent[0])  # and waits for it
    assert answer["FunctionError"] == "Unhandled"
    assert "exit status 1" in json.loads(answer["Payload"].read())["errorMessage"]
    assert [path.name for path in (tmp_path / "objects").rglob("*") if path.is_file()] == ["cancel"]


def test_what_is_no_call_of_ours_is_refused_by_the_function(settings: AwsSettings) -> None:
    for event in (b"{}", b'{"ephemeron": 2}', b'{"ephemeron": 1}', b"[]"):
        answer = client(settings, "lambda").invoke(FunctionName="ephemeron", Payload=event)
        assert json.loads(answer["Payload"].read())["errorType"] == "CorruptMessage"


def test_a_function_that_is_gone_refuses_calls(service: LambdaService, tmp_path: Path) -> None:
    async def scenario(platform: AwsPlatform) -> None:
        with pytest.raises(InvocationRefused, match="does not exist; run: ephemeron cloud deploy aws"):
            await platform.invoke(call(platform, "echo"))
        assert not platform._open() - set(platform._known.open)

    run(settings_of(service, function="nothing"), tmp_path, scenario)


def test_other_memory_than_the_function_s_is_refused(settings: AwsSettings, tmp_path: Path) -> None:
    limits = inspect(settings).limits
    assert (limits.memory_min_mb, limits.memory_max_mb, limits.lifetime_s) == (256, 256, 60.0)
    wrong = Call(run="r", rank=0, attempt=0, memory_mb=512, lifetime_s=1.0, channel="")
    with pytest.raises(InvocationRefused, match="no function of 512 MB is deployed, only of 256 MB"):
        check_call(wrong, limits)
