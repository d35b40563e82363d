"""Messages of function processes: each is read back as it was written, and a line that is none is refused."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from ephemeron.errors import CorruptMessage
from ephemeron.functions import process_messages as messages
from ephemeron.functions.base import Call

CALL = Call(run="r", rank=1, attempt=0, memory_mb=256, lifetime_s=60.0, channel="folder", entry="echo", request={"n": [1]})
OF_HOST = [
    messages.Start(),
    messages.InvokeMessage(
        call=CALL, invocation="ab", origin=1.5, lifetime_s=60.0, vcpus=0.5, scratch="/s", base="/b", cold=True, log="/l"
    ),
    messages.SuccessorAccepted(number=1),
    messages.SuccessorRefused(number=2, text="no room"),
]
OF_FUNCTION = [
    messages.Ready(pid=7),
    messages.StartFailed(error="OSError", traceback="T"),
    messages.Running(),
    messages.EventMessage(line='{"kind":"note"}'),
    messages.InvokeSuccessor(number=1, call=CALL),
    messages.Returned(value={"deep": [1, None, True]}, reusable=True),
    messages.Raised(error="E", traceback="T", reusable=False),
]


def test_every_kind_of_message_is_tried() -> None:
    assert {type(m) for m in OF_HOST} == set(get_args(messages.HostMessage))
    assert {type(m) for m in OF_FUNCTION} == set(get_args(messages.FunctionMessage))


@pytest.mark.parametrize("message", OF_HOST, ids=lambda m: type(m).__name__)
def test_a_message_of_the_host_is_read_back(message: messages.HostMessage) -> None:
    line = messages.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert messages.host_message(line) == message
    with pytest.raises(CorruptMessage):
        messages.function_message(line)


@pytest.mark.parametrize("message", OF_FUNCTION, ids=lambda m: type(m).__name__)
def test_a_message_of_a_function_is_read_back(message: messages.FunctionMessage) -> None:
    line = messages.encode(message)
    assert messages.function_message(line) == message
    with pytest.raises(CorruptMessage):
        messages.host_message(line)


@pytest.mark.parametrize(
    "line", [b"", b"nothing\n", b"[]\n", b"{}\n", b'{"message": []}\n', b'{"message": "Ready"}\n', b'{"message": "Ready", "pid": "7"}\n']
)
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(CorruptMessage):
        messages.function_message(line)


def test_a_value_that_is_not_json_cannot_be_sent() -> None:
    with pytest.raises(TypeError):
        messages.encode(messages.Returned(value={"a set": {1}}, reusable=True))


def test_unknown_fields_are_refused() -> None:
    line = json.dumps({"message": "Ready", "pid": 7, "more": 1}).encode()
    with pytest.raises(CorruptMessage, match="more"):
        messages.function_message(line)
