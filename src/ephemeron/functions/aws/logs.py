"""What CloudWatch Logs say about invocations: the bill, and the deaths that nobody else can tell of.

One request looks for all functions at once: Lambda's own lines are found by a filter pattern, in the function's log
group, from a moment before the last look (lines arrive late and out of order). The quota is five requests a second
for an account; this makes one every few seconds, and none while nothing runs.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Any

from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.aws.settings import THROTTLED, AwsSettings, code_of, explain

PATTERN = '?"REPORT RequestId" ?"Task timed out after" ?"Runtime exited"'
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
    """One log event; None if it is nothing of Lambda's own.

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
            request=found["request"], stream=stream, billed_s=values["billed_ms"] / 1000, size_mb=values["size_mb"],
            used_mb=values["used_mb"], failed=status is not None and status[1] != "success",
        )  # fmt: skip
    if found := _TIMED_OUT.search(message):
        text = f"killed at its time limit, after {found[2]} seconds"
        return Death(request=found["request"], stream=stream, timed_out=True, text=text)
    if found := _EXITED.search(message):
        text = f"its process ended: {found['how'] or 'without a word'}"
        return Death(request=found["request"], stream=stream, timed_out=False, text=text)
    return None


class LogReader:
    """Reads one function's log group, from a moment on.

    Args:
        client: of boto3, for `logs`.
        settings: which function.
        since_ms: Unix time in milliseconds.
    """

    def __init__(self, client: Any, settings: AwsSettings, *, since_ms: int) -> None:
        self.problem = ""
        """Why logs cannot be read; empty as long as they can."""
        self._client, self._settings = client, settings
        self._since_ms = self._first_ms = since_ms
        self._seen: set[str] = set()
        self._order: deque[str] = deque()

    async def poll(self) -> list[LogReport | Death]:
        """What is new. Throttled, or not allowed to read: nothing."""
        out: list[LogReport | Death] = []
        for event in await self._fetch(filterPattern=PATTERN, startTime=self._since_ms):
            if event["eventId"] in self._seen:
                continue
            self._remember(event["eventId"])
            self._since_ms = max(self._since_ms, event["timestamp"] - _LATE_MS)
            said = parse(event["message"], event["logStreamName"])
            if said is not None:
                out.append(said)
        return out

    async def tail(self, stream: str, request: str) -> list[str]:
        """The last lines of an invocation, output of its code included."""
        events = await self._fetch(logStreamNames=[stream], startTime=self._first_ms)
        lines = [str(event["message"]).rstrip("\n") for event in events]
        starts = [n for n, line in enumerate(lines) if line.startswith(f"START RequestId: {request}")]
        return lines[starts[-1] if starts else 0 :][-_TAIL:]

    async def _fetch(self, **what: Any) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        token: dict[str, str] = {}
        try:
            while True:
                page = await asyncio.to_thread(
                    self._client.filter_log_events, logGroupName=self._settings.log_group, **what, **token
                )
                out += page["events"]
                if not page.get("nextToken"):
                    return out
                token = {"nextToken": page["nextToken"]}
        except Exception as e:  # noqa: BLE001 - botocore makes its classes as it goes
            if code_of(e) not in THROTTLED | {"ResourceNotFoundException"}:  # no log group: nothing has run yet
                self.problem = "; ".join(explain(e, self._settings, doing="logs:FilterLogEvents"))
            return out

    def _remember(self, id: str) -> None:
        self._seen.add(id)
        self._order.append(id)
        if len(self._order) > _REMEMBERED:
            self._seen.discard(self._order.popleft())
