"""Pictures as PNG are the pictures of the page: the same shapes at the same places, in the colours of the style sheet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plans
import pytest

from ephemeron.rendering.palette import LINE_COLOURS
from ephemeron.rendering.png import EDGE, WIDTH, write_png
from ephemeron.rendering.svg import el, text
from ephemeron.training.report.pareto import png
from ephemeron.training.report.plan_page import picture


def drawn(path: Path) -> np.ndarray:
    """Pixels of a file, rows first, RGB from 0 to 255."""
    from matplotlib.image import imread

    return np.round(imread(path)[..., :3] * 255).astype(int)


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_shapes_have_the_places_of_the_picture_and_the_colours_of_the_style_sheet(tmp_path):
    inner = el(
        "svg",
        el("rect", x=1, y=0, width=1, height=1, class_="dot orange"),
        x=50,
        y=0,
        width=50,
        height=50,
        viewBox="0 0 2 1",
        preserveAspectRatio="none",
    )
    shapes = [
        inner,
        el("path", d="M0 50h50v50h-50Z", class_="area blue"),
        el("g", el("circle", r=10, class_="dot green"), transform="translate(75 75)"),
        text(5, 20, "$5 and $6"),
    ]
    write_png(tmp_path / "a.png", "title", "below", [[("panel", el("svg", *shapes, viewBox="0 0 100 100"))]])
    pixels = drawn(tmp_path / "a.png")
    side = WIDTH - 2 * EDGE
    per_pixel = pixels.shape[1] / WIDTH
    left, top = EDGE, pixels.shape[0] / per_pixel - EDGE - side

    def at(x: float, y: float) -> list[int]:
        return pixels[int((top + y / 100 * side) * per_pixel), int((left + x / 100 * side) * per_pixel)].tolist()

    assert at(90, 25) == rgb(LINE_COLOURS["orange"]), "the right half of the inner picture"
    assert at(60, 25) == [255, 255, 255], "its left half is empty"
    assert at(75, 75) == rgb(LINE_COLOURS["green"])
    assert at(75, 90) == [255, 255, 255]
    blue = np.array(rgb(LINE_COLOURS["blue"]))
    assert np.abs(np.array(at(25, 75)) - (0.1 * blue + 0.9 * 255)).max() <= 1, "an area has a tenth of its line's colour"


def test_curves_are_refused(tmp_path):
    curve = el("svg", el("path", d="M0 0C1 1 2 2 3 3", class_="line blue"), viewBox="0 0 9 9")
    with pytest.raises(ValueError, match="has C, which is not drawn"):
        write_png(tmp_path / "a.png", "", "", [[("", curve)]])


def test_a_point_of_the_page_is_in_the_picture(tmp_path):
    """Each of the nine configurations of the front is a blue dot, but for the chosen one, which is orange."""
    png(plans.plan(), tmp_path / "a.png")
    pixels = drawn(tmp_path / "a.png")
    assert str(picture(plans.plan())).count('class="dot orange"') == 2, "the point and its key"
    for colour in ("blue", "orange", "amber"):
        assert (pixels == rgb(LINE_COLOURS[colour])).all(axis=-1).sum() > 50
