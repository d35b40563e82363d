"""Simulation of a cache: a recorded or generated sequence of events, and the hits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ephemeron.data.cache.cache import Cache
from ephemeron.data.cache.events import Accessed, Event, Key


def replay(
    cache: Cache, events: Iterable[Event], *, nbytes: Callable[[Key], int] = lambda key: 1, cost_s: Callable[[Key], float] = lambda key: 1.0
) -> list[bool]:
    """Runs events through a cache in order; what it misses is offered to it at once, unpinned.

    Args:
        cache: usually empty.
        events: of the jobs, in order.
        nbytes: the size of each object in bytes.
        cost_s: seconds that each object takes to make.

    Returns:
        For each `Accessed` whether it was a hit.
    """
    hits: list[bool] = []
    for event in events:
        if isinstance(event, Accessed):
            hit = cache.lookup(event.job, event.key, now_s=event.now_s)
            hits.append(hit)
            if not hit:
                cache.admit(event.key, nbytes=nbytes(event.key), cost_s=cost_s(event.key))
        else:
            cache.observe(event)
    return hits
