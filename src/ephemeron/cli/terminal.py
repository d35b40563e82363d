"""Consoles that print texts unchanged: brackets and colons are neither styles nor emoji.

A style is given beside a text, as `(text, style)`, never within it. All consoles are created here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Part: TypeAlias = "str | tuple[str, str]"
"""A text, or a text and its style."""


_PIPED = 10_000


def make_console(*, to_stderr: bool = False, width: int | None = None, for_tables: bool = False) -> Console:
    """A console for text output.

    Args:
        to_stderr: standard error instead of standard output.
        width: in columns; None: as wide as the terminal.
        for_tables: where the output is no terminal, nothing is folded: programs read lines.
    """
    from rich.console import Console

    file = sys.stderr if to_stderr else sys.stdout
    if for_tables and not file.isatty():
        width = _PIPED
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def text_of(*parts: Part) -> Text:
    """One text of styled and plain parts."""
    from rich.text import Text

    return Text.assemble(*parts)
