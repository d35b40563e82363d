"""Arguments of a worker's call, and the message that a successor finds in place of a checkpoint's number.

The driver and workers write a `WorkerRequest` into `Call.request`, with which the entries `worker` and `stage` are run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from ephemeron.communication.channels.retrying import CHANNEL_RETRY_S
from ephemeron.config.typed import AtLeast, NonNegative, build
from ephemeron.errors import CorruptMessage, JobError

RECOVER = b"recover"
"""First bytes of a `Recovery`. Alone: the predecessor can say nothing."""
OVER = b"over"
"""Message to a successor that is not needed: the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """Arguments of one invocation of a worker."""

    channel_retry_s: float = CHANNEL_RETRY_S
    """See `channels.retrying`."""
    slowest_s: NonNegative = 0.0
    """Longest recent iteration that the caller knows of, without waits; see `Timeouts`."""
    typical_s: NonNegative = 0.0
    """Usual iteration of the caller, with waits; 0: unknown."""
    hand_within_s: NonNegative | None = None
    """Seconds in which the predecessor hands off; None: this invocation is not a prepared successor."""
    not_after: Annotated[int, AtLeast(0)] | None = None
    """Iteration whose objects a peer misses: the invocation starts at that iteration or before it; None: at any."""
    tries: Annotated[int, AtLeast(0)] = 0
    """Replacements of this rank in a row, by peers whose waits had timed out."""
    reached: int = -1
    """Latest iteration that the predecessors have reached."""
    seen: tuple[tuple[int, int], ...] = ()
    """Rank and the latest iteration at which the predecessor has seen it."""
    waited: tuple[tuple[int, int, float], ...] = ()
    """Rank, iteration and seconds: for which peers the predecessor waited until its end."""
    together: bool = False
    """Whether all ranks go back to their checkpoints of iteration `not_after`."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Message of a predecessor that ends in the middle of an iteration: its successor starts from a checkpoint."""

    seen: tuple[tuple[int, int], ...] = ()
    """See `WorkerRequest`."""
    waited: tuple[tuple[int, int, float], ...] = ()
    back: int | None = None
    """Iteration to whose checkpoints all ranks go back; None: they do not."""
    sent: bool = False
    """Whether the objects that peers missed have been sent: `WorkerRequest.not_after` does not count any more."""

    def to_bytes(self) -> bytes:
        return RECOVER + json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, data: bytes, *, key: str) -> Recovery:
        """The inverse of `to_bytes`.

        Args:
            data: begins with `RECOVER`.
            key: of the object, for the error.

        Raises:
            CorruptMessage: it is another document.
        """
        try:
            return build(cls, json.loads(data.removeprefix(RECOVER) or b"{}"), where=key)
        except (ValueError, JobError) as e:
            raise CorruptMessage(str(e), key=key) from None
