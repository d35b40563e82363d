"""Exactly-once delivery: the positions of a job's sample stream that have been used, and the next ones of each rank.

A position is a place in an epoch's order; the sampler determines the sample at it. A batch is named by (generation, epoch, rank,
sequence), and its contents follow from that name by arithmetic (`delivery`). So a request that is lost, repeated, or sent to
a restarted router gets the same answer, and a reply that comes twice is recognised by its name: `LocalBuffer` takes each once. No
lists of delivered positions are kept.

A position counts as delivered when it is *acknowledged*: the rank reports how many batches of the epoch it has used for good.
Acknowledgements are cumulative, hence the larger one is always valid, also against a saved state that is older. To resume, the
acknowledged counts are those in the trainers' checkpoint, so batches that were fetched and not trained on are delivered again.

The state: per rank its epoch and a count; the generation; and for epochs that a change of the world size divided (usually one), the
positions that were left, as spans. Where ranks advance together, as under BSP, that is a suffix, one span; a rank that is d batches
behind adds at most d. So the state is O(world size + skew) and does not grow with samples or epochs. Save it after each `reshape`,
before any rank learns of it; at other times it may be old.

Partition of the positions of an epoch among ranks, by arithmetic alone: there is no state that could be lost.

Step t of an epoch is a contiguous run of positions, cut into one batch for each rank. So after all ranks have made
t steps a *prefix* of the epoch is used up, for every world size, and two worlds with the same global batch use
the same positions in the same steps (but for the last two, where the remainder is dealt).

The remainder rule. A full step is world_size × batch positions. The remainder is shorter than one step:

- `keep`: no position is repeated and none is dropped; the remainder is distributed evenly as a smaller last step. If it
  is too small for each rank to get one position, the step before gives up some, so that every rank has the same number
  of batches and none is empty. Empty batches, always explicit, remain where they cannot be avoided: fewer
  positions than ranks in all, or batch = 1.
- `even`: a smaller last step as well, but with equally many positions for each rank: it is filled up with positions
  from the beginning of the epoch, fewer than there are ranks, which are thus delivered twice. No batch is empty, and a
  single rank repeats none.
- `drop`: the remainder is left out.
- `pad`: the step is filled up with positions from the beginning of the epoch, which are thus delivered twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredBatch:
    """A rank's batch; equal requests get equal batches."""

    epoch: int
    rank: int
    sequence: int
    positions: tuple[int, ...]
    """Places in the epoch's order. Empty where there are fewer positions than ranks."""
    padding: int = 0
    """Number of positions at the end that are delivered twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """Answer to a request after the last batch of an epoch."""

    epoch: int
    batches: int
    """Batches of every rank in this generation's part of the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRefused:
    """Answer to a request of an earlier generation, or for an acknowledged batch: drop it."""

    reason: str


Answer: TypeAlias = DeliveredBatch | EpochEnd | DeliveryRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryState:
    """State of a `Delivery`, as it is stored."""

    version: int
    samples: int
    batch: int
    remainder: Remainder
    generation: int
    at: tuple[tuple[int, int], ...]
    """Epoch and acknowledged batches of each rank."""
    left: dict[str, tuple[tuple[int, int], ...]]
    """For epochs that a change of the world size divided: the positions that were left, as spans."""


class Delivery:
    """One job's stream: `samples` positions in each epoch, divided among `world_size` ranks.

    Invariants: an answer depends on nothing but the request and the last `reshape`; over the generations, each
    position of an epoch is acknowledged once (with `drop` at most once, with `pad` and `even` at least once).

    Args:
        samples: N, positions of an epoch.
        batch: positions in a rank's batch.
        world_size: ranks.
        remainder: treatment of the rest of N / (batch × world_size); see `delivery`.

    Raises:
        JobError: an argument is out of range.
    """

    def __init__(self, *, samples: int, batch: int, world_size: int, remainder: Remainder = "keep") -> None:
        self.samples = samples
        self.generation = 0
        self._deal = EpochPartition(count=samples, batch=batch, world_size=world_size, remainder=remainder)
        self._at = [(0, 0)] * world_size
        self._left: dict[int, tuple[range, ...]] = {}

    @property
    def world_size(self) -> int:
        """Ranks of the current generation."""
        return self._deal.world_size

    def batches(self, epoch: int) -> int:
        """Batches that every rank gets in an epoch: all of them, or those that were left for this generation."""
        return self._dealt(epoch).batches

    def request(self, *, rank: int, epoch: int, sequence: int, acked: int, generation: int) -> Answer:
        """Answers a request of a rank for a batch. Repetitions get the same answer.

        Args:
            sequence: number of the batch in the epoch, from 0.
            acked: batches of this epoch that the rank has finished with; all earlier epochs count as finished.
            generation: generation of the rank.

        Raises:
            IndexError: the rank does not exist, or the epoch never had such a batch.
        """
        if not self.acknowledge(rank=rank, epoch=epoch, acked=acked, generation=generation):
            return DeliveryRefused(reason=f"generation {generation} is not the current one, {self.generation}")
        batches = self.batches(epoch)
        if (epoch, sequence) < self._at[rank]:
            return DeliveryRefused(reason=f"rank {rank} has acknowledged batch {sequence} of epoch {epoch}")
        if sequence >= batches:
            return EpochEnd(epoch=epoch, batches=batches)
        return self.batch(rank=rank, epoch=epoch, sequence=sequence)

    def batch(self, *, rank: int, epoch: int, sequence: int) -> DeliveredBatch:
        """The contents of a batch, without a request: for prefetching.

        Raises:
            IndexError: the batch does not exist.
        """
        deal = self._dealt(epoch)
        part = deal.part(rank, sequence)
        spans = pick(self._spans(epoch), part)
        positions = [position for span in spans for position in span]
        padding = len(part) - len(positions)
        beyond = range(max(0, part.start - deal.count), max(0, part.stop - deal.count))
        return DeliveredBatch(
            epoch=epoch, rank=rank, sequence=sequence, positions=(*positions, *(place % self.samples for place in beyond)), padding=padding
        )

    def acknowledge(self, *, rank: int, epoch: int, acked: int, generation: int) -> bool:
        """Records the batches that a rank has used. False: the rank is of an earlier generation, and was ignored.

        Raises:
            IndexError: the rank does not exist, or the epoch never had so many batches.
        """
        if generation != self.generation:
            return False
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in 0 … {self.world_size - 1}")
        if epoch < 0 or not 0 <= acked <= self.batches(epoch):
            raise IndexError(f"rank {rank} cannot have used {acked} of {self.batches(epoch)} batches of epoch {epoch}")
        self._at[rank] = max(self._at[rank], (epoch, acked))
        first = min(self._at)[0]
        self._left = {epoch: spans for epoch, spans in self._left.items() if epoch >= first}
        return True

    def reshape(self, *, world_size: int, batch: int | None = None, generation: int | None = None) -> None:
        """Divides the positions that are not acknowledged among new ranks. Earlier ranks are refused from now on.

        Call it on a state with every valid acknowledgement: that of the checkpoint which the trainers resume from, or after
        `acknowledge` from each rank.

        Args:
            generation: number of the new one, larger than the present one; None: the present one plus one. If one state is
                resumed more than once, use different numbers, to distinguish the ranks of those attempts.

        Raises:
            JobError: an argument is out of range.
        """
        following = self.generation + 1 if generation is None else generation
        if following <= self.generation:
            raise JobError(f"generation = {generation} is not after {self.generation}", remedy="give a larger one")
        deal = EpochPartition(
            count=self.samples, batch=self._deal.batch if batch is None else batch, world_size=world_size, remainder=self._deal.remainder
        )
        first, last = min(self._at)[0], max(max(self._at)[0], *self._left, 0)
        left = {epoch: self._remaining(epoch) for epoch in range(first, last + 1)}
        whole = (range(self.samples),)
        self._left = {epoch: spans for epoch, spans in left.items() if spans != whole}
        self._deal, self.generation = deal, following
        self._at = [(first, 0)] * world_size

    def state(self) -> DeliveryState:
        """The whole state."""
        return DeliveryState(
            version=STATE_VERSION,
            samples=self.samples,
            batch=self._deal.batch,
            remainder=self._deal.remainder,
            generation=self.generation,
            at=tuple(self._at),
            left={str(epoch): tuple((span.start, span.stop) for span in spans) for epoch, spans in self._left.items()},
        )

    def state_dict(self) -> dict[str, object]:
        """The whole state as JSON."""
        state: dict[str, object] = plain(self.state())
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """The inverse of `state_dict`: world size, batch and remainder rule are those of the state.

        Raises:
            JobError: the state is of another release, has another number of samples, or is damaged.
        """
        if state.get("version") != STATE_VERSION:
            raise JobError(f"a delivery state of version {state.get('version')!r} is not of this release")
        if state.get("samples") != self.samples:
            raise JobError(
                f"the delivery state has {state.get('samples')!r} samples, the dataset has {self.samples}",
                remedy="resume with the data set version that the state was saved with",
            )
        try:
            self.load(build(DeliveryState, state, where="delivery state"))
        except JobError as e:
            raise JobError(f"the delivery state is damaged: {e}") from e

    def load(self, state: DeliveryState) -> None:
        """Continues from a state.

        Raises:
            JobError: its numbers are impossible.
        """
        deal = EpochPartition(count=self.samples, batch=state.batch, world_size=len(state.at), remainder=state.remainder)
        try:
            left = {int(e): tuple(range(start, stop) for start, stop in spans) for e, spans in state.left.items()}
        except ValueError as e:
            raise JobError(str(e)) from None
        self._deal, self._at, self._left, self.generation = deal, list(state.at), left, state.generation

    def _spans(self, epoch: int) -> tuple[range, ...]:
        return self._left.get(epoch, (range(self.samples),))

    def _dealt(self, epoch: int) -> EpochPartition:
        count = sum(map(len, self._spans(epoch)))
        return EpochPartition(count=count, batch=self._deal.batch, world_size=self._deal.world_size, remainder=self._deal.remainder)

    def _remaining(self, epoch: int) -> tuple[range, ...]:
        """Positions that this generation has not acknowledged."""
        deal, spans = self._dealt(epoch), self._spans(epoch)
        used = [deal.batches if at > epoch else acked if at == epoch else 0 for at, acked in self._at]
        if min(used) == deal.batches:
            return ()
        ragged = range(min(used), max(used))
        parts = [deal.part(rank, step) for step in ragged for rank in range(self.world_size) if used[rank] <= step]
        rest = range(deal.step(max(used)).start, deal.count)
        return merge(span for part in (*parts, rest) for span in pick(spans, part))


# -- partition of the positions of an epoch among ranks -----------------------------------------------------------


Remainder: TypeAlias = Literal["keep", "even", "drop", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPartition:
    """`count` positions for `world_size` ranks."""

    count: int
    batch: int
    """Positions in a rank's batch."""
    world_size: int
    remainder: Remainder = "keep"

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("batch", 1), ("world_size", 1)):
            if getattr(self, name) < least:
                raise JobError(f"{name} = {getattr(self, name)} is too small", remedy=f"give {least} or more")
        if self.remainder not in get_args(Remainder):
            raise JobError(f"remainder = {self.remainder!r} is not known", remedy="give 'even', 'keep', 'drop' or 'pad'")

    @property
    def batches(self) -> int:
        """Batches of every rank."""
        whole, rest = divmod(self.count, self.batch * self.world_size)
        return whole + (rest > 0 and self.remainder != "drop")

    def step(self, sequence: int) -> range:
        """The positions of all ranks in a step: below `count`, or beyond it where they are padding."""
        size = self.batch * self.world_size
        start, end = sequence * size, (sequence + 1) * size
        if self.remainder == "even":
            return range(start, min(end, -(-self.count // self.world_size) * self.world_size))
        if self.remainder != "keep":
            return range(start, end)
        scanty = self.count % size if self.count > size and self.batch > 1 else 0
        if 0 < scanty < self.world_size:  # the last two steps share their positions
            start -= (self.world_size - scanty) * (sequence == self.batches - 1)
            end -= (self.world_size - scanty) * (sequence == self.batches - 2)
        return range(start, min(end, self.count))

    def part(self, rank: int, sequence: int) -> range:
        """The positions of a rank in a step; sizes differ by at most one.

        Raises:
            IndexError: the rank or the batch does not exist.
        """
        if not (0 <= rank < self.world_size and 0 <= sequence < self.batches):
            raise IndexError(f"batch {sequence} of rank {rank} is not among the {self.batches} of {self.world_size} ranks")
        step = self.step(sequence)
        least, more = divmod(len(step), self.world_size)
        start = rank * least + min(rank, more)
        return step[start : start + least + (rank < more)]


def pick(spans: Sequence[range], part: range) -> list[range]:
    """The elements number `part` of the concatenated spans, as spans."""
    found, before = [], 0
    for span in spans:
        found.append(span[max(0, part.start - before) : max(0, part.stop - before)])
        before += len(span)
    return [span for span in found if span]


def merge(spans: Iterable[range]) -> tuple[range, ...]:
    """The same numbers in as few spans as possible, in order; the spans do not overlap."""
    merged: list[range] = []
    for span in sorted((span for span in spans if span), key=lambda span: span.start):
        if merged and merged[-1].stop == span.start:
            span = range(merged.pop().start, span.stop)
        merged.append(span)
    return tuple(merged)
