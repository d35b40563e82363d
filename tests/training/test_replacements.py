"""Promise 10: invocations are bounded by faults, and a run that keeps losing functions has a clear end."""

from __future__ import annotations

import dataclasses
import json

import pytest
from training_runs import WORLD, synthetic

from ephemeron.config.typed import build, plain
from ephemeron.events import Ended, FaultFired, Invoked, Note
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.recovery.replacement import MOST_TRIES
from ephemeron.training.worker.request import WorkerRequest

PATTERNS = [
    {"pattern": "k-reduce", "sync": "bsp"},
    {"pattern": "k-reduce", "sync": "hap"},
    {"pattern": "k-reduce", "sync": "ssp:1"},
    {"pattern": "k-reduce", "sync": "asp"},
    {"pattern": "pipelined"},
    {"pattern": "parameter-server", "sync": "bsp"},
    {"pattern": "parameter-server", "sync": "asp"},
]
SHAPE = {"workers": 4, "samples": 16 * 4 * 8, "epochs": 1, "checkpoint_every": 2}


def blind(trigger):
    """The client does not see who dies."""
    original = trigger._read

    def read(event):
        actions = original(event)
        return [] if isinstance(event, Ended) and event.status == "lost" else actions

    trigger._read = read


@pytest.mark.parametrize("slow", [1, 3])
@pytest.mark.parametrize("how", PATTERNS, ids=str)
def test_a_rank_slower_than_peers_are_patient(how, slow):
    """Iterations of 0.57 s, and of 23 to 46 s on one rank: it may be taken for dead until its pace is known."""
    run = synthetic(**SHAPE, **how, faults=[f"delay:rank={slow},factor={40 if slow == 1 else 80}"])
    assert run.ending.status == "finished", run.ending.causes
    assert len(run.of(Invoked)) <= 4 + 2, [e.text for e in run.of(Note)]
    assert run.left == {"run/spec", "run/result"}


@pytest.mark.parametrize("watched", [True, False], ids=["with a client", "without"])
@pytest.mark.parametrize("how", [{"sync": "bsp"}, {"pattern": "parameter-server"}, {"sync": "asp"}], ids=str)
def test_a_run_replaces_so_many_functions_and_no_more(how, watched):
    """A rank dies whenever it has done one more iteration: nothing but the limit of the whole run ends that."""
    faults = [f"kill:rank=2,iteration={n},phase=compute,attempt={n}" for n in range(8)]
    run = synthetic(**SHAPE, **how, faults=faults, max_replacements=4, until=None if watched else blind)
    assert run.ending.status == "failed"
    assert len(run.of(Invoked)) <= 4 + 4
    (cause, *_) = run.ending.causes
    assert "rank 2" in cause
    assert "4 functions of this run have been" in cause
    assert "--max-replacements" in cause
    enough = synthetic(**SHAPE, **how, faults=faults, max_replacements=8, until=None if watched else blind)
    assert enough.ending.status == "finished", enough.ending.causes
    assert len(enough.of(Invoked)) == 4 + len(enough.of(FaultFired))


def test_replacing_the_same_rank_for_the_same_iteration_has_an_end():
    faults = [f"kill:rank=1,iteration=3,phase=compute,attempt={n}" for n in range(20)]
    run = synthetic(**SHAPE, faults=faults, until=blind)
    assert run.ending.status == "failed"
    assert "rank 1" in run.ending.causes[0]
    assert "iteration 3" in run.ending.causes[0]
    invoked = run.of(Invoked)
    assert [e.attempt for e in invoked if e.rank == 1] == list(range(MOST_TRIES + 1))
    assert len(invoked) <= MOST_TRIES + 2 * SHAPE["workers"]  # of the others, one life each comes to its limit


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_lifetimes_of_two_to_twenty_iterations(sync):
    """Iterations of 2.9 s: every lifetime in which one fits is passed without a death, and costs little time."""
    world = dataclasses.replace(WORLD, compute={"a": 2.9 * 1769 / 20, "b": 4.0, "m": 0.0})
    how = {"workers": 4, "aggregators": 2, "samples": 64 * 20, "epochs": 1, "world": world, "sync": sync}
    whole = synthetic(**how)
    for function_timeout_s, share in ((6, 1.1), (7, 1.1), (8, 1.05), (10, 1.05), (12, 1.05), (16, 1.02), (29, 1.01), (58, 1.01)):
        run = synthetic(**how, function_timeout_s=float(function_timeout_s))
        assert run.sha == whole.sha
        assert {e.status for e in run.of(Ended)} == {"ok"}
        assert run.trigger.ledger.ended_at < share * whole.trigger.ledger.ended_at


def test_rank_1_waits_for_the_result_past_its_own_lifetime():
    """It has dismissed nobody: if rank 0 is dead, its successor is who finds out."""
    world = dataclasses.replace(WORLD, compute={"a": 176.9, "b": 4.0, "m": 0.0}, latency_s=0.001)
    run = synthetic(
        pattern="parameter-server",
        sync="asp",
        workers=2,
        aggregators=2,
        function_timeout_s=16.4,
        checkpoint_every=1,
        samples=160,
        epochs=1,
        world=world,
        faults=["kill:rank=0,iteration=3,phase=load"],
        until=blind,
    )
    assert run.ending.status == "finished"


def test_whoever_waits_to_its_end_has_time_for_a_successor():
    """With requests of 30 ms and a life of 5.8 s, finding out who is late takes longer than 3 % of a life."""
    run = synthetic(
        sync="ssp:1",
        workers=5,
        aggregators=2,
        function_timeout_s=5.8136,
        checkpoint_every=2,
        samples=16 * 5 * 6,
        epochs=1,
        world=dataclasses.replace(WORLD, compute={"a": 26.535, "b": 4.0, "m": 0.0}, cold_start_s=0.1),
        faults=["kill:rank=3,iteration=5,phase=upload"],
        until=blind,
    )
    assert run.ending.status == "finished"
    assert {e.status for e in run.of(Ended)} <= {"ok", "lost"}


@pytest.mark.parametrize("workers", [1, 3])
def test_an_attempt_that_was_claimed_and_never_started_is_replaced(workers, monkeypatch):
    """Every first function dies between the claim of its successor and its start: no function is left to miss it."""
    invoke = InvocationLifecycle.invoke

    async def dies(self, rank, attempt, reason, request, **more):
        if self.attempt == 0:
            self.invocation.ctx.die()
        await invoke(self, rank, attempt, reason, request, **more)

    monkeypatch.setattr(InvocationLifecycle, "invoke", dies)
    short = {"function_timeout_s": 15.0, "aggregators": 1, "samples": 64 * 20, "epochs": 1}
    run = synthetic(workers=workers, **short)
    assert run.ending.status == "finished", run.ending.causes
    assert [(e.rank, e.attempt) for e in run.of(Invoked)][workers : 2 * workers] == [(r, 2) for r in range(workers)]
    assert [e.text for e in run.of(Note) if "no function runs" in e.text]
    monkeypatch.undo()
    assert run.sha == synthetic(workers=workers, **short).sha
    assert run.left == {"run/spec", "run/result"}


def test_a_successor_is_started_although_the_time_is_over(monkeypatch):
    """The platform may kill a function a little after its limit, and claiming an attempt takes time: what is left is negative by then."""
    successor, left_s, invoke = (getattr(InvocationLifecycle, name) for name in ("invoke_successor", "_left_s", "invoke"))
    over, sent = set(), []

    async def late(self):
        over.add(self.rank)
        await successor(self)
        over.discard(self.rank)

    async def arrives(self, rank, attempt, reason, request, **more):
        sent.append(build(WorkerRequest, json.loads(json.dumps(plain(request))), where="request"))
        await invoke(self, rank, attempt, reason, request, **more)

    monkeypatch.setattr(InvocationLifecycle, "invoke_successor", late)
    monkeypatch.setattr(InvocationLifecycle, "_left_s", lambda self: -0.011 if self.rank in over else left_s(self))
    monkeypatch.setattr(InvocationLifecycle, "invoke", arrives)
    short = {"workers": 2, "function_timeout_s": 15.0, "samples": 64 * 20, "epochs": 1}
    run = synthetic(**short)
    assert run.ending.status == "finished", run.ending.causes
    assert {request.hand_within_s for request in sent} == {0.0}
    monkeypatch.undo()
    assert run.sha == synthetic(**short).sha
