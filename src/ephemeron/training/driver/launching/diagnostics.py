"""Checks of a platform and a channel, step by step: installed packages, permissions, one object, one function.

    for finding in diagnose("aws", channel="s3://bucket/prefix"): print(finding.text)

The object and the function's records are deleted afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ephemeron import blocking
from ephemeron.communication.channels import Channel, open_channel, public_address
from ephemeron.communication.channels.credentials import environment
from ephemeron.config.typed import build
from ephemeron.errors import ChannelError, EphemeronError, JobError, KeyExists, MissingExtra
from ephemeron.functions.async_invoke.provider import Provider, Settings
from ephemeron.functions.async_invoke.sizes import sizes_text
from ephemeron.functions.base import Call, Limits, Outcome, Platform
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.prices import load_prices
from ephemeron.runs.folders import new_run_id
from ephemeron.training.driver.launching import admission
from ephemeron.training.job import Configuration
from ephemeron.training.worker.probe_messages import ProbeRequest, ProbeResult, TransferProbe
from ephemeron.units import human_count

ANSWER_S = 120.0
"""Seconds after which a function that has not ended is abandoned."""
OBJECT_MB = 0.05
LOCAL_MEMORY_MB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one step."""

    step: str
    """`installed`, `platform`, `channel` or `function`."""
    ok: bool
    text: str
    """The finding in one line; of a failure, with a remedy."""


def diagnose(
    platform: str, *, channel: str = "", settings: Settings | None = None, call: bool = True, workers: int = 1
) -> Iterator[CheckResult]:
    """Checks a platform, the cheapest step first, and ends at the first that fails.

    Args:
        platform: one of `ephemeron.training.job.PLATFORMS`.
        channel: address; empty: a folder of this machine for `local`, else no object is tried and no function called.
        settings: where on a cloud; None: its defaults.
        call: whether a function is called. On a cloud that costs a few seconds of it.
        workers: how many functions have to fit at once.
    """
    if platform == "simulated":
        yield CheckResult(step="platform", ok=True, text="simulated functions run in this process, in virtual time: nothing to check")
        return
    public, secrets = public_address(channel)
    given = {"platform": platform, "workers": workers, "channel": public}
    c = build(Configuration, given, where="cloud check")
    c = dataclasses.replace(c, aggregators=1, memory_mb=LOCAL_MEMORY_MB, function_timeout_s=ANSWER_S)
    step = "installed"
    try:
        yield CheckResult(step=step, ok=True, text=_installed(platform))
        step = "platform"
        where = cloud(platform) if platform in CLOUDS else None
        if where is not None:
            settings = (settings or where.settings()).located()
            for text in where.inspect(settings, public, secrets):
                yield CheckResult(step=step, ok=True, text=text)
            if public:
                # As `train` does it: what it would refuse is refused here, with the same words.
                c, limits = admission.admit(where, dataclasses.replace(c, memory_mb=0, function_timeout_s=0.0), settings, secrets)
                yield CheckResult(step=step, ok=True, text=_fit(c, limits))
        step = "channel"
        if not public and platform != "local":
            yield CheckResult(step=step, ok=True, text="no --channel given: no object was tried, and no function called")
            return
        with environment(secrets), tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
            address = public if "://" in public else (Path(folder).resolve() / "objects").as_uri()
            yield CheckResult(step=step, ok=True, text=blocking.run(lambda _: _object(address)))
            step = "function"
            if call:
                c = dataclasses.replace(c, channel=address)
                yield CheckResult(step=step, ok=True, text=blocking.run(lambda _: _function(where, settings, c, Path(folder), secrets)))
    except EphemeronError as e:
        yield CheckResult(step=step, ok=False, text=" ".join(str(e).split()))


def _fit(c: Configuration, limits: Limits) -> str:
    sizes = limits.sizes_mb
    memory = f"sizes {sizes_text(sizes)}" if sizes else f"any size from {limits.memory_min_mb} to {limits.memory_max_mb} MB"
    return (
        f"{human_count(c.workers, 'function')} of {c.memory_mb} MB can run at once, for {c.function_timeout_s:g} s each; "
        f"{limits.concurrency} at most; {memory}"
    )


def _installed(platform: str) -> str:
    modules = [("torch", "torch")] + ([(cloud(platform).module, cloud(platform).extra)] if platform in CLOUDS else [])
    for module, extra in modules:
        if module and importlib.util.find_spec(module) is None:
            raise MissingExtra(module, extra)
    return " and ".join(module for module, _ in modules if module)


async def _object(address: str) -> str:
    """Puts, reads, lists and deletes an object, and makes sure that a key that is taken is refused."""
    prefix = new_run_id("check")
    key, data = f"{prefix}/probe", bytes(round(OBJECT_MB * 1e6))
    async with open_channel(address) as channel:
        began = time.perf_counter()
        await channel.put(key, [data], create=True)
        put = time.perf_counter()
        try:
            found = await channel.fetch(key)
            fetched = time.perf_counter()
            if found is None or bytes(found) != data:
                raise ChannelError("what was put is not what is read: readers see other objects than writers", key=key)
            with contextlib.suppress(KeyExists):
                await channel.put(key, [b"other"], create=True)
                raise ChannelError("a key that is taken was given away again, on which fencing relies", key=key)
            if channel.traits.service != "server" and key not in await channel.list(prefix):
                raise ChannelError("an object that is there is not listed", key=key)
        finally:
            await _forget(channel, prefix)
    return (
        f"{address} from here: {OBJECT_MB * 1000:.0f} kB put in {_ms(put - began)}, read in {_ms(fetched - put)}; "
        "a key is given away once; lists; deletes"
    )


async def _function(where: Provider[Any] | None, settings: Settings | None, c: Configuration, folder: Path, secrets: dict[str, str]) -> str:
    """Calls one function that puts and reads an object."""
    run, address = new_run_id("check"), c.store
    run_dir = folder / run
    run_dir.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        if where is None:
            from ephemeron.functions.local import LocalPlatform

            local = await LocalPlatform.start(run_dir, env=secrets)
            stack.push_async_callback(local.shutdown)
            platform: Platform = local
        else:
            handle = admission.make_handle(c, run=run, run_dir=run_dir, channel=address, since=time.time(), starting=True)
            recorded = await where.open(handle, settings)
            stack.push_async_callback(_leave, address, run)
            stack.push_async_callback(recorded.shutdown)
            platform = recorded
        lifetime_s = min(c.function_timeout_s, ANSWER_S)
        outcome, invoked = await _call(platform, run, c.memory_mb, lifetime_s, address)
    if outcome.status != "ok":
        raise JobError(
            f"a function was called and ended badly: {outcome.status}: {_first_line(outcome.error)}",
            remedy=_remedy(outcome, "" if where is None else where.logs(settings)),
        )
    result = ProbeResult.of(outcome.value)
    assert result.transfer is not None  # it was asked for
    row = result.transfer.rows[-1]
    bill = load_prices("objects", platform="" if where is None else where.name).functions_usd(outcome.gb_seconds, 1)
    return (
        f"one of {c.memory_mb} MB began {result.entered_wall - invoked:.1f} s after it was called, "
        f"put an object in {_ms(row.up_s)} and read it in {_ms(row.down_s)}; billed {outcome.billed_s:.1f} s"
        + (f", ${bill:.6f} at list prices" if where is not None and where.name in ("aws", "aws-microvm") else "")
    )


async def _call(platform: Platform, run: str, memory_mb: int, lifetime_s: float, address: str) -> tuple[Outcome, float]:
    request = ProbeRequest(transfer=TransferProbe(sizes_mb=(OBJECT_MB,), repeats=1, parallel=1))
    call = Call(
        run=run,
        rank=0,
        attempt=0,
        memory_mb=memory_mb,
        lifetime_s=lifetime_s,
        channel=address,
        entry="probe",
        origin=time.time(),
        request=asdict(request),
    )
    invoked = time.time()
    invocation = await platform.invoke(call)
    try:
        async with asyncio.timeout(lifetime_s + ANSWER_S):
            return await invocation.wait(), invoked
    except TimeoutError:
        raise JobError(
            f"a function was called and nothing was heard of it for {lifetime_s + ANSWER_S:.0f} s",
            remedy="see its log, and whether it reaches the channel",
        ) from None


def _first_line(error: str) -> str:
    lines = error.strip().splitlines()
    return lines[0][:300] if lines else "without a word"


def _remedy(outcome: Outcome, logs: str) -> str:
    """Remedy for a function that ended badly."""
    if outcome.error.startswith(("ChannelUnreachable", "ChannelTimeout")):
        what = "the function does not reach the channel: check the network between them, and its credentials there"
    elif outcome.status == "out_of_memory":
        what = "give functions more memory"
    elif outcome.error.startswith(("ModuleNotFoundError", "ImportError", "MissingExtra")):
        what = "install that where functions run"
    else:
        what = "" if logs else "see the message"
    return "; ".join(filter(None, (what, logs and f"its log: {logs}")))


async def _leave(address: str, run: str) -> None:
    async with open_channel(address) as channel:
        await _forget(channel, run)


async def _forget(channel: Channel, prefix: str) -> None:
    with contextlib.suppress(ChannelError):
        await channel.delete(await channel.list(prefix))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
