"""A short form of the simulated schedules of `benchmarks.chaos_simulated`."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.chaos_schedules import BARRIERS_FROM, DIRECT_FROM, LOCAL_FROM, MERGING_FROM, schedule, without_store_faults
from benchmarks.chaos_simulated import check, run, simulate

from ephemeron.events import Ended, FaultFired, Invoked


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_nothing_is_lost_counted_twice_left_or_waited_for(first):
    wrong = {seed: found for seed in range(first, first + 10) if (found := run(seed))}
    assert not wrong


def test_what_a_predecessor_has_seen_of_a_peer_counts():
    """A lifetime has room for one wait in vain: a dead peer is replaced although every look is a function's first."""
    assert not {seed: found for seed in (2052, 2338) if (found := check(without_store_faults(seed)))}


def test_a_rank_that_is_done_waits_until_another_can_replace_rank_0():
    """Ranks 0 and 1 are dead when rank 2 is done, nobody waits for them, and no client watches."""
    assert not check(without_store_faults(1611))


@pytest.mark.parametrize("seed", [959, 1627, 10484], ids=["bsp", "ssp", "asp"])
def test_a_lost_merged_shard_costs_its_aggregator_alone_a_replacement(seed):
    """The others wait for it, so the aggregator waits for their next contributions, and must not replace them."""
    assert not check(without_store_faults(seed))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(11392, id="a contribution lost before the first checkpoint is sent again with versions that are still there"),
        pytest.param(20274, id="a rank whose own contribution was lost blames nobody else"),
        pytest.param(21038, id="a rank that waits for an earlier version is not late with a later one"),
        pytest.param(20400, id="asp: the last version lacks one shard of a rank that sent others"),
        pytest.param(20739, id="an aggregator that has only just got all it needs is not late"),
        pytest.param(21580, id="a merged shard that a dead aggregator had put is missed by its replacement"),
        pytest.param(22418, id="the client's replacement sends again what the dead one was to send"),
        pytest.param(31729, id="a life that ends while it waits for several ranks has one successor"),
        pytest.param(31667, id="whoever has little time left leaves a replacement as much time as others"),
        pytest.param(60053, id="asp: waits that end at once take one look at whether a rank goes on"),
        pytest.param(22126, id="late at the end of a life"),
    ],
)
def test_each_fault_costs_one_invocation(seed):
    """Schedules in which ranks were replaced that only waited for another."""
    assert not check(without_store_faults(seed))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(100345, id="what is missed comes while its sender's checkpoints are looked at"),
        pytest.param(100494, id="another attempt has made the share, and what it was made of is gone"),
        pytest.param(101367, id="a replacement hears of a slow rank from the versions that it repeats"),
        pytest.param(101513, id="rank 0 can only just end"),
        pytest.param(101968, id="a replacement that begins anew gets time for all of it"),
        pytest.param(111285, id="a server has added up everything just now"),
        pytest.param(111749, id="ssp: a rank computes what it could not begin before"),
        pytest.param(1105139, id="bsp: a superseded rank that still runs has deleted what its replacement is to reduce"),
        pytest.param(1002550, id="asp: a merged shard arrives after the wait for it has timed out"),
        pytest.param(903668, id="asp: a rank that repeats iterations to send a lost put has prepared its successor"),
    ],
)
def test_each_fault_costs_one_invocation_with_a_faulty_store(seed):
    assert not run(seed)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(307096, id="a rank that gives an aggregator more time still waits for its shard, and is not late itself"),
        pytest.param(302197, id="pipelined: the same, with many chunks"),
        pytest.param(302084, id="bsp: what predecessors waited for one iteration shortens no wait for a later one"),
        pytest.param(302872, id="pipelined: the same, where a slow rank has just caught up"),
        pytest.param(303333, id="hap: the same, at the end of the run"),
        pytest.param(308366, id="bsp: the same, where a rank has just replaced itself"),
        pytest.param(309043, id="ssp: the same, for a rank that sends this one nothing"),
        pytest.param(300990, id="what predecessors waited for a rank counts no more once it goes on"),
        pytest.param(307648, id="the first look at a slow rank says how slow it is"),
        pytest.param(408116, id="the replacement of a slow rank gets that rank's time to repeat iterations"),
    ],
)
def test_a_live_rank_is_not_replaced_because_of_waits_for_others(seed):
    assert not run(seed)


def test_a_start_whose_answer_is_lost_and_whose_proof_is_cut_off_is_no_duplicate():
    assert not run(202817)


def test_a_specification_of_which_every_read_is_truncated_is_not_lost():
    assert not run(900828)


def test_an_object_that_is_put_again_after_a_damaged_one_is_read_in_time_though_one_read_is_truncated():
    """An aggregator that pauses as long as for the damaged object has had all its inputs for too long, and is replaced."""
    assert not run(6002029)


@pytest.mark.parametrize("watched", [True, False], ids=["with a client", "without"])
@pytest.mark.parametrize(
    ("iterations", "lost", "killed"),
    [
        pytest.param(6, 4, ("iteration=3,phase=compute,attempt=2",), id="it dies before it repeats that iteration"),
        pytest.param(6, 4, ("iteration=4,phase=compute,attempt=2",), id="it dies when it has a successor"),
        pytest.param(8, 5, (), id="it hands off before it repeats that iteration"),
        pytest.param(8, 5, ("iteration=5,phase=load,attempt=3",), id="it hands off, and its successor dies"),
    ],
)
def test_the_successor_of_a_rank_that_is_to_repeat_a_lost_put_does_so(iterations, lost, killed, watched):
    """There are checkpoints of later iterations: an attempt that starts from one of them puts nothing that is missed."""
    s = schedule(903668)
    s = dataclasses.replace(
        s,
        iterations=iterations,
        faults=(f"drop-put:rank=4,iteration={lost}", *(f"kill:rank=4,{at}" for at in killed)),
        watched=watched,
        configuration=dataclasses.replace(s.configuration, checkpoint_every=iterations - 1),
    )
    assert len(simulate(s).of(FaultFired)) == 1 + len(killed)
    assert not check(s)


def test_no_rank_leaves_because_rank_0_lives_while_rank_1_is_dead():
    """Rank 1 of a parameter server's asynchronous run dies unnoticed, the others finish, and then rank 0 dies."""
    assert not run(120389)


@pytest.mark.parametrize("seed", [40104, 20783, 21042, 11351])
def test_waits_that_outlast_a_life_are_added_up(seed):
    """The time that an invocation leaves for a wait is shorter than the timeout: without the sum every invocation waits to its end."""
    assert not check(without_store_faults(seed))


def test_the_store_s_faults_happen():
    schedules = [schedule(seed) for seed in range(100)]
    assert any(s.failing for s in schedules)
    assert any(s.torn for s in schedules)
    assert sum(simulate(s).store_faults > 0 for s in schedules if s.damaged is not None and s.iterations > s.damaged[1]) > 3


def test_one_late_request_makes_a_life_no_shorter():
    """The first put of a function takes as long as three iterations; all fits one life all the same."""
    assert not [e for e in simulate(without_store_faults(1552)).of(Ended) if e.outcome == "relayed"]


def test_a_schedule_is_a_pure_function_of_its_seed():
    assert schedule(7) == schedule(7)
    assert schedule(7) != schedule(8)


def test_lives_that_bring_nothing_use_up_the_run_s_replacements():
    """A schedule in which no life is long enough to catch up: it ends, and says with which limit."""
    s = without_store_faults(2338)
    outcome = simulate(s)
    assert outcome.ending is not None
    assert outcome.ending.status == "finished" or "which is the limit" in outcome.ending.causes[0]
    assert len(outcome.of(Invoked)) < 2 * 100 + 2 * s.configuration.workers * s.iterations


@pytest.mark.parametrize("seed", [3000085, 3000162, 3000306, 3000360, 3000415, 3000537])
def test_a_rank_that_waits_before_an_evaluation_is_not_replaced_for_what_it_waits_for(seed):
    assert schedule(seed).merges_evaluations
    assert run(seed) == []


@pytest.mark.parametrize("first", range(MERGING_FROM + 1000, MERGING_FROM + 1040, 10))
def test_merged_evaluations_survive_what_everything_else_survives(first):
    assert {seed: run(seed) for seed in range(first, first + 10) if run(seed)} == {}


@pytest.mark.parametrize("first", range(BARRIERS_FROM, BARRIERS_FROM + 40, 10))
def test_barriers_survive_what_everything_else_survives(first):
    assert {seed: found for seed in range(first, first + 10) if (found := run(seed))} == {}


@pytest.mark.parametrize("seed", [4001235, 4001449])
def test_a_rank_that_lacks_a_lost_version_at_a_barrier_is_not_replaced_for_it(seed):
    assert run(seed) == []


@pytest.mark.parametrize("first", range(LOCAL_FROM, LOCAL_FROM + 40, 10))
def test_local_steps_survive_what_everything_else_survives(first):
    """Ranks have a state of their own, which no merged version holds."""
    assert any(schedule(seed).local_steps > 1 and schedule(seed).faults for seed in range(first, first + 10))
    assert {seed: found for seed in range(first, first + 10) if (found := run(seed))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(DIRECT_FROM, DIRECT_FROM + 20, 5))
def test_partitions_survive_what_everything_else_survives(first):
    """Functions are connected to each other; pairs of them are cut, silent, slow, or never connect."""
    seeds = range(first, first + 5)
    assert any("cut:" in " ".join(schedule(seed).faults) for seed in seeds)
    assert {seed: found for seed in seeds if (found := run(seed))} == {}


def test_a_replacement_that_asks_a_dead_rank_is_not_replaced_for_it():
    """Over direct channels; it is slow, too, and computes before it asks what its predecessor has sent."""
    assert run(7000121) == []


def test_a_replacement_that_repeats_iterations_asks_before_it_computes():
    """Who holds the versions to repeat may end meanwhile."""
    assert run(7010265) == []
