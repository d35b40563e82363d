"""HTML tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, style: str = "") -> str:
    """A table. Cells are markup already; the first `words` columns are text, the others are numbers."""
    heads = "".join(f'<th scope="col"{_side(i, words)}>{escape(h)}</th>' for i, h in enumerate(head))
    body = "".join(f"<tr>{''.join(f'<td{_side(i, words)}>{c}</td>' for i, c in enumerate(row))}</tr>" for row in rows)
    top = f"<thead><tr>{heads}</tr></thead>" if head else ""
    return f'<div class="scroll"><table class="{style}">{top}<tbody>{body}</tbody></table></div>'


def _side(i: int, words: int) -> str:
    return "" if i < words else ' class="n"'
