"""Functions of a direct run die: they are replaced from live peers, at the very iteration, and the weights are the same."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from training_runs import Run, make_job, real, synthetic

from ephemeron.communication.direct.mesh import GONE_S
from ephemeron.events import PHASES, Ended, FaultFired, Invoked, Loaded, Note
from ephemeron.training.job import SchedulerSpec, Target, parse_fault
from random_schedules import seeds

pytestmark = pytest.mark.slow

SHAPE = {"workers": 4, "aggregators": 4, "checkpoint_every": 4}
AT = (1, 9, 19)
"""Iterations of 20."""
_SHAS: dict[str, str] = {}


def kill(rank: int, iteration: int, phase: str = "compute", attempt: int = 0) -> str:
    more = f",attempt={attempt}" if attempt else ""
    return f"kill:rank={rank},iteration={iteration},phase={phase}{more}"


def undisturbed(**how: Any) -> str:
    """Weights of the same schedule over the store."""
    how.pop("decide", None)
    key = repr(sorted(how.items()))
    if key not in _SHAS:
        _SHAS[key] = synthetic(**{**SHAPE, **how}).sha
    return _SHAS[key]


def disturbed(*faults: str, **how: Any) -> Run:
    """A direct run that ends as over the store, with all faults fired and nothing left behind."""
    run = synthetic(channel="direct", faults=faults, **{**SHAPE, **how})
    assert run.sha == undisturbed(**how)
    assert run.left == {"run/spec", "run/result"}
    assert len(run.of(FaultFired)) == len(faults)
    return run


def resumed(run: Run) -> list[tuple[int, int]]:
    """Rank and iteration with which each replacement has begun."""
    return [(e.rank, e.iteration) for e in run.of(Loaded) if e.attempt]


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "load"])
@pytest.mark.parametrize("rank", range(4))
def test_a_replacement_repeats_no_iteration(rank: int, phase: str) -> None:
    """The lanes kill each rank in each phase at one of the iterations, by turns, so each phase is met at all of them."""
    turn = rank + PHASES.index(phase)
    for iteration in AT if os.environ.get("EPHEMERON_FULL_MATRIX") else AT[turn % 3 :][:1]:
        run = disturbed(kill(rank, iteration, phase))
        assert len(run.of(Invoked)) == 5
        [(replaced, at)] = resumed(run)
        assert replaced == rank
        assert at in (iteration, iteration + 1)


@pytest.mark.parametrize("owners", [1, 2, 3])
def test_ranks_that_sum_nothing_recover_too(owners: int) -> None:
    run = disturbed(kill(3, 9), kill(0, 13, "upload"), aggregators=owners)
    assert [at for _, at in resumed(run)] in ([9, 13], [9, 14])


def test_all_but_one_die_at_once() -> None:
    run = disturbed(*(kill(rank, 9) for rank in (0, 1, 2)))
    assert sorted(resumed(run)) == [(0, 9), (1, 9), (2, 9)]


@pytest.mark.parametrize("phase", ["compute", "upload", "download"])
def test_all_die_at_once_and_go_on_from_a_common_checkpoint(phase: str) -> None:
    run = disturbed(*(kill(rank, 10, phase) for rank in range(4)))
    assert sorted(resumed(run)) == [(rank, 8) for rank in range(4)]


def test_all_die_twice() -> None:
    first = [kill(rank, 10) for rank in range(4)]
    run = disturbed(*first, *(kill(rank, 11, "upload", 1) for rank in range(4)))
    assert len(run.of(Invoked)) == 12


def test_a_replacement_dies_while_it_loads_and_again_when_it_trains() -> None:
    run = disturbed(kill(0, 9), kill(0, 9, "load", 1), kill(0, 9, "compute", 2))
    assert resumed(run) == [(0, 9), (0, 9)]


def test_those_who_could_give_the_state_die_one_after_the_other() -> None:
    run = disturbed(kill(0, 9, "upload"), kill(1, 10, "download"), kill(2, 10, "upload"))
    assert len(run.of(Invoked)) == 7


def test_two_functions_of_two() -> None:
    assert resumed(disturbed(kill(1, 9), workers=2, aggregators=2)) == [(1, 9)]
    both = disturbed(kill(0, 9), kill(1, 9), workers=2, aggregators=2)
    assert sorted(resumed(both)) == [(0, 8), (1, 8)]


def test_all_go_back_where_a_private_state_is_lost_with_those_who_keep_it() -> None:
    faults = [kill(rank, 10) for rank in range(4)]  # ranks 1 to 3 keep what only rank 0 has
    run = disturbed(*faults, workers=6, aggregators=6)
    assert any("go back to the checkpoint of iteration 8" in e.text for e in run.of(Note))
    assert {at for _, at in resumed(run)} >= {8}


@pytest.mark.parametrize("sync", ["hap", "ssp:1"])
@pytest.mark.parametrize("phase", PHASES)
def test_policies_with_stale_versions_repeat_iterations(sync: str, phase: str) -> None:
    if sync == "ssp:1":
        run = synthetic(channel="direct", faults=[kill(1, 0 if phase == "load" else 10, phase)], sync=sync, **SHAPE)
        assert run.ending.status == "finished"
        return
    for rank in (0, 3):
        iteration = 0 if phase == "load" else 10
        if (rank, phase) != (3, "wait"):
            run = synthetic(channel="direct", faults=[kill(rank, iteration, phase)], sync=sync, **{**SHAPE, "aggregators": 2})
            assert run.sha == undisturbed(sync=sync, aggregators=2)


@pytest.mark.parametrize("sync", ["bsp", "hap"])
@pytest.mark.parametrize("phase", ["compute", "upload", "wait"])
def test_a_death_that_no_client_sees_is_noticed_before_the_timeout(phase: str, sync: str) -> None:
    """Its connections are closed, it refuses new ones, and nobody hears of it."""
    for rank in (0, 3):
        run = synthetic(channel="direct", faults=[kill(rank, 9, phase)], sync=sync, until=blinded, epochs=3, **{**SHAPE, "aggregators": 2})
        assert run.sha == undisturbed(sync=sync, aggregators=2, epochs=3)
        [died], [*starts, last] = run.of(FaultFired), run.of(Invoked)
        assert len(starts) == 4
        assert last.rank == rank
        assert GONE_S <= last.t - died.t < 0.9 * run.trigger.spec.peer_timeout_s


def blinded(driver: Any) -> None:
    """The client takes no notice of functions that are lost."""
    read = driver._read
    driver._read = lambda event: [] if isinstance(event, Ended) and event.status == "lost" else read(event)


# -- hand-offs --------------------------------------------------------------------------------------------

RELAYS: dict[str, Any] = {"epochs": 4, "function_timeout_s": 12.0}
FIRST = 19
"""Iteration of the first hand-off."""


def handed_off(run: Run) -> set[int]:
    """Iterations at which hand-offs were done."""
    return {e.iteration for e in run.of(Loaded) if e.attempt}


class Messages:
    """Ranks that have put a hand-off message into the store."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()

    def __call__(self, time_s: float, operation: str, key: str) -> None:
        if operation == "put" and key.startswith("run/hand/"):
            self.ranks.add(int(key.split("/")[2]))


@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_successors_get_the_state_from_their_predecessors(sync: str) -> None:
    messages = Messages()
    run = disturbed(sync=sync, decide=messages, **RELAYS)
    assert len(handed_off(run)) == 2
    assert not messages.ranks


def test_successors_are_started_together() -> None:
    """Also that of a function which began later and would start it later: all ranks would wait for it."""
    run = disturbed(kill(2, 2), **RELAYS)
    relays = sorted((e for e in run.of(Invoked) if e.reason == "relay"), key=lambda e: e.t)[:4]
    assert {e.rank for e in relays} == {0, 1, 2, 3}
    assert relays[-1].t - relays[0].t < 1.0, "one iteration takes 0.6 s"


def test_where_a_successor_cannot_connect_the_store_has_its_state() -> None:
    def cut(driver: Any) -> None:
        driver.platform.network.partition(2, 2)

    messages = Messages()
    run = synthetic(channel="direct", until=cut, decide=messages, **SHAPE, **RELAYS)
    assert run.sha == undisturbed(**RELAYS)
    assert len(handed_off(run)) == 2
    assert messages.ranks == {2}
    assert run.left == {"run/spec", "run/result"}


@pytest.mark.parametrize("sync", ["bsp", pytest.param("hap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("attempt", [0, 1])
def test_deaths_at_a_hand_off(sync: str, phase: str, attempt: int) -> None:
    how = {**RELAYS, "epochs": 3}
    for rank in (0, 3):
        iteration = 0 if phase == "load" else FIRST - 1 + attempt
        run = synthetic(channel="direct", faults=[kill(rank, iteration, phase, attempt)], sync=sync, **SHAPE, **how)
        assert run.sha == undisturbed(sync=sync, **how)
        assert run.left == {"run/spec", "run/result"}


@pytest.mark.parametrize("sync", ["bsp", pytest.param("hap", marks=pytest.mark.slow)])
def test_deaths_between_hand_offs(sync: str) -> None:
    faults = [kill(2, 30, attempt=1), kill(1, 0, "load", 1)]
    run = synthetic(channel="direct", faults=faults, sync=sync, epochs=8, function_timeout_s=12.0, **SHAPE)
    assert run.sha == undisturbed(sync=sync, epochs=8)
    assert len(run.of(FaultFired)) == 2


def test_a_contribution_that_a_hand_off_finds_incomplete_goes_along() -> None:
    """HAP: others hand off one version behind; what they have sent of it dies with the function that was to sum it."""
    how = {"workers": 4, "aggregators": 1, "checkpoint_every": 7, "sync": "hap", "epochs": 3, "function_timeout_s": 12.0}
    run = synthetic(channel="direct", faults=[kill(3, 2, "upload"), kill(3, 2, "compute", 1)], elements=12000, **how)
    assert run.sha == undisturbed(elements=12000, **how)
    assert len(run.of(Invoked)) < 30


def test_rounding_errors_are_private_state() -> None:
    run = disturbed(kill(1, 9), kill(2, 9, "aggregate"), exchange={"compression": "int8"}, elements=3000)
    assert {at for _, at in resumed(run)} <= {9, 10}


# -- any deaths -------------------------------------------------------------------------------------------


def schedule(seed: int) -> tuple[list[str], dict[str, Any]]:
    """Faults and configuration of a random run: up to seven deaths, most of them close together."""
    r = random.Random(seed)
    workers, epochs = r.randint(2, 5), 1
    how: dict[str, Any] = {
        "workers": workers,
        "aggregators": r.randint(1, workers),
        "checkpoint_every": r.choice([3, 4, 7]),
        "sync": r.choice(["bsp", "bsp", "bsp", "hap"]),
        "elements": r.choice([8, 64, 12000]),
    }
    if r.random() < 0.3:
        epochs = 3
        how["function_timeout_s"] = 12.0
    if r.random() < 0.2 and how["sync"] == "bsp":
        how["exchange"] = {"compression": "int8"}
    iterations = 10 * epochs
    center, faults = r.randrange(iterations), []
    for _ in range(r.randint(1, 7)):
        near = min(iterations - 1, max(0, center + r.randint(-1, 1)))
        at = near if r.random() < 0.6 else r.randrange(iterations)
        faults.append(kill(r.randrange(workers), at, r.choice(PHASES), r.choice([0, 0, 0, 1, 1, 2])))
    return faults, {**how, "epochs": epochs}


def survives(seed: int) -> None:
    faults, how = schedule(seed)
    run = synthetic(channel="direct", faults=faults, **how)
    assert run.sha == undisturbed(**how), (faults, how)
    assert run.left == {"run/spec", "run/result"}


@pytest.mark.parametrize("seed", range(10))
def test_whatever_dies_the_weights_are_those_over_the_store(seed: int) -> None:
    survives(seed)


@pytest.mark.slow
def test_more_random_schedules() -> None:
    for seed in seeds(range(100, 200), 3):
        survives(seed)


# -- models -----------------------------------------------------------------------------------------------

JOBS: dict[str, dict[str, Any]] = {
    "dropout, Adam": {"model": Target(target="tiny:mlp", options={"dropout": 0.3}), "optimizer": Target(target="Adam")},
    "batch statistics": {"model": Target(target="tiny:with_batch_norm")},
    "scheduler that watches": {
        "scheduler": SchedulerSpec(target="ReduceLROnPlateau", options={"patience": 0}, monitor="loss"),
        "evaluate_every": "4 steps",
    },
    "moving average": {"ema_decay": 0.9},
}
MODELS: dict[str, dict[str, Any]] = {name: {} for name in JOBS} | {"local steps": {"exchange": {"local_steps": 2}}}


@pytest.fixture(scope="module")
def models() -> dict[str, str]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("phase", ["compute", "upload", "download"])
def test_a_model_recovers_bit_for_bit(kind: str, phase: str, models: dict[str, str]) -> None:
    job, how = make_job(**JOBS.get(kind, {})), {"workers": 4, "aggregators": 4, "checkpoint_every": 50, **MODELS[kind]}
    if kind not in models:
        models[kind] = real(job, **how).sha
    faults = [kill(1, 5, phase), kill(0, 7, phase), kill(3, 8, "compute")]
    run = real(job, channel="direct", faults=list(map(parse_fault, faults)), **how)
    assert run.sha == models[kind]
    assert len(run.of(FaultFired)) == 3
    assert min(at for _, at in resumed(run)) >= 5, "no checkpoint was stored"
