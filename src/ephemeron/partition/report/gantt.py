"""Gantt chart of a simulated iteration as a self-contained SVG, with a lane for each device and each link.

Few spans are drawn one by one. Of many, consecutive spans of a device for one micro-batch in one direction are one bar, so that a thousand
operators in eight micro-batches are some dozens of bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ephemeron.partition.schedule_simulator.schedule import Replay, ReplaySpan
from ephemeron.rendering.svg import Scale, el, joined, num, text, ticks
from ephemeron.units import exact_seconds, human_bytes

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1160, 150, 14, 34, 40
TALL, LOW = 26, 16
"""Height of a device's lane, and of a link's."""
FEW = 400
"""Most spans that are drawn one by one."""
COLOURS = {"forward": "#0072b2", "backward": "#e69f00", "tensor": "#56b4e9", "gradient": "#cc79a7"}
"""Okabe and Ito's palette."""
WORDS = {"forward": "forward pass", "backward": "backward pass", "tensor": "tensor sent forward", "gradient": "gradient sent back"}
_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
_SOFT = "#5d6673"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Consecutive spans of one micro-batch and direction."""

    resource: str | tuple[str, str]
    direction: str
    micro_batch: int
    start_s: float
    end_s: float
    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Key of its colour."""
        if isinstance(self.resource, str):
            return self.direction
        return "tensor" if self.direction == "forward" else "gradient"


def bars(spans: Sequence[ReplaySpan], *, few: int = FEW) -> tuple[Bar, ...]:
    """Bars of spans; consecutive spans of a resource are joined if there are more than `few`."""
    made: list[Bar] = []
    open_: dict[str | tuple[str, str], int] = {}
    joined = len(spans) > few
    end_s = max((s.end_s for s in spans), default=0.0)
    for s in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        last = open_.get(s.resource) if joined else None
        if last is not None:
            b = made[last]
            near = s.start_s - b.end_s <= 1e-3 * end_s
            if near and (b.direction, b.micro_batch) == (s.direction, s.micro_batch):
                made[last] = Bar(
                    resource=b.resource,
                    direction=b.direction,
                    micro_batch=b.micro_batch,
                    start_s=b.start_s,
                    end_s=s.end_s,
                    names=(*b.names, s.what),
                )
                continue
        open_[s.resource] = len(made)
        made.append(
            Bar(resource=s.resource, direction=s.direction, micro_batch=s.micro_batch, start_s=s.start_s, end_s=s.end_s, names=(s.what,))
        )
    return tuple(made)


def gantt(done: Replay, *, few: int = FEW, nbytes: Mapping[str, tuple[int, int]] | None = None) -> Markup:
    """SVG of a simulated iteration.

    Args:
        done: the simulation.
        few: see `bars`.
        nbytes: bytes of tensors and of their gradients per micro-batch, for tooltips of links.
    """
    drawn = bars(done.spans, few=few)
    lanes = _lanes(done)
    at: dict[str | tuple[str, str], float] = {}
    y = float(TOP)
    for lane in lanes:
        at[lane] = y
        y += _height(lane) + 4
    floor = y + 2
    scale = Scale(0.0, done.iteration_s or 1.0, LEFT, WIDTH - RIGHT)
    parts = [_grid(scale, floor), *(_label(lane, at[lane], done) for lane in lanes)]
    several = any(b.micro_batch for b in drawn)
    parts += [_bar(b, at[b.resource], scale, nbytes or {}, several=several) for b in drawn]
    height = floor + BOTTOM
    return el(
        "svg",
        _legend(),
        *parts,
        viewBox=f"0 0 {WIDTH} {num(height)}",
        width=WIDTH,
        height=height,
        class_="chart gantt",
        role="img",
        aria_label="Tasks of each device and each link over time",
        xmlns="http://www.w3.org/2000/svg",
        font_family=_FONT,
        font_size=12,
    )


def _lanes(done: Replay) -> list[str | tuple[str, str]]:
    """Devices in the order of the pipeline, then the links that are used."""
    used = dict.fromkeys(s.resource for s in done.spans)
    devices = [d for d in done.stages if d in used] or sorted(r for r in used if isinstance(r, str))
    place = {d: k for k, d in enumerate(devices)}
    links = sorted((r for r in used if isinstance(r, tuple)), key=lambda k: (place[k[0]], place[k[1]]))
    return [*devices, *links]


def _height(lane: str | tuple[str, str]) -> int:
    return TALL if isinstance(lane, str) else LOW


def _label(lane: str | tuple[str, str], y: float, done: Replay) -> Markup:
    height = _height(lane)
    words = lane if isinstance(lane, str) else " → ".join(lane)
    busy = done.busy_s[lane] / done.iteration_s if done.iteration_s else 0.0
    short = words if len(words) <= 21 else words[:20] + "…"
    title = el("title", f"{words}: busy {busy:.0%} of the time")
    label = el(
        "text", title, short, x=LEFT - 8, y=y + height / 2 + 4, text_anchor="end", fill=_SOFT, font_size=12 if isinstance(lane, str) else 11
    )
    ground = el("rect", x=LEFT, y=y, width=WIDTH - LEFT - RIGHT, height=height, fill="#8a929c", fill_opacity=0.1)
    return ground + label


def _bar(b: Bar, y: float, scale: Scale, nbytes: Mapping[str, tuple[int, int]], *, several: bool) -> Markup:
    x0, x1 = scale(b.start_s), scale(b.end_s)
    height = _height(b.resource)
    width = max(x1 - x0, 0.4)
    # neighbours of one colour are distinguishable: odd micro-batches are paler, and wide bars have an outline
    rect = el(
        "rect",
        el("title", _said(b, nbytes, several=several)),
        x=x0,
        y=y,
        width=width,
        height=height,
        fill=COLOURS[b.kind],
        fill_opacity=0.8 if b.micro_batch % 2 else 1.0,
        stroke="#ffffff" if width > 3 else None,
        stroke_width=0.7 if width > 3 else None,
    )
    if not several or not isinstance(b.resource, str):
        return rect
    label = str(b.micro_batch)
    if width < 7 * len(label) + 4:
        return rect
    return rect + text((x0 + x1) / 2, y + height / 2 + 4, label, text_anchor="middle", style="fill:#fff", pointer_events="none")


def _said(b: Bar, nbytes: Mapping[str, tuple[int, int]], *, several: bool) -> str:
    where = b.resource if isinstance(b.resource, str) else " → ".join(b.resource)
    many = f"{len(b.names)} {'operators' if isinstance(b.resource, str) else 'transfers'}"
    what = b.names[0] if len(b.names) == 1 else many
    size = ""
    if not isinstance(b.resource, str):
        known = [nbytes[n][b.direction == "backward"] for n in b.names if n in nbytes]
        size = f", {human_bytes(sum(known))}" if known else ""
    which = f", micro-batch {b.micro_batch}" if several else ""
    return f"{where}: {WORDS[b.kind]}, {what}{which}{size}\n{exact_seconds(b.start_s)} to {exact_seconds(b.end_s)}, {exact_seconds(b.end_s - b.start_s)}"


def _grid(scale: Scale, floor: float) -> Markup:
    size, unit = (1.0, "s") if scale.hi >= 1 else (1e-3, "ms") if scale.hi >= 1e-3 else (1e-6, "µs")
    out = []
    for value, name in ticks(0.0, scale.hi / size, 8, lambda v: f"{v:g} {unit}" if v else "0"):
        x = scale(value * size)
        out.append(el("line", x1=x, x2=x, y1=TOP - 4, y2=floor, stroke="#8a929c", stroke_opacity=0.3))
        out.append(text(x, floor + 16, name, text_anchor="middle", fill=_SOFT))
    out.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, stroke=_SOFT))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, floor + 33, "time", text_anchor="middle", fill=_SOFT))
    return joined(out)


def _legend() -> Markup:
    out, x = [], float(LEFT)
    for kind, words in WORDS.items():
        out.append(el("rect", x=x, y=8, width=14, height=12, rx=2, fill=COLOURS[kind]))
        out.append(text(x + 20, 18, words, fill=_SOFT))
        x += 46 + 7.0 * len(words)
    return joined(out)
