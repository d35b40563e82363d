"""Shards as functions: each hands over to a successor before its time limit, and one that dies is replaced.

    shards = ShardFunctions(platform, channel, run="clicks-store", key=key, address=address, options=options)
    await shards.start()
    store = await shards.connect()
    ...
    await shards.stop()

Some seconds before its time limit, a shard starts its successor; when that has had time to start, it stores a snapshot while it goes
on serving, then the last changes, and ends. The successor restores them and claims the shard; clients find it through the channel and
send again what was not acknowledged. Functions must be reachable at an address: on AWS Lambda, where they are not, run shards as
processes of a VM (`processes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from dataclasses import dataclass, field, replace

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.direct.transport import HOST_VARIABLE, own_address
from ephemeron.communication.rpc import is_loopback
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import NonNegative, Positive, plain
from ephemeron.errors import InvocationRefused, JobError, PlatformError, ServiceUnreachable
from ephemeron.events import Ended
from ephemeron.functions.base import Call, Invocation, Platform
from ephemeron.functions.context import Context
from ephemeron.runs.function_set import AGAIN_S, Fail, FunctionSet, How, Start
from ephemeron.sparse.store.client import SparseStore
from ephemeron.sparse.store.codec import Compression
from ephemeron.sparse.store.messages import Whole
from ephemeron.sparse.store.places import Directory, ShardPlace, framed
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, Shard, ShardOptions

_log = logging.getLogger(__name__)

ENTRY = "sparse-shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseShardRequest:
    """Arguments of the entry `sparse-shard`."""

    options: ShardOptions = field(default_factory=ShardOptions)
    """`host`: `auto` for the function's own address in its network; `EPHEMERON_DIRECT_HOST` precedes."""
    first: Whole = 1
    """Attempt of the shard that the call with attempt 0 claims."""
    start_s: Positive = 5.0
    """Seconds that a successor is given to start."""
    hand_over_s: NonNegative = 10.0
    """Seconds before the time limit at which a shard hands over; at most a quarter of the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseShardResult:
    """Result of the entry `sparse-shard`."""

    outcome: str
    """`handed-over`, `stopped`, `replaced` or `duplicate`."""
    gets: int
    pushes: int


def token_of(key: str) -> str:
    """Token of a store whose functions have a run's key; without one, that of `EPHEMERON_SPARSE_TOKEN`.

    Raises:
        JobError: there is neither.
    """
    if key:
        return hmac.digest(key.encode(), b"sparse store", "sha256").hex()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise JobError("a sparse store has no token", remedy=f"start it with the key of a run, or set {TOKEN_VARIABLE}")
    return token


async def run_sparse_shard(ctx: Context, request: SparseShardRequest) -> SparseShardResult:
    """The entry `sparse-shard`: serves one shard until its time limit nears, or it is stopped."""
    loop, call = asyncio.get_running_loop(), ctx.call
    host = os.environ.get(HOST_VARIABLE, "").strip() or request.options.host
    host = own_address() if host == "auto" else host
    options = replace(request.options, host=host, allow_remote=not is_loopback(host))
    shard = Shard(options, token=token_of(call.key), channel=framed(ctx.channel, owner=ctx.invocation))
    left_s = max(0.0, ctx.deadline - loop.time())
    hand_over_s, start_s = min(request.hand_over_s, left_s / 4), min(request.start_s, left_s / 4)

    async def hand_over() -> None:
        await asyncio.sleep(left_s - hand_over_s - start_s)
        successor = replace(call, attempt=call.attempt + 1, reason="relay")
        ready_at = loop.time() + start_s
        while loop.time() < ready_at:
            try:
                await ctx.invoke(successor)
                break
            except PlatformError as e:
                _log.warning("the successor of shard %d is not started: %s", options.shard, e)
                await asyncio.sleep(min(AGAIN_S, max(0.0, ready_at - loop.time())))
        await asyncio.sleep(max(0.0, ready_at - loop.time()))
        shard.hand_over.set()

    handing = loop.create_task(hand_over())
    try:
        end = await shard.run(
            attempt=request.first + call.attempt, predecessor_until=loop.time() + start_s + hand_over_s if call.reason == "relay" else None
        )
    finally:
        handing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await handing
    status = shard.status
    return SparseShardResult(outcome=end, gets=status.gets, pushes=status.pushes)


class ShardFunctions:
    """A store whose shards are functions of a platform, each kept alive until `stop`.

    The shards go on without this object, and hand over; only one that dies is then not replaced.

    Args:
        platform: where they run; its deployment serves the entry `sparse-shard`.
        channel: of the store, opened here.
        run: name of the run on the platform, of this store alone; also that of the store in its channel.
        key: of the run; clients get the token from it.
        address: of the channel, for the functions.
        request: settings of all shards; `options.shards` of them are started.
        memory_mb: quota of each.
        lifetime_s: time limit of each; None: the platform's.
        origin: of the run's events; see `Call`.
    """

    def __init__(
        self,
        platform: Platform,
        channel: Channel,
        *,
        run: str,
        key: SigningKey,
        address: str,
        request: SparseShardRequest | None = None,
        memory_mb: int = 1769,
        lifetime_s: float | None = None,
        origin: float = 0.0,
    ) -> None:
        request = request or SparseShardRequest()
        self.replacements = 0
        self._hand_overs = [0] * request.options.shards
        self._platform, self._channel = platform, framed(channel, owner="shard-functions")
        self._run, self._key = run, key
        self._request = replace(request, options=replace(request.options, name=f"{run}/store"))
        self._call = Call(
            run=run,
            rank=0,
            attempt=0,
            memory_mb=memory_mb,
            lifetime_s=lifetime_s or platform.limits.lifetime_s,
            channel=address,
            entry=ENTRY,
            origin=origin,
            key=key.text,
        )
        self._directory = Directory(self._channel, f"{run}/store")
        self._set = FunctionSet()
        self._later: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Starts all shards.

        Raises:
            InvocationRefused: the platform starts none.
        """
        for shard in range(self._request.options.shards):
            await self._start(shard, 0)
            self._set.keep(shard, is_running=True)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def hand_overs(self) -> int:
        """Functions that have handed over to the next one."""
        return sum(self._hand_overs)

    async def connect(self, *, client: str = "", attempt: int = 0, compression: Compression | None = None) -> SparseStore:
        """A client of the store; see `SparseStore.connect`."""
        return await SparseStore.connect(
            self._directory.locate,
            token_of(self._key.text),
            shards=self._request.options.shards,
            client=client,
            attempt=attempt,
            compression=compression,
        )

    async def stop(self, *, timeout_s: float = 60.0) -> None:
        """Ends all shards, which store their state first.

        Raises:
            ServiceUnreachable: they do not end in time; they are then killed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                async with await self.connect() as store:
                    await store.stop()
                while self._set.open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ServiceUnreachable(f"the shards of {self._run} did not end within {timeout_s:g} s") from None
        finally:
            await self.close()
            await self._platform.cancel_all(self._run)

    async def close(self) -> None:
        """Stops replacing shards that die. They go on."""
        self._set.stop()
        if self._later is not None:
            self._later.cancel()
        tasks = [*self._starting, *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, shard: int, attempt: int) -> Invocation:
        options = replace(self._request.options, shard=shard)
        if not attempt:
            place = ShardPlace(self._channel, options.name, shard)
            self._request = replace(self._request, first=max(self._request.first, await place.last_attempt() + 1))
        request = plain(replace(self._request, options=options))
        call = replace(self._call, rank=shard, attempt=attempt, request=request)
        return await self._platform.invoke(replace(call, reason="replacement") if attempt else call)

    async def _watch(self) -> None:
        async for event in self._platform.events(self._run):
            if not isinstance(event, Ended) or event.rank >= self._request.options.shards:
                continue
            shard, how, said = event.rank, _how(event), event.error.strip().partition("\n")[0] or event.status
            if how == "handed over":
                self._hand_overs[shard] += 1
                self._set.progressed(self._hand_overs[shard], shard)
            if how == "lost":
                _log.warning("shard %d, attempt %d, has ended (%s): it is replaced", shard, event.attempt, said)
                self.replacements += shard in self._set.open
            # Where its successor is on the way already, one of both finds that the other has the claim.
            self._set.ended(shard, how, said, now=asyncio.get_running_loop().time(), attempt=event.attempt)
            self._step()

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        for action in self._set.decide(loop.time()):
            if isinstance(action, Fail):
                _log.error("shard %d is not replaced any more: %s", action.slot, action)
                continue
            task = loop.create_task(self._start_again(action))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        if (due := self._set.due) is not None:
            self._later = loop.call_at(due, self._step)
        self._changed.set()

    async def _start_again(self, wanted: Start) -> None:
        try:
            await self._start(wanted.slot, wanted.attempt)
        except InvocationRefused as e:
            _log.warning("shard %d cannot be replaced now: %s", wanted.slot, e)
            self._set.ended(wanted.slot, "refused", str(e), now=asyncio.get_running_loop().time())
            self._step()


def _how(event: Ended) -> How:
    if event.status == "ok":
        return "handed over" if event.outcome in ("handed-over", "replaced", "duplicate") else "done"
    return "cancelled" if event.status == "cancelled" else "lost"
