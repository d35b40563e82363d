"""One HTML page that needs nothing else: style, script and pictures are inside, and its own security policy forbids it to fetch
anything."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from ephemeron.rendering.palette import BAD, LINE_COLOURS, PHASE_COLOURS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def document(title: str, parts: Iterable[str], *, script: bool = False) -> str:
    """A page in the style of all of them.

    Args:
        title: plain text.
        parts: markup, see `card`.
        script: the timeline needs it; nothing else does.
    """
    ending = f"<script>{_asset('report.js')}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_colours()}{_asset('report.css')}</style></head><body><main>"
        f"{''.join(parts)}</main>{ending}</body></html>\n"
    )


def _asset(name: str) -> str:
    return files("ephemeron.rendering").joinpath("assets", name).read_text(encoding="utf-8")


def _colours() -> str:
    both = [*PHASE_COLOURS.items(), *LINE_COLOURS.items(), ("bad", BAD)]
    return ":root{" + "".join(f"--{name}:{colour};" for name, colour in both) + "}\n"


def tiled(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: what, how much, and a word below it. Plain text."""
    cells = [
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd class='sub'>{escape(c)}</dd></div>" for a, b, c in tiles
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def card(title: str, body: str, words: str = "") -> str:
    """A section. `body` is markup; title and words are plain text."""
    said = f'<p class="caption">{escape(words)}</p>' if words else ""
    return f"<section><h2>{escape(title)}</h2>{body}{said}</section>"
