"""Frames that a peer must not send, and calls of a lost connection."""

from __future__ import annotations

from typing import Any

import pytest

from ephemeron.communication.rpc import Receive
from ephemeron.communication.rpc.frame import Frame, Kind
from ephemeron.communication.rpc.session import PendingCall, Session
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError


def frame(kind: Kind, id: int = 1, tag: dict[str, Any] | None = None, cost: int = 40) -> Frame:
    return Frame(kind, id, tag or {}, [], [], 0, cost)


def session(**more: Any) -> Session:
    return Session(**{"client": False, "max_calls": 2, **more})


@pytest.mark.parametrize(
    "wrong",
    [
        frame(Kind.REPLY),
        frame(Kind.ERROR),
        frame(Kind.REQUEST),
        frame(Kind.REQUEST, tag={"m": 3}),
        frame(Kind.REQUEST, tag={"m": "x", "p": []}),
        frame(Kind.REQUEST, tag={"p": {}}),
    ],
)
def test_a_server_takes_only_requests_with_a_method(wrong: Frame) -> None:
    with pytest.raises(ProtocolError):
        session().arrived(wrong)


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.CANCEL])
def test_a_client_is_asked_nothing(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match="client"):
        session(client=True).arrived(frame(kind, tag={"m": "x"}))


def test_calls_at_once_are_limited_and_numbers_unique() -> None:
    server = session()
    for id in (1, 2):
        assert server.arrived(frame(Kind.REQUEST, id, {"m": "x"}))
        server.running[id] = lambda: None
    with pytest.raises(ProtocolError, match="under way"):
        server.arrived(frame(Kind.REQUEST, 2, {"m": "x"}))
    with pytest.raises(ProtocolError, match="max_calls = 2"):
        server.arrived(frame(Kind.REQUEST, 3, {"m": "x"}))
    server.arrived(frame(Kind.CANCEL, 1))
    assert server.arrived(frame(Kind.REQUEST, 3, {"m": "x"}))


def test_late_frames_of_forgotten_calls_are_dropped() -> None:
    client = session(client=True)
    for kind in (Kind.REPLY, Kind.ERROR):
        assert not client.arrived(frame(kind, 99))


def test_a_lost_connection_says_of_each_call_whether_to_repeat_it() -> None:
    client = session(client=True)
    answers = [PendingCall(Receive.VIEWS) for _ in range(2)]
    answers[1].left = True
    client.answers.update(enumerate(answers))
    client.fail(ConnectionResetError("gone"))
    for answer, may_repeat in zip(answers, (True, False), strict=True):
        with pytest.raises(ConnectionLost, match="gone") as caught:
            answer.result()
        assert caught.value.may_repeat is may_repeat
    assert not client.busy


def test_a_deadline_that_passed_at_the_server_first_is_the_same_error() -> None:
    client = session(client=True)
    answer = client.answers[1] = PendingCall(Receive.VIEWS)
    client.arrived(frame(Kind.ERROR, 1, {"type": "CallTimedOut", "text": "too late"}))
    with pytest.raises(CallTimedOut, match="too late"):
        answer.result()
