"""A sample of the kill matrix on a platform: after any death, duplicate or loss, the weights are those of an undisturbed run.

    @pytest.fixture(scope="module")
    def world(...) -> Iterator[TrainingWorld]: ...

    class TestMyPlatform(TrainingMatrix): ...

The simulator goes through every rank, phase and iteration in virtual time; a real platform takes seconds for each start, so
here each phase is hit once, rank 0 (which closes the run) and others, and faults that do not meet share a run: two starts
in a row cost less than two runs. A case says what has to be seen besides equal weights, so that a fault which did not fire
is a failure and no success.

A platform adds what only it can do (a node that dies, an environment killed from outside) in tests of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from ephemeron.events import Ended, FaultFired, Invoked, Progress
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.testing.training_world import TrainingWorld, of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One disturbed run."""

    name: str
    faults: tuple[str, ...]
    deaths: int = 0
    """Kills that fire, each followed by a replacement."""
    drops: int = 0
    """Puts that are lost."""
    duplicates: int = 0
    """Calls that are delivered twice."""
    relays: bool = False
    """With a lifetime so short that every rank hands over at least once."""


CASES = (
    Case(
        # Two at once, each in the first iteration; then rank 0 again, half of whose upload is there, and rank 1, which
        # had to wait for it. The client sees deaths: peers are patient, and replace nobody before its fault.
        name="deaths in every phase, a call delivered twice",
        faults=(
            "duplicate:rank=1",
            "kill:rank=0,iteration=0,phase=load",
            "kill:rank=2,iteration=0,phase=compute",
            "kill:rank=0,iteration=3,phase=upload,attempt=1",
            "kill:rank=1,iteration=3,phase=wait",
        ),
        deaths=4,
        duplicates=1,
    ),
    Case(
        # Where lives are short, peers miss a lost put soon, and replace who has sent it. The first life of a rank has its first
        # iteration, however slow the machine is, and maybe no other one.
        name="past lifetimes, a put lost, and a successor dies while it loads",
        faults=("drop-put:rank=0,iteration=0", "kill:rank=2,iteration=0,phase=load,attempt=1"),
        deaths=1,
        drops=1,
        relays=True,
    ),
)


class TrainingMatrix:
    """Base class of a pytest class, in whose module there is a fixture `world`."""

    def test_nothing_happens(self, world: TrainingWorld) -> None:
        result, events = world.undisturbed
        summary, workers = result.summary, world.shape["workers"]
        assert (summary.status, summary.platform) == ("finished", world.platform), result.causes
        assert len(of(events, Progress)) == workers * summary.iterations
        assert len(of(events, Invoked)) == summary.invocations == workers
        assert [e.outcome for e in of(events, Ended)] == ["finished"] * workers
        billed = sum(e.gb_seconds for e in of(events, Ended))
        assert summary.billed.gb_seconds == pytest.approx(billed, rel=1e-6)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_whatever_happens_the_weights_are_the_same(self, case: Case, world: TrainingWorld) -> None:
        if case.relays and world.slow_relays and not os.environ.get("EPHEMERON_FULL_MATRIX"):
            pytest.skip("every start is cold here, and this takes minutes: EPHEMERON_FULL_MATRIX=1 runs it")
        how = world.past_lifetimes(world.undisturbed[1]) if case.relays else {}
        result, events = world.go(**{**how, "faults": case.faults + how.get("faults", ())})
        world.check_same(result)
        fired = [e.fault for e in of(events, FaultFired)]
        assert len(fired) == case.deaths + case.drops, fired
        ends, reasons = of(events, Ended), [e.reason for e in of(events, Invoked)]
        lost = [e.status for e in ends].count("lost")
        if world.platform == "simulated":
            assert lost == case.deaths
        else:  # on a machine that is busy with other things, a call may be lost besides, and is replaced as any other
            assert lost >= case.deaths, ends
        assert reasons.count("replacement") >= case.deaths + case.drops - case.relays, "a successor is replaced by a rank that misses it"
        assert reasons.count("duplicate") == case.duplicates
        if case.relays:
            handed_over = {e.rank for e in of(events, Invoked) if e.reason == "relay"}
            assert handed_over == set(range(world.shape["workers"]))

    def test_functions_that_drive_may_die_and_pass_their_time_limit(self, world: TrainingWorld) -> None:
        if world.platform == "simulated":
            pytest.skip(
                "a simulated run lives inside its command; what drives is tested in virtual time in tests/runs/test_driver_function.py"
            )
        how = world.past_lifetimes(world.undisturbed[1])
        if world.slow_relays:
            del how["function_timeout_s"]
        result = world.go_detached(kills=1, **how)
        world.check_same(result)
        drivers = list(events_of(RunFolder(result.folder.path / "driver")))
        assert {e.reason for e in of(drivers, Invoked)} >= {"start", "replacement"}, drivers
        ends = [e.outcome for e in of(drivers, Ended) if e.status == "ok"]
        assert "finished" in ends, ends
        assert "failed" not in ends, "functions have driven it to its end"

    def test_direct_channels_give_the_same_weights_whatever_dies(self, world: TrainingWorld) -> None:
        store = world.configured()["channel"]
        faults = ("kill:rank=0,iteration=3,phase=upload", "kill:rank=1,iteration=5,phase=wait")
        result, events = world.go(channel="direct" if store is None else f"direct+{store}", faults=faults, aggregators=0)
        world.check_same(result)
        assert len(of(events, FaultFired)) == 2
        traffic = result.summary.traffic
        assert traffic.direct_bytes_sent > 0
        through_store = world.undisturbed[0].summary.traffic
        assert traffic.puts + traffic.gets < through_store.puts + through_store.gets  # polls depend on the waiting time
