"""The HTTP process of the image, which Lambda calls at each step of a MicroVM: `python -m ephemeron.functions.aws_microvm.handler`.

    POST HOOKS/ready       while the image is built: 200 as soon as the imports are made; then the snapshot is taken
    POST HOOKS/validate    on a MicroVM of the new image
    POST HOOKS/run         a call, once: secrets and random state are made, and the call runs in the background
    POST HOOKS/suspend, resume, terminate
    GET  /about            which release and memory this is

Lambda calls hooks from inside, by the name `localhost`. The endpoint of a MicroVM passes requests on, too, from all who hold a
token for it, with its own name and an id: those are refused, as is a second run hook.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from ephemeron import logs
from ephemeron.communication.rpc.http import Handler, HttpRequest, Response, json_response, listen
from ephemeron.errors import CorruptMessage
from ephemeron.functions.aws_microvm.payload import RunPayload
from ephemeron.functions.aws_microvm.settings import ADDRESS
from ephemeron.functions.aws_microvm.supervisor import ImageSettings, MicrovmSupervisor, told_by

HOOKS = "/aws/lambda-microvms/runtime/v1"
PORT = 9000


def main() -> None:
    """Serves until the MicroVM ends."""
    logs.configure()
    try:
        told = told_by(dict(os.environ))
    except (KeyError, ValueError) as e:
        sys.exit(f"ephemeron: this image is made by `ephemeron cloud deploy aws-microvm`; its environment lacks {e}")
    host, _, port = os.environ.get(ADDRESS, f"0.0.0.0:{PORT}").rpartition(":")
    asyncio.run(serve(told, host, int(port)))


async def serve(told: ImageSettings, host: str, port: int) -> None:
    """Answers hooks."""
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        supervisor = MicrovmSupervisor(told, Path(folder))
        supervisor.prepare()
        running: set[asyncio.Task[None]] = set()
        await listen(answering(supervisor, told, running), host=host, port=port)
        await asyncio.Event().wait()


def answering(supervisor: MicrovmSupervisor, told: ImageSettings, running: set[asyncio.Task[None]]) -> Handler:
    """Answers of the handler; `running` gets the task of the call."""

    async def answer(request: HttpRequest) -> Response:
        if request.method == "GET" and request.path == "/about":
            return json_response({"ephemeron": 1, "code": told.digest, "memory_mb": told.memory_mb})
        hook = request.path.removeprefix(f"{HOOKS}/")
        if request.method != "POST" or hook == request.path:
            return Response(status=404)
        if not _of_lambda(request):
            return json_response({"error": "hooks are called by Lambda only"}, status=403)
        if hook == "ready":
            return _ready(supervisor)
        if hook == "run":
            return _run(supervisor, request, running)
        _say(f"hook {hook}")
        return Response()

    return answer


def _ready(supervisor: MicrovmSupervisor) -> Response:
    try:
        return Response(status=200 if supervisor.ready() else 503)
    except RuntimeError as e:
        return json_response({"error": str(e)}, status=500)


def _run(supervisor: MicrovmSupervisor, request: HttpRequest, running: set[asyncio.Task[None]]) -> Response:
    if supervisor.taken:
        return json_response({"error": "this MicroVM has its call already"}, status=409)
    try:
        body = request.json()
        payload = RunPayload.from_text(str(body.get("runHookPayload", "")))
        envelope = payload.envelope
    except (ValueError, CorruptMessage) as e:
        return json_response({"error": str(e)}, status=400)
    supervisor.accept(str(body.get("microvmId", "")), payload)
    _say(f"run {envelope.run}, rank {envelope.rank}, attempt {envelope.attempt}: {envelope.id}")
    running.add(asyncio.ensure_future(supervisor.run()))
    return Response()


def _of_lambda(request: HttpRequest) -> bool:
    host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
    return host in ("localhost", "127.0.0.1", "[::1]") and "x-amzn-requestid" not in request.headers


def _say(text: str) -> None:
    sys.stdout.write(f"ephemeron: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
