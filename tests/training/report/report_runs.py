"""Synthetic runs: the events that a small BSP training would have left, without training anything."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from ephemeron.events import (
    Checkpointed,
    Ended,
    Evaluated,
    Event,
    FaultFired,
    Invoked,
    Loaded,
    Note,
    Progress,
    RunEnded,
    RunStarted,
    Started,
    Traffic,
)


@dataclass(frozen=True)
class Prices:
    """AWS Lambda and S3, roughly."""

    gb_second_usd: float = 1.66667e-5
    invocation_usd: float = 2e-7
    put_usd: float = 5e-6
    get_usd: float = 4e-7
    delete_usd: float = 0.0
    list_usd: float = 5e-6


PRICES = Prices()


@dataclass
class Run:
    """Builds events call by call; `t` is kept per rank."""

    workers: int = 4
    iterations: int = 60
    epochs: int = 6
    job: str = "digits"
    memory_mb: int = 704
    step_s: float = 0.045
    events: list[Event] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(7))
    _traffic: dict[tuple[int, int], Traffic] = field(default_factory=dict)
    _begun: dict[tuple[int, int], float] = field(default_factory=dict)

    def launch(self, t: float = 0.0, **more: object) -> None:
        self.events.append(
            RunStarted(
                t=t,
                run_id="digits-20260101-0001",
                job=self.job,
                workers=self.workers,
                aggregators=min(2, self.workers),
                memory_mb=self.memory_mb,
                iterations=self.iterations,
                epochs=self.epochs,
                samples=1437,
                configuration={"pattern": "k-reduce", "sync": "bsp", "channel": "folder", "lifetime_s": 0.0},
                platform="local",
                wall_time=1_767_225_600.0,
                notes=["Memory quotas are not enforced here: the cgroup is read-only."],
                **more,
            )
        )

    def call(self, rank: int, attempt: int, t: float, reason: str = "start", load_s: float = 0.35) -> float:
        """Invokes, starts and loads; returns when the function is ready."""
        name, start = f"inv-{rank}-{attempt}", t + 0.15 + 0.05 * rank
        self.events += [
            Invoked(t=t, rank=rank, attempt=attempt, invocation=name, reason=reason),
            Started(t=start, rank=rank, attempt=attempt, invocation=name, cold=attempt == 0),
            Loaded(t=start + load_s, rank=rank, attempt=attempt, iteration=0, spans=[("load", start, start + load_s)]),
        ]
        self._begun[rank, attempt], self._traffic[rank, attempt] = start, Traffic(gets=3, bytes_down=400_000)
        return start + load_s

    def step(self, rank: int, attempt: int, i: int, t: float) -> None:
        """One iteration, from `t` to `t + step_s`."""
        s, jitter = self.step_s, self.random.uniform(0.85, 1.0)
        a, b, c, d = t + 0.45 * s * jitter, t + 0.62 * s, t + 0.8 * s, t + 0.95 * s
        spans = [("compute", t, a), ("upload", a, b), ("wait", b, c), ("download", c, d)]
        if rank < 2:
            spans = [("compute", t, a), ("wait", a, a + 0.1 * s), ("aggregate", a + 0.1 * s, c), ("download", c - 0.05 * s, d)]
        traffic = self._traffic[rank, attempt] + Traffic(puts=2, gets=2, polls=1, bytes_up=20_000, bytes_down=40_000)
        self._traffic[rank, attempt] = traffic
        loss = 2.3 * math.exp(-3 * i / self.iterations) + 0.12 * self.random.random()
        self.events.append(
            Progress(
                t=t + s,
                rank=rank,
                attempt=attempt,
                iteration=i,
                epoch=i * self.epochs // self.iterations,
                samples=16 + rank,
                loss=loss,
                version=i,
                spans=spans,
                traffic=traffic,
            )
        )

    def end(self, rank: int, attempt: int, t: float, status: str = "ok", outcome: str = "finished", **more: object) -> None:
        billed = t - self._begun[rank, attempt]
        known = status == "ok"
        self.events.append(
            Ended(
                t=t,
                rank=rank,
                attempt=attempt,
                invocation=f"inv-{rank}-{attempt}",
                status=status,
                outcome=outcome if known else "",
                billed_s=billed,
                gb_seconds=billed * self.memory_mb / 1024,
                memory_mb=self.memory_mb,
                peak_memory_mb=412.0 + rank,
                traffic=self._traffic[rank, attempt] if known else Traffic(),
                **more,
            )
        )

    def evaluate(self, rank: int, attempt: int, epoch: int, iteration: int, t: float) -> None:
        right = round(90 * (1 - 0.8 * math.exp(-0.8 * epoch)))
        loss_sum = 90 * (0.1 + 2.2 * math.exp(-0.6 * epoch))
        self.events.append(
            Evaluated(
                t=t,
                rank=rank,
                attempt=attempt,
                epoch=epoch,
                iteration=iteration,
                samples=90,
                sums={"loss": (loss_sum, 90), "accuracy": (right, 90)},
            )
        )

    def train(self, first: int, last: int, t: float, attempts: dict[int, int]) -> float:
        """Iterations `first..last-1` of all ranks in step; returns the time after them."""
        per = max(1, self.iterations // self.epochs)
        for i in range(first, last):
            for rank, attempt in attempts.items():
                self.step(rank, attempt, i, t)
                if (i + 1) % per == 0:
                    self.evaluate(rank, attempt, (i + 1) // per, i + 1, t + self.step_s)
            t += self.step_s
        return t

    def all(self, attempts: dict[int, int], t: float, reason: str = "start") -> float:
        return max(self.call(rank, attempt, t, reason) for rank, attempt in attempts.items())


def clean(**more: object) -> list[Event]:
    run = Run(**more)
    run.launch()
    attempts = dict.fromkeys(range(run.workers), 0)
    t = run.train(0, run.iterations, run.all(attempts, 0.02), attempts)
    for rank in attempts:
        run.end(rank, 0, t + 0.01)
    return [*run.events, RunEnded(t=t + 0.05, status="finished")]


def replaced() -> list[Event]:
    """Rank 2 is killed in iteration 30; attempt 1 takes up at 25 and repeats five iterations."""
    run = Run()
    run.launch()
    attempts = dict.fromkeys(range(4), 0)
    t = run.train(0, 30, run.all(attempts, 0.02), attempts)
    run.events.append(Checkpointed(t=t, rank=2, attempt=0, iteration=25, nbytes=90_000))
    run.events.append(FaultFired(t=t + 0.02, rank=2, attempt=0, fault="kill", iteration=30))
    run.end(2, 0, t + 0.03, status="lost", error="exit code -9")
    run.events.append(Note(t=t + 0.04, level="warning", text="rank 2 was lost; replaced"))
    t = run.call(2, 1, t + 0.05, "replacement")
    attempts[2] = 1
    t = run.train(25, 30, t, {2: 1})
    t = run.train(30, 60, t, attempts)
    for rank, attempt in attempts.items():
        run.end(rank, attempt, t + 0.01)
    return [*run.events, RunEnded(t=t + 0.05, status="finished")]


def relayed() -> list[Event]:
    """Every rank passes its lifetime limit twice."""
    run = Run()
    run.launch()
    t = 0.02
    for attempt in range(3):
        attempts = dict.fromkeys(range(4), attempt)
        t = run.train(20 * attempt, 20 * attempt + 20, run.all(attempts, t, "relay" if attempt else "start"), attempts)
        for rank in attempts:
            run.end(rank, attempt, t + 0.01, outcome="finished" if attempt == 2 else "relayed")
        t += 0.02
    return [*run.events, RunEnded(t=t + 0.05, status="finished")]


def stopped() -> list[Event]:
    run = Run()
    run.launch()
    attempts = dict.fromkeys(range(4), 0)
    t = run.train(0, 22, run.all(attempts, 0.02), attempts)
    for rank in attempts:
        run.end(rank, 0, t + 0.01, outcome="stopped")
    return [*run.events, RunEnded(t=t + 0.05, status="stopped")]


def failed() -> list[Event]:
    """The model cannot even be imported."""
    run = Run()
    run.launch()
    for rank in range(4):
        run.call(rank, 0, 0.02)
        run.end(rank, 0, 1.0, status="error", error="Traceback (most recent call last):\n  ImportError: no model <here>")
    cause = "rank 0, attempt 0: ImportError: no model <here>"
    return [*run.events, RunEnded(t=1.1, status="failed", causes=[cause])]


def launched() -> list[Event]:
    run = Run()
    run.launch()
    return run.events


def running() -> list[Event]:
    """Cut off in the middle: no bill, no end."""
    return [e for e in clean() if e.t < 2.0 and not isinstance(e, Ended | RunEnded)]


def long_run() -> list[Event]:
    return clean(workers=8, iterations=2_500, epochs=50)


def bills(events: Iterable[Event], prices: Prices = PRICES) -> float:
    """What a run costs by its bills alone, for runs in which every function brought its counters home."""
    total = 0.0
    for e in events:
        if isinstance(e, Ended):
            t = e.traffic
            total += e.gb_seconds * prices.gb_second_usd + prices.invocation_usd
            total += t.puts * prices.put_usd + (t.gets + t.polls) * prices.get_usd
            total += t.deletes * prices.delete_usd + t.lists * prices.list_usd
    return total


def many() -> list[Event]:
    """More ranks than lanes of full height have room for."""
    return clean(workers=100, iterations=30, epochs=3)
