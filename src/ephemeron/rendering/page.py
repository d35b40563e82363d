"""Self-contained HTML pages from the templates in `templates/`: style, script and pictures are inside, and the page's own security
policy forbids it to fetch anything.

Templates escape every value that is not `Markup`, so text from a job, a profile or an error can be passed as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from markupsafe import Markup

from ephemeron.rendering.palette import BAD, LINE_COLOURS, PHASE_COLOURS
from ephemeron.rendering.svg import el

if TYPE_CHECKING:
    from jinja2 import Environment

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined)


def render(template: str, **values: object) -> Markup:
    """A file of `templates/` with values, which are escaped unless they are `Markup`."""
    return Markup(_environment().get_template(template).render(values))


def document(title: str, parts: Iterable[Markup], *, script: bool = False) -> str:
    """A whole page.

    Args:
        title: of the browser window.
        parts: sections, see `card`.
        script: whether to include the script, which only the timeline needs.
    """
    return (
        render(
            "document.html",
            policy=_POLICY,
            title=title,
            style=Markup(style_sheet()),
            parts=parts,
            script=Markup(_asset("report.js")) if script else "",
        )
        + "\n"
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def style_sheet() -> str:
    """CSS of all pages."""
    both = [*PHASE_COLOURS.items(), *LINE_COLOURS.items(), ("bad", BAD)]
    colours = "".join(f"--{name}:{colour};" for name, colour in both)
    return f":root{{{colours}}}\n" + _asset("report.css")


def header(
    over: str,
    title: str,
    summary: str,
    *,
    pill: str = "",
    pill_style: str = "",
    code: str = "",
    place: str = "",
    caption: str = "",
    causes: Sequence[str] = (),
) -> Markup:
    """The head of a page.

    Args:
        over: kind of page, above the title.
        title, summary: of the page.
        pill, pill_style: status beside the title, and its CSS class.
        code, place: identifier and place below the title.
        caption: a remark below the summary.
        causes: error texts.
    """
    return render(
        "header.html",
        over=over,
        title=title,
        summary=summary,
        pill=pill,
        pill_style=pill_style,
        code=code,
        place=place,
        caption=caption,
        causes=causes,
    )


def tiled(tiles: Iterable[tuple[str, str, str]]) -> Markup:
    """Key figures: name, value, and a remark below it."""
    return render("tiles.html", tiles=tiles)


def card(title: str, body: Markup, words: str = "") -> Markup:
    """A section with a caption."""
    return render("card.html", title=title, body=body, words=words)


def scrolled(picture: Markup) -> Markup:
    """A wide picture, which keeps a legible size where there is no room for it, and scrolls there."""
    return el("div", picture, class_="scroll wide", tabindex=0)


def side_by_side(*cards: Markup) -> Markup:
    """Sections in two columns, where there is room."""
    return render("side_by_side.html", cards=cards)


def items(texts: Iterable[str]) -> Markup:
    """A list."""
    return render("items.html", items=texts)


def legend(keys: Iterable[tuple[Markup, str]]) -> Markup:
    """Swatches and their names."""
    return render("legend.html", keys=keys)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1, style: str = "") -> Markup:
    """A table.

    Args:
        head: names of the columns; empty: none.
        rows: cells, escaped unless they are `Markup`.
        words: number of columns of text at the left; the others are aligned as numbers.
        style: CSS class.
    """
    return render("table.html", head=head, rows=rows, words=words, style=style)
