"""Links between stage processes, with one thread each, so that sending and computing overlap.

A link sends one message at a time, in order. A throttle delays messages as in `costs.peer`: latency and bytes over bandwidth, in
addition to the time of sending. So loopback behaves like a slow network, in each direction separately, with the times that the
schedule simulator assumes. A message without tensors is not delayed: it only signals that a micro-batch is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from ephemeron.communication.rpc import BlockingClient
from ephemeron.partition.costs.peer import Throttle
from ephemeron.partition.schedule_simulator.replay import ReplaySpan
from ephemeron.partition.schedule_simulator.schedule import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMessage:
    """One call of the other process."""

    method: str
    params: Mapping[str, object]
    buffers: Sequence[memoryview]
    what: str
    """Name of the span."""
    direction: Pass
    micro_batch: int


class SendingLink:
    """One direction between two devices.

    Args:
        source, target: devices.
        client: to the target; owned.
        throttle: added delay.
        failed: called once, in the link's thread, if a message cannot be delivered.
        clock: seconds.
        timeout_s: of one message.
    """

    def __init__(
        self,
        source: str,
        target: str,
        client: BlockingClient,
        *,
        throttle: Throttle,
        failed: Callable[[str, Exception], None],
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self.source, self.target = source, target
        self._client, self._throttle, self._failed, self._clock = client, throttle, failed, clock
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[LinkMessage] = SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()
        self._spans: list[ReplaySpan] = []
        threading.Thread(target=self._work, name=f"link {source} → {target}", daemon=True).start()

    def send(self, message: LinkMessage) -> None:
        """Queue a message; its buffers must not change until it is sent."""
        with self._changed:
            self._open += 1
        self._queue.put(message)

    def taken_spans(self) -> list[ReplaySpan]:
        """Spans since the last call; waits until all messages are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, timeout=self._timeout_s)
            spans, self._spans = self._spans, []
        return spans

    def _work(self) -> None:
        while True:
            message = self._queue.get()
            begun_s = self._clock()
            nbytes = sum(b.nbytes for b in message.buffers)
            try:
                if nbytes:
                    self._hold(begun_s + self._throttle.wait_s(nbytes))
                self._client.call(message.method, message.params, message.buffers, timeout_s=self._timeout_s)
            except Exception as e:  # noqa: BLE001 - reported to the device
                self._failed(self.target, e)
                return
            finally:
                ended_s = self._clock()
                with self._changed:
                    if nbytes:
                        self._spans.append(
                            ReplaySpan(
                                resource=(self.source, self.target),
                                what=message.what,
                                direction=message.direction,
                                micro_batch=message.micro_batch,
                                start_s=begun_s,
                                end_s=ended_s,
                            )
                        )
                    self._open -= 1
                    self._changed.notify_all()

    def _hold(self, until_s: float) -> None:
        while (left_s := until_s - self._clock()) > 0:
            time.sleep(left_s)
