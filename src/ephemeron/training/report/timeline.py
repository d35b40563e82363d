"""The timeline: one lane for each rank, coloured by phase, with a bracket under each invocation.

The coloured part is an inner SVG whose own viewBox is in seconds and stretches freely, so zooming is one
attribute; everything that must not stretch (marks, labels, ticks) is outside it and is moved by the script.
Without the script, and in print, the whole run is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from ephemeron.events import FaultFired
from ephemeron.rendering.page import legend, render, scrolled
from ephemeron.rendering.palette import MARKS
from ephemeron.rendering.svg import Scale, el, joined, nothing, num, text, time_ticks
from ephemeron.training.report.headline import Headline
from ephemeron.training.report.invocations import InvocationRow
from ephemeron.training.report.lanes import SHOWN_FIRST, STACKED_LANES, Column, Lane, Segment, cells
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.units import human_seconds

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1160, 74, 14, 10, 34
INNER = WIDTH - LEFT - RIGHT

_SHAPES: dict[str, Markup] = {
    "relay": Markup('<circle r="3.6" class="shape hollow"/>'),
    "replacement": Markup('<path d="M0-5L5 0L0 5L-5 0Z" class="shape solid"/>'),
    "duplicate": Markup('<rect x="-3.4" y="-3.4" width="6.8" height="6.8" class="shape hollow"/>'),
    "resume": Markup('<path d="M-3.5-4.5L4.5 0L-3.5 4.5Z" class="shape solid"/>'),
    "fault": Markup('<path d="M1-7L-4 1H-.5L-1.5 7L4-1.5H.5L2-7Z" class="shape spark"/>'),
    "bad": Markup('<path d="M-4-4L4 4M-4 4L4-4" class="shape cross"/>'),
}


def timeline(story: RunSummary, figures: Headline) -> Markup:
    """Legend, picture and, for the script, its zoom controls."""
    if not story.lanes or not story.seconds:
        return nothing("No function has been called yet.")
    tall = _lane_height(len(story.lanes))
    height = TOP + tall * len(story.lanes) + BOTTOM
    floor = height - BOTTOM
    rows: dict[int, list[InvocationRow]] = {lane.rank: [] for lane in story.lanes}
    for row in story.invocations:
        rows[row.rank].append(row)
    inner = [_lane(lane, i * tall, tall, rows[lane.rank]) for i, lane in enumerate(story.lanes)]
    labels = [_label(lane.rank, i, tall, figures.aggregators) for i, lane in enumerate(story.lanes)]
    at = {lane.rank: TOP + (i + 0.5) * tall for i, lane in enumerate(story.lanes)}
    scale = Scale(0.0, story.seconds, LEFT, WIDTH - RIGHT)
    marks = [_mark(kind, t, words, scale, at[rank] + _aside(kind, tall)) for kind, t, rank, words in _marks(story) if rank in at]
    view = f"0 0 {_sec(story.seconds)} {tall * len(story.lanes)}"
    spans = el(
        "svg",
        *inner,
        x=LEFT,
        y=TOP,
        width=INNER,
        height=floor - TOP,
        viewBox=view,
        preserveAspectRatio="none",
        class_="spans merged" if story.merged else "spans",
    )
    frame = el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, class_="axis")
    picture = el(
        "svg",
        *labels,
        frame,
        el("g", _ticks(scale, floor), class_="ticks"),
        spans,
        *marks,
        el("rect", x=0, y=TOP, width=0, height=floor - TOP, class_="pick"),
        viewBox=f"0 0 {WIDTH} {height}",
        class_="timeline",
        role="img",
        aria_label="What each function did, by time",
        data_end=repr(story.seconds),
        data_left=LEFT,
        data_width=INNER,
        data_floor=floor,
    )
    return _legend(story) + render("zoom_controls.html") + scrolled(picture)


def caption(story: RunSummary) -> str:
    """Legend of the picture."""
    words = "Where phases overlap, the lane shows the first of " + ", ".join(SHOWN_FIRST) + "."
    if story.merged:
        how = "and the heights in it are the exact shares of the phases. "
        if len(story.lanes) > STACKED_LANES:
            how = "and takes one colour, given out so that along a lane each phase has its true share. "
        each = f"each column merges {human_seconds(story.column_s)} of one function, "
        words = f"Too many spans to draw one by one: {each}{how}{words}"
    words += " The palest ground is time that no phase accounts for."
    return words + " A bracket under a lane is one invocation; dots lead from its call to the start of its code."


def _lane_height(n: int) -> int:
    return 34 if n <= 12 else 22 if n <= 32 else 12 if n <= 80 else 7


def _label(rank: int, i: int, tall: int, aggregators: int) -> Markup:
    y = TOP + (i + 0.5) * tall + 4
    if tall < 12 and i % 5:
        return Markup("")
    name = f"rank {rank}" if tall >= 22 else str(rank)
    role = "aggregates" if rank < aggregators and tall >= 34 else ""
    below = text(LEFT - 10, y + 7, role, text_anchor="end", class_="role") if role else ""
    return text(LEFT - 10, y - (5 if role else 1), name, text_anchor="end") + below


def _lane(lane: Lane, top: float, tall: int, rows: list[InvocationRow]) -> Markup:
    bar = tall - (12 if tall >= 22 else 3 if tall >= 12 else 1)
    y = top + (2 if tall >= 12 else 0.5)
    body = [_alive(row, y, bar) for row in rows]
    body += [_segment(s, y, bar) for s in lane.segments]
    if tall >= 22:
        body += [rect for column in lane.columns for rect in _column(column, y, bar)]
    else:
        body += [_cell(s, y, bar) for s in cells(lane.columns)]
    if tall >= 22:
        body += [_bracket(row, y + bar + 2, y + bar + 6) for row in rows]
    return joined(body)


def _alive(row: InvocationRow, y: float, bar: float) -> Markup:
    """A pale ground under the time that no span explains, and dots from call to start."""
    said = _said(row)
    ground = el("rect", el("title", said), x=_sec(row.start), y=y, width=_sec(row.end - row.start), height=bar, class_="alive")
    middle = y + bar / 2
    wait = el("path", d=f"M{_sec(row.invoked)} {num(middle)}H{_sec(row.start)}", class_="starting")
    return ground + (wait if row.start > row.invoked and bar >= 9 else "")


def _said(row: InvocationRow) -> str:
    out = f"rank {row.rank}, attempt {row.attempt} ({row.reason}): {row.status}"
    return f"{out}, {row.outcome}" if row.outcome else out


def _segment(s: Segment, y: float, bar: float) -> Markup:
    words = f"{s.phase}, iteration {s.iteration}, {_ms(s.end - s.start)}"
    return el("rect", el("title", words), x=_sec(s.start), y=y, width=_sec(s.end - s.start), height=bar, class_=s.phase)


def _cell(s: Segment, y: float, bar: float) -> Markup:
    return el("rect", el("title", s.phase), x=_sec(s.start), y=y, width=_sec(s.end - s.start), height=bar, class_=s.phase)


def _column(column: Column, y: float, bar: float) -> Iterator[Markup]:
    """Phases stacked from below; what is left empty is time without a span."""
    width, floor = column.end - column.start, y + bar
    for phase in SHOWN_FIRST:
        seconds = column.seconds.get(phase, 0.0)
        if seconds:
            height = bar * seconds / width
            floor -= height
            title = el("title", f"{phase}: {seconds / width:.0%} of {_ms(width)}")
            yield el("rect", title, x=_sec(column.start), y=floor, width=_sec(width), height=height, class_=phase)


def _sec(seconds: float) -> str:
    """A coordinate inside the spans, to 10 µs: finer than `num`, because it will be zoomed into."""
    return f"{seconds:.5f}".rstrip("0").rstrip(".")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


def _bracket(row: InvocationRow, top: float, low: float) -> Markup:
    style = "bracket" if row.well else "bracket lost"
    down = f"M{_sec(row.invoked)} {num(top)}V{num(low)}H{_sec(row.end)}"
    return el("path", d=down + ("" if row.status == "running" else f"V{num(top)}"), class_=style)


def _marks(story: RunSummary) -> Iterator[tuple[str, float, int, str]]:
    """(kind, time, rank, words)."""
    for row in story.invocations:
        if row.reason in _SHAPES:
            yield row.reason, row.invoked, row.rank, f"{_said(row)}, called at {human_seconds(row.invoked)}"
        if not row.well and row.status != "cancelled":
            yield "bad", row.end, row.rank, f"{_said(row)}, ended at {human_seconds(row.end)}"
    for fault in story.faults:
        yield "fault", fault.t, fault.rank, _fault_words(fault)


def _aside(kind: str, tall: int) -> float:
    """Faults sit above the middle of the lane, calls on the bracket, so that a kill and its repair stay apart."""
    if tall < 22:
        return 0.0
    return -0.2 * tall if kind == "fault" else 0.0 if kind == "bad" else tall / 2 - 4


def _fault_words(fault: FaultFired) -> str:
    where = "" if fault.iteration is None else f", iteration {fault.iteration}"
    return f"injected fault: {fault.fault}, rank {fault.rank}, attempt {fault.attempt}{where}"


def _mark(kind: str, t: float, words: str, scale: Scale, y: float) -> Markup:
    place = f"translate({num(scale(t))} {num(y)})"
    return el("g", el("title", words), _SHAPES[kind], class_="mark", data_t=repr(t), transform=place)


def _ticks(scale: Scale, floor: float) -> Markup:
    out = []
    for t, name in time_ticks(0.0, scale.hi, 10):
        x = scale(t)
        out.append(el("line", x1=x, x2=x, y1=TOP, y2=floor + 4, class_="grid"))
        out.append(text(x, floor + 18, name, text_anchor="middle"))
    return joined(out)


def _legend(story: RunSummary) -> Markup:
    seen = {s.phase for lane in story.lanes for s in lane.segments}
    seen |= {p for lane in story.lanes for c in lane.columns for p in c.seconds}
    keys = [(el("i", "", class_=f"key {p}"), str(p)) for p in SHOWN_FIRST if p in seen]
    kinds = {kind for kind, *_ in _marks(story)}
    for kind in _SHAPES:
        if kind in kinds:
            shape = el("svg", _SHAPES[kind], viewBox="-8 -8 16 16", width=16, height=16, aria_hidden="true")
            keys.append((shape, MARKS[kind]))
    return legend(keys)
