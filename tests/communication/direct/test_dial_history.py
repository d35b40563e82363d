"""Which transport is tried first, by what earlier attempts have shown."""

from __future__ import annotations

from ephemeron.communication.direct.upgrades import DialHistory

ALL = ("unix", "tcp", "websocket", "punched", "relay")


def test_the_given_order_holds_before_anything_is_measured() -> None:
    assert DialHistory(ALL).order("a") == list(ALL)
    assert DialHistory(("simulated", "other")).order("a") == ["simulated", "other"]


def test_what_failed_with_a_machine_comes_last_there_until_it_succeeds() -> None:
    history = DialHistory(ALL)
    history.failed("punched", "a")
    assert history.order("a") == ["unix", "tcp", "websocket", "relay", "punched"]
    assert history.order("b") == list(ALL)
    history.connected("punched", "a", 0.2)
    assert history.order("a") == list(ALL)


def test_what_failed_with_two_machines_and_succeeded_with_none_comes_last_with_others() -> None:
    history = DialHistory(ALL)
    history.failed("punched", "a")
    history.failed("punched", "b")
    assert history.order("c") == ["unix", "tcp", "websocket", "relay", "punched"]
    history.connected("punched", "b", 0.2)
    assert history.order("c") == list(ALL)
    assert history.order("a")[-1] == "punched"


def test_the_quicker_one_is_tried_first_but_the_relay_after_all() -> None:
    history = DialHistory(ALL)
    for _ in range(3):
        history.connected("websocket", "a", 0.9)
        history.connected("punched", "a", 0.1)
        history.connected("relay", "a", 0.001)
    assert history.order("a") == ["unix", "tcp", "punched", "websocket", "relay"]
    assert history.order("b") == history.order("a")


def test_small_differences_do_not_count() -> None:
    history = DialHistory(("punched", "websocket"))
    for _ in range(5):
        history.connected("punched", "a", 0.24)
        history.connected("websocket", "a", 0.22)
    assert history.order("a") == ["punched", "websocket"]


def test_large_messages_count_more_than_connecting() -> None:
    history = DialHistory(ALL)
    history.carried("websocket", "a", 0.25)
    assert history.order("a") == ["unix", "tcp", "punched", "websocket", "relay"]
    assert history.better("a", than="websocket") == ["unix", "tcp", "punched"]
    history.carried("punched", "a", 0.01)
    assert history.order("b") == history.order("a"), "what was learned there counts elsewhere"
    history.carried("punched", "a", 2.0)
    assert history.order("a") == ["unix", "tcp", "websocket", "punched", "relay"]
    history.carried("relay", "a", 0.001)
    assert history.order("a")[-1] == "relay"


def test_what_failed_is_still_better_if_it_worked() -> None:
    history = DialHistory(ALL)
    history.failed("punched", "a")
    assert history.better("a", than="relay") == ["unix", "tcp", "websocket", "punched"]
    assert history.better("a", than="unix") == []
