"""Policies for rows that cannot be read, empty files, and absent files during an import.

fail        refuses the import and publishes nothing (the default)
skip        leaves the sample out; a list of all that was left out is stored beside the version
quarantine  the same, and a copy is kept in the dataset's folder `quarantine`, to be inspected and repaired

Only errors of single samples or files are defects. A source that is wrong as a whole (no such column, no annotations, arrays of
other shapes) is refused in any case.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ephemeron.data.catalog.dataset import DefectEntry
from ephemeron.data.catalog.importers.source import ImportSource
from ephemeron.data.catalog.meta import DataRef
from ephemeron.errors import JobError

OnDefect: TypeAlias = Literal["fail", "skip", "quarantine"]
MOST_KEPT_BYTES = 16_000_000
"""Size up to which copies are kept."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A sample or file that cannot be imported."""

    file: str
    """Its name in the source."""
    reason: str
    at: str = ""
    """Line, row or annotation; empty: the whole file."""
    ref: DataRef | None = None
    """Location of its bytes, if there are any."""

    def entry(self, kept: str | None = None) -> DefectEntry:
        """Its entry in the list of defects.

        Args:
            kept: path of a copy in the store; None: there is none.
        """
        return DefectEntry(file=self.file, at=self.at, reason=self.reason, kept=kept)


class Defects:
    """The defects of an import, under a policy.

    Raises:
        JobError: the policy is unknown.
    """

    def __init__(self, policy: str = "fail") -> None:
        if policy not in get_args(OnDefect):
            raise JobError(f"on_defect = {policy!r} is not known", remedy="use fail, skip or quarantine")
        self.policy = policy
        self.found: list[Defect] = []

    def caught(self, e: JobError, source: ImportSource, file: str, *, at: str = "", ref: DataRef | None = None) -> None:
        """Records an error of one sample or file.

        Raises:
            JobError: the same error, if the policy is `fail`.
        """
        if self.policy == "fail":
            raise JobError(f"{e} (to leave out what is wrong: on_defect = 'skip', or --on-defect skip)") from None
        reason = e.problem.removeprefix(source.url).removeprefix(":").lstrip().removeprefix(f"{file} ")
        _log.debug("%s %s is left out: %s", file, at, reason)
        self.found.append(Defect(file=file, reason=reason, at=at, ref=ref))
