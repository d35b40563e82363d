"""A short form of the simulated schedules of `benchmarks.chaos_simulated`."""

from __future__ import annotations

import pytest
from benchmarks.chaos_simulated import run, schedule, simulate

from ephemeron.events import Ended, Invoked


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_nothing_is_lost_counted_twice_left_or_waited_for(first):
    wrong = {seed: found for seed in range(first, first + 10) if (found := run(seed))}
    assert not wrong


def test_what_a_predecessor_has_seen_of_a_peer_counts():
    """A lifetime has room for one wait in vain: a dead peer is replaced although every look is a function's first."""
    assert not {seed: found for seed in (2052, 2338) if (found := run(seed))}


def test_whoever_is_done_leaves_somebody_behind():
    """Ranks 0 and 1 are dead when rank 2 is done, nobody waits for them, and no client watches."""
    assert not run(1611)


@pytest.mark.parametrize("seed", [959, 1627, 10484], ids=["bsp", "ssp", "asp"])
def test_a_lost_merged_shard_costs_its_aggregator_alone_a_replacement(seed):
    """The others wait for it, so the aggregator waits for their next contributions, and must not replace them."""
    assert not run(seed)


def test_one_late_request_makes_a_life_no_shorter():
    """The first put of a function takes as long as three iterations; all fits one life all the same."""
    assert not [e for e in simulate(schedule(1552)).of(Ended) if e.outcome == "relayed"]


def test_a_schedule_is_a_pure_function_of_its_seed():
    assert schedule(7) == schedule(7)
    assert schedule(7) != schedule(8)


def test_lives_that_bring_nothing_use_up_the_run_s_replacements():
    """A schedule in which no life is long enough to catch up: it ends, and says with which limit."""
    s = schedule(2338)
    outcome = simulate(s)
    assert outcome.ending is not None
    assert outcome.ending.status == "finished" or "which is the limit" in outcome.ending.causes[0]
    assert len(outcome.of(Invoked)) < 2 * 100 + 2 * s.configuration.workers * s.iterations
