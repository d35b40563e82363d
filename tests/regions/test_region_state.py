"""State of a region's exchange: what is stored beside a decision restores it, and nothing of the decision is stored twice."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron.errors import CorruptMessage
from ephemeron.regions.communicator import Update
from ephemeron.regions.policies import Contribution, parse_sync
from ephemeron.regions.region_state import RegionState

NAMES, ELEMENTS = ("east", "west"), 4096
WHOLE = slice(0, ELEMENTS)


def after_a_round(sync: str, compression: str) -> tuple[RegionState, np.ndarray]:
    """A state and the vector of the decision after one round."""
    start, own = np.random.default_rng(3).normal(size=(2, ELEMENTS)).astype(np.float32)
    state = RegionState(parse_sync(sync), NAMES, compression, start)
    payload = state.payload(WHOLE, own)
    updates = [
        Update(region=name, fence=1, fragment=0, round=1, samples=1, norm=state.norm(payload, WHOLE), payload=payload) for name in NAMES
    ]
    contributions = [c for _, c in state.accepted(updates, WHOLE)]
    late = parse_sync(sync).delay / 3
    return state, state.policy.merge(WHOLE, own, contributions, last=False, late=late)


@pytest.mark.parametrize(
    ("sync", "compression", "vectors"),
    [
        ("diloco", "int4", 2),  # momentum and rounding errors: the common parameters are the decision
        ("diloco:lr=1,momentum=0", "int4", 1),
        ("diloco:lr=1,momentum=0", "none", 0),
        ("diloco:delay=2", "int4", 3),  # a quarter of the region's own parameters stays: they differ from the common ones
        ("sma", "none", 0),
    ],
)
def test_a_state_is_stored_without_the_decision_beside_it(sync: str, compression: str, vectors: int) -> None:
    state, decision = after_a_round(sync, compression)
    stored = state.encoded(decision)
    assert 4 * ELEMENTS * vectors <= len(stored) < 4 * ELEMENTS * vectors + 2048
    later = RegionState(parse_sync(sync), NAMES, compression, np.zeros(ELEMENTS, dtype=np.float32))
    later.load(stored, "state", decision)
    assert later.stored == state.applied, "others are told of rounds that a stored decision has"
    state.stored = later.stored
    next_own = decision + np.float32(0.25)
    payloads = [each.payload(WHOLE, next_own) for each in (state, later)]
    assert payloads[0] == payloads[1]
    other = [Contribution(np.full(ELEMENTS, 0.5, dtype=np.float32), 1)]
    merged = [each.policy.merge(WHOLE, next_own, other, last=False, late=0.75) for each in (state, later)]
    assert merged[0].tobytes() == merged[1].tobytes()


def test_zeros_of_another_sign_are_not_taken_for_the_same() -> None:
    state, decision = after_a_round("diloco:lr=1,momentum=0", "none")
    decision[:4] = 0.0
    state.policy.load({"common": np.where(decision == 0, np.float32(-0.0), decision)})
    later = RegionState(parse_sync("diloco:lr=1,momentum=0"), NAMES, "none", np.zeros(ELEMENTS, dtype=np.float32))
    later.load(state.encoded(decision), "state", decision)
    assert np.signbit(later.policy.state()["common"][:4]).all()


def test_a_damaged_state_is_refused() -> None:
    state, decision = after_a_round("diloco", "int4")
    stored = bytearray(state.encoded(decision))
    stored[-5] ^= 1
    with pytest.raises(CorruptMessage, match="checksum"):
        state.load(stored, "state", decision)
