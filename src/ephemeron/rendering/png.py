"""Pictures of a page as PNG: the same SVG elements and legends, in the styles of the page's own style sheet.

matplotlib draws the shapes that `svg.el` makes: `line`, `rect`, `circle`, `path` of straight segments, `text`, groups that are
moved, and pictures within pictures. Nothing else of SVG is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, fromstring

from markupsafe import Markup

from ephemeron.errors import MissingExtra
from ephemeron.rendering.page import style_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, EDGE, GAP = 1240.0, 20.0, 36.0
"""Width of the picture, its margin, and the space between panels, in CSS pixels."""
PER_INCH, DPI = 100.0, 130
LETTER = 7.4
"""Mean width of a letter of a legend, CSS pixels."""

Style = Mapping[str, str]
Panel = tuple[str, Markup]
"""Title, and what `card` has: a legend and a picture."""


def write_png(path: Path, title: str, below: str, rows: Sequence[Sequence[Panel]]) -> None:
    """Writes panels as one picture.

    Args:
        path: of the file.
        title, below: text at the top.
        rows: panels beside each other, from the top.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtra("matplotlib", "report") from e
    placed, height = _placed(rows, EDGE + 62.0)
    figure = Figure(figsize=(WIDTH / PER_INCH, height / PER_INCH), dpi=DPI)
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    ax.set_xlim(0.0, WIDTH)
    ax.set_ylim(height, 0.0)
    canvas = _Canvas(ax)
    canvas.text(EDGE, EDGE + 14, title, {"font-size": "17px", "font-weight": "650", "fill": _variable("ink")})
    canvas.text(EDGE, EDGE + 40, below, {"font-size": "14px", "fill": _variable("soft")})
    for panel in placed:
        canvas.text(panel.x, panel.y + 14, panel.title, {"font-size": "15px", "font-weight": "650", "fill": _variable("ink")})
        canvas.panel(panel)
    figure.savefig(path, format="png")


@dataclass(frozen=True, slots=True)
class _Placed:
    title: str
    body: Element
    x: float
    y: float
    width: float


def _placed(rows: Sequence[Sequence[Panel]], y: float) -> tuple[list[_Placed], float]:
    """Panels with their places, and the height of all."""
    found: list[_Placed] = []
    for row in rows:
        width = (WIDTH - 2 * EDGE - GAP * (len(row) - 1)) / len(row)
        mine = [
            _Placed(title, _flat(fromstring(f"<div>{body}</div>")), EDGE + i * (width + GAP), y, width)
            for i, (title, body) in enumerate(row)
        ]
        found += mine
        y = max(_bottom(panel) for panel in mine) + GAP
    return found, y - GAP + EDGE


def _flat(body: Element) -> Element:
    """The body with pictures in place of what scrolls them."""
    body[:] = [each for part in body for each in (part if "scroll" in part.get("class", "").split() else [part])]
    return body


def _bottom(panel: _Placed) -> float:
    y = panel.y + 26.0
    for child in panel.body:
        y += _height(child, panel.width)
    return y


def _height(part: Element, width: float) -> float:
    if part.tag == "svg":
        _, _, wide, tall = _box(part)
        return tall * width / wide
    if part.get("class") == "legend":
        return 24.0 * (1 + max((line for line, _, _ in _keys(part, width)), default=0))
    return 60.0 if part.get("class") == "nothing" else 0.0


def _keys(legend: Element, width: float) -> Iterator[tuple[int, float, Element]]:
    """Line, place and element of each key of a legend."""
    line, x = 0, 0.0
    for key in legend:
        wide = 48.0 + LETTER * len(_words(key))
        if x and x + wide > width:
            line, x = line + 1, 0.0
        yield line, x, key
        x += wide


def _words(element: Element) -> str:
    """Text of a legend's key, without the titles of its swatch."""
    return (element.text or "") + "".join(child.tail or "" for child in element)


def _box(picture: Element) -> tuple[float, float, float, float]:
    x, y, wide, tall = map(float, picture.attrib["viewBox"].split())
    return x, y, wide, tall


@dataclass(frozen=True, slots=True)
class _Place:
    """Scale and offset of a picture's coordinates on the canvas."""

    sx: float = 1.0
    sy: float = 1.0
    tx: float = 0.0
    ty: float = 0.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.tx + self.sx * x, self.ty + self.sy * y

    def moved(self, x: float, y: float) -> _Place:
        return _Place(self.sx, self.sy, *self.at(x, y))

    def scaled(self, sx: float, sy: float) -> _Place:
        return _Place(self.sx * sx, self.sy * sy, self.tx, self.ty)


class _Canvas:
    """Elements drawn on one pair of axes whose unit is a CSS pixel."""

    def __init__(self, ax: Axes) -> None:
        self.ax = ax
        self.order = 0
        self.size = 1.0
        """Scale of text and lines."""

    def panel(self, panel: _Placed) -> None:
        y = panel.y + 26.0
        for part in panel.body:
            if part.tag == "svg":
                self.picture(part, _Place(), panel.x, y, panel.width)
            elif part.get("class") == "legend":
                for line, x, key in _keys(part, panel.width):
                    self._key(key, panel.x + x, y + 24.0 * line)
            elif part.get("class") == "nothing":
                self.text(panel.x + 20, y + 30, part.text or "", {"font-size": "13px", "fill": _variable("soft")})
            y += _height(part, panel.width)

    def _key(self, key: Element, x: float, y: float) -> None:
        swatch = key[0]
        if swatch.tag == "svg":
            self.picture(swatch, _Place(), x, y + 1.0, float(swatch.get("width", "14")))
            x += float(swatch.get("width", "14"))
        else:
            self._rects({_paint(_style(swatch), "fill"): [_corners(_Place(), x, y, 14.0, 12.0)]})
            x += 14.0
        self.text(x + 6, y + 11, _words(key), {"font-size": "13px", "fill": _variable("soft")})

    def picture(self, svg: Element, place: _Place, x: float, y: float, width: float, height: float | None = None) -> None:
        """An `svg` element at a place of its parent's coordinates; without a height, its proportions are kept."""
        x0, y0, wide, tall = _box(svg)
        sx = width / wide
        self.size, before = (sx if height is None else self.size), self.size
        inner = place.moved(x, y).scaled(sx, sx if height is None else height / tall).moved(-x0, -y0)
        self._inside(svg, inner)
        self.size = before

    def _inside(self, parent: Element, place: _Place) -> None:
        rects: dict[tuple[float, ...], list[list[tuple[float, float]]]] = {}
        for child in parent:
            if child.tag == "rect" and _number(child, "width") > 0:
                size = (_number(child, n) for n in ("x", "y", "width", "height"))
                style = _style(child)
                rects.setdefault(_paint(style, "fill"), []).append(_corners(place, *size))
        self._rects(rects)
        for child in parent:
            self._one(child, place)

    def _one(self, e: Element, place: _Place) -> None:
        style = _style(e)
        if e.tag == "svg":
            size = (_number(e, n) for n in ("x", "y", "width", "height"))
            self.picture(e, place, *size)
        elif e.tag == "g":
            moved = re.match(r"translate\(([-\d.e]+)[ ,]+([-\d.e]+)\)", e.get("transform", ""))
            self._inside(e, place.moved(float(moved[1]), float(moved[2])) if moved else place)
        elif e.tag == "line":
            ends = [place.at(_number(e, f"x{i}"), _number(e, f"y{i}")) for i in (1, 2)]
            self._path([ends], [False], {**style, "fill": "none"})
        elif e.tag == "path":
            lines, closed = _segments(e.attrib["d"], place)
            self._path(lines, closed, style)
        elif e.tag == "circle":
            self._circle(*place.at(_number(e, "cx"), _number(e, "cy")), _number(e, "r") * place.sx, style)
        elif e.tag == "text":
            anchor = {"end": "right", "middle": "center"}.get(e.get("text-anchor", ""), "left")
            self.text(*place.at(_number(e, "x"), _number(e, "y")), e.text or "", style, anchor)

    def text(self, x: float, y: float, words: str, style: Style, anchor: str = "left") -> None:
        from matplotlib.patheffects import withStroke

        size = float(style.get("font-size", "12px").removesuffix("px")) * self.size
        halo = "stroke" in style and style["stroke"] != "none"
        self.ax.text(
            x,
            y,
            words,
            ha=anchor,
            va="baseline",
            fontsize=_points(size),
            color=_paint(style, "fill"),
            parse_math=False,
            fontweight="bold" if int(style.get("font-weight", "400")) >= 600 else "normal",
            zorder=self._next(),
            path_effects=[withStroke(linewidth=_points(3 * self.size), foreground=style["stroke"])] if halo else None,
        )

    def _rects(self, by_colour: Mapping[tuple[float, ...], list[list[tuple[float, float]]]]) -> None:
        from matplotlib.collections import PolyCollection

        for colour, boxes in by_colour.items():
            self.ax.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0, antialiaseds=False, zorder=self._next()))

    def _path(self, lines: Sequence[Sequence[tuple[float, float]]], closed: Sequence[bool], style: Style) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Shape

        parts = [
            Shape([*line, line[0]] if whole else list(line), closed=whole)
            for line, whole in zip(lines, closed, strict=True)
            if len(line) > 1
        ]
        if not parts:
            return
        self.ax.add_patch(PathPatch(Shape.make_compound_path(*parts), **self._drawn(style)))

    def _circle(self, x: float, y: float, r: float, style: Style) -> None:
        from matplotlib.patches import Circle

        self.ax.add_patch(Circle((x, y), r, **self._drawn(style)))

    def _drawn(self, style: Style) -> dict[str, object]:
        """Arguments of a patch: colours, width and dashes."""
        wide = float(style.get("stroke-width", "1").removesuffix("px"))
        dashes = style.get("stroke-dasharray")
        found: dict[str, object] = {
            "facecolor": _paint(style, "fill"),
            "edgecolor": _paint(style, "stroke"),
            "linewidth": _points(wide * self.size),
            "zorder": self._next(),
            "joinstyle": "round",
        }
        if dashes is not None:
            found["linestyle"] = (0.0, [float(x) / wide for x in dashes.split()])
        return found

    def _next(self) -> int:
        self.order += 1
        return self.order


def _corners(place: _Place, x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [place.at(a, b) for a, b in ((x, y), (x + width, y), (x + width, y + height), (x, y + height))]


def _points(pixels: float) -> float:
    return pixels * 72.0 / PER_INCH


def _number(e: Element, name: str) -> float:
    return float(e.get(name, "0"))


def _segments(d: str, place: _Place) -> tuple[list[list[tuple[float, float]]], list[bool]]:
    """Lines of path data, and which of them are closed.

    Raises:
        ValueError: the path has curves.
    """
    lines: list[list[tuple[float, float]]] = []
    closed: list[bool] = []
    x = y = 0.0
    for command, text in re.findall(r"([A-Za-z])([^A-Za-z]*)", d):
        values = [float(v) for v in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", text)]
        dx, dy = (x, y) if command.islower() else (0.0, 0.0)
        match command.upper():
            case "Z":
                closed[-1] = True
            case "H" | "V":
                for v in values:
                    x, y = (dx + v, y) if command.upper() == "H" else (x, dy + v)
                    lines[-1].append(place.at(x, y))
            case "M" | "L":
                for i in range(0, len(values), 2):
                    dx, dy = (x, y) if command.islower() else (0.0, 0.0)
                    x, y = dx + values[i], dy + values[i + 1]
                    if command.upper() == "M" and i == 0:
                        lines.append([])
                        closed.append(False)
                    lines[-1].append(place.at(x, y))
            case _:
                raise ValueError(f"path data {d[:40]!r} has {command}, which is not drawn")
    return lines, closed


@cache
def _sheet() -> tuple[list[tuple[str, frozenset[str], Style]], Style]:
    """Rules for one element (tag or empty, classes, declarations) by specificity, and variables, of the light theme."""
    css = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", style_sheet())
    variables: dict[str, str] = {}
    rules: list[tuple[str, frozenset[str], Style]] = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css):
        declared = {k.strip(): v.strip() for k, _, v in (part.partition(":") for part in body.split(";")) if v}
        variables |= {k.removeprefix("--"): v for k, v in declared.items() if k.startswith("--")}
        for selector in selectors.split(","):
            found = re.fullmatch(r"(?:svg )?([a-z]*)((?:\.[\w-]+)*)", selector.strip())
            if found is not None and (found[1] or found[2]):
                rules.append((found[1], frozenset(filter(None, found[2].split("."))), declared))
    resolved = [
        (tag, classes, {k: re.sub(r"var\(--([\w-]+)\)", lambda m: variables[m[1]], v) for k, v in style.items()})
        for tag, classes, style in rules
    ]
    return sorted(resolved, key=lambda rule: (len(rule[1]), bool(rule[0]))), variables


def _variable(name: str) -> str:
    return _sheet()[1][name]


def _style(e: Element) -> Style:
    """Declarations that hold for an element."""
    names = frozenset(e.get("class", "").split())
    found = {k: v for k, v in e.attrib.items() if k in ("fill", "stroke", "stroke-width", "fill-opacity", "stroke-opacity")}
    for tag, classes, style in _sheet()[0]:
        if tag in ("", e.tag) and classes <= names:
            found |= style
    return found


def _paint(style: Style, name: str) -> tuple[float, ...]:
    """RGBA of `fill` or `stroke`."""
    from matplotlib.colors import to_rgba

    colour = style.get(name, "#000" if name == "fill" else "none")
    opacity = float(style.get(f"{name}-opacity", "1"))
    return to_rgba(colour, None if colour == "none" else opacity)
