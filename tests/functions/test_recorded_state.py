"""How calls end, from records and log lines alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.events import Invoked
from ephemeron.functions.async_invoke.call_tracker import (
    CANCELLED_S,
    DEATH_S,
    LATE_S,
    NOT_BEGUN_S,
    ORPHANED_S,
    REPORT_S,
    CallResult,
    CallTracker,
)
from ephemeron.functions.async_invoke.invoker import FIRST_PAUSE_S, LONGEST_PAUSE_S, TRIES, pauses
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.records import SendingRecord, invocation_of, line_of, record_of
from ephemeron.functions.async_invoke.records import parse as parse_record
from ephemeron.functions.aws.logs import parse
from ephemeron.functions.base import Call

REQUEST = "6f74bd9c-9a6f-4a0c-8c2d-0123456789ab"
OTHER = "00000000-9a6f-4a0c-8c2d-0123456789ab"
CALL = Call(run="r", rank=2, attempt=1, memory_mb=512, lifetime_s=900.0, channel="", reason="relay", origin=5.0)


def sending(id: str, call: Call, **more: Any) -> dict[str, Any]:
    """A call that is about to be sent, as its line has it."""
    value: dict[str, Any] = json.loads(line_of(SendingRecord.of(id, call, **more)))
    return value


class Calls(CallTracker):
    """A tracker that is fed records as JSON objects."""

    def feed(self, record: dict[str, Any], *, now: float) -> list[Invoked]:  # type: ignore[override]
        return super().feed(parse_record(record), now=now)


SENDING = sending("2.1.x", CALL, at=8.0)
SENT = {"record": "sent", "id": "2.1.x", "request": REQUEST}
BEGUN = {"record": "begun", "id": "2.1.x", "delivery": 0, "request": REQUEST, "stream": "s", "at": 9.0}
OUTCOME = {
    "record": "outcome",
    "id": "2.1.x",
    "delivery": 0,
    "status": "ok",
    "value": {"outcome": "finished"},
    "error": "",
    "took_s": 1.23456,
    "peak_mb": 99.5,
}
FINAL = {
    "record": "final",
    "id": "2.1.x",
    "delivery": 0,
    "request": REQUEST,
    "invocation": "2.1.x",
    "billed_by": "report",
    "outcome": {"status": "ok"},
}
REPORT = LogReport(request=REQUEST, stream="s", billed_s=1.3, size_mb=512, used_mb=100)


def fed(*records: dict[str, Any], now: float = 0.0) -> Calls:
    calls = Calls()
    for record in records:
        calls.feed(record, now=now)
    return calls


def only(calls: CallTracker, now: float) -> CallResult:
    (final,) = calls.due(now=now)
    assert calls.due(now=now + 10_000) == [], "an end comes once"
    assert calls.open == []
    return final


def test_a_call_is_invoked_when_it_is_announced():
    calls = Calls()
    assert calls.feed(SENDING, now=0) == [Invoked(t=3.0, rank=2, attempt=1, invocation="2.1.x", reason="relay")]
    assert calls.feed(SENDING, now=1) == [], "twice is harmless"
    assert calls.open == ["2.1.x"]


def test_with_a_report_the_bill_is_lambdas():
    calls = fed(SENDING, SENT, BEGUN, OUTCOME)
    assert calls.due(now=0.1) == [], "the REPORT line may still come"
    calls.feed_log(REPORT, now=0.2)
    final = only(calls, 0.2)
    assert (final.outcome.status, final.outcome.value) == ("ok", {"outcome": "finished"})
    assert (final.outcome.billed_s, final.outcome.peak_memory_mb, final.billed_by) == (1.3, 100, "report")
    assert final.outcome.gb_seconds == pytest.approx(0.65)


def test_without_a_report_the_handler_s_own_seconds_are_billed_rounded_up():
    calls = fed(SENDING, SENT, BEGUN, OUTCOME)
    assert calls.due(now=REPORT_S - 0.01) == []
    final = only(calls, REPORT_S)
    assert (final.outcome.billed_s, final.outcome.peak_memory_mb, final.billed_by) == (1.235, 99.5, "handler")


@pytest.mark.parametrize(
    ("said", "status", "billed"),
    [
        ([REPORT], "lost", 1.3),
        ([Death(request=REQUEST, stream="s", timed_out=True, text="killed at its time limit"), REPORT], "timed_out", 1.3),
        ([Death(request=REQUEST, stream="s", timed_out=False, text="signal: killed"), REPORT], "lost", 1.3),
        ([Death(request=REQUEST, stream="s", timed_out=False, text="signal: killed"), replace(REPORT, used_mb=512)], "out_of_memory", 1.3),
        ([Death(request=REQUEST, stream="s", timed_out=False, text="signal: killed")], "lost", 0.0),
    ],
)
def test_the_logs_tell_of_a_death_and_the_store_is_asked_once_more(said: list[Any], status: str, billed: float):
    calls = fed(SENDING, SENT, BEGUN)
    for line in said:
        calls.feed_log(line, now=50.0)
    assert calls.due(now=50.0) == [], "an outcome may lie in the store that was put before the line was written"
    final = only(calls, 50.0 + DEATH_S)
    assert (final.outcome.status, final.outcome.billed_s) == (status, billed)


def test_an_outcome_that_was_late_in_the_store_counts_more_than_the_logs():
    calls = fed(SENDING, SENT, BEGUN)
    calls.feed_log(replace(REPORT, failed=True), now=50.0)
    calls.feed(OUTCOME, now=50.5)
    assert only(calls, 50.5).outcome.status == "ok"


def test_logs_may_come_first_and_those_of_others_do_not_count():
    calls = fed(SENDING, SENT)
    calls.feed_log(REPORT, now=0)
    calls.feed_log(replace(REPORT, request=OTHER), now=0)
    calls.feed_log(replace(REPORT, stream="of another environment"), now=0)
    calls.feed(BEGUN, now=0.1)
    calls.feed(OUTCOME, now=0.1)
    assert only(calls, 0.1).billed_by == "report"


def test_a_process_that_dies_while_it_imports_is_known_by_its_request():
    calls = fed(SENDING, SENT)
    calls.feed_log(replace(REPORT, used_mb=512, failed=True), now=1.0)
    assert calls.due(now=1.0) == []
    final = only(calls, 1.0 + DEATH_S)
    assert (final.outcome.status, final.stream, final.request) == ("out_of_memory", "s", REQUEST)


def test_silence_is_a_loss_after_lifetime_and_grace():
    calls = fed(SENDING, SENT, BEGUN)
    assert calls.due(now=900.0 + LATE_S - 1) == []
    final = only(calls, 900.0 + LATE_S)
    assert (final.outcome.status, final.billed_by) == ("lost", "unknown")


@pytest.mark.parametrize(
    ("record", "after_s", "status", "said"),
    [
        (None, NOT_BEGUN_S, "lost", "not begun"),
        ({"record": "unsent", "id": "2.1.x", "error": "throttled for ever"}, 0.0, "lost", "throttled for ever"),
        ({"record": "cancelled", "id": "2.1.x"}, CANCELLED_S, "cancelled", "before it began"),
    ],
)
def test_a_call_that_never_begins(record: dict[str, Any] | None, after_s: float, status: str, said: str):
    calls = fed(SENDING, SENT)
    if record is not None:
        calls.feed(record, now=0.0)
    if after_s:
        assert calls.due(now=after_s - 0.01) == []
    final = only(calls, after_s)
    assert final.outcome.status == status
    assert said in final.outcome.error


def test_a_call_whose_sender_ended_before_it_sent_it_is_lost_soon():
    successor = sending("2.2.y", replace(CALL, attempt=2), at=20.0, by="2.1.x")
    calls = fed(SENDING, SENT, BEGUN, successor, OUTCOME)
    calls.feed_log(REPORT, now=1.0)
    assert [f.id for f in calls.due(now=1.0)] == ["2.1.x"]
    assert calls.due(now=1.0 + ORPHANED_S - 0.01) == []
    (lost,) = calls.due(now=1.0 + ORPHANED_S)
    assert (lost.id, lost.outcome.status) == ("2.2.y", "lost")
    assert "2.1.x ended before" in lost.outcome.error
    # It was heard after all: it counts as another delivery, and is billed.
    (late,) = calls.feed({**BEGUN, "id": "2.2.y", "request": OTHER}, now=20.0)
    assert late.invocation == "2.2.y.1000"
    calls.feed({**OUTCOME, "id": "2.2.y", "value": {"outcome": "fenced"}}, now=21.0)
    calls.feed_log(replace(REPORT, request=OTHER), now=21.0)
    (end,) = calls.due(now=21.0)
    assert (end.invocation, end.outcome.billed_s) == ("2.2.y.1000", 1.3)
    assert calls.open == []


def test_a_call_that_was_sent_is_not_orphaned():
    successor = sending("2.2.y", replace(CALL, attempt=2), at=20.0, by="2.1.x")
    calls = fed(SENDING, SENT, BEGUN, successor, {"record": "sent", "id": "2.2.y", "request": OTHER}, OUTCOME)
    assert [f.id for f in calls.due(now=REPORT_S)] == ["2.1.x"]
    assert calls.due(now=NOT_BEGUN_S - 0.01) == []


def test_a_second_delivery_is_an_invocation_of_its_own():
    calls = fed({**SENDING, "copies": 2}, SENT, BEGUN, OUTCOME)
    calls.feed_log(REPORT, now=0)
    (first,) = calls.due(now=0)
    assert first.invocation == "2.1.x"
    assert calls.open == ["2.1.x"], "the other one has not begun"
    (invoked,) = calls.feed({**BEGUN, "delivery": 1, "stream": "t", "at": 10.5}, now=1)
    assert (invoked.invocation, invoked.reason, invoked.t) == ("2.1.x.1", "duplicate", 5.5)
    calls.feed({**OUTCOME, "delivery": 1, "value": {"outcome": "duplicate"}}, now=1)
    calls.feed_log(replace(REPORT, stream="t", billed_s=0.1), now=1)
    final = only(calls, 1)
    assert (final.invocation, final.outcome.billed_s) == (invocation_of("2.1.x", 1), 0.1)


def test_a_copy_that_never_comes_is_not_waited_for_for_ever():
    calls = fed({**SENDING, "copies": 2}, SENT, BEGUN, OUTCOME)
    calls.feed_log(REPORT, now=0)
    assert len(calls.due(now=0)) == 1
    assert calls.due(now=NOT_BEGUN_S) == []
    assert calls.open == []


def test_ends_of_an_earlier_collector_are_not_told_again():
    calls = fed(SENDING, SENT, BEGUN, OUTCOME, FINAL)
    assert calls.due(now=10_000) == []
    assert calls.open == []


RECORDS = [SENDING, SENT, BEGUN, OUTCOME, {**BEGUN, "delivery": 1, "stream": "t"}, {**OUTCOME, "delivery": 1}]


@given(st.lists(st.sampled_from(range(len(RECORDS))), max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_repeating_records_and_lines_changes_nothing(extra: list[int], reports: list[bool]):
    """Whatever is fed again, in whatever order after the first time: the same ends, each once."""
    plain, noisy = Calls(), Calls()
    for record in RECORDS:
        plain.feed(record, now=0.0)
        noisy.feed(record, now=0.0)
    for n, again in zip(extra, reports, strict=False):
        noisy.feed(RECORDS[n], now=1.0)
        if again:
            noisy.feed_log(replace(REPORT, request=OTHER), now=1.0)
    ends = [[(f.invocation, f.outcome) for f in calls.due(now=NOT_BEGUN_S)] for calls in (plain, noisy)]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2


@given(st.permutations([0, 1, 2, 3, 4, 5]), st.lists(st.floats(0, 2_000), min_size=6, max_size=6))
def test_every_call_ends_once_whatever_comes_when(order: list[int], times: list[float]):
    calls = Calls()
    ends: list[str] = []
    calls.feed({**SENDING, "copies": 2}, now=0.0)
    happenings: list[Any] = [
        SENT,
        BEGUN,
        OUTCOME,
        REPORT,
        {**BEGUN, "delivery": 1, "stream": "t"},
        Death(request=REQUEST, stream="t", timed_out=False, text="gone"),
    ]
    for n, now in zip(order, sorted(times), strict=True):
        what = happenings[n]
        if isinstance(what, dict):
            calls.feed(what, now=now)
        else:
            calls.feed_log(what, now=now)
        ends += [f.invocation for f in calls.due(now=now)]
        assert calls.due(now=now) == []
    ends += [f.invocation for f in calls.due(now=10_000.0)]
    assert len(set(ends)) == len(ends)
    # Two deliveries, and the first once more if it was given up before it began.
    assert 1 <= len(ends) <= 3
    assert calls.open == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            f"REPORT RequestId: {REQUEST}\tDuration: 2712.01 ms\tBilled Duration: 3100 ms\tMemory Size: 704 MB\tMax Memory Used: 317 MB\tInit Duration: 387.5 ms\t",
            LogReport(request=REQUEST, stream="s", billed_s=3.1, size_mb=704, used_mb=317),
        ),
        (
            f"REPORT RequestId: {REQUEST}\tDuration: 1000.00 ms\tBilled Duration: 1000 ms\tMemory Size: 128 MB\tMax Memory Used: 31 MB\tStatus: timeout\t",
            LogReport(request=REQUEST, stream="s", billed_s=1.0, size_mb=128, used_mb=31, failed=True),
        ),
        (
            f"2026-11-21T17:59:59.123Z {REQUEST} Task timed out after 900.10 seconds",
            Death(request=REQUEST, stream="s", timed_out=True, text="killed at its time limit, after 900.10 seconds"),
        ),
        (
            f"RequestId: {REQUEST} Error: Runtime exited with error: signal: killed\nRuntime.ExitError",
            Death(request=REQUEST, stream="s", timed_out=False, text="its process ended: signal: killed"),
        ),
        (
            f"RequestId: {REQUEST} Error: Runtime exited without providing a reason\nRuntime.ExitError",
            Death(request=REQUEST, stream="s", timed_out=False, text="its process ended: without a word"),
        ),
        (f"START RequestId: {REQUEST} Version: $LATEST", None),
        ("REPORT RequestId: of somebody's own making", None),
        (f"REPORT RequestId: {REQUEST}\tDuration: 1 ms", None),
        ("seven is not a colour", None),
    ],
)
def test_lambdas_own_lines_are_understood(message: str, expected: Any):
    assert parse(message, "s") == expected


@given(st.text(max_size=300))
def test_no_line_breaks_the_reader(message: str):
    parse(message, "s")
    assert not isinstance(parse(json.dumps(message), "s"), LogReport)


@given(st.integers())
def test_pauses_grow_to_a_bound_and_end(seed: int):
    waits = list(pauses(random.Random(seed)))
    assert len(waits) == TRIES - 1
    bound = FIRST_PAUSE_S
    for wait in waits:
        assert 0 <= wait <= bound <= LONGEST_PAUSE_S
        bound = min(2 * bound, LONGEST_PAUSE_S)
    assert len(set(waits)) > 1, "not in step"


@pytest.mark.parametrize("record", [SENDING, SENT, BEGUN, OUTCOME, FINAL])
def test_a_record_is_read_back(record: dict[str, Any]) -> None:
    read = parse_record(record)
    assert record_of(line_of(read)) == read


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"kind": "note", "t": 1}', "an event"),
        ('{"record": "begun", "id": "0.0', "truncated"),
        ('{"record": "retired", "id": "0.0.a"}', "a kind of another version"),
        ('{"record": "sent", "id": "0.0.a"}', "incomplete"),
        ('{"record": "sent", "id": "0.0.a", "request": 7}', "of another type"),
    ],
)
def test_a_line_that_is_no_record_is_skipped(line: str, why: str) -> None:
    assert record_of(line) is None, why


def test_a_bill_is_rounded_up_to_the_step_of_its_platform() -> None:
    begun = {**BEGUN, "billed_by": "supervisor", "billing_step_s": 1.0}
    calls = fed(SENDING, SENT, begun, {**OUTCOME, "burst_vcpu_s": 0.5})
    (final,) = calls.due(now=1.0)
    assert (final.outcome.billed_s, final.outcome.gb_seconds, final.outcome.burst_vcpu_s) == (2.0, 1.0, 0.5)


def test_time_in_which_a_function_is_suspended_is_no_silence() -> None:
    calls = fed(SENDING, SENT, BEGUN)
    calls.feed({"record": "suspended", "id": "2.1.x"}, now=100.0)
    assert calls.due(now=100_000.0) == [], "it may be suspended for as long as it likes"
    calls.feed({"record": "woken", "id": "2.1.x"}, now=100_000.0)
    late = 100_000.0 + (CALL.lifetime_s - 100.0) + LATE_S
    assert calls.due(now=late - 1.0) == []
    (final,) = calls.due(now=late)
    assert final.outcome.status == "lost"
