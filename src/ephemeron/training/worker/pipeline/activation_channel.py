"""Messages of one stage: immutable objects whose keys sender and receiver compute alike.

No object is overwritten with other bytes: a replaced function sends the same bytes again under the same key. An object is deleted
by its only reader, once no replacement of that reader would need it; what is sent again later stays until the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ephemeron.partition.runtime.codec import BoundaryValue
from ephemeron.training.collectives import StalledPeers
from ephemeron.training.collectives.group import Arrivals
from ephemeron.training.collectives.object_receiver import ObjectReceiver
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
        self,
        lifecycle: InvocationLifecycle,
        stages: Stages,
        *,
        replica: int,
        poll_worth_s: float,
        wanted: Callable[[int], Iterable[MessageKey]],
    ) -> None:
        self._lifecycle, self._invocation = lifecycle, lifecycle.invocation
        self._stages, self._replica, self._wanted = stages, replica, wanted
        self._receiver = ObjectReceiver(
            self._invocation.exchange, self._invocation.trace, poll_worth_s=poll_worth_s, on_timeout=lifecycle.on_timeout
        )
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
        self, message: MessageKey, values: Mapping[str, BoundaryValue], *, loss: float | None = None, weight: float | None = None
    ) -> None:
        """Puts one message.

        Args:
            message: its key.
            values: by name.
            loss, weight: loss of the micro-batch, and its weight in a mean, if known.

        Raises:
            JobError: a value is neither a dense tensor nor a plain one.
        """
        lifecycle, began = self._lifecycle, self._lifecycle.now()
        header = ActivationHeader(
            flags=self.flags, sent_at=lifecycle.run_now(), busy_s=lifecycle.timeouts.slowest_s, loss=loss, weight=weight
        )
        await self._invocation.exchange.put(self._key(message), sealed(values, header))
        self._invocation.trace.record("upload", began, lifecycle.now())

    async def receive(self, message: MessageKey) -> tuple[ActivationHeader, dict[str, BoundaryValue]]:
        """Waits for one message.

        Raises:
            InvocationExit: see `InvocationLifecycle.on_timeout`.
            CorruptMessage: it is damaged.
        """
        lifecycle, key = self._lifecycle, self._key(message)
        stream = f"{message.kind}.{message.source}.{message.target}.{message.micro_batch}"
        sender = self._stages.rank(message.sender, self._replica)

        async def stalled() -> StalledPeers:
            return StalledPeers(message.iteration, [sender], [key])

        def decode(data: memoryview) -> tuple[ActivationHeader, dict[str, BoundaryValue]]:
            return opened(data, key=key)

        (header, values), _ = await self._receiver.receive(
            key,
            stream,
            phase="download",
            reference=self._reference,
            timeout_s=lifecycle.wait_timeout_s,
            stalled=stalled,
            decode=decode,
            sent_at=lambda received: received[0].sent_at,
        )
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
            await self._invocation.exchange.delete(gone)

    def state(self) -> Arrivals:
        """Arrival times of messages by stream, for a successor: see `ObjectReceiver.state`."""
        return self._receiver.state()

    def load(self, state: Arrivals) -> None:
        """Restores what `state` returned."""
        self._receiver.load(state)

    def _key(self, m: MessageKey) -> str:
        return self._lifecycle.keys.between(m.iteration, m.kind, m.source, m.target, self._replica, m.micro_batch)
