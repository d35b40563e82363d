"""Which functions are started, again or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.errors import FunctionLost, InvocationRefused
from ephemeron.runs.function_set import AGAIN_S, MOST_LOSSES, MOST_REFUSALS, Fail, FunctionSet, How, Start, end_of


def lost(functions: FunctionSet, slot: int, times: int) -> list[object]:
    """Actions after each of so many losses."""
    found: list[object] = []
    for n in range(times):
        functions.ended(slot, "lost", f"loss {n}")
        found += functions.decide(0.0)
    return found


def test_a_fixed_slot_is_filled_until_it_is_done() -> None:
    functions = FunctionSet()
    functions.keep(3)
    assert functions.decide(0.0) == [Start(3, 0)]
    assert functions.decide(0.0) == [], "each action is given once"
    functions.ended(3, "unfinished", "its time was up")
    assert functions.decide(0.0) == [Start(3, 1)]
    functions.ended(3, "handed over")
    assert (functions.decide(0.0), functions.running) == ([], {3}), "its successor runs already"
    functions.ended(3, "lost", "killed")
    assert functions.decide(0.0) == [Start(3, 3)]
    functions.ended(3, "done")
    assert (functions.decide(0.0), functions.open) == ([], frozenset())
    functions.ended(3, "lost", "late")
    assert functions.decide(0.0) == []


def test_too_many_losses_in_a_row_fail_a_slot_and_progress_ends_the_row() -> None:
    functions = FunctionSet()
    for slot in (0, 1):
        functions.keep(slot)
    functions.decide(0.0)
    assert lost(functions, 0, MOST_LOSSES) == [Start(0, n) for n in range(1, MOST_LOSSES + 1)]
    functions.progressed(5, 0)
    functions.progressed(5, 1)
    assert functions.losses(0) == 0
    assert len(lost(functions, 0, MOST_LOSSES)) == MOST_LOSSES
    functions.progressed(5, 0)  # nothing more than before
    functions.ended(0, "unfinished", "its time was up")
    [failed] = functions.decide(0.0)
    assert failed == Fail(0, "its time was up", MOST_LOSSES + 1)
    assert str(failed) == f"lost {MOST_LOSSES + 1} times in a row without progress: its time was up"
    assert functions.running == {1}, "the other slot has its own budget"
    assert functions.decide(0.0) == []


def test_what_another_one_would_not_do_better_fails_at_once() -> None:
    functions = FunctionSet()
    functions.keep(0)
    functions.decide(0.0)
    functions.ended(0, "failed", "ValueError: mine")
    [failed] = functions.decide(0.0)
    assert (failed, str(failed)) == (Fail(0, "ValueError: mine", 0), "ValueError: mine")


def test_a_refusal_costs_nothing_and_is_tried_again_after_a_pause() -> None:
    functions = FunctionSet()
    functions.keep(0)
    assert functions.decide(10.0) == [Start(0, 0)]
    for n in range(MOST_REFUSALS):
        functions.ended(0, "refused", "full", now=10.0 + n)
        assert functions.decide(10.0 + n) == []
        assert functions.due == 10.0 + n + AGAIN_S
        assert functions.decide(functions.due) == [Start(0, 0)]
    assert functions.due is None
    functions.ended(0, "refused", "full", now=99.0)
    assert functions.decide(200.0) == [Fail(0, "full", 0)]


def test_as_many_are_opened_as_there_is_work_for() -> None:
    functions = FunctionSet(is_shared=True)
    functions.want(2)
    assert functions.decide(0.0) == [Start(0, 0), Start(1, 0)]
    functions.want(3)
    assert functions.decide(0.0) == [Start(2, 0)]
    functions.ended(1, "done")
    assert functions.decide(0.0) == [Start(3, 0)], "slots are opened once"
    functions.want(0)
    functions.ended(0, "lost", "killed")
    assert functions.decide(0.0) == []
    functions.want(3)
    functions.ended(2, "refused", "full", now=0.0)
    assert functions.decide(0.5) == [], "the platform is full, for whichever"
    assert functions.decide(1.0) == [Start(4, 0), Start(5, 0)]


def test_functions_that_another_driver_has_started_count_until_they_end() -> None:
    functions = FunctionSet(is_shared=True)
    functions.adopt(4)
    functions.want(3)
    assert functions.decide(0.0) == [Start(5, 0), Start(6, 0)], "numbers go on behind theirs"
    assert functions.running == {4, 5, 6}
    functions.ended(4, "done")
    assert functions.decide(0.0) == [Start(7, 0)]
    functions.validate()


def test_a_shared_budget_counts_all_and_its_end_is_that_of_the_set() -> None:
    functions = FunctionSet(is_shared=True)
    functions.want(4)
    functions.decide(0.0)
    found: list[object] = []
    for _ in range(MOST_LOSSES + 1):
        functions.ended(min(functions.running), "lost", "it found no task")
        found += functions.decide(0.0)
    assert found[-1] == Fail(MOST_LOSSES, "it found no task", MOST_LOSSES + 1)
    functions.want(10)
    assert functions.decide(0.0) == []


def test_of_many_functions_more_may_be_lost_before_the_first_one_achieves_something() -> None:
    functions = FunctionSet(is_shared=True)
    functions.want(1000)
    functions.decide(0.0)
    functions.want(3)  # which does not make those that are lost too many
    for lost in range(101):
        assert [action for action in functions.decide(0.0) if isinstance(action, Fail)] == []
        functions.ended(lost, "lost", "killed")
    assert functions.decide(0.0) == [Fail(100, "killed", 101)]


def test_nothing_is_started_or_fails_after_a_stop() -> None:
    functions = FunctionSet()
    functions.keep(0)
    functions.decide(0.0)
    functions.stop()
    functions.ended(0, "lost", "killed")
    assert (functions.decide(0.0), functions.due) == ([], None)
    functions.ended(0, "failed", "mine")
    assert functions.decide(0.0) == []


def test_an_end_that_comes_after_its_successor_is_old_news() -> None:
    functions = FunctionSet()
    functions.keep(0, is_running=True)
    functions.ended(0, "lost", "killed", attempt=0)
    assert functions.decide(0.0) == [Start(0, 1)]
    functions.ended(0, "lost", "the same, told again", attempt=0)
    assert functions.decide(0.0) == []
    functions.ended(0, "lost", "its successor, which nobody has told of", attempt=4)
    assert functions.decide(0.0) == [Start(0, 5)]


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (InvocationRefused("no", binding="concurrency"), "refused"),
        (InvocationRefused("the concurrency limit is reached"), "refused"),
        (InvocationRefused("the payload is too large", binding="payload"), "failed"),
        (FunctionLost("gone", rank=0), "failed"),
    ],
)
def test_why_a_start_was_refused(error: Exception, how: How) -> None:
    assert end_of(error) == how


HOWS: list[How] = ["done", "handed over", "unfinished", "lost", "failed", "refused", "cancelled"]


@given(st.booleans(), st.lists(st.tuples(st.sampled_from(HOWS), st.integers(0, 7), st.integers(0, 5), st.booleans()), max_size=80))
def test_what_is_paid_for_is_bounded_by_what_is_achieved(is_shared: bool, steps: list[tuple[How, int, int, bool]]) -> None:
    functions, now, progress = FunctionSet(is_shared=is_shared), 0.0, 0
    for slot in range(0 if is_shared else 4):
        functions.keep(slot)
    running: dict[int, int] = {}
    since: dict[int, int] = {}
    for how, pick, want, progresses in steps:
        now += 0.3
        if is_shared:
            functions.want(want)
        if running:
            slot = sorted(running)[pick % len(running)]
            if progresses:
                progress += 1
                functions.progressed(progress, None if is_shared else slot)
                since = {} if is_shared else {**since, slot: 0}
            if how != "handed over":
                del running[slot]
            if how in ("lost", "unfinished"):
                row = -1 if is_shared else slot
                since[row] = since.get(row, 0) + 1
            functions.ended(slot, how, "so", now=now)
        before = len(running)
        for action in functions.decide(now):
            if isinstance(action, Start):
                assert action.slot not in running, "a slot has one function"
                running[action.slot] = action.attempt
        assert not is_shared or len(running) <= max(want, before), "none is started above what is wanted"
        functions.validate()
        assert functions.running == running.keys()
        assert all(count <= MOST_LOSSES + 1 for count in since.values())
