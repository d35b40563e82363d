"""Events of a region's exchanges: bytes, seconds, staleness, plans, and contributions that were left out."""

from __future__ import annotations

from ephemeron.events import RegionExchanged, UpdateQuarantined
from ephemeron.regions.communicator.base import LinkMeter, PeerTraffic
from ephemeron.regions.link_pace import described
from ephemeron.regions.region_state import RegionState
from ephemeron.training.worker.lifecycle import InvocationLifecycle


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
