"""A run's objects as functions and clients reach them: framed, signed, through outages of the store, every request metered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ephemeron.communication.channels.base import Buffer, Channel, Received
from ephemeron.communication.channels.retrying import Outage, Retrying, RetryPolicy
from ephemeron.communication.channels.wrappers import Faulty, Metered
from ephemeron.communication.keys import Keys, is_put_again, is_signed
from ephemeron.communication.object_frame import Framed
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import ChannelEmptied, ChannelTimeout, CorruptMessage
from ephemeron.events import Traffic


class RunChannel(Framed):
    """`Framed(Retrying(Metered(Faulty(channel))))`, and an error of its own for a store that has lost the run.

    Args:
        channel: the store itself, or a model of a function's network before it.
        owner: name of this writer, unlike every other's in the run; its jitter is drawn from it, too.
        retry: see `Retrying`, as for `told` and `latest`.
        drops: injected faults; see `Faulty`.
        damaged: see `Framed`.
        run: that has been launched; its specification is there as long as the run is.
        signing: key of the run, with which its objects are signed and verified; None: for a party that reads and writes
            none that are signed.
        signs: whether the object of a key is signed; of a run's own, the kinds in `keys.SIGNED`.
        put_again: see `Framed`; of a run's own, the kinds in `keys.PUT_AGAIN`.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        owner: str,
        retry: RetryPolicy | None = None,
        told: Callable[[Outage], None] = lambda outage: None,
        latest: float = float("inf"),
        drops: Callable[[str], bool] | None = None,
        damaged: Callable[[CorruptMessage], None] = lambda error: None,
        run: str = "",
        signing: SigningKey | None = None,
        signs: Callable[[str], bool] = is_signed,
        put_again: Callable[[str], bool] = is_put_again,
    ) -> None:
        self._run, self._signing, self._signs = run, signing, signs
        self.meter = Metered(channel if drops is None else Faulty(channel, drops=drops))
        self.retrying = Retrying(self.meter, policy=retry or RetryPolicy(), rng=random.Random(owner), told=told, latest=latest)
        super().__init__(self.retrying, owner=owner, damaged=damaged, put_again=put_again)

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        if self._signing is not None and self._signs(key):
            buffers = self._signing.signed(buffers, name=key)
        await super().put(key, buffers, create=create)

    async def fetch(self, key: str) -> memoryview | None:
        data = await super().fetch(key)
        return data if data is None else self._verified(data, key)

    def _verified(self, data: memoryview, key: str) -> memoryview:
        if self._signing is None or not self._signs(key):
            return data
        return self._signing.verified(data, name=key)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        try:
            received = await super().get(key, deadline=deadline, expected_at=expected_at)
            return received._replace(data=self._verified(received.data, key))
        except ChannelTimeout as e:
            # A rank whose wait has timed out first checks that the run exists, before it suspects a peer.
            # A damaged specification is one: `fetch` would return None.
            spec = Keys(self._run).spec
            if self._run and key != spec and await self.inner.fetch(spec) is None:
                raise ChannelEmptied(
                    "the store has lost the run's objects, its specification too; a cache keeps them through a restart only "
                    "with an append-only file (--appendonly yes); train again, there or through an object store",
                    key=spec,
                ) from e
            raise

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes so far, frames and repeated requests included."""
        return self.meter.traffic

    @property
    def outages_s(self) -> float:
        """Seconds so far in which the store did not answer: not the slowness of a rank."""
        return self.retrying.outages_s

    @property
    def bytes_down(self) -> int:
        """Bytes read so far."""
        return self.meter.bytes_down


def outage_text(outage: Outage, *, who: str, policy: RetryPolicy) -> str:
    """An outage in one line."""
    if outage.over:
        return f"{who}: the store answers again after {outage.seconds:.0f} s; {outage.requests} requests were repeated"
    return (
        f"{who}: the store has not answered for {outage.seconds:.0f} s ({outage.problem}); "
        f"requests are repeated for up to {policy.total_s:g} s (channel_retry_s)"
    )
