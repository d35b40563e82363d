"""Random schedules of faults in virtual time: kills, duplicate calls, lost puts, late puts, slow ranks, failing requests.

    python -m benchmarks.chaos_simulated --seeds 10000 [--first N] [--json]

A schedule is a pure function of its seed: a pattern, a protocol, a number of functions and the faults. Invariants:

- the run ends, with a client that supervises and without one;
- every rank uses each contribution exactly once (ASP, SSP, HSP), or the weights are those of the undisturbed run (BSP, HAP);
- the number of invocations is at most the number of ranks, plus one for each invocation that reaches its function timeout, plus
  one for each fault;
- no object is left in the channel except the result and the specification.

Derivation of "one for each fault". Only the process that has created the claim of an attempt launches it, so several ranks that
suspect the same peer cause one replacement. A rank whose wait times out looks for the missing object and replaces the rank that
has not sent it, whose object was lost, or that has had all its inputs for some time without an output. It does not replace a rank
that itself waits for another one. A replacement gets twice the timeout before it is replaced in turn. Waits of earlier
invocations count only for the same iteration and while the peer makes no progress; a rank that gives its peers more time goes on
waiting, so it is not late itself. So a rank costs a replacement only if it

- was killed;
- has lost a put (acknowledged and gone, or damaged for good), which only another attempt sends again;
- is slower than the timeout: its requests or its arithmetic take longer than expected by more than half of the shortest timeout
  within that time. Such a rank cannot be told from a dead one (half, because a wait also contains an iteration of usual length).
  The shortest timeout is 20 s, or a fifth of the function timeout. A rank that is always slow counts once: its messages, or the
  first observation of its progress, make its pace known.

An invocation that reaches its function timeout has one successor: the one that it prepared, the one that it starts when it ends
in the middle of a wait, or the one that others start if the store accepted nothing in its last moments.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.chaos_schedules import LOCAL_FROM, Schedule, schedule
from benchmarks.chaos_troubles import Troubles
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import build, plain
from ephemeron.errors import EphemeronError
from ephemeron.events import Continued, Ended, Event, FaultFired, Invoked
from ephemeron.functions import simulation
from ephemeron.functions.base import Limits
from ephemeron.functions.context import Context
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.testing.flaky import FlakyChannel
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.run_driver import RunDriver, RunOutcome
from ephemeron.training.job import Configuration, Job, Simulation, Target, TrainingOptions, parse_fault
from ephemeron.training.worker.loop import run_worker
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.result import WorkerResult
from ephemeron.training.worker.spec import RunSpec

MOST_S = 100_000.0
"""Virtual seconds after which a run counts as hanging."""
ELEMENTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run."""

    ending: RunOutcome | None
    """None: it did not end."""
    events: list[Any]
    left: frozenset[str]
    slowest_s: Mapping[int, float]
    """By rank, its longest computation, before an injected delay multiplies it."""
    store_faults: int
    """Ranks that were late, and objects that were damaged for good."""

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def simulate(s: Schedule) -> Outcome:
    """Runs a schedule."""
    spec = RunSpec(
        run_id="run",
        model=Target(target="none"),
        loss=Target(target="none"),
        optimizer=Target(target="none"),
        configuration=s.configuration,
        epochs=s.epochs,
        seed=1,
        dtype="float32",
        samples=16 * s.configuration.workers * s.iterations // s.epochs,
        prices=load_prices("objects"),
        faults=s.faults,
        trainer="counting" if s.counts else "synthetic",
        trainer_options={} if s.counts else {"elements": ELEMENTS, "local_steps": s.local_steps},
        cold_start_s=s.world.cold_start_s,
        options=TrainingOptions(evaluate_every="3 steps" if s.merges_evaluations and s.epochs == 1 else "1 epoch"),
        shares_evaluations=s.merges_evaluations,
    )
    prepared = Prepared(
        job=Job(name="chaos", model=Target(target="none")), spec=spec, objects={Keys("run").spec: [spec.to_bytes()]}, model_bytes=0
    )
    events: list[Event] = []

    async def go() -> Outcome:
        troubles = Troubles(s)

        async def function(ctx: Context, request: WorkerRequest) -> WorkerResult:
            return await run_worker(troubles.around(ctx), request)

        platform = SimulatedPlatform(s.world, entries={"worker": function}, seed=s.seed, limits=Limits())
        store: Any = platform.store
        client = FlakyChannel(store, lambda operation, key: troubles.decide(-1, operation, key))
        trigger = RunDriver(platform, client, spec, channel_address="memory", clock=asyncio.get_running_loop().time, on_event=events.append)
        await trigger.launch(prepared)
        if not s.watched:
            _blind(trigger)
        ending = None
        try:
            async with asyncio.timeout(MOST_S):
                ending = await trigger.watch()
        except TimeoutError:
            pass
        return Outcome(
            ending=ending,
            events=events,
            left=frozenset(store.objects),
            slowest_s=troubles.slowest_s,
            store_faults=troubles.faults() + troubles.damaged,
        )

    return simulation.run(go())


def _blind(trigger: RunDriver) -> None:
    """Hides deaths from the client: the ranks have to detect them."""
    read: Callable[[Event], list[Any]] = trigger._read

    def blind(event: Event) -> list[Any]:
        actions = read(event)
        dead = isinstance(event, Ended) and event.status in ("lost", "timed_out")
        return [] if dead else actions

    trigger._read = blind  # type: ignore[method-assign]


@lru_cache(maxsize=256)
def _undisturbed(told: str, iterations: int, epochs: int, seed: int) -> str:
    configuration = build(Configuration, json.loads(told), where="configuration")
    world = Simulation(compute={"a": 1.0, "b": 4.0, "m": 0.0}, latency_s=0.001, cold_start_s=0.1)
    calm = Schedule(
        seed=seed,
        configuration=configuration,
        iterations=iterations,
        epochs=epochs,
        world=world,
        faults=(),
        late_puts=0.0,
        late_s=0.0,
        watched=True,
    )
    ending = simulate(calm).ending
    assert ending is not None
    assert ending.final is not None, ending.causes
    return str(ending.final.weights_sha256)


def _calm(s: Schedule) -> str:
    """Weights of the undisturbed run: neither K nor pattern, timeouts nor checkpoints change them."""
    c = s.configuration
    k = c.aggregators if c.sync == "hap" else 1
    calm = dataclasses.replace(c, function_timeout_s=900.0, checkpoint_every=25, pattern="k-reduce", aggregators=k, channel="memory")
    seed = LOCAL_FROM + s.local_steps - 1 if s.local_steps else 0
    return _undisturbed(json.dumps(plain(calm)), s.iterations, s.epochs, seed)


def run(seed: int) -> list[str]:
    """Names of violated invariants with details; empty when all hold."""
    return check(schedule(seed))


def check(s: Schedule) -> list[str]:
    """Names of violated invariants of a schedule with details; empty when all hold."""
    try:
        outcome = simulate(s)
    except (EphemeronError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as e:
        return [f"raised: {type(e).__name__}: {e}"]
    if outcome.ending is None:
        return [f"ends: not within {MOST_S:g} s, {len(outcome.of(Invoked))} invocations"]
    if outcome.ending.status != "finished":
        return [f"ends: {outcome.ending.status}: {'; '.join(outcome.ending.causes)}"]
    wrong = _wrong_weights(s, outcome.ending)
    invoked = [e for e in outcome.of(Invoked) if e.reason != "duplicate"]
    most = s.configuration.workers + _newcomers(s.configuration) + _at_their_limit(outcome) + faults_of(s, outcome)
    if len(invoked) > most:
        wrong.append(f"invocations: {len(invoked)} > {most}")
    if outcome.left != {"run/spec", "run/result"}:
        wrong.append(f"left over: {sorted(outcome.left - {'run/spec', 'run/result'})[:5]}")
    return wrong


def _newcomers(c: Configuration) -> int:
    """Number of functions that the changes of a schedule start."""
    found, workers, memory_mb = 0, c.workers, c.memory_mb
    for entry in c.resize.schedule:
        now, quota_mb = entry.workers or workers, entry.memory_mb or memory_mb
        found += max(0, now - workers) if quota_mb == memory_mb else now
        workers, memory_mb = now, quota_mb
    return found


def faults_of(s: Schedule, outcome: Outcome) -> int:
    """Number of faults that may cost an invocation: see above."""
    delays = [parse_fault(f) for f in s.faults if f.startswith("delay")]
    slow = sum(d.factor * max(s.step_s, outcome.slowest_s.get(d.rank, 0.0)) > s.peer_timeout_s for d in delays)
    return len(outcome.of(FaultFired)) + slow + outcome.store_faults


def _at_their_limit(outcome: Outcome) -> int:
    """Number of invocations that reached their timeout, with or without a successor that they started."""
    reasons = {(e.rank, e.attempt): e.reason for e in outcome.of(Invoked)}
    latest = {e.invocation: e.attempt for e in outcome.of(Continued)}
    left = sum(
        e.status == "timed_out"
        or (e.outcome == "relayed" and reasons.get((e.rank, latest.get(e.invocation, e.attempt) + 1)) == "replacement")
        for e in outcome.of(Ended)
    )
    return left + list(reasons.values()).count("relay")


def _wrong_weights(s: Schedule, ending: RunOutcome) -> list[str]:
    assert ending.final is not None
    assert ending.arrays is not None
    if not s.counts:
        return [] if ending.final.weights_sha256 == _calm(s) else ["same weights: they differ"]
    off = np.flatnonzero(ending.arrays["counts"] != 1)
    wrong = [f"exactly once: {off.size} of {ending.arrays['counts'].size} counts are not 1"] if off.size else []
    elsewhere = ending.final.metrics["loss"]
    if elsewhere and s.configuration.pattern != "parameter-server":  # there only rank 0 reads the end of it
        wrong.append(f"exactly once: ranks are off by {elsewhere:g} on average")
    return wrong


def main() -> int:
    """Runs many seeds on all processors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("ephemeron").setLevel(logging.ERROR)  # every fault is a warning
    seeds = range(options.first, options.first + options.seeds)
    failures: dict[int, list[str]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for seed, wrong in zip(seeds, pool.map(run, seeds, chunksize=20), strict=True):
            if wrong:
                failures[seed] = wrong
                print(f"seed {seed}: {'; '.join(wrong)}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"schedules": len(seeds), "failures": len(failures)}))
    else:
        print(f"{len(seeds)} schedules, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
