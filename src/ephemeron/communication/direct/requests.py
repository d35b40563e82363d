"""Requests between members: a question, and one answer or none."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.communication.direct.message import Head, Kind

if TYPE_CHECKING:
    from ephemeron.communication.direct.mesh import Mesh

_log = logging.getLogger(__name__)
_ASKED = struct.Struct("<q")
"""Number in the head of the inner message; before its extra bytes."""

Answer = Callable[[int, Head, memoryview], Awaitable[Sequence[Buffer]]]
"""Answers requests of a kind: rank of the asking member, head, body. `LinkFailed`: it has no answer."""


class Requests:
    """Questions of one member that are not answered yet, and its answers to others.

    Args:
        mesh: sends them.
        start: runs an answer beside everything else.
    """

    def __init__(self, mesh: Mesh, start: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._mesh, self._start = mesh, start
        self._answers: dict[int, Answer] = {}
        self._waiting: dict[int, tuple[int, asyncio.Future[memoryview]]] = {}
        """By number of the request: rank that is asked, and its answer."""
        self._last = 0

    def answer(self, kind: int, handler: Answer) -> None:
        """See `Mesh.answer`."""
        self._answers[kind] = handler

    async def ask(self, rank: int, kind: int, extra: bytes, buffers: Sequence[Buffer], *, number: int, timeout_s: float) -> memoryview:
        """See `Mesh.request`."""
        self._last += 1
        asked, answer = self._last, asyncio.get_running_loop().create_future()
        self._waiting[asked] = rank, answer
        try:
            if not self._mesh.send(rank, Kind.REQUEST, asked, kind, _ASKED.pack(number) + extra, buffers):
                raise LinkFailed(f"no route to rank {rank}")
            async with asyncio.timeout(timeout_s):
                found: memoryview = await answer
                return found
        except TimeoutError as e:
            raise LinkFailed(f"rank {rank} has not answered within {timeout_s:g} s") from e
        finally:
            del self._waiting[asked]

    def take(self, head: Head, body: memoryview) -> None:
        """Takes in a message of another member that is a request or an answer."""
        if head.kind == Kind.REQUEST:
            self._start(self._reply(head, body))
            return
        rank, answer = self._waiting.get(head.number, (-1, None))
        if answer is None or answer.done() or rank != head.sender:
            return
        if head.part:
            answer.set_result(body)
        else:
            answer.set_exception(LinkFailed(f"rank {rank} has no answer"))

    def lost(self, rank: int, why: str) -> None:
        """Fails what a rank was asked: the question, or its answer, may be lost."""
        for asked, answer in self._waiting.values():
            if asked == rank and not answer.done():
                answer.set_exception(LinkFailed(f"the connection to rank {rank} is lost: {why}"))

    async def _reply(self, head: Head, body: memoryview) -> None:
        (number,) = _ASKED.unpack_from(head.extra)
        inner = head._replace(kind=head.part, number=number, extra=head.extra[_ASKED.size :])
        handler, buffers, found = self._answers.get(head.part), list[Buffer](), 1
        try:
            if handler is None:
                raise LinkFailed(f"requests of kind {head.part} are not answered here")
            buffers = list(await handler(head.sender, inner, body))
        except LinkFailed as e:
            _log.debug("no answer to rank %d: %s", head.sender, e)
            found = 0
        self._mesh.send(head.sender, Kind.REPLY, head.number, found, b"", buffers)
