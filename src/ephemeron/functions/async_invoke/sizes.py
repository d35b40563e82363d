"""Memory sizes of a deployment where memory belongs to a function and not to a call: one function for each size.

The function of the first size has the deployment's name, those of the others have their MB after it: `ephemeron`,
`ephemeron-1769`, `ephemeron-3008`. All of them know name and sizes from their environment, so a function of one size can call one of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ephemeron.errors import JobError

FUNCTION, SIZES = "EPHEMERON_FUNCTION", "EPHEMERON_SIZES"
"""Variables of the functions: the deployment's name and its sizes."""


def function_of(function: str, sizes_mb: Sequence[int], memory_mb: int) -> str:
    """Name of the function of a size; of a size that is not deployed, the deployment's.

    >>> function_of("ephemeron", (1024, 1769), 1769)
    'ephemeron-1769'
    """
    return f"{function}-{memory_mb}" if memory_mb in sizes_mb[1:] else function


def parse_sizes(text: str, *, low_mb: int, high_mb: int) -> tuple[int, ...]:
    """Sizes from text such as `1024,1769`.

    Args:
        text: MB, separated by commas; the first is the default of runs.
        low_mb: least size.
        high_mb: largest size.

    Raises:
        JobError: one is no number, given twice, or out of bounds.
    """
    sizes: list[int] = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise JobError(f"memory of {part.strip()!r} is no number of MB", remedy="give sizes as 1024,1769")
        size = int(part)
        if not low_mb <= size <= high_mb:
            raise JobError(f"memory of {size} MB is outside {low_mb} to {high_mb} MB")
        if size in sizes:
            raise JobError(f"memory of {size} MB is given twice", remedy="give each size once")
        sizes.append(size)
    return tuple(sizes)


def text_of(sizes_mb: Sequence[int]) -> str:
    """The inverse of `parse_sizes`."""
    return ",".join(map(str, sizes_mb))


def sizes_in(variables: Mapping[str, str]) -> tuple[int, ...]:
    """Sizes of a deployment, by the variables of its functions; empty: it has one function."""
    return tuple(int(size) for size in variables.get(SIZES, "").split(",") if size)


def sizes_text(sizes_mb: Sequence[int]) -> str:
    """Sizes for people: `1024, 1769 MB`."""
    return f"{', '.join(map(str, sizes_mb))} MB"


def not_deployed(sizes_mb: Sequence[int], memory_mb: int, command: str) -> str:
    """Remedy for a size that is not deployed: the command that deploys it beside the others."""
    more = text_of([*sizes_mb, memory_mb])
    return f"run: {command} --memory-mb {more}, with its other options as before"
