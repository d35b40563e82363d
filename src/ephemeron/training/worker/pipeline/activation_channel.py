"""What a stage sends and receives: immutable objects with keys that both sides compute.

Nobody overwrites: what a replaced function sends again is the same bytes under the same key. An object is deleted by
its only reader, once no replacement of that reader would need it again; what is sent again after that lies there until
the run is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ephemeron.communication.keys import Keys
from ephemeron.training.collectives import StalledPeers, wait_for_object
from ephemeron.training.collectives.poll_schedule import ArrivalPredictor
from ephemeron.training.worker.invocation import InvocationContext
from ephemeron.training.worker.pipeline.activation_codec import opened, sealed
from ephemeron.training.worker.spec import Stages


class MessageKey(NamedTuple):
    """One object between two stages of a replica."""

    iteration: int
    what: str
    source: int
    """Stage of the program, or function for `s`, that sends it."""
    target: int
    micro_batch: int
    sender: int
    """Function (stage of ranks) that sends it."""


class ActivationChannel:
    """One rank's letters.

    Args:
        stages: of the run.
        replica: whose letters.
        poll_worth_s: see `collectives.Group`.
        wanted: letters that this rank reads in an iteration.
    """

    def __init__(
        self, life: InvocationContext, stages: Stages, *, replica: int, poll_worth_s: float,
        wanted: Callable[[int], Iterable[MessageKey]],
    ) -> None:  # fmt: skip
        self._life, self._stages, self._replica, self._wanted = life, stages, replica, wanted
        self._keys = Keys(life.call.run)
        self._expect = ArrivalPredictor(life.channel.traits.latency_s, poll_worth_s)
        self._reference = life.now()
        self.flags = 0
        """Of all letters read in this iteration."""
        self._deleted = 0

    def begin(self, flags: int) -> None:
        """A new iteration, with what this rank wants all to know."""
        self.flags, self._reference = flags, self._life.now()

    async def send(self, a: MessageKey, values: Mapping[str, Any], **said: Any) -> None:
        """Puts one.

        Raises:
            JobError: a value that does not travel.
        """
        began = self._life.now()
        said["sent_at"] = self._life.run_now()
        said["busy_s"] = self._life.timeouts.slowest_s
        await self._life.channel.put(self._key(a), sealed(values, flags=self.flags, **said))
        self._life.trace.record("upload", began, self._life.now())

    async def receive(self, a: MessageKey) -> tuple[dict[str, Any], dict[str, Any]]:
        """Waits for one: what was said, and the values.

        Raises:
            Leave, ChannelTimeout: see `InvocationContext.overdue`.
            CorruptMessage: it is damaged.
        """
        life, key = self._life, self._key(a)
        stream = f"{a.what}.{a.source}.{a.target}.{a.micro_batch}"
        reference, began = self._reference, life.now()
        polled = not life.channel.traits.waits
        sender = self._stages.rank(a.sender, self._replica)
        predicted = self._expect.predict(stream, reference) if polled else None

        async def stalled() -> StalledPeers:
            return StalledPeers(a.iteration, [sender], [key])

        (head, values), got, found, missed = await wait_for_object(
            life.channel, key, timeout_s=life.patience, stalled=stalled, on_timeout=life.overdue,
            accept=lambda data: opened(data, key=key), expected_at=predicted,
        )  # fmt: skip
        if polled:
            age_s = life.run_now() - (life.now() - found) - head["sent_at"]
            gap_s = min(0.25, (found - max(began, predicted or 0)) / 3) if missed or got.polls else 0.0
            self._expect.observe(stream, reference, found=found, gap_s=gap_s, age_s=age_s)
        if found > began:
            life.trace.record("wait", began, found)
        life.trace.record("download", found, life.now())
        self.flags |= head["flags"]
        life.heard(sender, head["busy_s"])
        return head, values

    def forget_before(self, durable: int) -> None:
        """Takes it that a predecessor has deleted what no replacement needs from `durable` on."""
        self._deleted = durable

    async def collect_garbage(self, durable: int) -> None:
        """Deletes letters to this rank that even a replacement of it, from its checkpoint, would not read again."""
        gone = [self._key(a) for t in range(self._deleted, durable) for a in self._wanted(t)]
        self._deleted = max(self._deleted, durable)
        if gone:
            await self._life.channel.delete(gone)

    def state(self) -> dict[str, Any]:
        """For a successor: when letters are to be expected."""
        return {"expected": self._expect.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._expect.load(state["expected"])

    def _key(self, a: MessageKey) -> str:
        return self._keys.between(a.iteration, a.what, a.source, a.target, self._replica, a.micro_batch)
