"""Arguments of a worker's call and of a probe: what is written is read back, and what is wrong is refused by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

import pytest

from ephemeron.config.typed import build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.functions.base import Call
from ephemeron.training.worker.probe_messages import ProbeRequest, StepProbe, TransferProbe
from ephemeron.training.worker.request import RECOVER, Recovery, WorkerRequest

REQUEST = WorkerRequest(
    channel_retry_s=7.0,
    slowest_s=0.5,
    typical_s=0.25,
    hand_within_s=3.0,
    not_after=4,
    tries=2,
    reached=3,
    seen=((1, 3), (2, 4)),
    waited=((1, 4, 0.5),),
)
CALL = Call(
    run="r", rank=1, attempt=2, memory_mb=512, lifetime_s=60.0, channel="folder", reason="relay", origin=5.0, request=REQUEST.to_json()
)


T = TypeVar("T")


def read(kind: type[T], request: Mapping[str, object]) -> T:
    """As `functions.entries` reads it."""
    return build(kind, request, where="request")


def test_a_request_survives_the_way_to_a_function() -> None:
    call = Call.from_payload(json.loads(json.dumps(CALL.to_payload())))
    assert read(WorkerRequest, call.request) == REQUEST
    assert (call.origin, call.reason, call.duplicate) == (5.0, "relay", False)


def test_a_call_without_arguments_has_the_defaults() -> None:
    assert read(WorkerRequest, {}) == WorkerRequest()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"not_afer": 4}, "unknown key not_afer"),
        ({"tries": -1}, "tries = -1 should be at least 0"),
        ({"slowest_s": float("nan")}, "slowest_s = nan is not a number"),
        ({"seen": [[1, "x"]]}, r"seen\[0\]\[1\] = 'x' should be a whole number"),
        ({"waited": [[1, 2]]}, r"waited\[0\] = \[1, 2\] should have 3 values"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_path(request_: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        read(WorkerRequest, request_)


@pytest.mark.parametrize(("change", "message"), [({"rank": "1"}, "rank = '1'"), ({"options": {}}, "unknown key options")])
def test_a_payload_that_is_no_call_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Call.from_payload({**CALL.to_payload(), **change})


def test_a_recovery_is_read_back_and_damage_names_the_key() -> None:
    recovery = Recovery(seen=((1, 3),), waited=((1, 4, 0.5),), sent=True)
    assert Recovery.of(recovery.to_bytes(), key="k") == recovery
    assert Recovery.of(RECOVER, key="k") == Recovery()
    with pytest.raises(CorruptMessage, match="run/hand"):
        Recovery.of(RECOVER + b'{"seen": 1}', key="run/hand")


def test_a_probe_request_keeps_its_types() -> None:
    request = ProbeRequest(
        probe=StepProbe(batches=(1, 8), window_s=0.5, windows=2), transfer=TransferProbe(sizes_mb=(0.1,), repeats=1, parallel=2)
    )
    assert read(ProbeRequest, json.loads(json.dumps(asdict(request)))) == request
    with pytest.raises(JobError, match="windows = 0 should be at least 1"):
        read(ProbeRequest, {"probe": {"batches": [1], "window_s": 0.5, "windows": 0}})
