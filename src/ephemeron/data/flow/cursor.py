"""Where a loader's iterations begin, and where a resumed one would go on. Pure; torchdata's `StatefulDataLoader`, exactly.

- Every iteration is an epoch: the one after the epoch before, even if that was left early, unless a state was loaded or an
  epoch was set.
- An epoch begins with its first batch, not with `iter`, so that an iterator that nobody asks takes no epoch away.
- The state is that of the latest iteration, also after it was left: whoever saved it goes on there, in another process.
  After the last batch, but before the loop has noticed, it says that nothing of that epoch is left.
- Setting the epoch that comes next anyway changes nothing: the position of a loaded state is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.data.flow.stream import BatchStream


@dataclass(slots=True)
class Cursor:
    """The epochs of one loader.

    Args:
        stream: where the first iteration begins.
    """

    stream: BatchStream
    """Where the latest iteration stands, or the first one begins."""
    _pending: BatchStream | None = field(init=False)
    """Where the next iteration begins; None: with epoch number `_following`."""
    _following: int = field(init=False)
    _latest: int = 0
    """Number of the iteration that `stream` belongs to."""
    _under_way: bool = False

    def __post_init__(self) -> None:
        self._pending, self._following = self.stream, self.stream.epoch + 1

    def begin(self) -> tuple[int, BatchStream]:
        """The next iteration: its number, and a stream of its own."""
        self.stream = self._next()
        self._pending, self._following = None, self.stream.epoch + 1
        self._latest, self._under_way = self._latest + 1, True
        return self._latest, self.stream.copy()

    def delivered(self, iteration: int, stream: BatchStream) -> None:
        """An iteration has handed out a batch, and stands there now."""
        if iteration == self._latest:
            self.stream = stream

    def ended(self, iteration: int, *, whole: bool) -> None:
        """An iteration is over: the loop has noticed its end (`whole`), or has left it."""
        if iteration != self._latest:
            return
        self._under_way = False
        if whole:
            self._pending = self._next()

    def saved(self) -> BatchStream:
        """Where whoever loads the state goes on."""
        if self._pending is None or (self._under_way and self.stream.steps_left() > 0):
            return self.stream
        return self._pending

    def load(self, stream: BatchStream) -> None:
        """The next iteration begins there; those under way do not count any more."""
        self.stream = self._pending = stream
        self._latest, self._under_way = self._latest + 1, False

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begins with this epoch."""
        if self._pending is None or self._pending.epoch != epoch:
            self._pending = self.stream.begin(epoch)

    def _next(self) -> BatchStream:
        return self.stream.begin(self._following) if self._pending is None else self._pending
