"""Decisions of a region: what it goes on with after an exchange, with the state of the exchange beside it, in the region's channel.

A decision that applies rounds is stored with its state; the state is there before the decision. Exchanges that only send have none: what they change is stored with
what they send (`own_updates`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ephemeron.errors import KeyExists, RegionSuperseded
from ephemeron.regions.records import DecisionMeta, RegionKeys, decode_decision, encode_decision
from ephemeron.regions.region_state import RegionState
from ephemeron.training.worker.lifecycle import InvocationLifecycle


class Decisions:
    """Decisions of one region, as its rank 0 makes them.

    Args:
        lifecycle: of the invocation.
        keys: of the region's exchange.
    """

    def __init__(self, lifecycle: InvocationLifecycle, keys: RegionKeys) -> None:
        self._lifecycle, self._keys, self._channel = lifecycle, keys, lifecycle.channel
        self._made: list[int] = []
        """Iterations of those that are stored or being stored, ascending."""
        self._states: dict[int, set[str]] = {}
        """By iteration, keys of the states that attempts of this rank have stored."""

    def __contains__(self, iteration: int) -> bool:
        return iteration in self._made

    def take_over(self, stored: Sequence[str]) -> None:
        """Learns what earlier attempts have stored, from the keys of the region's exchange."""
        self._made = self._keys.decided(stored)
        for key in stored:
            if (iteration := self._keys.iteration_of_state(key)) is not None:
                self._states.setdefault(iteration, set()).add(key)

    def latest(self, *, before: int) -> int | None:
        """Iteration of the latest decision before another one; None: there is none."""
        return max((known for known in self._made if known < before), default=None)

    def make(self, iteration: int, vector: np.ndarray, state: RegionState) -> Callable[[], Awaitable[None]]:
        """A decision with its state, both as they are now; returns what stores them.

        Storing raises `RegionSuperseded` where another attempt of this rank was first with other parameters.
        """
        attempt, key = self._lifecycle.attempt, self._keys.decision(iteration)
        state_key, encoded = self._keys.state(iteration, attempt), state.encoded(vector)
        left_out = tuple(update.region for update in state.quarantined)
        data = encode_decision(vector, DecisionMeta(attempt=attempt, quarantined=left_out, plans=state.plans))
        if iteration not in self._made:
            self._made.append(iteration)
        self._states.setdefault(iteration, set()).add(state_key)

        async def write() -> None:
            await self._channel.put(state_key, [encoded])
            try:
                await self._channel.put(key, [data], create=True)
            except KeyExists:
                await self._compare(iteration, data)

        return write

    async def _compare(self, iteration: int, data: bytes) -> None:
        """Looks whether the stored decision is this one: an earlier attempt that goes on unnoticed has made the same."""
        key = self._keys.decision(iteration)
        there, meta = decode_decision((await self._channel.get(key, deadline=self._deadline())).data, key)
        if there.tobytes() != decode_decision(data, key)[0].tobytes():
            raise RegionSuperseded(f"attempt {meta.attempt} of this region's rank 0 has decided iteration {iteration}")
        self._states[iteration].add(self._keys.state(iteration, meta.attempt))

    async def restore(self, iteration: int, state: RegionState) -> np.ndarray:
        """The vector of a stored decision; a state becomes the one beside it."""
        key = self._keys.decision(iteration)
        vector, meta = decode_decision((await self._channel.get(key, deadline=self._deadline())).data, key)
        key = self._keys.state(iteration, meta.attempt)
        state.load((await self._channel.get(key, deadline=self._deadline())).data, key, vector)
        self._states.setdefault(iteration, set()).add(key)
        return vector

    def forget(self, durable: int) -> list[str]:
        """Forgets those that no replacement would read; returns the keys to delete.

        Args:
            durable: number of iterations that no rank of this region would repeat.
        """
        gone: list[str] = []
        old = [known for known in self._made if known < durable][:-1]
        for known in old:
            gone += [self._keys.decision(known), *sorted(self._states.pop(known, ()))]
        self._made = self._made[len(old) :]
        return gone

    def _deadline(self) -> float:
        return self._lifecycle.now() + self._lifecycle.wait_timeout_s()
