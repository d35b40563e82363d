"""Small stories of jobs for the tests of caches: permutations drawn beforehand, accesses merged by time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ephemeron.data.cache import Accessed, Announced, Event, Joined


def told(samples: int, *, rates: Sequence[float] = (1.0, 1.0, 1.0, 1.0), epochs: int = 1, ahead: int = 0, seed: int = 0) -> list[Event]:
    """Jobs over the same samples; each announces an epoch when the one `ahead` before it begins.

    They begin a thousandth of a second after one another, so that no two accesses are simultaneous.
    """
    rng = random.Random(seed)
    orders = [[rng.sample(range(samples), samples) for _ in range(epochs)] for _ in rates]
    accesses = sorted((k / rate + job / 1000, job, k) for job, rate in enumerate(rates) for k in range(samples * epochs))
    events: list[Event] = [Joined(job=job, keys=range(samples)) for job in range(len(rates))]
    for now_s, job, k in accesses:
        epoch, at = divmod(k, samples)
        if at == 0:
            first = 0 if epoch == 0 else epoch + ahead
            for drawn in range(first, min(epoch + ahead + 1, epochs)):
                events.append(Announced(job=job, keys=orders[job][drawn]))
        events.append(Accessed(job=job, key=orders[job][epoch][at], now_s=now_s))
    return events


def order_of(events: Sequence[Event]) -> list[object]:
    return [e.key for e in events if isinstance(e, Accessed)]
