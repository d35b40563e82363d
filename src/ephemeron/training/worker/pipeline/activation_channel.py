"""Messages of one stage: immutable objects whose keys sender and receiver compute alike.

No object is overwritten with other bytes: a replaced function sends the same bytes again under the same key. An object is deleted
by its only reader, once no replacement of that reader would need it; what is sent again later stays until the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ephemeron.partition.runtime.value_codec import BoundaryValue
from ephemeron.training.collectives import StalledPeers, wait_for_object
from ephemeron.training.collectives.poll_schedule import ArrivalPredictor
from ephemeron.training.collectives.state import Arrivals
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.pipeline.activation_codec import ActivationHeader, opened, sealed
from ephemeron.training.worker.spec import Stages


class MessageKey(NamedTuple):
    """One object between two stages of a replica."""

    iteration: int
    kind: str
    """See `activation_codec`."""
    source: int
    """Stage of the program, or function for kind `s`, that sends it."""
    target: int
    micro_batch: int
    sender: int
    """Function (stage of ranks) that sends it."""


class ActivationChannel:
    """Sends and receives one rank's messages.

    Args:
        lifecycle: of the invocation.
        stages: of the run.
        replica: this rank's.
        poll_worth_s: see `collectives.Group`.
        wanted: messages that this rank reads in an iteration.
    """

    def __init__(
        self, lifecycle: InvocationLifecycle, stages: Stages, *, replica: int, poll_worth_s: float,
        wanted: Callable[[int], Iterable[MessageKey]],
    ) -> None:  # fmt: skip
        self._lifecycle, self._invocation = lifecycle, lifecycle.invocation
        self._stages, self._replica, self._wanted = stages, replica, wanted
        self._predictor = ArrivalPredictor(lifecycle.channel.traits.latency_s, poll_worth_s)
        self._reference = lifecycle.now()
        self.flags = 0
        """Union of the flags of this rank and of all messages read in this iteration."""
        self._deleted = 0

    def begin(self, flags: int) -> None:
        """Begins an iteration.

        Args:
            flags: of this rank, for all ranks.
        """
        self.flags, self._reference = flags, self._lifecycle.now()

    async def send(
        self, message: MessageKey, values: Mapping[str, BoundaryValue], *, loss: float | None = None
    ) -> None:
        """Puts one message.

        Args:
            message: its key.
            values: by name.
            loss: mean loss of the micro-batch, if known.

        Raises:
            JobError: a value is neither a dense tensor nor a plain one.
        """
        lifecycle, began = self._lifecycle, self._lifecycle.now()
        header = ActivationHeader(
            flags=self.flags, sent_at=lifecycle.run_now(), busy_s=lifecycle.timeouts.slowest_s, loss=loss
        )
        await lifecycle.channel.put(self._key(message), sealed(values, header))
        self._invocation.trace.record("upload", began, lifecycle.now())

    async def receive(self, message: MessageKey) -> tuple[ActivationHeader, dict[str, BoundaryValue]]:
        """Waits for one message.

        Raises:
            InvocationExit: see `InvocationLifecycle.on_timeout`.
            CorruptMessage: it is damaged.
        """
        lifecycle, key = self._lifecycle, self._key(message)
        stream = f"{message.kind}.{message.source}.{message.target}.{message.micro_batch}"
        reference, began = self._reference, lifecycle.now()
        polled = not lifecycle.channel.traits.waits
        sender = self._stages.rank(message.sender, self._replica)
        predicted = self._predictor.predict(stream, reference) if polled else None

        async def stalled() -> StalledPeers:
            return StalledPeers(message.iteration, [sender], [key])

        (header, values), got, found, missed = await wait_for_object(
            lifecycle.channel, key, timeout_s=lifecycle.wait_timeout_s, stalled=stalled,
            on_timeout=lifecycle.on_timeout, accept=lambda data: opened(data, key=key), expected_at=predicted,
        )  # fmt: skip
        if polled:
            age_s = lifecycle.run_now() - (lifecycle.now() - found) - header.sent_at
            gap_s = min(0.25, (found - max(began, predicted or 0)) / 3) if missed or got.polls else 0.0
            self._predictor.observe(stream, reference, found=found, gap_s=gap_s, age_s=age_s)
        if found > began:
            self._invocation.trace.record("wait", began, found)
        self._invocation.trace.record("download", found, lifecycle.now())
        self.flags |= header.flags
        lifecycle.on_message(sender, header.busy_s)
        return header, values

    def skip_deletion_before(self, iteration: int) -> None:
        """Messages of iterations before this one have been deleted by a predecessor."""
        self._deleted = iteration

    async def collect_garbage(self, durable: int) -> None:
        """Deletes messages of iterations before `durable`: no replacement of this rank would read them again."""
        gone = [self._key(message) for t in range(self._deleted, durable) for message in self._wanted(t)]
        self._deleted = max(self._deleted, durable)
        if gone:
            await self._lifecycle.channel.delete(gone)

    def state(self) -> Arrivals:
        """Arrival times of messages by stream, for a successor: see `ArrivalPredictor.state`."""
        return self._predictor.state()

    def load(self, state: Arrivals) -> None:
        """Restores what `state` returned."""
        self._predictor.load(state)

    def _key(self, m: MessageKey) -> str:
        return self._lifecycle.keys.between(m.iteration, m.kind, m.source, m.target, self._replica, m.micro_batch)
