"""Figure 4-7, arrow by arrow; versions; and what survives a coordinator."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.config.typed import build, plain
from ephemeron.data.service.messages import FlowEntry, Registry
from ephemeron.errors import JobError

IDLE_S = 10.0


def registered(now: float = 0.0) -> Registry:
    registry = Registry(idle_s=IDLE_S)
    assert registry.register(name="a/b", version=2, signature="x", samples=5, now=now) == "new"
    return registry


def in_state(state: str) -> Registry:
    registry = registered()
    if state != "created":
        registry.set_serving("a/b", now=0)
    if state == "accessed":
        registry.set_readers("a/b", readers=1, now=0)
    if state == "idle":
        assert registry.tick(now=IDLE_S) == ("a/b",)
    assert registry["a/b"].state == state
    return registry


@pytest.mark.parametrize(
    ("state", "event", "after"),
    [
        ("created", "serving", "ready"),
        ("created", "tick", "created"),
        ("ready", "serving", "ready"),
        ("ready", "read", "accessed"),
        ("ready", "unread", "ready"),
        ("ready", "early tick", "ready"),
        ("ready", "tick", "idle"),
        ("accessed", "read", "accessed"),
        ("accessed", "unread", "ready"),
        ("accessed", "tick", "accessed"),
        ("accessed", "serving", "accessed"),
        ("idle", "serving", "ready"),
        ("idle", "tick", "idle"),
    ],
)
def test_every_arrow(state: str, event: str, after: str) -> None:
    registry = in_state(state)
    match event:
        case "serving":
            registry.set_serving("a/b", now=1)
        case "read":
            registry.set_readers("a/b", readers=2, now=1)
        case "unread":
            registry.set_readers("a/b", readers=0, now=1)
        case "early tick":
            assert registry.tick(now=IDLE_S - 0.1) == ()
        case "tick":
            registry.tick(now=IDLE_S + 1)
    assert registry["a/b"].state == after
    assert registry.busy == (("a/b",) if after in ("ready", "accessed") else ())


@pytest.mark.parametrize("state", ["created", "ready", "accessed", "idle"])
def test_only_what_costs_nothing_can_be_deleted(state: str) -> None:
    registry = in_state(state)
    if state in ("created", "idle"):
        registry.delete("a/b")
        with pytest.raises(JobError, match="no flow 'a/b'"):
            registry["a/b"]
        assert registry.register(name="a/b", version=1, signature="other", samples=1, now=0) == "new"
    else:
        with pytest.raises(JobError, match=f"a/b is {state} and cannot be deleted; .*10 s"):
            registry.delete("a/b")
        assert "a/b" in registry.flows


def test_reading_puts_off_idleness() -> None:
    registry = in_state("accessed")
    registry.set_readers("a/b", readers=1, now=100)
    registry.set_readers("a/b", readers=0, now=105)
    assert registry.tick(now=105 + IDLE_S - 0.1) == ()
    assert registry.tick(now=105 + IDLE_S) == ("a/b",)
    assert registry.tick(now=1000) == (), "it is said once"


def test_a_flow_is_ready_for_a_while_however_long_its_router_was_silent() -> None:
    registry = in_state("accessed")
    gone = 3 * IDLE_S  # a busy machine: nothing was heard of the router, and then that its readers have left
    registry.set_readers("a/b", readers=0, now=gone)
    assert registry.tick(now=gone) == ()
    assert registry["a/b"].state == "ready"
    assert registry.tick(now=gone + IDLE_S) == ("a/b",)


def test_versions() -> None:
    registry = registered()
    with pytest.raises(JobError, match="version 1 is older than version 2"):
        registry.register(name="a/b", version=1, signature="x", samples=5, now=1)
    for signature, samples in (("y", 5), ("x", 6)):
        with pytest.raises(JobError, match=r"version 2 is registered with other steps or samples.*raise the version"):
            registry.register(name="a/b", version=2, signature=signature, samples=samples, now=1)
    assert registry.register(name="a/b", version=2, signature="x", samples=5, now=7) == "same"
    assert registry["a/b"].used_at == 7
    assert registry.register(name="a/b", version=3, signature="y", samples=9, now=8) == "updated"
    assert registry["a/b"].state == "created", "its router was of the version before"
    assert (registry["a/b"].version, registry["a/b"].signature, registry["a/b"].samples) == (3, "y", 9)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["register", "serving", "read", "unread", "tick", "delete"]),
        st.sampled_from("abc"),
        st.integers(1, 3),
        st.integers(0, 8),
    ),
    max_size=40,
)


@given(EVENTS, st.integers(0, 40))
def test_a_state_goes_on_as_its_registry_would(events: list[tuple[str, str, int, int]], cut: int) -> None:
    one, now = Registry(idle_s=IDLE_S), 0.0
    other: Registry | None = None

    def do(registry: Registry, event: str, name: str, version: int) -> object:
        try:
            match event:
                case "register":
                    return registry.register(name=name, version=version, signature="s", samples=1, now=now)
                case "serving":
                    return registry.set_serving(name, now=now)
                case "read" | "unread":
                    return registry.set_readers(name, readers=event == "read", now=now)
                case "tick":
                    return registry.tick(now=now)
                case _:
                    return registry.delete(name)
        except JobError as e:
            return str(e)

    for number, (event, name, version, pause) in enumerate(events):
        now += pause
        if number == cut:
            state = json.loads(json.dumps(plain(one.entries())))
            other = Registry(idle_s=IDLE_S)
            other.restore([build(FlowEntry, entry, where="entry") for entry in state], now=now)
            for entry in one.flows.values():
                entry.used_at = now  # another clock: what is left of idleness is not carried over
        said = do(one, event, name, version)
        if other is not None:
            assert do(other, event, name, version) == said
            assert other.entries() == one.entries()
        for entry in one.flows.values():
            assert (entry.name in one.busy) == (entry.state in ("ready", "accessed"))
