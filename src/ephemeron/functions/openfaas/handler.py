"""The HTTP process that of-watchdog starts in each replica: `python -m ephemeron.functions.openfaas.handler`.

    POST /         a call (an `InvokeRequest`); answers when it has ended, after its outcome is in the store
    GET  /ready    200 as soon as calls are taken (of-watchdog's `ready_path`)
    GET  /about    which release, memory and lifetime this is: how a client knows a wrong image

Answers 200 to what ended well or was cancelled, 500 to what failed, 504 to what reached its lifetime, 429 while busy, 400
to a request that is not a call. The state of a call is in the store, not in the answer: a gateway that stops waiting
changes nothing, and the call goes on to its own end.

On SIGTERM (the replica is to go) the running call is finished, if the cluster grants it the time. Credentials of the
channel come as OpenFaaS secrets, files that become variables here: see `SECRETS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ephemeron import logs
from ephemeron.communication.rpc.http import Handler, HttpRequest, Response, json_response, listen
from ephemeron.errors import ChannelError, CorruptMessage
from ephemeron.functions.async_invoke.records import InvokeRequest
from ephemeron.functions.openfaas.replica import FunctionReplica, ReplicaSettings, gateway_answer, told_by
from ephemeron.functions.passed_on import SERVICES

PORT = 5000
UPSTREAM = "http_upstream_url"
"""Variable of of-watchdog with the address of this handler."""
SECRETS: Mapping[str, str] = {
    "ephemeron-channel-user": "EPHEMERON_CHANNEL_USER",
    "ephemeron-channel-password": "EPHEMERON_CHANNEL_PASSWORD",
    "ephemeron-aws-access-key-id": "AWS_ACCESS_KEY_ID",
    "ephemeron-aws-secret-access-key": "AWS_SECRET_ACCESS_KEY",
    **{name.lower().replace("_", "-"): name for name in SERVICES},
}
"""OpenFaaS secret to variable of the function."""
SECRETS_FOLDER = "/var/openfaas/secrets"
_STATUS = {"ok": 200, "cancelled": 200, "timed_out": 504}


def main() -> None:
    """Serves until it is told to end."""
    logs.configure()
    os.environ.update(secrets_in(Path(os.environ.get("EPHEMERON_SECRETS_FOLDER", SECRETS_FOLDER))))
    try:
        told = told_by(dict(os.environ))
    except (KeyError, ValueError) as e:
        sys.exit(f"ephemeron: this image is deployed by `ephemeron cloud deploy openfaas`; its environment lacks {e}")
    port = urlsplit(os.environ.get(UPSTREAM, "")).port or PORT
    asyncio.run(serve(told, port))


async def serve(told: ReplicaSettings, port: int) -> None:
    """Serves calls on a port of loopback, where of-watchdog finds it."""
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        replica = FunctionReplica(told, Path(folder))
        replica.prepare()
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        listener = await listen(answering(replica, told), port=port)
        await ending.wait()
        await replica.idle.wait()
        await listener.close()
        await replica.close()


def answering(replica: FunctionReplica, told: ReplicaSettings) -> Handler:
    """Answers of the handler."""

    async def answer(request: HttpRequest) -> Response:
        if request.method == "GET":
            return _look(request.path, told)
        if replica.busy:
            return json_response({"error": "this replica runs a call already"}, status=429)
        try:
            envelope = InvokeRequest.from_event(json.loads(request.body or b"null"))
        except (ValueError, RecursionError, CorruptMessage) as e:
            return json_response({"error": str(e)}, status=400)
        sys.stdout.write(f"ephemeron: run {envelope.run}, rank {envelope.rank}, attempt {envelope.attempt}: {envelope.id}\n")
        sys.stdout.flush()
        # A closed connection does not end the call: its outcome is read from the store.
        running = asyncio.ensure_future(_run(replica, envelope, request.headers))
        return await asyncio.shield(running)

    return answer


async def _run(replica: FunctionReplica, envelope: InvokeRequest, headers: Mapping[str, str]) -> Response:
    try:
        outcome = await replica.serve(envelope, request=headers.get("x-call-id", ""), callback=headers.get("x-callback-url", ""))
    except ChannelError as e:
        return json_response({"error": f"the channel cannot be reached from here: {e}"}, status=500)
    return Response(
        status=_STATUS.get(outcome.status, 500), headers={"Content-Type": "application/json"}, body=gateway_answer(outcome, envelope.id)
    )


def _look(path: str, told: ReplicaSettings) -> Response:
    if path == "/ready":
        return Response(body=b"ok")
    if path == "/about":
        about = {"ephemeron": 1, "code": told.digest, "memory_mb": told.memory_mb, "lifetime_s": told.lifetime_s}
        return json_response(about)
    return Response(status=404)


def secrets_in(folder: Path) -> dict[str, str]:
    """Variables from the files of secrets."""
    found = {}
    for name, variable in SECRETS.items():
        try:
            found[variable] = (folder / name).read_text().strip()
        except OSError:
            pass  # this function has no such secret
    return found


if __name__ == "__main__":
    main()
