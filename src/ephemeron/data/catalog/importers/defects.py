"""Treatment of unreadable rows, empty files and absent files during an import.

fail        refuses the import and publishes nothing (the default)
skip        leaves the sample out; a list of all entries left out is stored beside the version
quarantine  the same, and a copy of the entry is kept in the dataset's folder `quarantine`, for inspection and repair

Only a problem of single samples or single files is a defect. A source of another kind altogether (no such column,
no annotations, arrays of other shapes) is refused in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ephemeron.data.catalog.importers.source import ImportSource
from ephemeron.data.catalog.meta import DataRef
from ephemeron.errors import JobError

OnDefect: TypeAlias = Literal["fail", "skip", "quarantine"]
MOST_KEPT_BYTES = 16_000_000
"""Larger entries are not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """An entry that is not a usable sample."""

    file: str
    """Name of the file in the source."""
    reason: str
    at: str = ""
    """Line, row or annotation, if the defect concerns less than the file."""
    ref: DataRef | None = None
    """Location of its bytes, if there are any."""

    def to_json(self) -> dict[str, Any]:
        """JSON value of the entry in the list."""
        return {"file": self.file, "at": self.at, "reason": self.reason}


class Defects:
    """Defects found so far, and the policy for them.

    Raises:
        JobError: the policy is unknown.
    """

    def __init__(self, policy: str = "fail") -> None:
        if policy not in get_args(OnDefect):
            raise JobError(f"on_defect = {policy!r} is not known", remedy="use fail, skip or quarantine")
        self.policy = policy
        self.found: list[Defect] = []

    def caught(self, e: JobError, source: ImportSource, file: str, *, at: str = "", ref: DataRef | None = None) -> None:
        """Records an error that concerns one sample or file.

        Raises:
            JobError: the same error, if the policy is `fail`.
        """
        if self.policy == "fail":
            raise JobError(f"{e} (to leave out what is wrong: on_defect = 'skip', or --on-defect skip)") from None
        reason = e.problem.removeprefix(source.url).removeprefix(":").lstrip().removeprefix(f"{file} ")
        self.found.append(Defect(file=file, reason=reason, at=at, ref=ref))
