"""Log groups in memory, and the part of CloudWatch Logs that reads them.

Of filter patterns the used part is supported: words and "quoted phrases" that all must occur, and those with a
leading `?` of which one must.
"""

from __future__ import annotations

import bisect
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.communication.rpc.http import HttpRequest, Response, json_response

_PAGE = 1_000
_TERM = re.compile(r'(\??)(?:"((?:[^"\\]|\\.)*)"|(\S+))')


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CloudWatchLine:
    """One log event."""

    timestamp: int
    """Milliseconds since 1970."""
    n: int
    """Order among all lines."""
    stream: str
    message: str


class Logs:
    """All log groups of the service."""

    def __init__(self) -> None:
        self.groups: dict[str, list[CloudWatchLine]] = defaultdict(list)
        self._n = 0

    def write(self, group: str, stream: str, message: str) -> None:
        """Appends a line."""
        self._n += 1
        self.groups[group].append(CloudWatchLine(timestamp=int(time.time() * 1000), n=self._n, stream=stream, message=message.rstrip("\n")))

    async def handle(self, request: HttpRequest) -> Response:
        """Answers a CloudWatch Logs request (JSON 1.1: the operation is a header)."""
        action = request.headers.get("x-amz-target", "").rpartition(".")[2]
        wanted = request.json()
        group = str(wanted.get("logGroupName", ""))
        if action == "DeleteLogGroup":
            return json_response({}) if self.groups.pop(group, None) is not None else _no_group()
        if action == "DescribeLogGroups":
            prefix = str(wanted.get("logGroupNamePrefix", ""))
            return json_response({"logGroups": [{"logGroupName": g} for g in sorted(self.groups) if g.startswith(prefix)]})
        if action not in ("FilterLogEvents", "GetLogEvents"):
            return _error("UnknownOperationException", f"{action or 'no operation'} is not spoken here")
        if group not in self.groups:
            return _no_group()
        return json_response(self._filtered(group, wanted) if action == "FilterLogEvents" else self._stream(group, wanted))

    def _filtered(self, group: str, wanted: Mapping[str, Any]) -> dict[str, object]:
        streams = wanted.get("logStreamNames")
        lines = [
            line
            for line in _between(self.groups[group], wanted)
            if (not streams or line.stream in streams) and matches(str(wanted.get("filterPattern", "")), line.message)
        ]
        begin = int(wanted.get("nextToken", 0))
        page = lines[begin : begin + min(int(wanted.get("limit", _PAGE)), _PAGE)]
        more = {"nextToken": str(begin + len(page))} if begin + len(page) < len(lines) else {}
        return {
            "events": [
                {
                    "logStreamName": line.stream,
                    "timestamp": line.timestamp,
                    "message": line.message,
                    "ingestionTime": line.timestamp,
                    "eventId": str(line.n),
                }
                for line in page
            ],
            **more,
        }

    def _stream(self, group: str, wanted: Mapping[str, Any]) -> dict[str, object]:
        lines = [line for line in _between(self.groups[group], wanted) if line.stream == wanted.get("logStreamName")]
        limit = int(wanted.get("limit", _PAGE))
        lines = lines[:limit] if wanted.get("startFromHead") else lines[-limit:]
        events = [{"timestamp": line.timestamp, "message": line.message} for line in lines]
        return {"events": events, "nextForwardToken": f"f/{len(lines)}", "nextBackwardToken": "b/0"}


def matches(pattern: str, message: str) -> bool:
    """Whether a message fits a pattern of plain terms.

    >>> matches('?"REPORT RequestId" ?timed', "Task timed out")
    True
    """
    needed: list[str] = []
    optional: list[str] = []
    for mark, quoted, word in _TERM.findall(pattern):
        (optional if mark else needed).append(quoted or word)
    return all(term in message for term in needed) and (not optional or any(term in message for term in optional))


def _between(lines: list[CloudWatchLine], wanted: Mapping[str, Any]) -> list[CloudWatchLine]:
    begin, end = wanted.get("startTime"), wanted.get("endTime")
    first = 0 if begin is None else bisect.bisect_left(lines, int(begin), key=lambda line: line.timestamp)
    return [line for line in lines[first:] if end is None or line.timestamp < int(end)]


def _no_group() -> Response:
    return _error("ResourceNotFoundException", "The specified log group does not exist.")


def _error(kind: str, text: str) -> Response:
    return json_response({"__type": kind, "message": text}, status=400, headers={"x-amzn-ErrorType": kind})
