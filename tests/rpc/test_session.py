"""Windows of streams, and what a peer must not send."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.communication.rpc import Receive
from ephemeron.communication.rpc.frame import Frame, Kind
from ephemeron.communication.rpc.session import PendingCall, Session, StreamState
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, RemoteError, StreamEnded


def frame(kind: Kind, id: int = 1, tag: dict[str, Any] | None = None, cost: int = 40) -> Frame:
    return Frame(kind, id, tag or {}, [], [], 0, cost)


def flow(window: int, peer_window: int = 1000) -> StreamState:
    return StreamState(1, window=window, peer_window=peer_window, receive=Receive.VIEWS)


@settings(max_examples=300)
@given(
    st.integers(1, 400),
    st.lists(st.integers(36, 500), max_size=60),
    st.lists(st.sampled_from(("send", "deliver", "take", "credit")), max_size=400),
)
def test_a_window_is_kept_and_never_stands_still(window: int, costs: list[int], order: list[str]) -> None:
    sender, receiver = flow(1000, peer_window=window), flow(window)
    to_send, wire, credits = deque(costs), deque[Frame](), deque[int]()
    taken: list[int] = []

    def step(what: str) -> bool:
        if what == "send" and to_send and sender.may_send(to_send[0]):
            sender.sending(to_send[0])
            wire.append(frame(Kind.MESSAGE, cost=to_send.popleft()))
        elif what == "deliver" and wire:
            receiver.arrived(wire.popleft())
        elif what == "take" and receiver.may_take():
            came, credit = receiver.take()
            taken.append(came.cost)
            if credit:
                credits.append(credit)
        elif what == "credit" and credits:
            sender.arrived(frame(Kind.CREDIT, tag={"n": credits.popleft()}))
        else:
            return False
        assert receiver.unread_bytes <= window + max(costs)
        return True

    for what in order:
        step(what)
    # Whatever happened: if everybody goes on, everything arrives, in order.
    while any(step(what) for what in ("send", "deliver", "take", "credit")):
        pass
    assert taken == costs
    assert not to_send


def test_a_sender_beyond_the_window_is_cut_off() -> None:
    receiver = flow(100)
    receiver.arrived(frame(Kind.MESSAGE, cost=60))
    receiver.arrived(frame(Kind.MESSAGE, cost=40))
    with pytest.raises(ProtocolError, match="beyond window"):
        receiver.arrived(frame(Kind.MESSAGE, cost=36))


@pytest.mark.parametrize("credit", [0, -1, 41, "40", None, 1.5])
def test_credit_that_was_not_spent_is_refused(credit: Any) -> None:
    sender = flow(100)
    sender.sending(40)
    with pytest.raises(ProtocolError, match="given back"):
        sender.arrived(frame(Kind.CREDIT, tag={"n": credit}))


def test_nothing_follows_an_end() -> None:
    receiver = flow(100)
    receiver.arrived(frame(Kind.MESSAGE))
    receiver.arrived(frame(Kind.END))
    assert receiver.take()[0].kind is Kind.MESSAGE
    with pytest.raises(StreamEnded):
        receiver.take()
    with pytest.raises(ProtocolError):
        receiver.arrived(frame(Kind.MESSAGE))


def test_what_came_before_a_failure_can_be_taken() -> None:
    receiver = flow(100)
    receiver.arrived(frame(Kind.MESSAGE))
    receiver.arrived(frame(Kind.RESET, tag={"type": "ValueError", "text": "broken"}))
    receiver.take()
    with pytest.raises(RemoteError, match="ValueError: broken"):
        receiver.take()
    with pytest.raises(RemoteError):
        receiver.sending(40)


def session(**more: Any) -> Session:
    return Session(**{"client": False, "window": 100, "peer_window": 100, "max_calls": 2, **more})


@pytest.mark.parametrize(
    "wrong",
    [
        frame(Kind.REPLY),
        frame(Kind.ERROR),
        frame(Kind.REQUEST),
        frame(Kind.REQUEST, tag={"m": 3}),
        frame(Kind.REQUEST, tag={"m": "x", "p": []}),
        frame(Kind.OPEN, tag={"p": {}}),
    ],
)
def test_a_server_takes_only_requests_with_a_method(wrong: Frame) -> None:
    with pytest.raises(ProtocolError):
        session().arrived(wrong)


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.OPEN, Kind.CANCEL])
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


def test_late_frames_of_forgotten_calls_and_streams_are_dropped() -> None:
    client = session(client=True)
    for kind in (Kind.REPLY, Kind.ERROR, Kind.MESSAGE, Kind.CREDIT, Kind.END, Kind.RESET):
        assert not client.arrived(frame(kind, 99))


def test_a_lost_connection_says_of_each_call_whether_to_repeat_it() -> None:
    client = session(client=True)
    answers = [PendingCall(Receive.VIEWS) for _ in range(2)]
    answers[1].left = True
    client.answers.update(enumerate(answers))
    stream = client.flow(5, Receive.VIEWS)
    client.fail(ConnectionResetError("gone"))
    for answer, may_repeat in zip(answers, (True, False), strict=True):
        with pytest.raises(ConnectionLost, match="gone") as caught:
            answer.result()
        assert caught.value.may_repeat is may_repeat
    with pytest.raises(ConnectionLost):
        stream.take()
    assert not client.busy


def test_a_deadline_that_passed_at_the_server_first_is_the_same_error() -> None:
    client = session(client=True)
    answer = client.answers[1] = PendingCall(Receive.VIEWS)
    client.arrived(frame(Kind.ERROR, 1, {"type": "CallTimedOut", "text": "too late"}))
    with pytest.raises(CallTimedOut, match="too late"):
        answer.result()
