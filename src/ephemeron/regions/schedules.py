"""Rounds of a region, as its specification says."""

from __future__ import annotations

from ephemeron.regions.policies import Adaptation, AdaptiveSchedule, ExchangeSchedule, first_plans, parse_sync
from ephemeron.training.worker.spec import GroupMembership


def schedule_of(membership: GroupMembership, iterations: int) -> ExchangeSchedule | AdaptiveSchedule:
    """Rounds of a region.

    Args:
        membership: of the region.
        iterations: of its run.
    """
    sync = parse_sync(membership.sync)
    if sync.auto:
        how = Adaptation(every=membership.every, compression=membership.compression, fragments=1, delay=0)
        reference = membership.iterations[0]
        return AdaptiveSchedule(iterations=iterations, reference=reference, plans=first_plans(how, reference=reference))
    return ExchangeSchedule(
        iterations=iterations, every=membership.every, rounds=membership.rounds, fragments=sync.fragments, delay=sync.delay
    )
