"""The supervisor: what it does about every way in which a function can end."""

from __future__ import annotations

import pytest

from ephemeron.events import Checkpointed, Ended, Evaluated, Invoked, Loaded, Note, Progress, RunStarted, Started
from ephemeron.runs.function_set import MOST_LOSSES
from ephemeron.training.driver.supervisor import Fail, Finish, Replace, RunSupervisor, Stopped

LOST = ("lost", "timed_out")


def invoked(rank, attempt=0, reason="start"):
    return Invoked(t=0, rank=rank, attempt=attempt, invocation=f"i{rank}.{attempt}", reason=reason)


def ended(rank, attempt=0, status="ok", outcome="", **more):
    return Ended(t=0, rank=rank, attempt=attempt, invocation=f"i{rank}.{attempt}", status=status, outcome=outcome, **more)


def progress(rank, iteration, attempt=0):
    return Progress(t=0, rank=rank, attempt=attempt, iteration=iteration, epoch=0, samples=1, loss=0.0, version=0)


def loaded(rank, iteration, attempt=0):
    return Loaded(t=0, rank=rank, attempt=attempt, iteration=iteration)


@pytest.fixture
def supervisor():
    made = RunSupervisor(world=3)
    for rank in range(3):
        assert made.feed(invoked(rank)) == []
    return made


def test_what_merely_happens_calls_for_nothing(supervisor):
    for event in (
        RunStarted(t=0, run_id="r", job="j", workers=3, aggregators=1, memory_mb=1, iterations=1, epochs=1, samples=1),
        Started(t=0, rank=0, attempt=0, invocation="i0.0", cold=True),
        loaded(0, 0),
        progress(0, 0),
        Checkpointed(t=0, rank=0, attempt=0, iteration=1, nbytes=1),
        Evaluated(t=0, rank=0, attempt=0, epoch=1, iteration=1, samples=1, sums={"loss": (1, 1)}),
        Note(t=0, text="hello"),
    ):
        assert supervisor.feed(event) == []


# -- good ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["relayed", "duplicate", "fenced"])
def test_somebody_else_carries_on(supervisor, outcome):
    assert supervisor.feed(ended(1, outcome=outcome)) == []


def test_rank_0_finishes_the_run_and_the_others_do_not(supervisor):
    assert supervisor.feed(ended(1, outcome="finished")) == []
    assert supervisor.feed(ended(0, outcome="finished")) == [Finish()]
    assert supervisor.feed(ended(2, outcome="finished")) == []


def test_the_run_has_stopped_when_all_have(supervisor):
    assert supervisor.feed(ended(0, outcome="stopped")) == []
    assert supervisor.feed(ended(2, outcome="stopped")) == []
    assert supervisor.feed(ended(1, outcome="stopped")) == [Stopped()]


def test_who_had_finished_need_not_stop(supervisor):
    supervisor.feed(ended(2, outcome="finished"))
    supervisor.feed(ended(0, outcome="stopped"))
    assert supervisor.feed(ended(1, outcome="stopped")) == [Stopped()]


def test_running_invocations_are_known(supervisor):
    assert supervisor.running == {"i0.0": (0, 0), "i1.0": (1, 0), "i2.0": (2, 0)}
    supervisor.feed(ended(1, outcome="relayed"))
    supervisor.feed(invoked(1, 1, "relay"))
    assert supervisor.running == {"i0.0": (0, 0), "i1.1": (1, 1), "i2.0": (2, 0)}


# -- losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", LOST)
def test_a_loss_is_replaced_by_the_next_attempt(supervisor, status):
    assert supervisor.feed(ended(1, status=status)) == [Replace(1, 1)]
    supervisor.feed(invoked(1, 1, "replacement"))
    assert supervisor.feed(ended(1, 1, status=status)) == [Replace(1, 2)]


@pytest.mark.parametrize("status", [*LOST, "error", "out_of_memory"])
def test_an_attempt_that_has_a_successor_is_of_no_interest(supervisor, status):
    supervisor.feed(invoked(1, 1, "replacement"))
    assert supervisor.feed(ended(1, 0, status=status)) == []


@pytest.mark.parametrize("status", ["error", "out_of_memory"])
def test_what_fails_before_it_hands_over_fails_the_run(supervisor, status):
    """Its successor would wait for it in vain, and fail in the same way, with a successor of its own."""
    supervisor.feed(invoked(1, 1, "relay"))
    assert isinstance(supervisor.feed(ended(1, 0, status=status, error="E: no"))[0], Fail)


@pytest.mark.parametrize("status", [*LOST, "error", "out_of_memory"])
def test_how_an_attempt_ends_that_has_handed_over_is_of_no_interest(supervisor, status):
    supervisor.feed(invoked(1, 1, "relay"))
    supervisor.feed(loaded(1, 5, attempt=1))
    assert supervisor.feed(ended(1, 0, status=status)) == []


@pytest.mark.parametrize("status", LOST)
def test_whoever_dies_with_a_successor_needs_no_other(supervisor, status):
    supervisor.feed(invoked(1, 1, "relay"))
    assert supervisor.feed(ended(1, 0, status=status)) == []


@pytest.mark.parametrize("status", [*LOST, "error", "out_of_memory"])
def test_a_rank_that_has_finished_is_of_no_interest(supervisor, status):
    supervisor.feed(ended(1, outcome="finished"))
    assert supervisor.feed(ended(1, 0, status=status)) == []


def test_what_we_ended_ourselves_is_not_replaced(supervisor):
    assert supervisor.feed(ended(1, status="cancelled")) == []


def fruitless(supervisor, rank, status, times, **more):
    """Actions after each of several attempts that do nothing and end."""
    actions = []
    first = supervisor.latest[rank]
    for attempt in range(first, first + times):
        supervisor.feed(invoked(rank, attempt, "replacement"))
        actions += supervisor.feed(ended(rank, attempt, status=status, **more))
    return actions


def test_a_lifetime_into_which_no_iteration_fits_fails_the_run_the_third_time(supervisor):
    supervisor.feed(progress(1, 4))
    *before, last = fruitless(supervisor, 1, "timed_out", 3, error="60 s are over")
    assert before == [Replace(1, 1), Replace(1, 2)]
    assert isinstance(last, Fail)
    for part in ("rank 1", "no iteration fits", "60 s are over", "--function-timeout-s"):
        assert part in last.cause


def test_losses_without_end_fail_the_run(supervisor):
    *before, last = fruitless(supervisor, 1, "lost", MOST_LOSSES + 1, error="no word")
    assert before == [Replace(1, attempt) for attempt in range(1, MOST_LOSSES + 1)]
    assert isinstance(last, Fail)
    assert f"lost {MOST_LOSSES + 1} times" in last.cause
    assert "no word" in last.cause


def test_progress_forgives_losses(supervisor):
    for iteration in range(1, 20):
        supervisor.feed(progress(1, iteration, supervisor.latest[1]))
        assert all(isinstance(a, Replace) for a in fruitless(supervisor, 1, "timed_out", 1))
        supervisor.feed(invoked(1, supervisor.latest[1] + 1, "replacement"))


def test_repeated_iterations_are_no_progress(supervisor):
    supervisor.feed(progress(1, 7))
    fruitless(supervisor, 1, "timed_out", 2)
    supervisor.feed(loaded(1, 5, supervisor.latest[1]))
    for iteration in (5, 6, 7):
        supervisor.feed(progress(1, iteration, supervisor.latest[1]))
    supervisor.feed(invoked(1, 2, "replacement"))
    assert isinstance(supervisor.feed(ended(1, 2, status="timed_out"))[0], Fail)


def test_one_ranks_losses_are_not_anothers(supervisor):
    fruitless(supervisor, 1, "timed_out", 2)
    assert fruitless(supervisor, 2, "timed_out", 1) == [Replace(2, 1)]


# -- what cannot be mended --------------------------------------------------------------------------------


def test_an_error_of_the_users_code_fails_the_run_at_once(supervisor):
    (action,) = supervisor.feed(ended(2, status="error", error="ValueError: bad label"))
    assert action == Fail("rank 2, attempt 0: ValueError: bad label")


def test_a_quota_that_is_too_small_is_named_with_its_remedy(supervisor):
    (action,) = supervisor.feed(ended(2, status="out_of_memory", memory_mb=256))
    assert isinstance(action, Fail)
    for part in ("rank 2", "out of memory", "256 MB", "--memory-mb"):
        assert part in action.cause


# -- resuming ---------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_can_stop_again(supervisor):
    for rank in range(3):
        supervisor.feed(ended(rank, outcome="stopped"))
    for rank in range(3):
        supervisor.feed(invoked(rank, 1, "resume"))
    assert supervisor.feed(ended(0, 1, outcome="stopped")) == []
    assert supervisor.feed(ended(1, 1, outcome="stopped")) == []
    assert supervisor.feed(ended(2, 1, outcome="stopped")) == [Stopped()]


def test_resuming_forgives_losses(supervisor):
    fruitless(supervisor, 1, "timed_out", 3)
    supervisor.feed(invoked(1, 3, "resume"))
    assert supervisor.feed(ended(1, 3, status="timed_out")) == [Replace(1, 4)]


def test_the_same_events_give_the_same_actions():
    events = [
        invoked(0),
        invoked(1),
        progress(0, 0),
        ended(1, status="lost"),
        invoked(1, 1, "replacement"),
        ended(0, outcome="relayed"),
        invoked(0, 1, "relay"),
        ended(1, 1, status="timed_out"),
        ended(0, 1, outcome="finished"),
    ]
    first, second = RunSupervisor(2), RunSupervisor(2)
    assert [first.feed(e) for e in events] == [second.feed(e) for e in events]
    assert first == second


def test_what_the_newest_attempt_has_finished(supervisor):
    """What an older attempt that still runs has finished tells nothing of the newest."""
    supervisor.feed(progress(1, 8))
    assert supervisor.reached == {1: 8}
    supervisor.feed(invoked(1, 1, "replacement"))
    supervisor.feed(progress(1, 9, attempt=0))
    assert supervisor.reached == {}
    supervisor.feed(progress(1, 3, attempt=1))
    assert supervisor.reached == {1: 3}
    supervisor.feed(invoked(1, 2, "relay"))
    supervisor.feed(loaded(1, 7, attempt=2))  # its predecessor has finished iteration 6
    assert supervisor.reached == {1: 6}


def test_functions_that_time_out_before_each_hand_off_end_the_run(supervisor):
    """Each invokes its successor and is killed before it hands off; the successor repeats the iteration."""
    for attempt in range(2):
        supervisor.feed(loaded(1, 4, attempt))
        supervisor.feed(invoked(1, attempt + 1, "relay"))
        assert supervisor.feed(ended(1, attempt, status="timed_out")) == []
    supervisor.feed(loaded(1, 4, 2))
    supervisor.feed(invoked(1, 3, "relay"))
    (action,) = supervisor.feed(ended(1, 2, status="timed_out"))
    assert isinstance(action, Fail)
    assert "no iteration fits the lifetime limit" in action.cause


def test_a_missed_hand_off_is_forgotten_after_progress(supervisor):
    for attempt in range(6):
        supervisor.feed(progress(1, attempt, attempt))
        supervisor.feed(invoked(1, attempt + 1, "relay"))
        assert supervisor.feed(ended(1, attempt, status="timed_out")) == []


def test_an_evaluation_that_fits_no_life_is_named():
    made = RunSupervisor(world=1, evaluates_at=lambda iteration: iteration == 5)
    made.feed(invoked(0))
    made.feed(progress(0, 4))
    actions: list[object] = []
    for attempt in range(4):
        actions = made.feed(ended(0, attempt, status="timed_out", error="killed after 6.0 s"))
        if isinstance(actions[0], Fail):
            break
        made.feed(invoked(0, attempt + 1))
    assert isinstance(actions[0], Fail)
    assert "the evaluation before iteration 5 does not fit the lifetime limit" in actions[0].cause
    assert "smaller test_fraction" in actions[0].cause
