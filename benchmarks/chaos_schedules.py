"""Faults of one simulated schedule of `benchmarks.chaos_simulated`, as a pure function of its seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from ephemeron.events import PHASES
from ephemeron.training.job import Configuration, ResizeOptions, Simulation
from ephemeron.training.job.generation import ScheduledResize

MERGING_FROM = 3_000_000
"""First seed of schedules in which functions merge their evaluations."""
LOCAL_FROM = 5_000_000
"""First seed of schedules whose ranks take local steps with a state of their own between exchanges."""
RESIZES_FROM = 6_000_000
"""First seed of schedules in which the functions of the run change."""
DIRECT_FROM = 7_000_000
"""First seed of schedules whose functions are connected to each other: with partitions, slow links and pairs that never connect."""
BARRIERS_FROM = 4_000_000
"""First seed of schedules under HSP: several epochs, after which half of them merge their evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run and its faults."""

    seed: int
    configuration: Configuration
    iterations: int
    epochs: int = 1
    """They share the iterations equally."""
    world: Simulation
    faults: tuple[str, ...]
    late_puts: float
    """Share of puts that take up to `late_s` longer."""
    late_s: float
    watched: bool
    """True if the platform tells the client which functions die."""
    failing: float = 0.0
    """Share of requests that fail: throttled, unavailable, or served without an answer."""
    torn: float = 0.0
    """Share of reads that are truncated."""
    damaged: tuple[int, int] | None = None
    """Rank and iteration whose first object the store keeps truncated."""

    @property
    def merges_evaluations(self) -> bool:
        """True if functions merge their evaluations: every three iterations, under HSP at the end of each epoch."""
        c = self.configuration
        if c.sync == "hsp":
            return self.seed % 2 == 1
        return self.seed >= MERGING_FROM and c.sync in ("bsp", "hap") and c.pattern != "parameter-server"

    @property
    def local_steps(self) -> int:
        """Steps of each rank between two exchanges; 0: gradients are exchanged."""
        return 1 + self.seed % 4 if LOCAL_FROM <= self.seed < DIRECT_FROM and not self.counts else 0

    @property
    def counts(self) -> bool:
        """True if contributions are counted; otherwise weights are compared."""
        return self.configuration.sync.startswith(("ssp", "asp", "hsp"))

    @property
    def peer_timeout_s(self) -> float:
        """Shortest peer timeout."""
        return min(20.0, 0.2 * self.configuration.function_timeout_s)

    @property
    def step_s(self) -> float:
        """Seconds of computing per iteration of a rank that is not slowed down."""
        assert self.world.compute is not None
        return self.world.compute.seconds(self.configuration.batch_size, self.configuration.memory_mb)


def schedule(seed: int) -> Schedule:
    """Schedule of a seed."""
    if seed >= DIRECT_FROM:
        s = with_partitions(seed)
    elif seed >= RESIZES_FROM:
        s = with_resizes(seed)
    else:
        s = with_barriers(seed) if BARRIERS_FROM <= seed < LOCAL_FROM else without_store_faults(seed)
    rng = random.Random(f"store/{seed}")
    c = s.configuration
    again = c.sync in ("bsp", "hap") and c.pattern != "parameter-server" and c.workers > 1  # otherwise a damaged object cannot be put again
    damaged = (rng.randrange(c.workers), rng.randrange(s.iterations)) if rng.random() < 0.2 and again else None
    return dataclasses.replace(s, failing=rng.choice([0.0, 0.0, 0.01, 0.03]), torn=rng.choice([0.0, 0.0, 0.02]), damaged=damaged)


def with_resizes(seed: int) -> Schedule:
    """Schedule of a seed whose functions change at ends of epochs, with faults of functions and late puts only."""
    s, rng = without_store_faults(seed), random.Random(f"resizes/{seed}")
    pattern, sync = rng.choice([("k-reduce", "bsp"), ("k-reduce", "hap"), ("pipelined", "bsp"), ("k-reduce", "hap")])
    epochs, each = rng.randint(2, 4), rng.randint(1, 4)
    entries, most = [], s.configuration.workers
    for epoch in sorted(rng.sample(range(1, epochs), rng.randint(1, epochs - 1))):
        workers = rng.randint(1, 6)
        entry: dict[str, int] = {"from_epoch": epoch, "workers": workers}
        if rng.random() < 0.2:
            entry["memory_mb"] = rng.choice([1769, 3008])
        if sync == "hap" and rng.random() < 0.5:
            entry["aggregators"] = rng.randint(1, workers)
        if rng.random() < 0.3:
            entry["batch_size"] = rng.choice([8, 16, 24])
        entries.append(ScheduledResize(**entry))
        most = max(most, workers)
    c = dataclasses.replace(
        s.configuration,
        pattern=pattern,
        sync=sync,
        channel="memory",
        resize=ResizeOptions(schedule=tuple(entries)),
        aggregators=1 if pattern == "k-reduce" and sync == "bsp" else s.configuration.aggregators,
    )
    faults = [f for f in s.faults if not f.startswith("kill")]
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3])):
        at = f"rank={rng.randrange(most)},iteration={rng.randrange(2 * each * epochs)},phase={rng.choice(PHASES)}"
        faults.append(f"kill:{at},attempt={rng.choice([0, 0, 0, 1])}")
    least = min(s.configuration.workers, *(e.workers or 1 for e in entries))
    mortal = {f.split(",")[0] for f in faults if f.startswith("kill")}
    return dataclasses.replace(
        s, configuration=c, epochs=epochs, iterations=epochs * each, faults=tuple(faults), watched=s.watched or len(mortal) + 1 >= least
    )


def with_partitions(seed: int) -> Schedule:
    """Schedule of a seed over direct connections, with faults of functions and of the network between them, and late puts."""
    s, rng = without_store_faults(seed), random.Random(f"partitions/{seed}")
    c = s.configuration
    pattern = "k-reduce" if c.pattern == "parameter-server" else c.pattern
    workers = max(2, c.workers)
    world, timeout_s = s.world, c.function_timeout_s
    if timeout_s < 900.0:  # hand-offs; another route is found in less than a fifth of the function timeout
        timeout_s, world = 100.0, dataclasses.replace(world, compute={"a": 6.0 * 1769 / 20, "b": 4.0, "m": 0.0})
        s = dataclasses.replace(s, iterations=s.iterations + 12)
    c = dataclasses.replace(
        c, channel="direct", function_timeout_s=timeout_s, pattern=pattern, workers=workers, aggregators=min(c.aggregators, workers)
    )
    faults = list(s.faults)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        ranks = rng.sample(range(workers), workers)
        apart = rng.choice([1, 1, rng.randint(1, workers - 1)])
        how = f"iteration={rng.randrange(s.iterations)},seconds={rng.choice([0.1, 1, 3, 12, 40, 1000])}"
        if rng.random() < 0.5:
            how += ",silent=1"
        one, others = ranks[0], ranks[1:]
        faults += [f"cut:rank={one},to={other},{how}" for other in others[:apart]]
    world = dataclasses.replace(
        world,
        direct_latency_s=rng.choice([0.0005, 0.0005, 0.02, 0.2]),
        direct_setup_s=rng.choice([0.0, 0.0, 0.3, 1.5]),
        direct_bandwidth_mb_s=rng.choice([None, None, 0.05]),
        direct_failure=rng.choice([0.0, 0.0, 0.0, 0.2, 0.6, 1.0]),
    )
    return dataclasses.replace(s, configuration=c, world=world, faults=tuple(faults))


def with_barriers(seed: int) -> Schedule:
    """Schedule of a seed under HSP, with faults of functions and late puts only."""
    s, rng = without_store_faults(seed), random.Random(f"epochs/{seed}")
    c = dataclasses.replace(s.configuration, pattern="k-reduce", sync="hsp", channel="memory")
    epochs = rng.randint(2, 4)
    return dataclasses.replace(s, configuration=c, epochs=epochs, iterations=epochs * max(1, round(s.iterations / epochs)))


def without_store_faults(seed: int) -> Schedule:
    """Schedule of a seed with faults of functions and late puts only."""
    rng = random.Random(seed)
    workers = rng.randint(1, 6)
    pattern = rng.choice(["k-reduce", "k-reduce", "k-reduce", "pipelined", "parameter-server"])
    syncs = {"k-reduce": ["bsp", "hap", "ssp:1", "ssp:2", "asp", "asp"], "pipelined": ["bsp", "hap", "ssp:2"]}
    sync = rng.choice(syncs.get(pattern, ["bsp", "asp"]))
    iterations, each_s = rng.randint(4, 10), rng.choice([0.3, 0.6, 2.0, 5.0])
    short = rng.random() < 0.3
    function_timeout_s = each_s * rng.uniform(6, 20) + 4.0 if short else 900.0
    configuration = Configuration(
        platform="simulated",
        channel="parameter_server" if pattern == "parameter-server" else "memory",
        pattern=pattern,
        sync=sync,
        workers=workers,
        aggregators=rng.randint(1, workers),
        memory_mb=1769,
        batch_size=16,
        function_timeout_s=function_timeout_s,
        checkpoint_every=rng.randint(1, 5),
    ).resolved()
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
        compute={"a": each_s * 1769 / 20, "b": 4.0, "m": 0.0},
        latency_s=rng.choice([0.001, 0.03]),
        bandwidth_mb_s=70.0,
        cold_start_s=rng.choice([0.1, 1.5]),
        straggler_sigma=rng.choice([0.0, 0.0, 0.3]),
    )
    late_puts, late_s, watched = rng.choice([0.0, 0.0, 0.05]), rng.uniform(0.1, 3.0), rng.random() < 0.5
    # A process has to be left that detects deaths. One more rank is lost if a put is late when its timeout ends.
    watched = watched or len(mortal) + bool(short and late_puts) >= workers
    return Schedule(
        seed=seed,
        configuration=configuration,
        iterations=iterations,
        world=world,
        faults=tuple(faults),
        late_puts=late_puts,
        late_s=late_s,
        watched=watched,
    )
