"""State of every call, and when and how each has ended: records and log lines in, ends out, no I/O.

A *delivery* is one run of a call's code; a call has one, or more if the cloud delivers it again. It ends

1. by its outcome, as soon as its REPORT line has arrived, or `REPORT_S` after the outcome without one;
2. by a log line that reports its death, `DEATH_S` after the line and after another look into the store, which
   might still hold an outcome;
3. `LATE_S` after its lifetime, if neither came: the cause is unknown;
4. if it never began: at once if it could not be sent or was cancelled, else `NOT_BEGUN_S` after it was sent.

Times are the collector's own, of the moment when it learned something: clocks of functions are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ephemeron.events import Invoked, Status, Traffic
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.records import (
    BegunRecord,
    CancelledRecord,
    FinalRecord,
    OutcomeRecord,
    Record,
    SendingRecord,
    SentRecord,
    SuspendedRecord,
    UnsentRecord,
    WokenRecord,
    invocation_of,
)
from ephemeron.functions.base import Call, Outcome

REPORT_S = 4.0
DEATH_S = 1.0
LATE_S = 30.0
EVENT_AGE_S = 60.0
"""Age at which AWS Lambda drops waiting calls; the smallest that can be configured."""
NOT_BEGUN_S = EVENT_AGE_S + 60.0
"""Largest age of a queued event, and a minute for the start of a large image."""
CANCELLED_S = 5.0
ORPHANED_S = 5.0
"""After the end of the sender: by then it would have begun, or a cold start takes longer."""
_LATE = 1_000
"""Offset of the numbers of deliveries that begin after they were given up; they are billed all the same."""
_REMEMBERED = 10_000
"""Requests that only logs have reported: other runs may share the log group."""


@dataclass(kw_only=True)
class CallDelivery:
    """One run of a call's code."""

    request: str
    stream: str
    seen_at: float
    outcome: OutcomeRecord | None = None
    outcome_at: float = 0.0
    billed_by: str = ""
    """Party that measures the bill, if not the cloud. Then no report is awaited."""
    billing_step_s: float = 0.001
    """Multiple of seconds to which the measured bill is rounded up."""
    report: LogReport | None = None
    death: Death | None = None
    death_at: float = math.inf
    """When the logs first reported its end."""
    ended: bool = False


@dataclass(kw_only=True)
class CallState:
    """One call."""

    id: str
    call: Call
    seen_at: float
    requests: set[str] = field(default_factory=set)
    unsent: str = ""
    cancelled_at: float = math.inf
    suspended_at: float | None = None
    """When its function was suspended; None: it is not."""
    copies: int = 1
    by: str = ""
    """Invocation that sends it; empty: a client."""
    deliveries: dict[int, CallDelivery] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether a delivery of it may still run, or begin."""
        begun = self.deliveries
        return len(begun) < self.copies or any(not delivery.ended for delivery in begun.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The end of one delivery."""

    id: str
    delivery: int
    call: Call
    outcome: Outcome
    request: str
    stream: str
    billed_by: str
    """`report`, `handler`, `unknown` (no bill), or `supervisor` on platforms other than AWS."""
    traffic: Traffic
    """Traffic of its reporter."""

    @property
    def invocation(self) -> str:
        """Its name in events."""
        return invocation_of(self.id, self.delivery)


class CallTracker:
    """State of a run's calls. Feeding a record twice changes nothing."""

    def __init__(self) -> None:
        self.sent: dict[str, CallState] = {}
        self._heard: dict[str, list[tuple[LogReport | Death, float]]] = {}
        """Per request, log lines without a known delivery: not yet begun, or of another run."""
        self._of_request: dict[str, list[CallDelivery]] = {}
        self._ended_at: dict[str, float] = {}
        """Per invocation, when its end became known."""

    @property
    def open(self) -> list[str]:
        """Ids of calls that have not ended."""
        return [sent.id for sent in self.sent.values() if sent.open]

    @property
    def running(self) -> int:
        """Calls that count against the concurrency."""
        return len(self.open)

    def feed(self, record: Record, *, now: float) -> list[Invoked]:
        """Takes in a record; returns the invocations that begin with it."""
        if isinstance(record, SendingRecord):
            return self._sending(record, now)
        sent = self.sent.get(record.id)
        if sent is None:
            return []  # of a client whose `SendingRecord` never arrived
        match record:
            case SentRecord():
                sent.requests.add(record.request)
            case UnsentRecord():
                sent.unsent = record.error or "refused"
            case CancelledRecord():
                sent.cancelled_at = min(sent.cancelled_at, now)
            case SuspendedRecord():
                sent.suspended_at = now if sent.suspended_at is None else sent.suspended_at
            case WokenRecord():
                self._woken(sent, now)
            case BegunRecord():
                return self._begun(sent, record, now)
            case OutcomeRecord():
                delivery = sent.deliveries.get(_number(sent, record.delivery))
                if delivery is not None and delivery.outcome is None:
                    delivery.outcome, delivery.outcome_at = record, now
            case FinalRecord():
                self._final(sent, record, now)
        return []

    def feed_log(self, said: LogReport | Death, *, now: float) -> None:
        """Takes in a log line."""
        self._heard.setdefault(said.request, []).append((said, now))
        if len(self._heard) > _REMEMBERED:
            del self._heard[next(iter(self._heard))]
        self._settle(said.request)

    def due(self, *, now: float) -> list[CallResult]:
        """Deliveries that have ended by now. Each is returned once."""
        out: list[CallResult] = []
        for sent in self.sent.values():
            if sent.deliveries:
                if now >= sent.seen_at + NOT_BEGUN_S:
                    sent.copies = min(sent.copies, len(sent.deliveries))
            elif (delivery := self._dead_unbegun(sent, now)) is not None:
                sent.deliveries[0] = delivery
            elif (final := _never_begun(sent, now, self._orphaned_at(sent, now))) is not None:
                sent.deliveries[0], sent.copies = CallDelivery(request="", stream="", seen_at=now, ended=True), 1
                out.append(final)
            for number, delivery in sent.deliveries.items():
                if not delivery.ended and (end := _end_of(sent, number, delivery, now)) is not None:
                    delivery.ended = True
                    self._ended_at[end.invocation] = now
                    out.append(end)
        return out

    def _orphaned_at(self, sent: CallState, now: float) -> float:
        """When the sender of a call ended without a `SentRecord`; infinity while it may still come."""
        if not sent.by or sent.requests:
            return math.inf
        return self._ended_at.get(sent.by, math.inf)

    def _sending(self, record: SendingRecord, now: float) -> list[Invoked]:
        id = record.id
        if id in self.sent:
            return []
        call = Call(
            run=record.run,
            rank=record.rank,
            attempt=record.attempt,
            memory_mb=record.memory_mb,
            lifetime_s=record.lifetime_s,
            channel="",
            entry=record.entry,
            reason=record.reason,
            origin=record.origin,
        )
        self.sent[id] = CallState(id=id, call=call, seen_at=now, copies=record.copies, by=record.by)
        t = record.at - record.origin
        return [Invoked(t=t, rank=call.rank, attempt=call.attempt, invocation=id, reason=call.reason)]

    def _woken(self, sent: CallState, now: float) -> None:
        """Time in which a function was suspended does not count against its lifetime."""
        if sent.suspended_at is not None:
            for delivery in sent.deliveries.values():
                delivery.seen_at += now - sent.suspended_at
            sent.suspended_at = None

    def _begun(self, sent: CallState, record: BegunRecord, now: float) -> list[Invoked]:
        number = _number(sent, record.delivery)
        if number in sent.deliveries:
            return []
        request = record.request
        delivery = CallDelivery(
            request=request, stream=record.stream, seen_at=now, billed_by=record.billed_by, billing_step_s=record.billing_step_s
        )
        sent.deliveries[number] = delivery
        self._of_request.setdefault(request, []).append(delivery)
        self._settle(request)
        if number == 0:
            return []
        t = record.at - sent.call.origin
        return [Invoked(t=t, rank=sent.call.rank, attempt=sent.call.attempt, invocation=invocation_of(sent.id, number), reason="duplicate")]

    def _final(self, sent: CallState, record: FinalRecord, now: float) -> None:
        """Takes over the decision of an earlier collector."""
        number = record.delivery
        blank = CallDelivery(request="", stream="", seen_at=now)
        sent.deliveries.setdefault(number, blank).ended = True
        self._ended_at.setdefault(invocation_of(sent.id, number), now)
        if not record.request:
            sent.copies = 1

    def _settle(self, request: str) -> None:
        """Assigns log lines to their deliveries."""
        deliveries = self._of_request.get(request)
        if not deliveries:
            return
        for said, at in self._heard.pop(request, ()):
            for delivery in deliveries:
                if delivery.stream == said.stream and (isinstance(said, Death) or delivery.report is None):
                    if isinstance(said, LogReport):
                        delivery.report = said
                    else:
                        delivery.death = delivery.death or said
                    delivery.death_at = min(delivery.death_at, at)
                    break

    def _dead_unbegun(self, sent: CallState, now: float) -> CallDelivery | None:
        """Delivery of a call that only logs have reported: its process died during its imports."""
        for request in sent.requests:
            for said, at in self._heard.get(request, ()):
                if now < at + DEATH_S:
                    continue
                delivery = CallDelivery(request=request, stream=said.stream, seen_at=at)
                self._of_request.setdefault(request, []).append(delivery)
                self._settle(request)
                return delivery
        return None


def _end_of(sent: CallState, number: int, delivery: CallDelivery, now: float) -> CallResult | None:
    if delivery.outcome is not None:
        if delivery.report is None and not delivery.billed_by and now < delivery.outcome_at + REPORT_S:
            return None
        return _by_outcome(sent, number, delivery, delivery.outcome)
    if now >= delivery.death_at + DEATH_S:
        return _dead(sent, number, delivery)
    if sent.suspended_at is None and now >= delivery.seen_at + sent.call.lifetime_s + LATE_S:
        error = f"nothing was reported {LATE_S:g} s after its lifetime of {sent.call.lifetime_s:g} s"
        return _final(sent, number, delivery, "lost", error, billed_s=sent.call.lifetime_s, billed_by="unknown")
    return None


def _by_outcome(sent: CallState, number: int, delivery: CallDelivery, said: OutcomeRecord) -> CallResult:
    report = None if delivery.billed_by else delivery.report
    billed = report.billed_s if report is not None else _rounded_up(said.took_s, delivery.billing_step_s)
    peak = report.used_mb if report is not None else said.peak_mb
    return _final(
        sent,
        number,
        delivery,
        said.status,
        said.error,
        value=said.value,
        billed_s=billed,
        peak_mb=peak,
        burst_vcpu_s=said.burst_vcpu_s,
        billed_by=delivery.billed_by or ("handler" if report is None else "report"),
    )


def _dead(sent: CallState, number: int, delivery: CallDelivery) -> CallResult:
    """End by the log source: over its time limit, over its memory quota, or lost."""
    report, death = delivery.report, delivery.death
    text = death.text if death is not None else "it ended without an outcome"
    status: Status = "lost"
    if death is not None and death.timed_out:
        status = "timed_out"
    elif report is not None and report.used_mb >= report.size_mb:
        status, text = "out_of_memory", f"killed at its memory quota of {report.size_mb:g} MB"
    billed, peak = (0.0, 0.0) if report is None else (report.billed_s, report.used_mb)
    by = "unknown" if report is None else "report"
    return _final(sent, number, delivery, status, text, billed_s=billed, peak_mb=peak, billed_by=by)


def _number(sent: CallState, number: int) -> int:
    """Number of a delivery, or another one if it had been given up before it began."""
    known = sent.deliveries.get(number)
    return number + _LATE if known is not None and known.ended and not known.request else number


def _never_begun(sent: CallState, now: float, orphaned_at: float) -> CallResult | None:
    blank = CallDelivery(request="", stream="", seen_at=now)
    if sent.unsent:
        return _final(sent, 0, blank, "lost", f"it could not be sent: {sent.unsent}", billed_by="handler")
    if now >= orphaned_at + ORPHANED_S:
        text = f"{sent.by} ended before it had sent it"
        return _final(sent, 0, blank, "lost", text, billed_by="unknown")
    if now >= sent.cancelled_at + CANCELLED_S:
        return _final(sent, 0, blank, "cancelled", "cancelled before it began", billed_by="unknown")
    if now >= sent.seen_at + NOT_BEGUN_S:
        return _final(sent, 0, blank, "lost", f"it has not begun within {NOT_BEGUN_S:g} s", billed_by="unknown")
    return None


def _final(
    sent: CallState,
    number: int,
    delivery: CallDelivery,
    status: Status,
    error: str,
    *,
    value: Mapping[str, object] | None = None,
    billed_s: float = 0.0,
    peak_mb: float = 0.0,
    burst_vcpu_s: float = 0.0,
    billed_by: str,
) -> CallResult:
    outcome = Outcome(
        status=status,
        value=value or {},
        error=error,
        billed_s=billed_s,
        gb_seconds=sent.call.memory_mb / 1024 * billed_s,
        burst_vcpu_s=burst_vcpu_s,
        peak_memory_mb=peak_mb,
    )
    return CallResult(
        id=sent.id,
        delivery=number,
        call=sent.call,
        outcome=outcome,
        request=delivery.request,
        stream=delivery.stream,
        billed_by=billed_by,
        traffic=Traffic() if delivery.outcome is None else delivery.outcome.traffic,
    )


def _rounded_up(seconds: float, step_s: float) -> float:
    """Seconds as they are billed, in multiples of a step.

    >>> _rounded_up(1.2341, 0.001), _rounded_up(1.2341, 1.0)
    (1.235, 2.0)
    """
    per_s = round(1 / step_s)
    return math.ceil(seconds * per_s - 1e-6) / per_s
