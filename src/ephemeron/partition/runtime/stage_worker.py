"""Main program of a stage process: one thread computes, threads of `rpc` put received messages into its inbox, links send messages.

The process ends with its leader in every case: it has the reading end of a pipe that only the leader keeps open, and also checks its
parent, because another child of the leader may have inherited the pipe.

Links between stage processes, with one thread each, so that sending and computing overlap.

A link sends one message at a time, in order. A throttle delays messages as in `costs.peer`: latency and bytes over bandwidth, in
addition to the time of sending. So loopback behaves like a slow network, in each direction separately, with the times that the
schedule simulator assumes. A message without tensors is not delayed: it only signals that a micro-batch is done.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

import torch

from ephemeron.communication.rpc import BlockingClient, BlockingServer, FrameLimits, Options
from ephemeron.config.typed import build
from ephemeron.errors import JobError, StageFailed
from ephemeron.partition.costs.links import Pair
from ephemeron.partition.costs.peer import Throttle
from ephemeron.partition.runtime.backend import StepResult, load_state, state_of
from ephemeron.partition.runtime.boundaries import stage_boundaries
from ephemeron.partition.runtime.codec import (
    Buffers,
    Header,
    Message,
    PeerLoss,
    PeersRequest,
    SharedGradients,
    StepRequest,
    decode_activation,
    decode_gradients,
    decode_input,
    decode_state,
    encode_activation,
    encode_gradients,
    encode_problem,
    encode_result,
    encode_state,
)
from ephemeron.partition.runtime.device import DeviceRun, MicroBatchInput, StageMessage
from ephemeron.partition.runtime.micro_batches import Training
from ephemeron.partition.schedule_simulator.schedule import Pass, ReplaySpan
from ephemeron.partition.tracing.split import ModelSplit
from ephemeron.user_code import line_of

_log = logging.getLogger(__name__)

OPTIONS = Options(limits=FrameLimits(max_frame=1 << 40), compress=False)
"""A frame may hold the state of a whole device; peers are authenticated."""
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProcessConfig:
    """Configuration of a stage process."""

    split: ModelSplit
    device: str
    training: Training
    at: torch.device
    token: str
    socket: str
    """Path to listen on; empty: TCP on loopback."""
    shared: bool
    """Whether large buffers are sent through shared memory."""
    throttles: Mapping[Pair, Throttle]
    timeout_s: float


@dataclass(slots=True)
class _StageJob:
    """A call whose reply the leader waits for."""

    method: str
    params: Header
    buffers: Buffers
    over: threading.Event = field(default_factory=threading.Event)
    reply: Message = field(default_factory=lambda: ({}, []))


@dataclass(frozen=True, slots=True)
class _Lost:
    """A link that cannot deliver."""

    peer: str
    error: Exception


class _PeerLost(Exception):
    """Another device accepts no messages; most likely it has failed."""


def main(orders: StageProcessConfig, ready: Connection, alive: int, others_end: int) -> None:
    """Run a stage process in a forked child; does not return.

    Args:
        orders: configuration.
        ready: receives the address, or the error.
        alive: reading end of a pipe that closes when the leader ends.
        others_end: the leader's end of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(others_end)
    threading.Thread(target=_watch, args=(alive, os.getppid()), daemon=True).start()
    try:
        torch.set_num_threads(1)
        process = _StageProcess(orders)
        address = process.listen()
        _log.debug("stage process of device %s listens at %s", orders.device, address)
        ready.send(("ready", address))
    except BaseException as e:  # noqa: BLE001 - the leader raises it
        ready.send(("failed", line_of(e)))
        os._exit(1)
    process.work()


def _watch(alive: int, parent: int) -> None:
    while os.getppid() == parent:
        if select.select([alive], [], [], _WATCH_S)[0]:
            break
    os._exit(1)


class _StageProcess:
    def __init__(self, orders: StageProcessConfig) -> None:
        self._orders = orders
        self._home = {b.stage: b.device for b in stage_boundaries(orders.split)}
        self._device = DeviceRun(orders.split, orders.device, orders.training, send=self._send, clock=time.monotonic, at=orders.at)
        self._inbox: SimpleQueue[_StageJob | StageMessage | MicroBatchInput | SharedGradients | _Lost] = SimpleQueue()
        self._early: list[StageMessage | MicroBatchInput | SharedGradients] = []
        self._links: dict[str, SendingLink] = {}
        self._shares: dict[str, Mapping[str, torch.Tensor]] = {}
        self._server = BlockingServer(self._answer, token=orders.token, options=OPTIONS)

    def listen(self) -> tuple[str, int]:
        """Listen; host and port, or path and 0."""
        if not self._orders.socket:
            return self._server.listen_tcp()
        self._server.listen_unix(self._orders.socket)
        return self._orders.socket, 0

    def work(self) -> None:
        """Execute calls until the leader kills the process."""
        while True:
            item = self._inbox.get()
            if isinstance(item, _StageJob):
                item.reply = self._execute(item)
                item.over.set()
            elif not isinstance(item, _Lost):  # a link that fails while idle fails again at the next send
                self._early.append(item)

    def _answer(self, method: str, params: Header, buffers: Buffers) -> Message:
        """Reply to a call; runs in a thread of `rpc`."""
        if method == "activation":
            self._inbox.put(decode_activation(params, buffers))
        elif method == "input":
            self._inbox.put(decode_input(params, buffers))
        elif method == "gradients":
            self._inbox.put(decode_gradients(params, buffers))
        else:
            job = _StageJob(method, params, buffers)
            self._inbox.put(job)
            job.over.wait()
            return job.reply
        return {}, []

    def _execute(self, job: _StageJob) -> Message:
        try:
            match job.method:
                case "connect":
                    self._connect(build(PeersRequest, job.params, where="connect").peers)
                case "step":
                    return self._step(build(StepRequest, job.params, where="step"))
                case "fetch":
                    return encode_state(state_of(self._device, self._orders.split.stages))
                case "put":
                    state = decode_state(job.params, job.buffers)
                    load_state(self._device, self._orders.split.stages, state)
                case "options":
                    self._device.updates.set_options(job.params)
                case _:
                    raise ValueError(f"unknown method {job.method}")
        except StageFailed as e:
            return encode_problem(e)
        except JobError as e:
            return encode_problem(e)
        except _PeerLost as e:
            return encode_problem(PeerLoss(message=str(e)))
        except Exception as e:  # noqa: BLE001 - the leader raises it
            return encode_problem(self._device.failure(e, None))
        return {}, []

    def _connect(self, peers: Mapping[str, tuple[str, int]]) -> None:
        for name, (place, port) in peers.items():
            self._links[name] = SendingLink(
                self._orders.device,
                name,
                connected(place, port, token=self._orders.token, shared=self._orders.shared),
                throttle=self._orders.throttles.get((self._orders.device, name), Throttle()),
                failed=lambda peer, error: self._inbox.put(_Lost(peer, error)),
                clock=time.monotonic,
                timeout_s=self._orders.timeout_s,
            )

    def _step(self, request: StepRequest) -> Message:
        device = self._device
        self._shares.clear()
        device.begin(request.iteration, request.micro_batches)
        early, self._early = self._early, []
        for item in early:
            self._take(item)
        while not device.computed:
            self._take_all(wait=not device.run_next())
        for partner, gradients in device.shared_gradients().items():
            params, buffers = encode_gradients(
                SharedGradients(iteration=request.iteration, device=self._orders.device, gradients=gradients)
            )
            self._links[partner].send(
                LinkMessage(
                    method="gradients", params=params, buffers=buffers, what="shared gradients", direction="backward", micro_batch=0
                )
            )
        while any(p not in self._shares for p in device.partners):
            self._take_all(wait=True)
        device.update(self._shares)
        sent = [span for link in self._links.values() for span in link.taken_spans()]
        result = StepResult(scored=device.scored, spans=[*device.spans, *sent])
        return encode_result(result, results=request.results)

    def _take_all(self, *, wait: bool) -> None:
        try:
            self._take(self._inbox.get(block=wait))
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            pass

    def _take(self, item: _StageJob | StageMessage | MicroBatchInput | SharedGradients | _Lost) -> None:
        if isinstance(item, _Lost):
            _log.warning("device %s cannot reach %s: %s", self._orders.device, item.peer, item.error)
            raise _PeerLost(f"{self._orders.device} cannot reach {item.peer}: {item.error}")
        if isinstance(item, _StageJob):
            raise AssertionError(f"call of {item.method} in the middle of a step")
        if item.iteration != self._device.iteration:
            self._early.append(item)
        elif isinstance(item, StageMessage):
            self._device.accept(item)
        elif isinstance(item, MicroBatchInput):
            self._device.feed(item)
        else:
            self._shares[item.device] = item.gradients

    def _send(self, message: StageMessage) -> None:
        params, buffers = encode_activation(message)
        self._links[self._home[message.target]].send(
            LinkMessage(
                method="activation",
                params=params,
                buffers=buffers,
                what=f"stage {message.source} → stage {message.target}",
                direction=message.direction,
                micro_batch=message.micro_batch,
            )
        )


def connected(place: str, port: int, *, token: str, shared: bool) -> BlockingClient:
    """A connection to a stage process."""
    if port:
        return BlockingClient.connect_tcp(place, port, token=token, options=OPTIONS)
    if shared:
        return BlockingClient.connect_shared(place, token=token, options=OPTIONS)
    return BlockingClient.connect_unix(place, token=token, options=OPTIONS)


# -- links between stage processes --------------------------------------------------------------------------------


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
