"""Tables of a run's page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ephemeron.events import PHASES
from ephemeron.rendering.page import table
from ephemeron.rendering.svg import el, joined, nothing, time_ticks
from ephemeron.rendering.svg import ticks as ticks_of
from ephemeron.runs.region_activity import RegionActivity
from ephemeron.training.report.charts import Axis, ChartLine, chart
from ephemeron.training.report.headline import Headline, usd
from ephemeron.training.report.invocations import InvocationRow
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.units import human_bytes, human_count, human_seconds

ROWS = 400
"""Invocations listed; of longer lists the bad ends are kept, and the first of the others."""

EVALUATIONS = 100
"""Evaluations listed."""

_SILENT = ("timed_out", "out_of_memory", "lost")
_MISSING = "A function that was killed does not report its last requests: those after its last report are missing here."


def phase_table(story: RunSummary) -> Markup:
    """Seconds of each phase, for each rank and in all."""
    lanes = [lane for lane in story.lanes if any(lane.totals.values())]
    shown = [p for p in PHASES if any(lane.totals.get(p) for lane in lanes)]
    if not shown:
        return nothing("No function reported how it spent its time.")
    alive = {lane.rank: sum(r.end - r.start for r in story.invocations if r.rank == lane.rank) for lane in lanes}
    rows = [
        [f"rank {lane.rank}", *(_share(lane.totals.get(p, 0.0), alive[lane.rank]) for p in shown), _s(alive[lane.rank])] for lane in lanes
    ]
    whole = sum(alive.values())
    sums = [_share(sum(lane.totals.get(p, 0.0) for lane in lanes), whole) for p in shown]
    rows.append(["all", *sums, _s(whole)])
    return table(["", *shown, "alive"], rows, style="last-sum")


def evaluation_table(story: RunSummary) -> Markup:
    """Every metric of every evaluation; of many evaluations the last ones."""
    points = story.learning.evaluations[-EVALUATIONS:]
    names = list(dict.fromkeys(name for e in points for name, value in e.metrics.items() if value is not None))
    rows = [[str(e.epoch), f"{e.iteration:,}", *(_metric(e.metrics.get(name)) for name in names)] for e in points]
    out = table(["epoch", "iteration", *names], rows)
    left = len(story.learning.evaluations) - len(points)
    return out + (_remark(f"{left} earlier evaluations are left out.") if left else "")


def _metric(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _share(seconds: float, whole: float) -> str:
    if not seconds:
        return "–"
    share = f"{seconds / whole:.0%}" if whole and seconds >= 0.005 * whole else "<1%"
    return joined([_s(seconds), " ", el("small", share)]) if whole else _s(seconds)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else human_seconds(seconds)


def invocation_table(story: RunSummary) -> Markup:
    """Every call and its bill."""
    if not story.invocations:
        return nothing("No function has been called yet.")
    shown = _worth_showing(story.invocations)
    head = ["rank", "attempt", "reason", "start", "outcome", "called at", "billed", "GB-s", "peak memory", "requests"]
    direct = story.spending.traffic.direct_bytes > 0
    rows = [_invocation(r) + ([human_bytes(r.traffic.direct_bytes)] if direct else []) for r in shown]
    out = table([*head, *(["direct bytes"] if direct else [])], rows, words=5)
    left = len(story.invocations) - len(shown)
    return out + (_remark(f"{left} more, all of which ended well, are left out.") if left else "")


def _remark(words: str) -> Markup:
    return el("p", words, class_="caption")


def _worth_showing(rows: Sequence[InvocationRow]) -> list[InvocationRow]:
    spare = ROWS - sum(not r.well for r in rows)
    out = []
    for r in rows:
        if not r.well or spare > 0:
            out.append(r)
            spare -= r.well
    return out


def _invocation(r: InvocationRow) -> list[str]:
    start = "never started" if r.cold is None else "cold" if r.cold else "warm"
    good = "good" if r.well else "bad"
    end = el("span", r.status.replace("_", " "), class_=good)
    end += joined([" ", el("small", r.outcome)]) if r.outcome else ""
    end += el("details", el("summary", "show"), el("pre", r.error)) if r.error else ""
    peak = f"{r.peak_memory_mb:.0f} of {r.memory_mb} MB" if r.peak_memory_mb else "–"
    name = el("span", str(r.attempt), title=r.invocation)
    about = "" if r.ended else "≈ "
    return [
        str(r.rank),
        name,
        r.reason,
        start,
        end,
        human_seconds(r.invoked),
        about + human_seconds(r.billed_s),
        about + f"{r.gb_seconds:.3f}",
        peak,
        f"{r.traffic.requests:,}",
    ]


def bill_table(story: RunSummary, figures: Headline) -> Markup:
    """Items of the bill."""
    spent, t = story.spending, story.spending.traffic
    requests = f"{human_count(t.puts, 'put', grouped=True)}, {human_count(t.gets, 'get', grouped=True)}, {human_count(t.polls, 'poll', grouped=True)}, {t.deletes:,} deletes"
    requests += f", {t.lists:,} lists" if t.lists else ""
    rows = [
        ["compute", f"{spent.gb_seconds:,.3f} GB-seconds", usd(spent.compute_usd)],
        ["requests", requests, usd(spent.requests_usd)],
        ["calls", f"{human_count(len(story.invocations), 'invocation', grouped=True)}", usd(spent.calls_usd)],
    ]
    if spent.burst_usd:
        rows.append(["bursts", f"{spent.burst_vcpu_s:,.1f} vCPU-seconds beyond the baseline", usd(spent.burst_usd)])
    if spent.suspended_usd:
        rows.append(["suspended", "memory written, kept and read", usd(spent.suspended_usd)])
    if t.direct_bytes:
        between = f"{human_bytes(t.direct_bytes_sent)} sent, {human_bytes(t.direct_bytes_received)} received"
        rows.append(["direct links", between, usd(spent.direct_usd)])
    beyond = max(0.0, figures.storage_usd - spent.requests_usd - spent.direct_usd)
    if beyond > 0.001 * figures.storage_usd:
        rows.append(["channel", "preparation, bytes moved and kept, parameter servers", usd(beyond)])
    metered = spent.total_usd + beyond
    moved = f"{human_bytes(t.bytes_up)} up, {human_bytes(t.bytes_down)} down"
    rows.append(["sum", moved, usd(metered)])
    out = table(["", "quantity", "cost"], rows, words=2, style="last-sum")
    if spent.estimated:
        out += _remark("Some invocations have no bill yet; theirs is estimated from quota and time.")
    if any(r.ended and r.status in _SILENT for r in story.invocations):
        out += _remark(_MISSING)
    if abs(figures.cost_usd - metered) > 0.005 * max(metered, 1e-12):
        out += _remark(f"The run's own result says {usd(figures.cost_usd)}.")
    return out


def configuration_table(figures: Headline) -> Markup:
    """Every setting that is known."""
    return settings_table(figures.configuration) if figures.configuration else nothing("Nothing is known of it.")


def settings_table(values: Iterable[tuple[str, str]]) -> Markup:
    """Names and values."""
    return table([], [[name, el("code", value)] for name, value in values], words=2, style="settings")


def said_table(story: RunSummary) -> Markup:
    """Notes and faults, in the order of time."""
    rows: list[tuple[float, str, str]] = [(n.t, n.level, n.text) for n in story.notes]
    for f in story.faults:
        where = "" if f.iteration is None else f", iteration {f.iteration}"
        rows.append((f.t, "fault", f"{f.fault} (rank {f.rank}, attempt {f.attempt}{where})"))
    rows += [(t, "resume", "the run was taken up again") for t in story.resumes]
    rows.sort(key=lambda row: row[0])
    cells = [[human_seconds(t), el("span", level, class_=f"level {level}"), words] for t, level, words in rows[:ROWS]]
    more = _remark(f"{len(rows) - ROWS} more are left out.") if len(rows) > ROWS else Markup("")
    return table(["at", "", "what"], cells, words=3) + more if rows else Markup("")


# -- regions on the page of a run ---------------------------------------------------------------------------------


_COLOURS = ("blue", "amber", "green", "grey")

CAPTION = (
    "Waiting is the time in exchanges with other regions: sending, and waiting for them. Bytes are metered by the regions. Staleness is "
    "the number of rounds that a region is ahead of what it has applied of the region furthest behind. Released is the time, of all functions "
    "together, for which a region that had done its share had ended them."
)


def exchanging(story: RunSummary) -> tuple[RegionActivity, ...]:
    """Regions that have exchanged with others."""
    return story.regions if any(region.exchanges for region in story.regions) else ()


def region_table(story: RunSummary, result: Mapping[str, Any] | None) -> Markup:
    """Step rate, staleness, bytes, waiting and cost of each region."""
    costs = {each["name"]: each["cost_usd"] for each in (result or {}).get("regions", ())}
    rows = []
    for region in exchanging(story):
        name = region.started.name
        rows.append(
            [
                name,
                region.started.platform,
                _functions(region),
                f"{region.steps_per_s:.3g}",
                f"{region.exchanges:,}",
                f"{region.staleness}",
                human_bytes(region.wan_bytes_sent),
                human_bytes(region.wan_bytes_received),
                _by_kernel(region),
                _waiting(region),
                f"{region.released_s:.0f} s" if region.released else "–",
                usd(costs[name]) if name in costs else "–",
            ]
        )
    head = (
        "region",
        "platform",
        "functions",
        "steps/s at the end",
        "exchanges",
        "staleness",
        "sent",
        "received",
        "by the kernel",
        "waiting",
        "released",
        "cost",
    )
    return table(head, rows, words=2)


def _by_kernel(region: RegionActivity) -> str:
    """Bytes sent and received over TCP, as the kernel has counted."""
    if not region.wan_kernel_bytes_sent:
        return "–"
    return f"{human_bytes(region.wan_kernel_bytes_sent)}, {human_bytes(region.wan_kernel_bytes_received)}"


def _waiting(region: RegionActivity) -> str:
    """Part of its time that it has waited, and what was predicted at the start."""
    predicted = region.started.predicted_waiting_share
    return f"{region.waiting_share:.1%}" + ("" if predicted is None else f" (predicted {predicted:.1%})")


def _functions(region: RegionActivity) -> str:
    """Functions from the start on: `4 → 2 → 3`."""
    return " → ".join(f"{n:,}" for n in (region.started.workers, *(change.workers for change in region.resized)))


def waiting_chart(story: RunSummary) -> Markup:
    """Waiting share of each region so far, over time."""
    lines = [
        ChartLine(label=label, points=tuple((p.t, 100 * p.waiting_share) for p in region.points), colour=colour)
        for label, colour, region in _named(story)
    ]
    most = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    return _over_time(story, lines, "waiting, %", most, "{:.3g}")


def progress_chart(story: RunSummary) -> Markup:
    """Iterations of each region over time."""
    lines = [
        ChartLine(label=label, points=tuple((p.t, float(p.iterations)) for p in region.points), colour=colour)
        for label, colour, region in _named(story)
    ]
    most = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    return _over_time(story, lines, "iterations", most, "{:,.0f}")


def _named(story: RunSummary) -> list[tuple[str, str, RegionActivity]]:
    return [(region.started.name, _COLOURS[i % len(_COLOURS)], region) for i, region in enumerate(exchanging(story))]


def _over_time(story: RunSummary, lines: list[ChartLine], title: str, most: float, form: str) -> Markup:
    axis = Axis(title=title, lo=0.0, hi=most * 1.04, ticks=ticks_of(0.0, most * 1.04, 5, form.format))
    return chart(lines, time_ticks(0, story.seconds, 6), (0.0, story.seconds), "time since launch", axis, None)
