"""The code of the Lambda function: `ephemeron.functions.aws.handler.handle`. Runs one delivery of one call.

Particular to Lambda: a process that is not fit for another invocation (see `process_reset`) ends itself once its
outcome is in the store; Lambda reports that as an error and starts a new one. The first invocation makes the imports, and
not Lambda's initialisation, which is limited to 10 s: PyTorch from a cold image can take longer. Both are billed alike
since August 2025.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ephemeron import logs
from ephemeron.config.own_processes import peak_mb
from ephemeron.events import Event, to_json
from ephemeron.functions.async_invoke.records import HandlerOutcome, InvokeRequest, RecordKeys
from ephemeron.functions.async_invoke.reporter import DeliverySource, InvocationReporter
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.function_output import warnings_emitted
from ephemeron.functions.process_reset import ProcessSnapshot

if TYPE_CHECKING:
    from ephemeron.communication.channels.base import Channel
    from ephemeron.functions.aws.settings import AwsSettings

MARGIN_S = 1.5
"""Reserve before Lambda's own limit, for the last report."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "POLARS_MAX_THREADS", "LOKY_MAX_CPU_COUNT")

_served = 0
_prepared = False
_client: Any = None
_making = threading.Lock()


def handle(event: object, context: Any) -> dict[str, object]:
    """Entry point of the Lambda function.

    Args:
        event: an `InvokeRequest`.
        context: Lambda's own.

    Raises:
        CorruptMessage: the event is not a call of this package.
        RuntimeError: the call's code has raised; the outcome is reported, and Lambda counts an error.
    """
    global _served
    logs.configure()
    cold, _served = _served == 0, _served + 1
    envelope = InvokeRequest.from_event(event)
    sys.stdout.write(f"ephemeron: run {envelope.run}, rank {envelope.rank}, attempt {envelope.attempt}: {envelope.id}\n")
    sys.stdout.flush()
    remaining_s = max(0.1, context.get_remaining_time_in_millis() / 1000 - MARGIN_S)
    lifetime_s = min(remaining_s, envelope.lifetime_s)
    reporter = InvocationReporter(
        envelope,
        lambda: _channel(envelope.channel),
        DeliverySource(request=context.aws_request_id, stream=context.log_stream_name),
        lifetime_s=lifetime_s,
    )
    call = reporter.start()
    with logs.context(**call.log_fields):
        outcome, fit = _serve(call, envelope, reporter, context, deadline=time.monotonic() + lifetime_s, cold=cold)
    reporter.close(outcome)
    if not fit:
        sys.stdout.write("ephemeron: the invocation left threads behind; this process ends\n")
        sys.stdout.flush()
        os._exit(1)
    if outcome.status == "error":
        raise RuntimeError(outcome.error)
    return {"id": envelope.id, "delivery": reporter.delivery, "status": outcome.status}


def _serve(
    call: Call, envelope: InvokeRequest, reporter: InvocationReporter, context: Any, *, deadline: float, cold: bool
) -> tuple[HandlerOutcome, bool]:
    """Runs the entry; returns its outcome, and whether the process is fit for another one."""
    from ephemeron.functions.aws.managed_instances import VCPUS
    from ephemeron.user_code import failure, never_interrupted

    never_interrupted()
    vcpus = float(os.environ.get(VCPUS, 0.0)) or Limits().vcpus(int(context.memory_limit_in_mb))
    for name in _THREADS:
        os.environ.setdefault(name, str(max(1, int(vcpus))))
    scratch = Path(tempfile.mkdtemp(prefix="eph-")).resolve()
    value: Mapping[str, object] = {}
    error = ""
    fit = False
    clean: ProcessSnapshot | None = None
    try:
        _prepare()
        clean = ProcessSnapshot(scratch)
        value = asyncio.run(_run(call, envelope, reporter, context, deadline, scratch, vcpus, cold))
    except BaseException as e:  # noqa: BLE001 - whatever ends the loop is the user's
        line, trace = failure(e)
        value, error = {}, f"{line}\n{trace}"
        sys.stderr.write(trace)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if clean is not None:
            fit = clean.restore()
        shutil.rmtree(scratch, ignore_errors=True)
    outcome = HandlerOutcome(status="error" if error else "ok", value=value, error=error, took_s=reporter.took_s, peak_mb=peak_mb())
    return outcome, fit


async def _run(
    call: Call,
    envelope: InvokeRequest,
    reporter: InvocationReporter,
    lambda_context: Any,
    deadline: float,
    scratch: Path,
    vcpus: float,
    cold: bool,
) -> Mapping[str, object]:
    from ephemeron.functions.async_invoke.sizes import FUNCTION, sizes_in
    from ephemeron.functions.aws.invoker import Sender
    from ephemeron.functions.aws.managed_instances import QUALIFIER, VCPUS
    from ephemeron.functions.aws.settings import AwsSettings
    from ephemeron.functions.context import Context, ThreadCompute
    from ephemeron.functions.entries import serve

    loop = asyncio.get_running_loop()
    settings = AwsSettings(
        function=os.environ.get(FUNCTION) or lambda_context.function_name,
        sizes_mb=sizes_in(os.environ),
        region=os.environ.get("AWS_REGION"),
        every_s=envelope.every_s,
        qualifier=QUALIFIER if VCPUS in os.environ else "",
    )
    delivery = reporter.delivery

    def emit(event: Event) -> None:
        reporter.say(to_json(event))

    def die() -> NoReturn:
        reporter.flush()  # events before an injected death must be in the store
        os.kill(os.getpid(), 9)
        raise AssertionError("unreachable")

    compute = ThreadCompute(max(1, int(vcpus)))
    try:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(_channel(call.channel))
            sender = Sender(
                settings,
                lambda: _made_once(settings),
                channel=channel,
                names=RecordKeys(envelope.calls),
                announce=reporter.announce,
                by=reporter.name,
            )
            sending: set[asyncio.Task[str]] = set()

            async def invoke(successor: Call) -> None:
                # The request is completed also when its caller is cancelled: it has taken the lease for the successor.
                task = asyncio.create_task(sender.send(successor))
                sending.add(task)
                await asyncio.shield(task)

            stack.callback(asyncio.create_task(_ahead(settings, envelope.lifetime_s)).cancel)
            stack.push_async_callback(_all_sent, sending)
            stack.enter_context(warnings_emitted(emit, lambda: time.time() - call.origin))
            return await serve(
                Context(
                    call=call,
                    invocation=envelope.id if delivery == 0 else f"{envelope.id}.{delivery}",
                    channel=channel,
                    emit=emit,
                    flush=reporter.flush,
                    invoke=invoke,
                    compute=compute,
                    origin=_origin(call, loop.time()),
                    deadline=loop.time() + deadline - time.monotonic(),
                    die=die,
                    cpu_time=time.process_time,
                    scratch=scratch,
                    cold=cold,
                )
            )
    finally:
        compute.close()


async def _ahead(settings: AwsSettings, lifetime_s: float) -> None:
    """Makes the client in time: near the time limit its import could take longer than is left."""
    await asyncio.sleep(0.5 * lifetime_s)
    await asyncio.to_thread(_made_once, settings)


async def _all_sent(sending: set[asyncio.Task[str]]) -> None:
    await asyncio.gather(*sending, return_exceptions=True)


def _made_once(settings: AwsSettings) -> Any:
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


def _prepare() -> None:
    """Makes the imports of `EPHEMERON_PRELOAD`, once per process."""
    global _prepared
    if not _prepared:
        from ephemeron.functions.entries import preload

        preload()
        _prepared = True


def _channel(address: str) -> Channel:
    from ephemeron.communication.channels.address import open_channel

    return open_channel(address)
