"""Structured logging: the standard `logging` library, with run, rank and attempt on every record.

Modules log through `logging.getLogger(__name__)`. Code that works for one function enters `context(run=…, rank=…, attempt=…)`
once; records logged inside it carry these fields, also across `await` and in simulated functions that share a process. The
library adds no handler by itself: programs that embed it configure `logging` as they like and may add `ContextFilter` to a
handler of theirs. The command line and function processes call `configure`.

Environment variables: `EPHEMERON_LOG_LEVEL` (debug, info, warning, error; default warning) and `EPHEMERON_LOG_FORMAT` (text
or json). Both are inherited by function processes on this machine.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from ephemeron.errors import JobError

LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "EPHEMERON_LOG_LEVEL"
FORMAT_VARIABLE = "EPHEMERON_LOG_FORMAT"

_EMPTY: Mapping[str, str | int] = MappingProxyType({})
_FIELDS: ContextVar[Mapping[str, str | int]] = ContextVar("ephemeron_log_fields", default=_EMPTY)


@contextmanager
def context(**fields: str | int) -> Iterator[None]:
    """Fields of all records logged inside, in addition to those of an enclosing context."""
    token = _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


class ContextFilter(logging.Filter):
    """Adds the current context to each record: as attributes (`record.rank`) and together as `record.fields`."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields = _FIELDS.get()
        record.fields = fields
        for name, value in fields.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields: Mapping[str, str | int] = getattr(record, "fields", _EMPTY)
        return f"{text} [{' '.join(f'{k}={v}' for k, v in fields.items())}]" if fields else text


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", _EMPTY),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the time: progress bars and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # closed: a record is never worth the work that it tells of
            self.handleError(record)


def variables() -> dict[str, str]:
    """Environment variables by which function processes log like this one; for platforms that do not inherit them."""
    return {name: os.environ[name] for name in (LEVEL_VARIABLE, FORMAT_VARIABLE) if os.environ.get(name)}


def configure(level: str | None = None) -> None:
    """Sends the library's records to standard error. A second call changes the level only.

    Args:
        level: one of `LEVELS`; None: as `EPHEMERON_LOG_LEVEL` says.

    Raises:
        JobError: unknown level or format.
    """
    chosen = (level or os.environ.get(LEVEL_VARIABLE) or "warning").lower()
    if chosen not in LEVELS:
        raise JobError(f"log level {chosen} is not known", remedy=f"use one of {', '.join(LEVELS)}")
    style = os.environ.get(FORMAT_VARIABLE) or "text"
    if style not in ("text", "json"):
        raise JobError(f"{FORMAT_VARIABLE} = {style} is not known", remedy="use text or json")
    logger = logging.getLogger("ephemeron")
    logger.setLevel(chosen.upper())
    if not any(isinstance(h, _StderrHandler) for h in logger.handlers):
        handler = _StderrHandler()
        handler.addFilter(ContextFilter())
        handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
