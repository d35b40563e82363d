"""Devices as processes of this machine, one each, forked from the leader, so that losses, optimisers and models need no pickling.

A stage process ends with `close`, with the leader, and with a failure of any device, because half an iteration leaves no state to
continue from. The root cause is reported: a stage that raised, else a process that died, before processes that only lost a peer.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from ephemeron.communication.rpc import BlockingClient
from ephemeron.config.typed import plain
from ephemeron.errors import CallTimedOut, ConnectionLost, JobError, StageFailed
from ephemeron.partition.costs.links import Pair
from ephemeron.partition.costs.peer import Throttle
from ephemeron.partition.runtime.backend import Backend, DeviceState, StepResult
from ephemeron.partition.runtime.boundaries import stage_boundaries
from ephemeron.partition.runtime.codec import (
    Message,
    PeersRequest,
    StepRequest,
    decode_problem,
    decode_result,
    decode_state,
    encode_input,
    encode_state,
)
from ephemeron.partition.runtime.device import MicroBatchInput, devices_of
from ephemeron.partition.runtime.micro_batches import Training
from ephemeron.partition.runtime.stage_worker import StageProcessConfig, connected, main
from ephemeron.partition.tracing.split import ModelSplit

_log = logging.getLogger(__name__)

_START_S = 60.0
_GRACE_S = 2.0
"""Time to wait for the root cause after a process has lost a peer."""


class ProcessBackend(Backend):
    """One forked process for each device.

    Args:
        split: processes begin with the state of these stages.
        training: loss, optimiser and schedule.
        at: PyTorch device by name of the device.
        throttles: of links.
        transport: `shared`, `unix` or `tcp`.
        timeout_s: of a step.

    Raises:
        JobError: this system cannot fork, or CUDA is in use here and would not survive it.
        StageFailed: a process ends before it is ready.
    """

    def __init__(
        self,
        split: ModelSplit,
        training: Training,
        *,
        at: Mapping[str, torch.device],
        throttles: Mapping[Pair, Throttle],
        transport: str,
        timeout_s: float,
    ) -> None:
        _check_can_fork(at)
        every = stage_boundaries(split)
        self._names = devices_of(every)
        self._stages = {d: [b.stage for b in every if b.device == d] for d in self._names}
        self._timeout_s, self._iteration = timeout_s, 0
        self._clients: dict[str, BlockingClient] = {}
        self._processes: dict[str, BaseProcess] = {}
        self._end = weakref.finalize(self, _kill, self._processes, os.getpid())  # also if the pipeline is not closed
        self._folder = Path(tempfile.mkdtemp(prefix="ephemeron-"))
        self._alive: tuple[int, int] | None = os.pipe()
        token = secrets.token_hex(16)
        try:
            ready: dict[str, Connection] = {}
            for i, name in enumerate(self._names):
                orders = StageProcessConfig(
                    split=split,
                    device=name,
                    training=training,
                    at=at[name],
                    token=token,
                    socket="" if transport == "tcp" else str(self._folder / str(i)),
                    shared=transport == "shared",
                    throttles=throttles,
                    timeout_s=timeout_s,
                )
                self._processes[name], ready[name] = self._started(orders)
            places = {name: self._address(name, ready[name]) for name in self._names}
            _log.info("started %d stage processes: %s", len(self._names), self.processes)
            for name, (place, port) in places.items():
                self._clients[name] = connected(place, port, token=token, shared=transport == "shared")
            others = {n: {p: address for p, address in places.items() if p != n} for n in self._names}
            self._all("connect", {n: (plain(PeersRequest(peers=peers)), []) for n, peers in others.items()})
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> dict[str, int]:
        """Process by device."""
        return {n: p.pid for n, p in self._processes.items() if p.pid is not None}

    def step(self, iteration: int, feeds: Mapping[str, Sequence[MicroBatchInput]], *, results: bool) -> dict[str, StepResult]:
        self._iteration = iteration
        inputs = {d: [encode_input(f) for f in own if f.wanted] for d, own in feeds.items()}
        requests: dict[str, Message] = {
            d: (plain(StepRequest(iteration=iteration, micro_batches=len(own), results=results)), []) for d, own in feeds.items()
        }
        longest = max(map(len, inputs.values()))
        rest = [(d, inputs[d][m]) for m in range(longest) for d in inputs if m < len(inputs[d])]
        replies = self._all("step", requests, then=rest)
        return {d: decode_result(*reply) for d, reply in replies.items()}

    def fetch(self) -> dict[str, DeviceState]:
        return {d: decode_state(*reply) for d, reply in self._all("fetch", _to_all(self._names)).items()}

    def put(self, states: Mapping[str, DeviceState]) -> None:
        self._all("put", {d: encode_state(s) for d, s in states.items()})

    def set_options(self, options: Mapping[str, object]) -> None:
        self._all("options", {d: (dict(options), []) for d in self._names})

    def close(self) -> None:
        if self._alive is not None:
            _log.info("ending %d stage processes", len(self._processes))
        self._end()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        ends, self._alive = self._alive, None
        for end in ends or ():
            with suppress(OSError):
                os.close(end)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _started(self, orders: StageProcessConfig) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        assert self._alive is not None, "processes are started before `close`"
        reading, writing = self._alive
        process = context.Process(target=main, args=(orders, theirs, reading, writing), name=f"stage {orders.device}", daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def _address(self, name: str, ready: Connection) -> tuple[str, int]:
        end_s = time.monotonic() + _START_S
        while not ready.poll(0.1):
            if not self._processes[name].is_alive() or time.monotonic() > end_s:
                raise self._ended(name, "did not begin")
        try:
            said, what = ready.recv()
        except EOFError:
            raise self._ended(name, "did not begin") from None
        if said == "failed":
            raise StageFailed(f"cannot begin: {what}", device=name, iteration=0)
        place, port = what
        return place, port

    def _all(self, method: str, messages: Mapping[str, Message], *, then: Sequence[tuple[str, Message]] = ()) -> dict[str, Message]:
        """Replies of concurrent calls to all processes; sends the messages of `then` meanwhile. The root cause of a failure is raised."""
        replies: SimpleQueue[tuple[str, Message | Exception]] = SimpleQueue()
        clients = dict(self._clients)

        def call(name: str) -> None:
            try:
                params, buffers = messages[name]
                replies.put((name, clients[name].call(method, params, buffers, timeout_s=self._timeout_s)))
            except Exception as e:  # noqa: BLE001 - raised where the reply is awaited
                replies.put((name, e))

        for name in messages:
            threading.Thread(target=call, args=(name,), name=f"{method} {name}", daemon=True).start()
        for name, (params, buffers) in then:
            try:
                clients[name].call("input", params, buffers, timeout_s=self._timeout_s)
            except (ConnectionLost, CallTimedOut):
                break  # the call above fails, too
        found: dict[str, Message] = {}
        end_s = time.monotonic() + self._timeout_s + _GRACE_S
        while len(found) < len(messages):
            name, reply = self._next(replies, end_s, [n for n in messages if n not in found])
            problem = _problem(reply)
            if problem is not None:
                cause = self._cause(name, problem, replies)
                _log.warning("%s of device %s failed: %s", method, name, cause)
                raise cause
            assert not isinstance(reply, Exception)
            found[name] = reply
        return found

    def _next(
        self, replies: SimpleQueue[tuple[str, Message | Exception]], end_s: float, missing: Sequence[str]
    ) -> tuple[str, Message | Exception]:
        try:
            return replies.get(timeout=max(0.0, end_s - time.monotonic()))
        except Empty:
            return missing[0], CallTimedOut(f"no reply within {self._timeout_s:g} s")

    def _cause(self, name: str, problem: Exception, replies: SimpleQueue[tuple[str, Message | Exception]]) -> Exception:
        """Root cause: an exception of a stage, else a process that died, else a lost peer."""
        end_s = time.monotonic() + _GRACE_S
        while not isinstance(problem, (StageFailed, JobError, CallTimedOut)):
            dead = [n for n, p in self._processes.items() if not p.is_alive()]
            if dead:
                return self._ended(dead[0], "")
            if time.monotonic() > end_s:
                break
            try:
                other, reply = replies.get(timeout=0.02)
            except Empty:
                continue
            found = _problem(reply)
            if isinstance(found, (StageFailed, JobError)):
                name, problem = other, found
        if isinstance(problem, (StageFailed, JobError)):
            return problem
        return StageFailed(f"{self._told(name)}: {problem}", device=name, iteration=self._iteration)

    def _ended(self, name: str, what: str) -> StageFailed:
        process = self._processes[name]
        process.join(timeout=_GRACE_S)
        code = process.exitcode
        how = "is still there" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        text = f"{self._told(name)} {what + ': it ' if what else ''}{how}"
        return StageFailed(text, device=name, iteration=self._iteration)

    def _told(self, name: str) -> str:
        stages = self._stages[name]
        return f"the process of stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _kill(processes: Mapping[str, BaseProcess], leader: int) -> None:
    if os.getpid() != leader:
        return  # in a forked child
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.join()


def _problem(reply: Message | Exception) -> Exception | None:
    if isinstance(reply, Exception):
        return reply
    return decode_problem(reply[0])


def _to_all(names: Sequence[str]) -> dict[str, Message]:
    return {d: ({}, []) for d in names}


def _check_can_fork(at: Mapping[str, torch.device]) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise JobError('where="processes" forks, which this system cannot do', remedy='use where="here"')
    if any(d.type == "cuda" for d in at.values()) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise JobError(
            'where="processes": CUDA is in use in this process, and does not survive a fork',
            remedy='use where="here", which drives several CUDA devices, or touch none before',
        )
