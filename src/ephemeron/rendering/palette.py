"""Colours that the page and the picture share.

The six phases follow Okabe and Ito's palette, which stays apart under the common colour-vision deficiencies
and in greyscale print; `wait` is a pale grey, because nothing happens in it.
"""

from __future__ import annotations

from ephemeron.events import Phase

PHASE_COLOURS: dict[Phase, str] = {
    "load": "#cc79a7",
    "compute": "#0072b2",
    "upload": "#e69f00",
    "aggregate": "#009e73",
    "download": "#56b4e9",
    "wait": "#d5d9de",
}

LINE_COLOURS: dict[str, str] = {"blue": "#0072b2", "orange": "#d55e00", "green": "#009e73", "amber": "#e69f00", "grey": "#8a929c"}
BAD = "#c6362f"
"""A function that ended badly, a fault, a budget."""

MARKS: dict[str, str] = {
    "relay": "relay",
    "replacement": "replacement",
    "duplicate": "duplicate",
    "resume": "resume",
    "fault": "injected fault",
    "bad": "ended badly",
}
"""Marks of the timeline and what they mean."""
