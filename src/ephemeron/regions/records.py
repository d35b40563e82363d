"""What a region's exchange stores in the channel of the region, and what its payloads say beside the values.

RUN/region/ITERATION                 create-only: decision, the region's parameters after the exchange before that iteration
RUN/region/ITERATION.state.ATTEMPT   state of the exchange with that decision, of the attempt of rank 0 that has made it
RUN/region/out/FRAGMENT.ROUND        create-only: what the region sends, with what it owes by rounding; until all others have applied it
RUN/region/waiting                   that rank 0 waits for other regions, and lives
RUN/region/entry                     of a region that joins: the iteration that it begins with
RUN/region/loaded/RANK               of a region that joins: that a rank is ready to begin
RUN/region/released/RANK             attempt of a rank that has ended until the last exchange is over
RUN/region/leave                     request that the region leaves the run
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.regions.membership import Entrance, TakesPart
from ephemeron.regions.policies import Due, Measured, RoundPlan
from ephemeron.training.tensors import Arrays, decode_state, encode_state

_VECTOR, _PAYLOAD, _OWED = "parameters", "payload", "owed"
_LENGTH = struct.Struct("<I")

Applied = dict[str, dict[int, int]]
"""By region and fragment, the latest round that is in the parameters."""


@dataclass(frozen=True, slots=True)
class RegionKeys:
    """Keys of a region's exchange.

    Args:
        run: of the region.
    """

    run: str

    @property
    def decisions(self) -> str:
        """Prefix of decisions and states; other keys have a letter after it."""
        return f"{self.run}/region/"

    @property
    def outgoing(self) -> str:
        return f"{self.run}/region/out/"

    @property
    def waiting(self) -> str:
        return f"{self.run}/region/waiting"

    @property
    def entry(self) -> str:
        return f"{self.run}/region/entry"

    @property
    def loaded(self) -> str:
        """Prefix."""
        return f"{self.run}/region/loaded/"

    @property
    def leave(self) -> str:
        return f"{self.run}/region/leave"

    @property
    def released(self) -> str:
        """Prefix."""
        return f"{self.run}/region/released/"

    def decision(self, iteration: int) -> str:
        return f"{self.run}/region/{iteration:09d}"

    def state(self, iteration: int, attempt: int) -> str:
        return f"{self.decision(iteration)}.state.{attempt}"

    def sent(self, due: Due) -> str:
        return f"{self.outgoing}{due.fragment}.{due.round}"

    def decided(self, keys: Iterable[str]) -> list[int]:
        """Iterations of the decisions among keys, ascending."""
        names = [key.removeprefix(self.decisions) for key in keys]
        return sorted(int(name) for name in names if name.isdigit())

    def iteration_of_state(self, key: str) -> int | None:
        """Iteration of the decision that a state belongs to; None: the key is of something else."""
        name, dot, _ = key.removeprefix(self.decisions).partition(".state.")
        return int(name) if dot and name.isdigit() else None

    def due_of(self, key: str) -> Due:
        fragment, _, number = key.removeprefix(self.outgoing).partition(".")
        return Due(int(fragment), int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMeta:
    """Plain values of a decision."""

    attempt: int
    """Of rank 0, that has stored the state."""
    quarantined: tuple[str, ...] = ()
    """Regions whose contributions were left out."""
    plans: tuple[RoundPlan, ...] = ()
    """Of rounds under way and the next ones, where these are adapted to the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMeta:
    """Plain values of the state of an exchange."""

    applied: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By region and fragment, the latest round that is in the parameters."""
    norms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """See `quarantine`."""
    plans: tuple[RoundPlan, ...] = ()
    """As in the decision."""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """By region, its latest pace and link, where rounds are adapted to them."""
    members: Mapping[str, TakesPart] = field(default_factory=dict)
    """By region, its rounds."""
    entrance: Entrance | None = None
    """Of the region that joins."""
    in_decision: tuple[str, ...] = ()
    """Arrays that are the vector of the decision, and not stored again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadHead:
    """What a payload says beside the values."""

    codec: str
    """Value of `regions.compression` that it is encoded with."""
    seen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By region and fragment, rounds that the sender has applied: it needs them no more."""
    plan: RoundPlan | None = None
    """Of a later round, by the first region."""
    measured: Measured | None = None
    """Pace and link of the sender, where rounds are adapted to them."""
    entrance: Entrance | None = None
    """Of a region that joins, by the coordinator."""
    leaves: bool = False
    """Whether this is the sender's last round."""
    forgets: str = ""
    """A region that has asked to join and was not heard any more, by the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMeta:
    """Plain values of what a region sends."""

    iteration: int
    """Before which it is sent."""
    samples: int
    norm: float | None
    """None: it is not finite, which JSON cannot say."""


def encode_sent(payload: bytes, owed: np.ndarray, meta: SentMeta) -> bytes:
    """Bytes of what a region sends, as it is stored in the region.

    Args:
        payload: that is sent.
        owed: what the payload lacks by rounding; empty: nothing.
        meta: plain values.
    """
    return encode_state({_PAYLOAD: np.frombuffer(payload, dtype=np.uint8), _OWED: owed}, plain(meta))


def decode_sent(data: memoryview | bytes, key: str) -> tuple[bytes, np.ndarray, SentMeta]:
    """The inverse.

    Raises:
        CorruptMessage: not what a region sends.
    """
    arrays, meta = decode_state(data, key=key)
    try:
        return arrays[_PAYLOAD].tobytes(), arrays[_OWED], build(SentMeta, meta, where=key)
    except (JobError, KeyError) as e:
        raise CorruptMessage(f"not an update of a region: {e}", key=key) from None


def encode_decision(vector: np.ndarray, meta: DecisionMeta) -> bytes:
    """Bytes of a decision."""
    return encode_state({_VECTOR: vector}, plain(meta))


def decode_decision(data: memoryview | bytes, key: str) -> tuple[np.ndarray, DecisionMeta]:
    """The inverse.

    Raises:
        CorruptMessage: not a decision.
    """
    arrays, meta = decode_state(data, key=key)
    try:
        return arrays[_VECTOR], build(DecisionMeta, meta, where=key)
    except (JobError, KeyError) as e:
        raise CorruptMessage(f"not a decision of a region: {e}", key=key) from None


def encode_region_state(arrays: Arrays, meta: StateMeta) -> bytes:
    """Bytes of the state of an exchange."""
    return encode_state(arrays, dataclasses.asdict(meta))


def decode_region_state(data: memoryview | bytes, key: str) -> tuple[Arrays, StateMeta]:
    """The inverse.

    Raises:
        CorruptMessage: not such a state.
    """
    arrays, meta = decode_state(data, key=key)
    try:
        return arrays, build(StateMeta, meta, where=key)
    except JobError as e:
        raise CorruptMessage(f"not the state of a region: {e}", key=key) from None


def pack_payload(head: PayloadHead, data: Buffer) -> bytes:
    """A payload: the length of its head, the head as JSON, and the encoded values."""
    given = {name: value for name, value in dataclasses.asdict(head).items() if value is not None and value is not False and value != ""}
    text = json.dumps(given, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(text)), text, data))


def unpack_payload(payload: bytes | memoryview, *, region: str) -> tuple[PayloadHead, memoryview]:
    """The inverse.

    Raises:
        CorruptMessage: not a payload; names the region.
    """
    view = memoryview(payload)
    try:
        size = _LENGTH.size + int(_LENGTH.unpack_from(view)[0])
        return build(PayloadHead, json.loads(bytes(view[_LENGTH.size : size])), where="payload"), view[size:]
    except (struct.error, ValueError, JobError) as e:
        raise CorruptMessage(f"region {region} has sent no contribution: {e}") from None


def rounds_as_json(applied: Applied) -> dict[str, dict[str, int]]:
    """Rounds by region and fragment, for JSON."""
    return {region: {str(f): n for f, n in rounds.items()} for region, rounds in applied.items()}


def rounds_from_json(raw: Mapping[str, Mapping[str, int]]) -> Applied:
    """The inverse."""
    return {region: {int(f): n for f, n in rounds.items()} for region, rounds in raw.items()}
