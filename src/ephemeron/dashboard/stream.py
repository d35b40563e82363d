"""Documents of all pages by topic, and server-sent events with them: one whenever a document has changed.

Who watches a run reads its log on, each time for a fraction of a second; what one page has read, all others have. A stream ends with
its connection, or when the dashboard ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
from starlette.concurrency import run_in_threadpool

from ephemeron.dashboard.library import Library
from ephemeron.dashboard.run_documents import summary
from ephemeron.dashboard.services import Services, Tasks
from ephemeron.dashboard.studies import Studies

_READ_S = 0.25
"""Seconds of reading before the page is told."""
_PAUSE_S = 1.0
_KEEP_ALIVE_S = 15.0


class Pages:
    """Documents of pages.

    Args:
        library: of runs and studies.
        studies: of the library.
        services: data services.
    """

    TOPICS: ClassVar = ("runs", "run", "studies", "study", "services", "tasks")

    def __init__(self, library: Library, studies: Studies, services: Services) -> None:
        self.library, self.studies, self.services = library, studies, services
        self.tasks = Tasks(library.roots)
        self.over = asyncio.Event()
        """The dashboard ends."""

    def document(self, name: str, key: str) -> Any:
        """A document; None: there is no such run or study. Blocks."""
        match name:
            case "runs":
                return {"runs": self.library.rows()}
            case "studies":
                return {"studies": self.studies.rows()}
            case "services":
                return {"services": self.services.document()}
            case "tasks":
                return {"tasks": self.tasks.document()}
        found = self.library.run(key) if name == "run" else self.library.study(key)
        if found is None:
            return None
        if name == "study":
            return self.studies.head(found)
        if name == "curves":
            return {"curves": self.studies.curves(found)}
        view = self.library.view(found)
        view.read_for(_READ_S)
        return {"key": found.key, "study": found.study, "trial": found.trial, "path": str(found.path), **summary(view)}


async def events(pages: Pages, topic: str, key: str) -> AsyncIterator[bytes]:
    """Server-sent events of a topic: `document` with JSON, `gone` where there is none (any more)."""
    last, said_at = b"", time.monotonic()
    yield b"retry: 1000\n\n"
    while not pages.over.is_set():
        document = await run_in_threadpool(pages.document, topic, key)
        if document is None:
            yield b"event: gone\ndata: {}\n\n"
            return
        data = msgspec.json.encode(document)
        if data != last:
            last, said_at = data, time.monotonic()
            yield b"event: document\ndata: " + data + b"\n\n"
        elif time.monotonic() - said_at > _KEEP_ALIVE_S:
            said_at = time.monotonic()
            yield b": still here\n\n"
        is_reading = isinstance(document, dict) and document.get("share_read", 1.0) < 1.0
        try:
            async with asyncio.timeout(0.05 if is_reading else _PAUSE_S):
                await pages.over.wait()
        except TimeoutError:
            pass
