"""The code of the Lambda function: `ephemeron.functions.aws.handler.handle`. Runs one delivery of one call.

What is particular to Lambda: a process that is not fit for another invocation (see `_hygiene`) ends itself, after its
outcome is in the store; Lambda calls that an error and starts afresh. Imports are made by the first invocation and
not while Lambda initialises, because there they may take 10 s and no longer, which PyTorch from a cold image can
exceed; both are billed alike since August 2025.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn

from ephemeron.events import Event, to_json
from ephemeron.functions.async_invoke.records import InvokeRequest, Record, RecordKeys
from ephemeron.functions.async_invoke.reporter import InvocationReporter, peak_mb
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.function_output import warnings_emitted
from ephemeron.functions.process_reset import ProcessSnapshot

MARGIN_S = 1.5
"""Before Lambda's own limit: for the last word."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_served = 0
_entry: Any = None
_client: Any = None
_making = threading.Lock()


def handle(event: Any, context: Any) -> dict[str, Any]:
    """What Lambda calls.

    Args:
        event: an `InvokeRequest`.
        context: Lambda's own.

    Raises:
        CorruptMessage: it is no call of ours.
        RuntimeError: the call's code raised; the outcome has been reported, this is for Lambda's own books.
    """
    global _served
    cold, _served = _served == 0, _served + 1
    envelope = InvokeRequest.from_event(event)
    sys.stdout.write(
        f"ephemeron: run {envelope.run}, rank {envelope.rank}, attempt {envelope.attempt}: {envelope.id}\n"
    )
    sys.stdout.flush()
    remaining_s = max(0.1, context.get_remaining_time_in_millis() / 1000 - MARGIN_S)
    lifetime_s = min(remaining_s, envelope.lifetime_s)
    reporter = InvocationReporter(
        envelope, lambda: _channel(envelope.channel), {"request": context.aws_request_id, "stream": context.log_stream_name},
        lifetime_s=lifetime_s,
    )  # fmt: skip
    payload = reporter.start()
    call = Call.from_payload(payload if envelope.call is None else envelope.call)
    outcome, fit = _serve(call, envelope, reporter, context, deadline=time.monotonic() + lifetime_s, cold=cold)
    reporter.close(outcome)
    if not fit:
        sys.stdout.write("ephemeron: the invocation left threads behind; this process ends\n")
        sys.stdout.flush()
        os._exit(1)
    if outcome["status"] == "error":
        raise RuntimeError(outcome["error"])
    return {"id": envelope.id, "delivery": reporter.delivery, "status": outcome["status"]}


def _serve(
    call: Call, envelope: InvokeRequest, reporter: InvocationReporter, context: Any, *, deadline: float, cold: bool
) -> tuple[Record, bool]:
    """Runs the entry; its outcome, and whether the process is fit for another one."""
    from ephemeron.functions.function_main import failure

    vcpus = Limits().vcpus(int(context.memory_limit_in_mb))
    for name in _THREADS:
        os.environ.setdefault(name, str(max(1, int(vcpus))))
    scratch = Path(tempfile.mkdtemp(prefix="eph-")).resolve()
    done: Record = {"status": "ok", "value": {}, "error": ""}
    fit = False
    clean: ProcessSnapshot | None = None
    try:
        entry = _prepared()
        clean = ProcessSnapshot(scratch)
        value = asyncio.run(_run(entry, call, envelope, reporter, context, deadline, scratch, vcpus, cold))
        if not isinstance(value, dict):
            raise TypeError(f"a function returns a dict, not {type(value).__name__}")
        json.dumps(value)
        done["value"] = value
    except (Exception, BaseExceptionGroup, SystemExit, asyncio.CancelledError) as e:  # noqa: BLE001 - it is the user's
        said = failure("error", e)
        done |= {"status": "error", "error": f"{said['error']}\n{said['traceback']}"}
        sys.stderr.write(said["traceback"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if clean is not None:
            fit = clean.restore()
        shutil.rmtree(scratch, ignore_errors=True)
    return {**done, "took_s": reporter.took_s, "peak_mb": peak_mb()}, fit


async def _run(
    entry: Any, call: Call, envelope: InvokeRequest, reporter: InvocationReporter, lambda_context: Any, deadline: float, scratch: Path,
    vcpus: float, cold: bool,
) -> Any:  # fmt: skip
    from ephemeron.functions.aws.invoker import Sender
    from ephemeron.functions.aws.settings import AwsSettings
    from ephemeron.functions.context import Context, ThreadCompute

    loop = asyncio.get_running_loop()
    settings = AwsSettings(
        function=lambda_context.function_name, region=os.environ.get("AWS_REGION"), every_s=envelope.every_s
    )
    delivery = reporter.delivery

    def emit(event: Event) -> None:
        reporter.say(to_json(event))

    def die() -> NoReturn:
        reporter.flush()  # what was emitted before an injected death happened before it
        os.kill(os.getpid(), 9)
        raise AssertionError("unreachable")

    compute = ThreadCompute(max(1, int(vcpus)))
    try:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(_channel(call.channel))
            sender = Sender(
                settings, lambda: _made_once(settings), channel=channel, names=RecordKeys(envelope.calls),
                announce=reporter.announce, by=reporter.name,
            )  # fmt: skip
            sending: set[asyncio.Task[str]] = set()

            async def invoke(successor: Call) -> None:
                # What is being sent is sent, also when whoever wanted it is cancelled: its claim has been taken.
                task = asyncio.create_task(sender.send(successor))
                sending.add(task)
                await asyncio.shield(task)

            stack.callback(asyncio.create_task(_ahead(settings, envelope.lifetime_s)).cancel)
            stack.push_async_callback(_all_sent, sending)
            stack.enter_context(warnings_emitted(emit, lambda: time.time() - call.origin))
            return await entry(
                Context(
                    call=call, invocation=envelope.id if delivery == 0 else f"{envelope.id}.{delivery}", channel=channel,
                    emit=emit, invoke=invoke, compute=compute, origin=_origin(call, loop.time()),
                    deadline=loop.time() + deadline - time.monotonic(), die=die, cpu_time=time.process_time,
                    scratch=scratch, cold=cold,
                )
            )  # fmt: skip
    finally:
        compute.close()


async def _ahead(settings: Any, lifetime_s: float) -> None:
    """Makes the client in time: near the end of a life its import could take longer than is left."""
    await asyncio.sleep(0.5 * lifetime_s)
    await asyncio.to_thread(_made_once, settings)


async def _all_sent(sending: set[asyncio.Task[str]]) -> None:
    await asyncio.gather(*sending, return_exceptions=True)


def _made_once(settings: Any) -> Any:
    """The boto3 client, kept for later invocations of this process."""
    global _client
    from ephemeron.functions.aws.settings import client

    with _making:
        if _client is None:
            _client = client(settings, "lambda")
        return _client


def _origin(call: Call, loop_time: float) -> float:
    """The run's t = 0 on the loop's clock."""
    return loop_time - (time.time() - call.origin)


def _prepared() -> Any:
    """The code to run, imported once for a process."""
    global _entry
    if _entry is None:
        from ephemeron.functions.function_main import prepare_entry

        _entry = prepare_entry()
    return _entry


def _channel(address: str) -> Any:
    from ephemeron.communication.channels.address import open_channel

    return open_channel(address)
