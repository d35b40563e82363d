"""Which regions take part in which rounds, and how the coordinator lets one join."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ephemeron.regions.communicator.base import Update
from ephemeron.regions.communicator.members import EntranceRequest
from ephemeron.regions.entrance import Admissions, decode_snapshot, encode_snapshot
from ephemeron.regions.membership import LEAD, Entrance, RegionMembers
from ephemeron.regions.policies import ExchangeSchedule, parse_sync
from ephemeron.regions.records import PayloadHead, pack_payload, rounds_as_json
from ephemeron.regions.region_state import RegionState

NAMES = ("east", "north", "west")
SCHEDULE = ExchangeSchedule(iterations=100, every=10, rounds=9)


def test_regions_join_and_leave_with_rounds() -> None:
    members = RegionMembers(NAMES)
    assert members.active(1) == list(NAMES)
    members.is_absent("north")
    assert members.active(1) == ["east", "west"]
    members.keeps_for("north", 3)
    assert members.active(3) == ["east", "west"]
    members.enters("north", 5)
    assert [members.active(n) for n in (4, 5)] == [["east", "west"], list(NAMES)]
    members.leaves("east", 6)
    assert [members.coordinator(n) for n in (6, 7)] == ["east", "north"]
    again = RegionMembers(NAMES)
    again.load(members.state(), members.entrance)
    assert [again.active(n) for n in range(8)] == [members.active(n) for n in range(8)]
    assert again.entrance == Entrance(region="north", kept_from=3, first=5)
    again.is_heard("north")
    assert again.entrance is None


class Leader:
    """State of one region, which hears payloads without values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = RegionState(parse_sync("sma"), NAMES, "none", np.zeros(2, dtype=np.float32))
        self.state.members.is_absent("west")

    def hears(self, region: str, round: int, head: PayloadHead) -> None:
        payload = pack_payload(head, np.zeros(2, dtype=np.float32).tobytes())
        update = Update(region=region, fence=1, fragment=0, round=round, samples=1, norm=0.0, payload=payload)
        self.state.accepted([update], slice(0, 2))

    def head(self, **more: Any) -> PayloadHead:
        return PayloadHead(codec="none", seen=rounds_as_json(self.state.applied), **more)


def test_a_state_is_kept_once_all_regions_are_known_to_keep_their_updates() -> None:
    east, north = Leader("east"), Leader("north")
    kept = []
    for number in range(1, 5):
        announced = Entrance(region="west") if number == 2 else None
        heads = {"east": east.head(entrance=announced), "north": north.head()}
        for each in (east, north):
            for name, head in heads.items():
                each.hears(name, number, head)
        kept.append(east.state.is_kept_by_all("east"))
    # North applies the announcement with round 2, and says so with round 3.
    assert kept == [False, False, True, True]
    assert decode_snapshot(encode_snapshot(np.ones(2), bytes(east.state.encoded(np.ones(2))))).vector.tolist() == [1, 1]


@pytest.mark.parametrize(("ready", "round", "first"), [(False, 4, None), (True, 4, 4 + LEAD), (True, SCHEDULE.rounds - LEAD + 1, None)])
def test_a_region_gets_its_first_round_when_it_is_ready_and_there_are_rounds_left(ready: bool, round: int, first: int | None) -> None:
    east = Leader("east")
    east.state.announced(Entrance(region="west"), 2)
    desk: Any = Admissions.__new__(Admissions)
    desk._name, desk._asked = "east", EntranceRequest(region="west", ready=ready)
    said = desk.announcement(round, east.state, SCHEDULE, None)
    assert (None if said is None else said.first) == first
    desk._name = "north"
    assert desk.announcement(round, east.state, SCHEDULE, None) is None, "the coordinator alone announces"
