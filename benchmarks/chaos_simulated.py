"""Random schedules in virtual time: what dies, comes twice, is lost, is late or is slow, and what has to hold all the same.

    python -m benchmarks.chaos_simulated --seeds 10000 [--first N] [--json FILE]

A schedule is a pure function of its seed: a pattern, a protocol, a world of functions and what is done to it. Invariants:

- the run ends, with a client that watches and without one;
- every contribution is used exactly once by every rank (ASP, SSP), or the weights are those of the run undisturbed (BSP, HAP);
- invocations are at most the ranks, planned successors, and three for each fault or slow rank: who waits for whom is not always
  clear at once, and a rank whose pace is not known yet may be taken for dead;
- nothing is left in the channel but the result and the specification.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ephemeron import simulation
from ephemeron.channels.base import Buffer, Channel, Wrapper
from ephemeron.channels.keys import Keys
from ephemeron.errors import EphemeronError
from ephemeron.events import PHASES, Ended, Event, FaultFired, Invoked
from ephemeron.job import Configuration, Job, Simulation, Target
from ephemeron.platforms.base import Limits
from ephemeron.platforms.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.training.prepare import Prepared
from ephemeron.training.trigger import Ending, Trigger
from ephemeron.worker.loop import run_worker
from ephemeron.worker.spec import RunSpec

MOST_S = 100_000.0
"""Virtual seconds after which a run does not end."""
ELEMENTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run and what is done to it."""

    seed: int
    configuration: Configuration
    iterations: int
    world: Simulation
    faults: tuple[str, ...]
    late_puts: float
    """Share of puts that take up to `late_s` longer."""
    late_s: float
    watched: bool
    """Whether the client learns who dies."""

    @property
    def counts(self) -> bool:
        """Whether contributions are counted; else weights are compared."""
        return self.configuration.sync.startswith(("ssp", "asp"))


def schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    workers = rng.randint(1, 6)
    pattern = rng.choice(["k-reduce", "k-reduce", "k-reduce", "pipelined", "parameter-server"])
    syncs = {"k-reduce": ["bsp", "hap", "ssp:1", "ssp:2", "asp", "asp"], "pipelined": ["bsp", "hap", "ssp:2"]}
    sync = rng.choice(syncs.get(pattern, ["bsp", "asp"]))
    iterations, each_s = rng.randint(4, 10), rng.choice([0.3, 0.6, 2.0, 5.0])
    short = rng.random() < 0.3
    lifetime_s = each_s * rng.uniform(6, 20) + 4.0 if short else 900.0
    configuration = Configuration(
        platform="simulated", channel="parameter_server" if pattern == "parameter-server" else "memory", pattern=pattern,
        sync=sync, workers=workers, aggregators=rng.randint(1, workers), memory_mb=1769, batch_size=16,
        lifetime_s=lifetime_s, checkpoint_every=rng.randint(1, 5),
    ).resolved()  # fmt: skip
    ranks = list(range(workers))
    faults = []
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3])):
        kind = rng.choice(["kill", "kill", "kill", "duplicate", "drop-put"])
        rank, iteration, attempt = rng.choice(ranks), rng.randrange(iterations), rng.choice([0, 0, 0, 1])
        if kind == "kill":
            at = f"rank={rank},iteration={iteration},phase={rng.choice(PHASES)},attempt={attempt}"
        elif kind == "duplicate":
            at = f"rank={rank}"
        else:
            at = f"rank={rank},iteration={iteration}"
        faults.append(f"{kind}:{at}")
    if rng.random() < 0.4:
        slow = rng.choice([2.0, 5.0, 1.0 + 25.0 / each_s]) if not short else 1.5
        faults.append(f"delay:rank={rng.choice(ranks)},factor={slow:.2f}")
    mortal = {rank for rank in ranks if any(f.startswith(f"kill:rank={rank},") for f in faults)}
    world = Simulation(
        compute={"a": each_s * 1769 / 20, "b": 4.0, "m": 0.0}, latency_s=rng.choice([0.001, 0.03]), bandwidth_mb_s=70.0,
        cold_start_s=rng.choice([0.1, 1.5]), straggler_sigma=rng.choice([0.0, 0.0, 0.3]),
    )  # fmt: skip
    return Schedule(
        seed=seed, configuration=configuration, iterations=iterations, world=world, faults=tuple(faults),
        late_puts=rng.choice([0.0, 0.0, 0.05]), late_s=rng.uniform(0.1, 3.0),
        watched=rng.random() < 0.5 or len(mortal) == workers,  # somebody has to be left to find out
    )  # fmt: skip


class Late(Wrapper):
    """Some puts take longer, and are not there before."""

    def __init__(self, inner: Channel, rng: random.Random, share: float, late_s: float) -> None:
        super().__init__(inner)
        self._rng, self._share, self._late_s = rng, share, late_s

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        if self._rng.random() < self._share:
            await asyncio.sleep(self._rng.uniform(0, self._late_s))
        await self.inner.put(key, buffers, create=create)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that is over."""

    ending: Ending | None
    """None: it did not end."""
    events: list[Any]
    left: frozenset[str]

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def simulate(s: Schedule) -> Outcome:
    """Runs a schedule."""
    spec = RunSpec(
        run_id="run", model=Target(target="none"), loss=Target(target="none"), optimizer=Target(target="none"),
        configuration=s.configuration, epochs=1, seed=1, dtype="float32",
        samples=16 * s.configuration.workers * s.iterations, prices=load_prices("objects"), faults=s.faults,
        trainer="counting" if s.counts else "synthetic", trainer_options={} if s.counts else {"elements": ELEMENTS},
        cold_start_s=s.world.cold_start_s,
    )  # fmt: skip
    prepared = Prepared(
        job=Job(name="chaos", model=Target(target="none")), spec=spec, objects={Keys("run").spec: [spec.to_bytes()]},
        model_bytes=0,
    )  # fmt: skip
    events: list[Event] = []

    async def go() -> Outcome:
        platform = SimulatedPlatform(s.world, run_worker, seed=s.seed, limits=Limits())
        store: Any = platform.store
        if s.late_puts:
            platform.store = Late(store, random.Random(s.seed), s.late_puts, s.late_s)
        trigger = Trigger(
            platform, store, spec, channel_address="memory", clock=asyncio.get_running_loop().time,
            on_event=events.append,
        )  # fmt: skip
        await trigger.launch(prepared)
        if not s.watched:
            _blind(trigger)
        ending = None
        try:
            async with asyncio.timeout(MOST_S):
                ending = await trigger.watch()
        except TimeoutError:
            pass
        return Outcome(ending=ending, events=events, left=frozenset(store.objects))

    return simulation.run(go())


def _blind(trigger: Trigger) -> None:
    """The client does not see who dies: the ranks find out by themselves."""
    read: Callable[[Event], list[Any]] = trigger._read

    def blind(event: Event) -> list[Any]:
        actions = read(event)
        dead = isinstance(event, Ended) and event.status in ("lost", "timed_out")
        return [] if dead else actions

    trigger._read = blind  # type: ignore[method-assign]


@lru_cache(maxsize=256)
def _undisturbed(configuration: Configuration, iterations: int) -> str:
    world = Simulation(compute={"a": 1.0, "b": 4.0, "m": 0.0}, latency_s=0.001, cold_start_s=0.1)
    calm = Schedule(
        seed=0, configuration=configuration, iterations=iterations, world=world, faults=(), late_puts=0.0, late_s=0.0,
        watched=True,
    )  # fmt: skip
    ending = simulate(calm).ending
    assert ending is not None
    assert ending.final is not None, ending.causes
    return str(ending.final["weights_sha256"])


def _calm(s: Schedule) -> str:
    """Weights of the run in which nothing happens: neither K nor pattern, lifetimes nor checkpoints change them."""
    c = s.configuration
    k = c.aggregators if c.sync == "hap" else 1
    plain = dataclasses.replace(
        c, lifetime_s=900.0, checkpoint_every=25, pattern="k-reduce", aggregators=k, channel="memory"
    )
    return _undisturbed(plain, s.iterations)


def run(seed: int) -> list[str]:
    """Names of violated invariants with details; empty when all hold."""
    s = schedule(seed)
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
    fired = len(outcome.of(FaultFired)) + sum(not f.startswith(("kill", "drop")) for f in s.faults)
    planned = sum(e.reason == "relay" for e in invoked)
    # Lives that end while a peer is awaited go on as replacements of themselves: planned ones, too.
    closed = sum(e.outcome == "relayed" for e in outcome.of(Ended))
    most = s.configuration.workers + planned + closed + 3 * fired
    if len(invoked) > most:
        wrong.append(f"invocations: {len(invoked)} > {most}")
    if outcome.left != {"run/spec", "run/result"}:
        wrong.append(f"left over: {sorted(outcome.left - {'run/spec', 'run/result'})[:5]}")
    return wrong


def _wrong_weights(s: Schedule, ending: Ending) -> list[str]:
    assert ending.final is not None
    assert ending.arrays is not None
    if not s.counts:
        return [] if ending.final["weights_sha256"] == _calm(s) else ["same weights: they differ"]
    off = np.flatnonzero(ending.arrays["counts"] != 1)
    wrong = [f"exactly once: {off.size} of {ending.arrays['counts'].size} counts are not 1"] if off.size else []
    elsewhere = ending.final["metrics"]["loss"]
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
