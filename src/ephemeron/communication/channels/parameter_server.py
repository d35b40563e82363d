"""A long-lived process that keeps objects, wakes readers and adds vectors: the way of λDNN.

The quickest synchronisation per iteration and the fewest bytes: each worker sends one vector and reads one, and
waiting costs nothing. In return a machine runs (and is paid for) as long as the job, and its network carries W
vectors in and W out; several servers share the keys, each key living on one of them. It keeps everything in
memory and nothing else: when a server dies its objects are gone, and the run goes back to a checkpoint elsewhere.

    EPHEMERON_CHANNEL_TOKEN=... python -m ephemeron.communication.channels.parameter_server --port 7070
    open_channel("ps://127.0.0.1:7070")         # same token in the environment
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from ephemeron.communication.channels._ps_client import (
    TOKEN,
    AccumulateParams,
    DeleteParams,
    FetchReply,
    GetParams,
    GetReply,
    HeardReply,
    KeyParams,
    ListParams,
    ListReply,
    ParameterServerChannel,
    PutParams,
    ReduceParams,
)
from ephemeron.communication.channels.base import Buffer, joined
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.reduction import LocalReduction, SupportsReduction, Vector
from ephemeron.communication.object_frame import opened, sealed
from ephemeron.communication.rpc import Server
from ephemeron.communication.rpc.sockets import is_loopback
from ephemeron.config.typed import build
from ephemeron.errors import ChannelError, KeyExists

P = TypeVar("P")

__all__ = ["MemoryParameterServer", "ParameterServer", "ParameterServerChannel", "main"]


class MemoryParameterServer(MemoryChannel, SupportsReduction):
    """A parameter server without a server, for the simulator and for tests: same arithmetic, same event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = LocalReduction()

    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        try:
            self.contribute(key, rank=rank, world=world, weight=weight, vector=vector)
        except ValueError as e:
            raise ChannelError(str(e), key=key) from e

    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        try:
            return self.add(key, rank=rank, iteration=iteration, delta=delta).copy()
        except ValueError as e:
            raise ChannelError(str(e), key=key) from e

    async def heard(self, key: str) -> dict[int, int]:
        return self.reduction.heard(key)

    async def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        await super().delete(names)
        for key in names:
            self.reduction.forget(key)

    def contribute(self, key: str, *, rank: int, world: int, weight: float, vector: Vector, owned: bool = False) -> None:
        """`LocalReduction.reduce`, publishing the mean."""
        mean = self.reduction.reduce(key, rank=rank, world=world, weight=weight, vector=vector, owned=owned)
        if mean is not None:
            self.publish_vector(key, mean)

    def add(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        """`LocalReduction.accumulate`, publishing the sum. Every sum is new memory: a reader may hold the old one."""
        known = self.objects.get(key)
        current = None if known is None else np.frombuffer(opened(memoryview(known), key=key), dtype=delta.dtype)
        total = self.reduction.accumulate(key, current, rank=rank, iteration=iteration, delta=delta)
        if total is not current:
            self.publish_vector(key, total)
        return total

    def publish_vector(self, key: str, vector: Vector) -> None:
        """`publish` of an object that this server has made, framed as a writer would have."""
        self.publish_view(key, joined(sealed([memoryview(vector.data).cast("B") if vector.size else b""], key=key)))

    def publish_view(self, key: str, data: Buffer) -> None:
        """`publish` without a copy, for memory that no longer changes."""
        # The dictionary is typed as bytes, but its values are only read through a memoryview.
        self.publish(key, cast("bytes", memoryview(data).cast("B") if memoryview(data).nbytes else b""))


class ParameterServer:
    """The server: `MemoryParameterServer` behind `rpc.Server`.

    Args:
        token: what clients must know.
    """

    def __init__(self, *, token: str) -> None:
        self.memory = MemoryParameterServer()
        self.rpc = Server(self._handle, token=token)

    async def listen(self, host: str = "127.0.0.1", port: int = 0, *, allow_remote: bool = False) -> tuple[str, int]:
        """Listens and returns the address; beyond this machine only if `allow_remote`."""
        return await self.rpc.listen_tcp(host, port, allow_remote=allow_remote)

    async def close(self) -> None:
        """Stops and forgets everything."""
        await self.rpc.close()

    async def _handle(
        self, method: str, params: Mapping[str, object], buffers: Sequence[memoryview]
    ) -> tuple[Mapping[str, object], Sequence[Buffer]]:
        memory = self.memory
        match method:
            case "put":
                put = _read(PutParams, params)
                if put.create and put.key in memory.objects:
                    raise KeyExists("the key is taken")
                memory.publish_view(put.key, joined(buffers))
                return {}, ()
            case "get":
                get = _read(GetParams, params)
                deadline = asyncio.get_running_loop().time() + get.wait_s
                received = await memory.get(get.key, deadline=deadline)
                return asdict(GetReply(waited_s=received.waited_s)), (received.data,)
            case "fetch":
                found = await memory.fetch(_read(KeyParams, params).key)
                return asdict(FetchReply(found=found is not None)), () if found is None else (found,)
            case "delete":
                await memory.delete(_read(DeleteParams, params).keys)
                return {}, ()
            case "list":
                keys = tuple(await memory.list(_read(ListParams, params).prefix))
                return asdict(ListReply(keys=keys)), ()
            case "reduce":
                part = _read(ReduceParams, params)
                vector = _vector(part.dtype, buffers)
                memory.contribute(part.key, rank=part.rank, world=part.world, weight=part.weight, vector=vector, owned=True)
                return {}, ()
            case "accumulate":
                delta = _read(AccumulateParams, params)
                total = memory.add(delta.key, rank=delta.rank, iteration=delta.iteration, delta=_vector(delta.dtype, buffers))
                return {}, (memoryview(total.data),)
            case "heard":
                return asdict(HeardReply(heard=memory.reduction.heard(_read(KeyParams, params).key))), ()
        raise ValueError(f"a parameter server has no method {method!r}")


def _read(cls: type[P], params: Mapping[str, object]) -> P:
    return build(cls, params, where="request to the parameter server")


def _vector(name: str, buffers: Sequence[memoryview]) -> Vector:
    dtype = np.dtype(name)
    if dtype.kind != "f":
        raise ValueError(f"{dtype} is no dtype of floats")
    return np.frombuffer(joined(buffers), dtype=dtype)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ephemeron.communication.channels.parameter_server`: serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m ephemeron.communication.channels.parameter_server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default)")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="write 'host port' there when ready")
    parser.add_argument("--idle-exit-s", type=float, metavar="S", help="stop after that long without any client")
    parser.add_argument("--allow-remote", action="store_true", help="permit an address beyond this machine")
    args = parser.parse_args(argv)
    token = os.environ.get(TOKEN, "")
    if not token:
        parser.error(f"no token; set {TOKEN} to a long random text, here and for the functions")
    if not args.allow_remote and not is_loopback(args.host):
        parser.error(f"{args.host} is reachable from other machines; add --allow-remote if that is meant")
    try:
        asyncio.run(_serve(args.host, args.port, token, args.announce, args.idle_exit_s, args.allow_remote))
    except OSError as e:
        print(f"cannot listen on {args.host} port {args.port}: {e.strerror or e}", file=sys.stderr)
        return 1
    return 0


async def _serve(host: str, port: int, token: str, announce: Path | None, idle_exit_s: float | None, allow_remote: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = ParameterServer(token=token)
    bound_host, bound_port = await server.listen(host, port, allow_remote=allow_remote)
    if announce is None:
        print(f"ps://{bound_host}:{bound_port}", flush=True)
    else:
        _write_atomically(announce, f"{bound_host} {bound_port}\n")
    watcher = asyncio.create_task(_stop_when_idle(server, idle_exit_s, stop)) if idle_exit_s else None
    await stop.wait()
    if watcher is not None:
        watcher.cancel()
    await server.close()


async def _stop_when_idle(server: ParameterServer, after_s: float, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    last = loop.time()
    while loop.time() - last < after_s:
        await asyncio.sleep(after_s / 10)
        if server.rpc.connections:
            last = loop.time()
    stop.set()


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)


if __name__ == "__main__":
    sys.exit(main())
