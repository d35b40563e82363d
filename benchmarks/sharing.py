"""Jobs that share a cache, in virtual time: the order of their accesses, which can be replayed on any cache."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.data.cache import Accessed, Cache, CachePolicy, Event
from ephemeron.data.cache.baselines import replay
from ephemeron.data.sampling import CollaborativeSampler
from ephemeron.data.sampling.baselines import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training job."""

    indices: Sequence[int]
    """Its dataset."""
    rate: float = 1.0
    """Samples per second, on average."""
    starts_s: float = 0.0
    epochs: int = 1
    batch: int = 1
    leaves_s: float = math.inf
    """Time of its stop, if it has not ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """Shares of the accesses that hit, in per cent."""

    cold: float
    """Of the jobs' first epochs."""
    steady: float
    """Of their later epochs; not a number if there are none."""
    all: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessTrace:
    """Accesses of a simulation, each with its job and the job's epoch."""

    events: Sequence[Event]
    jobs: Sequence[int]
    epochs: Sequence[int]
    waited: bool
    """True if a job was ever given less than it asked for before the end of an epoch."""

    @property
    def order(self) -> list[int]:
        """Merged order of accesses."""
        return [e.key for e in self.events if isinstance(e, Accessed)]  # type: ignore[misc]

    def hit_rates(self, policy: CachePolicy, capacity: int) -> HitRates:
        """Hit rates of a cache of so many samples."""
        hits = replay(Cache(capacity, policy), self.events)
        cold = [hit for hit, epoch in zip(hits, self.epochs, strict=True) if epoch == 0]
        steady = [hit for hit, epoch in zip(hits, self.epochs, strict=True) if epoch > 0]
        return HitRates(
            cold=100 * sum(cold) / len(cold),
            steady=100 * sum(steady) / len(steady) if steady else math.nan,
            all=100 * sum(hits) / len(hits),
        )


def access_trace(sampler: CollaborativeSampler, tasks: Sequence[Task], *, seed: int, drift: float = 0.0, noise: float = 0.0) -> AccessTrace:
    """Simulates jobs that run as fast as they can; each takes its next batch when it has used the last one.

    Args:
        sampler: a new one.
        tasks: the jobs; they are named by their position.
        seed: of the jitter.
        drift: standard deviation of a job's log speed, which drifts (Ornstein-Uhlenbeck over a tenth of an epoch).
        noise: standard deviation of the log time of a single batch.
    """
    rng = np.random.default_rng(seed)
    forecast = Forecast(sampler)
    # Jobs that start at the same time join before any of them takes a batch.
    due = [(task.starts_s, takes, at) for at, task in enumerate(tasks) for takes in (False, True)]
    heapq.heapify(due)
    speed = rng.normal(0.0, drift, len(tasks)) if drift else np.zeros(len(tasks))
    events: list[Event] = []
    jobs: list[int] = []
    epochs: list[int] = []
    waited = False
    while due:
        now_s, takes, at = heapq.heappop(due)
        task, name = tasks[at], str(at)
        if not takes:
            sampler.add_job(name, task.indices, batch=task.batch, epochs=task.epochs)
            continue
        member = sampler.jobs[name]
        if now_s >= task.leaves_s or not member.left_to_take:
            sampler.remove_job(name)
            events += forecast.news()
            continue
        wanted = min(task.batch, member.left_to_take)
        batch, news = forecast.take(name, now_s=now_s)
        waited |= len(batch.indices) < wanted
        events += news
        for index in batch.indices.tolist():
            events.append(Accessed(job=name, key=index, now_s=now_s))
            jobs.append(at)
            epochs.append(batch.epoch)
        if drift:
            keep = math.exp(-10 * len(batch.indices) / member.size)
            speed[at] = keep * speed[at] + math.sqrt(1 - keep * keep) * rng.normal(0.0, drift)
        spread = math.exp(rng.normal(0.0, noise)) if noise else 1.0
        heapq.heappush(due, (now_s + len(batch.indices) / task.rate * math.exp(-speed[at]) * spread, True, at))
    return AccessTrace(events=events, jobs=jobs, epochs=epochs, waited=waited)


def merged(path: Path | None, result: dict[str, Any], identity: Sequence[str]) -> dict[str, Any]:
    """Result with the rows of an earlier file that it does not measure again, so that a long benchmark can be run in parts.

    Args:
        path: the earlier result, if any. Its rows keep the commit at which they were measured.
        result: has `rows`, each a dictionary.
        identity: the names that identify the subject of a row.
    """
    rows = [{**row, "commit": result["commit"]} for row in result["rows"]]
    if path is not None and path.exists():
        again = {tuple(row[name] for name in identity) for row in rows}
        earlier = json.loads(path.read_text())["rows"]
        rows = [row for row in earlier if tuple(row[name] for name in identity) not in again] + rows
    return {**result, "rows": sorted(rows, key=lambda row: [str(row[name]) for name in identity])}
