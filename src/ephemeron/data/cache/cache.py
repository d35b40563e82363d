"""Which objects a cache holds, by bytes: the bookkeeping between jobs and a policy. It holds keys; the caller holds the bytes.

    hit = cache.lookup(job, key, now_s=clock())
    if not hit:
        object = load(key)                                            # the caller's business
        admission = cache.admit(key, nbytes=len(object), cost_s=took_s, pin=True)
        forget(admission.evicted)
    ...                                                               # the object is on its way to the job
    forget(cache.unpin(key))

**Invariant.** `used_bytes ≤ max(capacity_bytes, pinned_bytes)`: objects without a pin never exceed the capacity, and only pins
may. An object that is larger than the capacity is refused, pinned or not, and nothing is evicted for it; so is an unpinned one
for which evicting unpinned objects would not make enough room, and one that the policy ranks below everything that would be
evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.data.cache.events import Accessed, Event, JobId, Key
from ephemeron.data.cache.policy import CachedItem, CachePolicy
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Outcome of offering an object to a cache."""

    admitted: bool
    """Whether the object is in the cache now."""
    evicted: tuple[Key, ...] = ()
    """Evicted objects, in order. Empty if the object was refused."""


class Cache:
    """A set of keys with sizes and reference counts, and a policy that names victims.

    Args:
        capacity_bytes: how much it may hold.
        policy: ranks what it holds; belongs to this cache alone.

    Raises:
        JobError: the capacity is below 1.
    """

    def __init__(self, capacity_bytes: int, policy: CachePolicy) -> None:
        if capacity_bytes < 1:
            raise JobError(f"capacity_bytes = {capacity_bytes} of a cache is below 1", remedy="leave the cache out instead")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of everything in the cache."""
        self.pinned_bytes = 0
        """Bytes of what is pinned."""
        self._policy = policy
        self._items: dict[Key, CachedItem] = {}
        self._pins: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def observe(self, event: Event) -> None:
        """Passes an event of a job on to the policy. Accesses go through `lookup`."""
        if isinstance(event, Accessed):
            raise ValueError("an access is a lookup: call lookup(job, key, now_s=…)")
        self._policy.observe(event)

    def lookup(self, job: JobId, key: Key, *, now_s: float) -> bool:
        """A job uses a key now.

        Returns:
            Whether the object is in the cache.
        """
        self._policy.observe(Accessed(job=job, key=key, now_s=now_s))
        return key in self._items

    def admit(self, key: Key, *, nbytes: int, cost_s: float = 1.0, pin: bool = False) -> Admission:
        """Offers an object that was just made. One that is in the cache already stays as it is, and may be pinned.

        Args:
            key: its name.
            nbytes: its size in bytes.
            cost_s: seconds that it took to make.
            pin: keep it until `unpin`, even beyond the capacity.

        Raises:
            ValueError: the size is below 0, or the cost is.
        """
        if nbytes < 0 or cost_s < 0:
            raise ValueError(f"object {key!r} has {nbytes} bytes and took {cost_s} s: both have to be 0 or more")
        if key not in self._items:
            if nbytes > self.capacity_bytes or (not pin and self.pinned_bytes + nbytes > self.capacity_bytes):
                return Admission(admitted=False)
            self._items[key] = item = CachedItem(key=key, nbytes=nbytes, cost_s=cost_s)
            self.used_bytes += nbytes
            self._policy.admit(item)
        if pin:
            self.pin(key)
        victims = self._victims()
        if key in victims:
            self._drop(key)
            return Admission(admitted=False)
        for victim in victims:
            self._drop(victim)
        return Admission(admitted=True, evicted=tuple(victims))

    def pin(self, key: Key) -> None:
        """Adds a pin to an object, for a job that is being served with it: it is not evicted before all pins are gone.

        Raises:
            KeyError: it is not in the cache.
        """
        count = self._pins.get(key, 0)
        if count == 0:
            self.pinned_bytes += self._items[key].nbytes
            self._policy.hold(key)
        self._pins[key] = count + 1

    def unpin(self, key: Key) -> tuple[Key, ...]:
        """Removes one pin.

        Returns:
            Objects that are evicted because pins no longer hold them, possibly this one.

        Raises:
            KeyError: it is not pinned.
        """
        count = self._pins[key] - 1
        if count:
            self._pins[key] = count
            return ()
        del self._pins[key]
        self.pinned_bytes -= self._items[key].nbytes
        self._policy.release(key)
        victims = self._victims()
        for victim in victims:
            self._drop(victim)
        return tuple(victims)

    def remove(self, key: Key) -> None:
        """Removes an object.

        Raises:
            KeyError: it is not in the cache.
            ValueError: it is pinned.
        """
        if key in self._pins:
            raise ValueError(f"object {key!r} is pinned {self._pins[key]} times")
        self._drop(key)

    def _victims(self) -> list[Key]:
        """Objects that would have to be evicted, least valuable first; none is evicted yet."""
        found: list[Key] = []
        excess = self.used_bytes - self.capacity_bytes
        while excess > 0:
            key = self._policy.victim()
            if key is None:
                break
            found.append(key)
            self._policy.hold(key)
            excess -= self._items[key].nbytes
        for key in found:
            self._policy.release(key)
        return found

    def _drop(self, key: Key) -> None:
        self.used_bytes -= self._items.pop(key).nbytes
        self._policy.evict(key)
