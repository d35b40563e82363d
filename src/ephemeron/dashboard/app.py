"""Routes of the dashboard: one page, its files, and documents for it.

GET  /                         the page; which part of it is shown is in the address after #
GET  /static/NAME              style, scripts and uPlot
GET  /api/session              what the page has to know first
GET  /api/runs, /api/studies, /api/services, /api/tasks
GET  /api/run?key=             also /api/run/series, /functions, /marks, /tile, /output
GET  /api/study?key=           also /api/study/curves
GET  /api/stream?topic=&key=   server-sent events: a document whenever it has changed
POST /api/run/end, /api/study/end
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import zlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ephemeron.config import own_processes
from ephemeron.dashboard import run_documents
from ephemeron.dashboard.access import CHANGE_HEADER
from ephemeron.dashboard.library import Library
from ephemeron.dashboard.output import output_of
from ephemeron.dashboard.phases import COLUMNS, rows_of
from ephemeron.dashboard.run_view import RunView
from ephemeron.dashboard.services import Services
from ephemeron.dashboard.stream import Pages, events
from ephemeron.dashboard.studies import Studies
from ephemeron.errors import UserError
from ephemeron.events import PHASES
from ephemeron.runs.status import may_be_running, status_of

END_FILE = "end"
"""In the folder of a trial: its study is to end it."""
_TIMEOUT_S = 60.0


async def end_run(folder: Path, *, now: bool) -> str:
    """Asks a run to stop at its next checkpoint, or kills its functions.

    Returns:
        A sentence for the user.

    Raises:
        UserError: it was not stopped; with the reason.
    """
    arguments = own_processes.command("stop-run", str(folder), *(["--now"] if now else []))
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UserError(f"the platform of {folder.name} did not answer within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = f"{folder.name} was not stopped: the process that asks it ended with {process.returncode}"
        raise UserError(lines[-1].removeprefix("error: ") if lines else reason)
    return "its functions were killed" if now else "it stops at its next checkpoint"


def end_trial(folder: Path) -> str:
    """Asks the study of a trial to end it.

    Returns:
        A sentence for the user.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        (folder / END_FILE).touch()
    except OSError as e:
        raise UserError(f"cannot write {folder / END_FILE}: {e.strerror}") from None
    return "its study ends it"


_LEVELS = range(-20, 21)
"""Powers of two seconds that a column of a tile may be wide."""
_READ_S = 0.5
"""Seconds of reading before an answer, where the log has not been read to its end."""
_MAX_BODY = 64 << 10
"""Bytes of a request's body; those of the pages have some hundred."""
_SMALL = 1400
"""Bytes that fit one packet and are not worth compressing."""


class Dashboard:
    """Handlers of the routes.

    Args:
        pages: documents of all pages.
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.library = pages.library

    async def session(self, request: Request) -> Response:
        return _json(
            request,
            {
                "change_header": CHANGE_HEADER,
                "change_value": request.scope.get("ephemeron.change", ""),
                "roots": [str(root) for root in self.library.roots],
                "phases": list(PHASES),
                "columns": COLUMNS,
            },
        )

    async def page(self, request: Request) -> Response:
        """A document of `Pages`, by the last part of the path."""
        name, key = request.url.path.rpartition("/")[2], request.query_params.get("key", "")
        return await _in_thread(request, lambda: self.pages.document(name, key))

    async def part(self, request: Request) -> Response:
        """A part of a run's page."""
        view = self._view(request)
        name = request.url.path.rpartition("/")[2]
        make: dict[str, Callable[[RunView], Any]] = {
            "series": lambda v: run_documents.series(v, points=_number(request, "points", 1200, range(10, 20_001))),
            "functions": run_documents.function_table,
            "marks": run_documents.marks,
        }
        return await _in_thread(request, lambda: make[name](_read(view)))

    async def tile(self, request: Request) -> Response:
        """Cells of a part of the timeline, one byte each: [lanes * rows, COLUMNS]."""
        view = self._view(request)
        level = _number(request, "level", 0, _LEVELS)
        index = _number(request, "index", 0, range(-1, 1 << 40))

        def made() -> tuple[bytes, int, int]:
            with _read(view).lock:
                ranks = run_documents.ranks_of(view)
                rows = rows_of(len(ranks))
                column_s = 2.0**level
                cells = view.lanes.tile(ranks, run_documents.alive_of(view), start=index * COLUMNS * column_s, column_s=column_s, rows=rows)
                return zlib.compress(cells.tobytes(), 1), rows, view.version

        data, rows, version = await run_in_threadpool(made)
        headers = {"content-encoding": "deflate", "x-rows": str(rows), "x-version": str(version)}
        return Response(data, media_type="application/octet-stream", headers=headers)

    async def output(self, request: Request) -> Response:
        view = self._view(request)
        invocation = request.query_params.get("invocation", "")
        offset = _number(request, "offset", 0, range(1 << 50)) if "offset" in request.query_params else None
        found = await run_in_threadpool(lambda: output_of(_read(view), invocation, offset))
        if found is None:
            raise HTTPException(404, "the run has no such invocation")
        return _json(request, found)

    async def stream(self, request: Request) -> Response:
        """Server-sent events."""
        topic, key = request.query_params.get("topic", ""), request.query_params.get("key", "")
        if topic not in Pages.TOPICS:
            raise HTTPException(404, "no such topic")
        return StreamingResponse(events(self.pages, topic, key), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def end_run(self, request: Request) -> Response:
        """Ends a run: {"key": …, "now": …}."""
        body = await _body(request)
        found = self.library.run(str(body.get("key", "")))
        if found is None:
            raise HTTPException(404, "there is no such run")
        view = self.library.view(found)
        if not may_be_running(await run_in_threadpool(status_of, view.folder)):
            raise HTTPException(409, f"run {found.path.name} is not running")
        return await _answered(request, end_run(found.path, now=body.get("now") is True))

    async def end_trial(self, request: Request) -> Response:
        """Ends a trial: {"key": of its study, "trial": N}."""
        body = await _body(request)
        found = self.library.study(str(body.get("key", "")))
        number = body.get("trial")
        if found is None or not isinstance(number, int):
            raise HTTPException(404, "there is no such trial")
        folder = await run_in_threadpool(self.pages.studies.may_end, found, number)
        if folder is None:
            raise HTTPException(409, f"trial {number} is not running")
        return await _answered(request, asyncio.to_thread(end_trial, folder))

    def _view(self, request: Request) -> RunView:
        found = self.library.run(request.query_params.get("key", ""))
        if found is None:
            raise HTTPException(404, "there is no such run")
        return self.library.view(found)


def _read(view: RunView) -> RunView:
    """The view, read on for a while if no page has read its log to the end. Blocks."""
    view.read_for(_READ_S if view.share_read < 1.0 or not view.version else 0.0)
    return view


def make_app(library: Library) -> Starlette:
    """The application, without access control (`access.Access`).

    Args:
        library: runs and studies to show.
    """
    pages = Pages(library, Studies(library), Services(library.roots))
    d = Dashboard(pages)
    names = ("runs", "studies", "services", "tasks", "run", "study", "curves")
    paths = {"run": "/api/run", "study": "/api/study", "curves": "/api/study/curves"}
    routes = [
        Route("/", _shell),
        Route("/static/{name}", _static),
        Route("/api/session", d.session),
        *(Route(paths.get(name, f"/api/{name}"), d.page) for name in names),
        *(Route(f"/api/run/{name}", d.part) for name in ("series", "functions", "marks")),
        Route("/api/run/tile", d.tile),
        Route("/api/run/output", d.output),
        Route("/api/stream", d.stream),
        Route("/api/run/end", d.end_run, methods=["POST"]),
        Route("/api/study/end", d.end_trial, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
    app.state.pages = pages
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(request, {"error": error.detail}, status=error.status_code)


async def _shell(request: Request) -> Response:
    return _file("index.html", request)


async def _static(request: Request) -> Response:
    return _file(request.path_params["name"], request)


@cache
def _contents(name: str) -> tuple[bytes, str] | None:
    """A file of `static/`, and its ETag. Only names that are there can be asked for."""
    found = {entry.name: entry for entry in files(__package__).joinpath("static").iterdir() if entry.is_file()}
    if name not in found:
        return None
    data = found[name].read_bytes()
    return data, f'"{zlib.crc32(data):08x}-{len(data)}"'


def _file(name: str, request: Request) -> Response:
    contents = _contents(name)
    if contents is None:
        raise HTTPException(404, "no such file")
    data, tag = contents
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return _compress_response(request, data, "text/javascript" if name.endswith(".js") else kind, headers=headers)


async def _in_thread(request: Request, make: Callable[[], Any]) -> Response:
    value = await run_in_threadpool(make)
    if value is None:
        raise HTTPException(404, "there is no such page")
    return _json(request, value)


async def _answered(request: Request, work: Any) -> Response:
    try:
        return _json(request, {"text": await work})
    except UserError as e:
        raise HTTPException(409, str(e)) from None


async def _body(request: Request) -> dict[str, Any]:
    data, nbytes = bytearray(), 0
    async for part in request.stream():  # to its end, for which there is a time limit: clients read no answer before
        nbytes += len(part)
        if nbytes <= _MAX_BODY:
            data += part
    if nbytes > _MAX_BODY:
        raise HTTPException(413, f"the request has more than {_MAX_BODY} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # the latter of `[[[[…`
        raise HTTPException(400, "the request holds no JSON") from None
    return value if isinstance(value, dict) else {}


def _number(request: Request, name: str, default: int, allowed: range) -> int:
    try:
        value = int(request.query_params.get(name, default))
    except ValueError:
        value = allowed.stop
    if value not in allowed:
        raise HTTPException(400, f"{name} is not from {allowed.start} to {allowed.stop - 1}")
    return value


def _json(request: Request, value: Any, status: int = 200) -> Response:
    return _compress_response(request, msgspec.json.encode(value), "application/json", status=status)


def _compress_response(request: Request, data: bytes, kind: str, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    headers = {**(headers or {}), "vary": "accept-encoding"}
    if len(data) > _SMALL and "deflate" in request.headers.get("accept-encoding", ""):
        data, headers["content-encoding"] = zlib.compress(data, 3), "deflate"
    return Response(data, media_type=kind, status_code=status, headers=headers)
