"""What strangers send before the token: the dashboard stays up, and answers others meanwhile. Raw sockets, on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from dashboard_worlds import TOKEN, troubled_run, write_run

uvicorn = pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")
pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")

from ephemeron.communication.unproved import UnprovedConnections  # noqa: E402
from ephemeron.dashboard.access import CHANGE_HEADER, Access  # noqa: E402
from ephemeron.dashboard.app import make_app  # noqa: E402
from ephemeron.dashboard.library import Library  # noqa: E402
from ephemeron.dashboard.request_limits import REQUEST_S, limited_protocol  # noqa: E402
from ephemeron.dashboard.server import listen  # noqa: E402


@asynccontextmanager
async def served(
    root: Path, unproved: UnprovedConnections | None = None, *, request_s: float = REQUEST_S
) -> AsyncIterator[tuple[int, Access]]:
    """A dashboard in this event loop: its port, and what guards it."""
    listening = listen("127.0.0.1", 0)
    port = int(listening.getsockname()[1])
    app = Access(make_app(Library([root])), token=TOKEN, host="127.0.0.1", port=port)
    protocol = limited_protocol(unproved or UnprovedConnections(), request_s=request_s)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield port, app
    finally:
        server.should_exit = True
        await running


async def answer(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to these bytes, once the connection is closed; 0: it is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        got = await reader.read()
    except ConnectionError:
        got = b""
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def request(port: int, *headers: str, line: str = "GET /api/session", body: bytes = b"") -> bytes:
    lines = [f"{line} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def own(port: int, *headers: str, line: str = "GET /api/session", body: bytes = b"") -> bytes:
    """A request of a program that has the token."""
    return request(port, f"Authorization: Bearer {TOKEN}", "Connection: close", *headers, line=line, body=body)


def test_a_hostile_cookie_is_read_in_one_pass(tmp_path: Path) -> None:
    """`http.cookies` takes 17 s for 60,000 backslashes on Python 3.11.7: here no more than the value itself is looked for."""

    async def main() -> None:
        async with served(tmp_path) as (port, app):
            name, value = f"ephemeron-{port}", app._derived("cookie")
            hostile = f'{name}="' + "\\" * 60_000
            assert (await answer(port, request(port, f"Cookie: {hostile}")))[0] == 401
            for good in (f"{name}={value}", f'a="\\; b"; {name}="{value}" ; other-{name}=1', f"x=1;{name}={value};"):
                assert (await answer(port, request(port, f"Cookie: {good}", "Connection: close")))[0] == 200, good
            for bad in (f"other-{name}={value}", f"{name}={value}0", f"{name}=", f"x={name}={value}", ";" * 9000):
                assert (await answer(port, request(port, f"Cookie: {bad}")))[0] == 401, bad

    asyncio.run(main())


def test_silent_connections_shut_nobody_out(tmp_path: Path) -> None:
    unproved = UnprovedConnections(in_all=6, per_address=4)

    async def main() -> None:
        async with served(tmp_path, unproved) as (port, _):
            with ExitStack() as stack:
                address = ("127.0.0.1", port)
                strangers = [stack.enter_context(await asyncio.to_thread(socket.create_connection, address)) for _ in range(200)]
                for stranger in strangers[-4:]:
                    stranger.sendall(b"GET / HT")
                assert (await answer(port, own(port)))[0] == 200
                for stranger in strangers[:190]:  # closed for later ones, long before their time limit
                    stranger.settimeout(60)
                    assert await asyncio.to_thread(is_closed, stranger)
                assert unproved.count <= 4

    asyncio.run(main())


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "half",
    [b"", b"GET / HTTP/1.1\r\nHost: ", b"POST /api/run/end HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"],
    ids=["silence", "half a head", "half a body"],
)
def test_an_unfinished_request_ends_after_its_time(tmp_path: Path, half: bytes) -> None:
    async def main() -> None:
        async with served(tmp_path, request_s=0.2) as (port, _):
            half_with_token = half.replace(b"\r\n", f"\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n".encode(), 1)
            assert (await answer(port, half_with_token))[0] == 0

    asyncio.run(main())


def test_a_stranger_is_not_kept_after_its_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as (port, _):
            # `answer` returns when the connection is closed, which nobody has asked for; the body is not waited for.
            assert (await answer(port, request(port)))[0] == 401
            without_body = f"POST /api/run/end HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 99999999999\r\n\r\nx"
            assert (await answer(port, without_body.encode()))[0] == 401
            assert (await answer(port, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"))[0] == 421

    asyncio.run(main())


def test_bodies_are_bounded_and_nesting_is_no_error_of_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as (port, _):
            for body, status in (
                (b"x" * (64 << 10), 400),
                (b"[" * 60_000, 400),
                (b'{"key": "none"}', 404),
                (b"[]", 404),
                (b" " * (1 << 20), 413),
                (b"[" * 200_000, 413),
            ):
                got, text = await answer(port, own(port, line="POST /api/run/end", body=body))
                assert got == status, (len(body), got)
                assert json.loads(text)["error"]

    asyncio.run(main())


def test_changes_of_a_page_still_need_its_header(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as (port, app):
            cookie = f"Cookie: ephemeron-{port}={app._derived('cookie')}"
            origin = f"Origin: http://127.0.0.1:{port}"
            given = [cookie, origin, "Connection: close"]
            told = request(port, *given, line="POST /api/run/end", body=b"{}")
            assert (await answer(port, told))[0] == 403
            told = request(port, *given, f"{CHANGE_HEADER}: {app.change_value}", line="POST /api/run/end", body=b"{}")
            assert (await answer(port, told))[0] == 404

    asyncio.run(main())


def test_output_is_read_within_the_runs_folder_only(tmp_path: Path) -> None:
    from ephemeron.dashboard.output import output_of

    library = Library([tmp_path / "runs"])
    (tmp_path / "secret.txt").write_text("a secret of this machine")
    run = write_run(tmp_path / "runs" / "r", troubled_run())
    found = library.run("0/r")
    assert found is not None
    view = library.view(found)
    view.read_for(60)
    name = next(iter(view.calls)).invocation  # type: ignore[union-attr]
    (run / "logs").mkdir(exist_ok=True)
    log = run / "logs" / f"{name}.txt"
    for text in ("printed", ""):
        log.unlink(missing_ok=True)
        log.write_text(text) if text else log.symlink_to(tmp_path / "secret.txt")
        document = output_of(view, name, None)
        assert document is not None
        assert document["text"] == text
    log.unlink()
    (run / "logs").rmdir()
    (tmp_path / f"{name}.txt").write_text("a secret of this machine")
    (run / "logs").symlink_to(tmp_path)
    document = output_of(view, name, None)
    assert document is not None
    assert document["text"] == ""


def test_a_nested_line_of_a_log_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    library = Library([tmp_path])
    run = write_run(tmp_path / "r", troubled_run())
    with (run / "events.jsonl").open("ab") as log:
        log.write(b"[" * 200_000 + b"\n")
        log.write(b'{"type":"progress"' + b',"rank":[' * 100_000 + b"\n")
    found = library.run("0/r")
    assert found is not None
    view = library.view(found)
    view.read_for(60)
    assert (view.share_read, view.unread) == (1.0, 2)
