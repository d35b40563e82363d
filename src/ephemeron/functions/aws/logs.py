"""CloudWatch Logs as log source: bills of invocations, and deaths that no handler can report.

One request covers all functions: a filter pattern finds Lambda's own lines in the function's log
group, from a moment before the last request (lines arrive late and out of order). The quota is five requests per second
and account; this makes one every few seconds, and none while no call is open.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.aws.settings import THROTTLED, AwsSettings, code_of, explain

PATTERN = '?"REPORT RequestId" ?"Task timed out after" ?"Runtime exited" ?"platform.report"'
_LATE_MS = 60_000
_REMEMBERED = 20_000
_TAIL = 200

_REQUEST = r"(?P<request>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_REPORT = re.compile(rf"^REPORT RequestId: {_REQUEST}\s")
_FIELDS = {
    "billed_ms": re.compile(r"\tBilled Duration: ([\d.]+) ms"),
    "size_mb": re.compile(r"\tMemory Size: (\d+) MB"),
    "used_mb": re.compile(r"\tMax Memory Used: (\d+) MB"),
}
_STATUS = re.compile(r"\tStatus: (\w+)")
_TIMED_OUT = re.compile(rf"{_REQUEST} Task timed out after ([\d.]+) seconds")
_EXITED = re.compile(rf"RequestId: {_REQUEST} Error: Runtime exited(?: with error: (?P<how>[^\n]*))?")


def parse(message: str, stream: str) -> LogReport | Death | None:
    """One log event; None if it is not a line of Lambda itself.

    >>> parse("REPORT RequestId: 6f74bd9c-9a6f-4a0c-8c2d-0123456789ab\\tDuration: 3.1 ms\\tBilled Duration: 4 ms\\t"
    ...       "Memory Size: 128 MB\\tMax Memory Used: 36 MB\\t", "s").billed_s
    0.004
    """
    if found := _REPORT.match(message):
        values = {name: float(m[1]) for name, pattern in _FIELDS.items() if (m := pattern.search(message))}
        if values.keys() != _FIELDS.keys():
            return None
        status = _STATUS.search(message)
        return LogReport(
            request=found["request"],
            stream=stream,
            billed_s=values["billed_ms"] / 1000,
            size_mb=values["size_mb"],
            used_mb=values["used_mb"],
            failed=status is not None and status[1] != "success",
        )
    if found := _TIMED_OUT.search(message):
        text = f"killed at its time limit, after {found[2]} seconds"
        return Death(request=found["request"], stream=stream, timed_out=True, text=text)
    if found := _EXITED.search(message):
        text = f"its process ended: {found['how'] or 'without a word'}"
        return Death(request=found["request"], stream=stream, timed_out=False, text=text)
    return None


def parse_json(message: str, stream: str) -> list[LogReport | Death]:
    """One log event in Lambda's JSON form, which functions on managed instances always have; empty if it is no report.

    There is one line for the bill and for the way in which an invocation ended, without sizes of memory.
    """
    try:
        record = json.loads(message)["record"]
        request, status, metrics = str(record["requestId"]), str(record.get("status", "success")), record["metrics"]
        billed_s = math.ceil(float(metrics.get("billedDurationMs", metrics["durationMs"])) - 1e-6) / 1000
        size_mb, used_mb = float(metrics.get("memorySizeMB", 1.0)), float(metrics.get("maxMemoryUsedMB", 0.0))
    except (ValueError, KeyError, TypeError):
        return []
    report = LogReport(request=request, stream=stream, billed_s=billed_s, size_mb=size_mb, used_mb=used_mb, failed=status != "success")
    if status == "timeout":
        return [report, Death(request=request, stream=stream, timed_out=True, text="killed at its time limit")]
    if record.get("errorType") == "Runtime.ExitError":
        return [report, Death(request=request, stream=stream, timed_out=False, text="its process ended")]
    return [report]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """One event of CloudWatch Logs."""

    id: str
    timestamp_ms: int
    """Unix time in milliseconds."""
    stream: str
    message: str

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> LogEvent:
        """An event as FilterLogEvents returns it."""
        return cls(
            id=str(event["eventId"]),
            timestamp_ms=int(event["timestamp"]),
            stream=str(event["logStreamName"]),
            message=str(event["message"]),
        )


class LogReader:
    """Reads one function's log group, from a moment on.

    Args:
        client: of boto3, for `logs`.
        settings: which function.
        since_ms: Unix time in milliseconds.
    """

    def __init__(self, client: Any, settings: AwsSettings, *, since_ms: int) -> None:
        self.problem = ""
        """Why logs cannot be read; empty: they can."""
        self._client, self._settings = client, settings
        self._since_ms = self._first_ms = since_ms
        self._seen: set[str] = set()
        self._order: deque[str] = deque()

    async def poll(self) -> list[LogReport | Death]:
        """New reports and deaths; none while requests are throttled or refused."""
        out: list[LogReport | Death] = []
        for event in await self._fetch(filterPattern=PATTERN, startTime=self._since_ms):
            if event.id in self._seen:
                continue
            self._remember(event.id)
            self._since_ms = max(self._since_ms, event.timestamp_ms - _LATE_MS)
            if event.message.startswith("{"):
                out += parse_json(event.message, event.stream)
            elif (said := parse(event.message, event.stream)) is not None:
                out.append(said)
        return out

    async def tail(self, stream: str, request: str) -> list[str]:
        """The last lines of an invocation, output of its code included."""
        events = await self._fetch(logStreamNames=[stream], startTime=self._first_ms)
        lines = [event.message.rstrip("\n") for event in events]
        starts = [n for n, line in enumerate(lines) if line.startswith(f"START RequestId: {request}")]
        return lines[starts[-1] if starts else 0 :][-_TAIL:]

    async def _fetch(self, **what: Any) -> list[LogEvent]:
        out: list[LogEvent] = []
        token: dict[str, str] = {}
        try:
            while True:
                page = await asyncio.to_thread(self._client.filter_log_events, logGroupName=self._settings.log_group, **what, **token)
                out += [LogEvent.of(event) for event in page["events"]]
                if not page.get("nextToken"):
                    return out
                token = {"nextToken": page["nextToken"]}
        except Exception as e:  # noqa: BLE001 - botocore makes its error classes at run time
            if code_of(e) not in THROTTLED | {"ResourceNotFoundException"}:  # no log group: nothing has run yet
                self.problem = "; ".join(explain(e, self._settings, doing="logs:FilterLogEvents"))
            return out

    def _remember(self, id: str) -> None:
        self._seen.add(id)
        self._order.append(id)
        if len(self._order) > _REMEMBERED:
            self._seen.discard(self._order.popleft())
