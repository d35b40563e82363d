"""What several tasks have is kept, within a limit."""

from __future__ import annotations

from ephemeron.functions.tasks.repeated_inputs import RepeatedInputs


def view(nbytes: int) -> memoryview:
    return memoryview(bytes(nbytes))


def test_what_two_tasks_had_is_kept_and_the_least_recent_is_dropped() -> None:
    kept = RepeatedInputs(100)
    for _ in range(2):
        for key in ("a", "b", "c"):
            assert kept.get(key) is None
            kept.used(key, view(40))
        kept.used("once" + str(_), view(1))
    assert [kept.get(key) is not None for key in ("a", "b", "c", "once0")] == [False, True, True, False]
    kept.used("b", view(40))
    kept.used("a", view(40))
    assert [kept.get(key) is not None for key in ("a", "b", "c")] == [True, True, False]


def test_one_is_kept_however_large() -> None:
    kept = RepeatedInputs(0)
    for key in ("a", "a", "b", "b"):
        kept.used(key, view(10))
    assert kept.get("a") is None
    assert kept.get("b") is not None


def test_keys_that_were_seen_once_do_not_grow_without_end() -> None:
    kept = RepeatedInputs(10)
    for n in range(25_000):
        kept.used(str(n), view(1))
    assert len(kept._seen) <= 10_000
