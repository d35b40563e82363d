"""State of a region's exchange that a replacement goes on from: policy, rounding errors, rounds applied, usual norms. No input or output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.regions.communicator import NormQuarantine, QuarantinedUpdate, Update
from ephemeron.regions.compression import Feedback, Plain, codec_of
from ephemeron.regions.membership import Entrance, RegionMembers
from ephemeron.regions.policies import (
    Adaptation,
    AdaptiveSchedule,
    Contribution,
    Due,
    ExchangeSchedule,
    Measured,
    RegionSync,
    RoundPlan,
    first_plans,
    parse_sync,
)
from ephemeron.regions.policies.schedule import KEPT
from ephemeron.regions.records import (
    Applied,
    PayloadHead,
    StateMeta,
    decode_region_state,
    encode_region_state,
    pack_payload,
    rounds_as_json,
    rounds_from_json,
    unpack_payload,
)
from ephemeron.training.worker.spec import GroupMembership

_OF_POLICY, _RESIDUAL = "p/", "residual"


class RegionState:
    """State between two exchanges.

    Args:
        sync: policy of the run.
        names: of the regions, in their order.
        compression: value of `regions.compression`.
        parameters: before the first iteration, of a replacement any of the same size; 1-D.
        fragments: of the run's schedule.
    """

    def __init__(self, sync: RegionSync, names: Sequence[str], compression: str, parameters: np.ndarray, *, fragments: int = 1) -> None:
        self.policy = sync.new()
        self.policy.begin(parameters)
        self.elements, self._dtype, self._compression = parameters.size, parameters.dtype, compression
        self._feedback = Feedback(codec_of(compression), parameters.size, parameters.dtype, changes=sync.auto)
        self._plain = Plain()
        self._norms = NormQuarantine()
        self.applied: Applied = {name: {} for name in names}
        self.members = RegionMembers(names)
        self._fragments = fragments
        self.stored: Applied = {}
        """Rounds that are in the parameters of the latest stored decision: others are told of no more."""
        self._seen: dict[str, Applied] = {}
        """By region, what it had applied when it sent its latest round."""
        self.plans: tuple[RoundPlan, ...] = ()
        """Of adapted rounds, the latest ones."""
        self.measured: dict[str, Measured] = {}
        """By region, what it has said of its pace and its link in its latest round."""
        self.quarantined: list[QuarantinedUpdate] = []
        """Contributions that were left out; emptied by the caller."""

    def payload(
        self,
        part: slice,
        own: np.ndarray,
        *,
        parameters: bool = False,
        compression: str = "",
        plan: RoundPlan | None = None,
        measured: Measured | None = None,
        entrance: Entrance | None = None,
        leaves: bool = False,
        forgets: str = "",
    ) -> bytes:
        """This region's part of a round; what it lacks by rounding is added to the next one.

        Args:
            part: elements of the fragment.
            own: the region's parameters, whole.
            parameters: send these as they are, whatever the policy.
            compression: of this round; "": that of the run.
            plan, measured, entrance, leaves, forgets: see `PayloadHead`.
        """
        seen = rounds_as_json(self.stored)
        if parameters:
            return pack_payload(PayloadHead(codec="none", seen=seen), self._plain.encode(own[part]))
        codec = compression or self._compression
        self._feedback.codec = codec_of(codec)
        data = self._feedback.encode(self.policy.contribution(part, own), part)
        self.policy.sent(part, own)
        head = PayloadHead(codec=codec, seen=seen, plan=plan, measured=measured, entrance=entrance, leaves=leaves, forgets=forgets)
        return pack_payload(head, data)

    def accepted(self, updates: Sequence[Update], part: slice, *, parameters: bool = False) -> list[tuple[str, Contribution]]:
        """Contributions by region, in the order given; those of quarantined regions are left out. All count as applied.

        Args:
            updates: of one fragment.
            part: its elements.
            parameters: these are parameters, whatever the policy: they are compared with none before.

        Raises:
            CorruptMessage: a payload is none.
        """
        found = []
        for update in updates:
            head, data = unpack_payload(update.payload, region=update.region)
            self._seen[update.region] = rounds_from_json(head.seen)
            self.applied[update.region][update.fragment] = update.round
            self._learn(update.region, update.round, head)
            self.members.is_heard(update.region)
            vector = codec_of(head.codec).decode(data, part.stop - part.start, self._dtype)
            left_out = (NormQuarantine() if parameters else self._norms).judge(update, norm=_norm(vector))
            if left_out is None:
                found.append((update.region, Contribution(vector, update.samples)))
            else:
                self.quarantined.append(left_out)
        return found

    def _learn(self, region: str, round: int, head: PayloadHead) -> None:
        if head.measured is not None:
            self.measured[region] = head.measured
        if region == self.members.coordinator(round):
            if head.plan is not None:
                self.plans = (*self.plans, head.plan)[-KEPT:]
            if head.entrance is not None:
                self.announced(head.entrance, round)
            known = self.members.entrance
            if head.forgets and known is not None and known.region == head.forgets:
                self.members.entrance = None
        if head.leaves:
            self.members.leaves(region, round)

    def learn_own(self, region: str, round: int, payload: bytes) -> None:
        """Takes in what this region has announced, where it does not apply its own part of a round."""
        self._learn(region, round, unpack_payload(payload, region=region)[0])

    def announced(self, entrance: Entrance, round: int) -> None:
        """Takes in what the coordinator has said of a region that joins, with its part of a round."""
        name = entrance.region
        self.applied.setdefault(name, {})
        if entrance.first is None:
            self.members.keeps_for(name, round)
        elif self.members.first_round(name) != entrance.first:
            self.members.enters(name, entrance.first)
            self.applied[name] = dict.fromkeys(range(self._fragments), entrance.first - 1)

    def is_kept_by_all(self, own: str) -> bool:
        """Whether all regions are known to keep their updates for the region that joins.

        Then this state, and the updates after those that are in it, are all that the region needs.
        """
        entrance = self.members.entrance
        if entrance is None:
            return False
        round = max(self.applied[own].values(), default=0)
        others = [name for name in self.members.active(round) if name not in (own, entrance.region)]
        return all(self.has_applied(name, own, Due(0, entrance.kept_from)) for name in others)

    def begin_anew(self) -> None:
        """This state was that of another region: rounding errors of its payloads are not this one's."""
        self._feedback.residual = np.zeros_like(self._feedback.residual)
        self._seen = {}

    def owed(self, part: slice) -> np.ndarray:
        """What the contributions of a fragment lack by rounding, a copy; empty: nothing."""
        return self._feedback.residual[part].copy()

    def owe(self, part: slice, owed: np.ndarray) -> None:
        """Restores what `owed` has returned."""
        if owed.size:
            self._feedback.residual[part] = owed

    def norm(self, payload: bytes, part: slice) -> float:
        """L2 norm of what a payload of this region holds."""
        head, data = unpack_payload(payload, region="")
        return _norm(codec_of(head.codec).decode(data, part.stop - part.start, self._dtype))

    def has_applied(self, region: str, sender: str, due: Due) -> bool:
        """Whether a region is known to have applied a sender's part of a round."""
        return self._seen.get(region, {}).get(sender, {}).get(due.fragment, 0) >= due.round

    def staleness(self, own: str) -> int:
        """Most rounds that this region is ahead of what it has applied of another one."""
        sent = max(self.applied[own].values(), default=0)
        others = [name for name in self.members.active(sent) if name != own]
        return max([0, *(sent - max(self.applied[name].values(), default=0) for name in others)])

    def encoded(self, vector: np.ndarray) -> bytes:
        """All of it as bytes, without what is stored beside it.

        Args:
            vector: of the decision that the state belongs to. An array of the state that is the same, bit for bit, is left out; without a delay and with
                one fragment that of DiLoCo's common parameters is.
        """
        arrays = {_OF_POLICY + name: array for name, array in self.policy.state().items()}
        if self._feedback.residual.size:
            arrays[_RESIDUAL] = self._feedback.residual
        same = tuple(name for name, array in arrays.items() if _identical(array, vector))
        arrays = {name: array for name, array in arrays.items() if name not in same}
        norms = {name: tuple(known) for name, known in self._norms.state().items()}
        meta = StateMeta(
            applied=rounds_as_json(self.applied),
            norms=norms,
            plans=self.plans,
            measured=self.measured,
            members=self.members.state(),
            entrance=self.members.entrance,
            in_decision=same,
        )
        return encode_region_state(arrays, meta)

    def load(self, data: Buffer, key: str, vector: np.ndarray) -> None:
        """Restores what `encoded` has returned.

        Args:
            data: the bytes.
            key: under which they are stored, for errors.
            vector: as for `encoded`.

        Raises:
            CorruptMessage: it is no such state.
        """
        arrays, meta = decode_region_state(bytes(data), key)
        arrays |= dict.fromkeys(meta.in_decision, vector)
        self.policy.load({n.removeprefix(_OF_POLICY): a for n, a in arrays.items() if n.startswith(_OF_POLICY)})
        if _RESIDUAL in arrays:
            self._feedback.residual = arrays[_RESIDUAL].copy()
        self._norms = NormQuarantine(state=meta.norms)
        self.applied, self.stored = rounds_from_json(meta.applied), rounds_from_json(meta.applied)
        self.plans, self.measured = meta.plans, dict(meta.measured)
        self.members.load(meta.members, meta.entrance)


def _identical(array: np.ndarray, vector: np.ndarray) -> bool:
    """Whether these have the same bytes; equal values may have signs of zero that differ."""
    if (array.shape, array.dtype) != (vector.shape, vector.dtype):
        return False
    return bool(np.array_equal(array.view(np.uint8), np.ascontiguousarray(vector).view(np.uint8)))


def _norm(vector: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(vector.astype(np.float64)))


# -- rounds of a region, as its specification says ----------------------------------------------------------------


def schedule_of(membership: GroupMembership, iterations: int) -> ExchangeSchedule | AdaptiveSchedule:
    """Rounds of a region.

    Args:
        membership: of the region.
        iterations: of its run.
    """
    sync = parse_sync(membership.sync)
    if sync.auto:
        how = Adaptation(every=membership.every, compression=membership.compression, fragments=1, delay=0)
        reference = membership.iterations[0]
        return AdaptiveSchedule(iterations=iterations, reference=reference, plans=first_plans(how, reference=reference))
    return ExchangeSchedule(
        iterations=iterations, every=membership.every, rounds=membership.rounds, fragments=sync.fragments, delay=sync.delay
    )
