"""Pace and events of a region's exchanges: bytes, seconds, staleness, plans, and contributions that were left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ephemeron.events import RegionExchanged, UpdateQuarantined
from ephemeron.regions.communicator.base import LinkMeter, PeerTraffic
from ephemeron.regions.policies import AdaptiveSchedule, Measured, RegionSync, RoundPlan, adapted, next_plan, slowest
from ephemeron.regions.region_state import RegionState
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.spec import GroupMembership


class ExchangeEvents:
    """Events of one invocation of rank 0.

    Args:
        region: its name.
        communicator: whose bytes are counted.
        lifecycle: of the invocation.
    """

    def __init__(self, region: str, communicator: LinkMeter, lifecycle: InvocationLifecycle) -> None:
        self._region, self._communicator, self._lifecycle = region, communicator, lifecycle
        self._counted = PeerTraffic()

    def emit(self, iteration: int, seconds: float, state: RegionState) -> None:
        """Tells of the exchange before an iteration.

        Args:
            iteration: that one.
            seconds: for which the region has waited.
            state: after the exchange.
        """
        invocation, t = self._lifecycle.invocation, self._lifecycle.run_now()
        before, self._counted = self._counted, sum(self._communicator.meter.values(), PeerTraffic())
        total = self._counted
        invocation.emit(
            RegionExchanged(
                t=t,
                rank=0,
                attempt=invocation.attempt,
                iteration=iteration,
                bytes_sent=total.sent - before.sent,
                bytes_received=total.received - before.received,
                kernel_bytes_sent=total.kernel_sent - before.kernel_sent,
                kernel_bytes_received=total.kernel_received - before.kernel_received,
                seconds=round(seconds, 6),
                staleness=state.staleness(self._region),
                plan=described(state.plans[-1] if state.plans else None),
            )
        )
        for left_out in state.quarantined:
            invocation.emit(
                UpdateQuarantined(t=t, rank=0, attempt=invocation.attempt, iteration=iteration, region=left_out.region, why=left_out.why)
            )
            invocation.warn(str(left_out))


# -- how the first region adapts the rounds of a run --------------------------------------------------------------


class LinkPace:
    """Pace and link of one region, and the plans that follow from those of all.

    Args:
        membership: of the region.
        sync: policy of the run.
        communicator: whose links are measured.
        now: time.
    """

    def __init__(self, membership: GroupMembership, sync: RegionSync, communicator: LinkMeter, now: Callable[[], float]) -> None:
        self._m, self._sync, self._communicator, self._now = membership, sync, communicator, now
        self._ended: tuple[int, float] | None = None
        """Iteration and time of the end of the exchange before."""
        self._iteration_s: float | None = None

    def begins(self, iteration: int) -> None:
        """An exchange begins before an iteration."""
        if self._sync.auto and self._ended is not None and iteration > self._ended[0]:
            count, passed = iteration - self._ended[0], self._now() - self._ended[1]
            share = self._m.iterations[self._m.index] / self._m.iterations[0]
            self._iteration_s = max(1e-9, passed / count * share)

    def ends(self, iteration: int) -> None:
        """The exchange before an iteration has ended."""
        self._ended = (iteration, self._now())

    def measured(self) -> Measured | None:
        """Seconds of an iteration of the first region at this region's pace, and the slowest link; None: not known yet."""
        links = [link for link in self._communicator.links.values() if link.bandwidth]
        if self._iteration_s is None or not links:
            return None
        return Measured(
            iteration_s=self._iteration_s,
            bandwidth=min(link.bandwidth or 0.0 for link in links),
            round_trip_s=max(link.round_trip_s or 0.0 for link in links),
        )

    def plan_after(self, round: int, schedule: AdaptiveSchedule, known: Mapping[str, Measured], *, nbytes: int) -> RoundPlan | None:
        """The plan of the round two after one that is being sent, by the coordinator; None: that one or the next is the last.

        Args:
            round: whose first fragment is being sent.
            schedule: of the region.
            known: what all regions have measured, as of their latest rounds.
            nbytes: of the parameters as float32.
        """
        before = schedule.plan(round + 1)
        if before is None:
            return None
        own, wanted, name = self.measured(), before.how, self._m.names[self._m.index]
        found = known if own is None else {**known, name: own}
        if (limits := slowest(list(found.values()))) is not None:
            wanted = adapted(limits, nbytes=nbytes, limit=self._sync.limit)
        reference = self._m.iterations[0]
        return next_plan(before, wanted, reference=reference, least=-(-reference // min(self._m.iterations)))


def described(plan: RoundPlan | None) -> str:
    """A plan in one line."""
    if plan is None:
        return ""
    how = plan.how
    return f"H={how.every} {how.compression} fragments={how.fragments} delay={how.delay}"
