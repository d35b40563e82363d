"""The port of importers: functions from a source to variants whose samples are yielded one by one.

An importer copies nothing. It reads annotations, headers and labels, checks them, and names files that are wrong with the reason.
Metadata is yielded as it goes, so that a data set of millions of samples needs the memory of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.config.typed import near
from ephemeron.data.catalog.importers.source import Defects, ImportSource
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.errors import JobError

Tell = Callable[[str, int, int | None], None]
"""`(what, done, total)`: called with the progress; `total` is None while it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """A source to import, with options."""

    source: ImportSource
    variant: str | None
    """The user's name for it; None: `train`, or all variants of the source."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the kind, complete with defaults."""
    defects: Defects = field(default_factory=Defects)
    """Collects defective samples."""

    def single(self, found: FoundFiles) -> dict[str, FoundFiles]:
        """The variant of a source without splits, by its name."""
        return {self.variant or "train": found}

    def split(self, found: Mapping[str, Callable[[], FoundFiles]]) -> dict[str, FoundFiles]:
        """The variants of a source with splits: all, or the requested one.

        Raises:
            JobError: the source has no such split.
        """
        if self.variant is not None and self.variant not in found:
            raise JobError(f"{self.source.url} has no {self.variant!r}", remedy=f"it has {', '.join(found)}")
        return {name: make() for name, make in found.items() if self.variant in (None, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """A variant that an importer has found."""

    samples: Iterable[SampleMeta]
    decoders: Mapping[str, Mapping[str, Any]]
    total: int | None = None
    """Number of samples, if it is known before they are yielded."""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """A kind of source."""

    kind: str
    find: Callable[[ImportRequest], dict[str, FoundFiles]]
    options: Mapping[str, str] = field(default_factory=dict)
    """Name -> default; the command line's help explains them."""

    def filled(self, options: Mapping[str, str]) -> dict[str, str]:
        """The options, with defaults for the others.

        Raises:
            JobError: an option is unknown.
        """
        for name in options:
            if name not in self.options:
                remedy = near(name, self.options, what="it takes") if self.options else "it takes none"
                raise JobError(f"import kind {self.kind!r} has no option {name!r}", remedy=remedy)
        return {**self.options, **options}


def counted(found: FoundFiles, variant: str, tell: Tell | None, *, every: int = 1000) -> Iterator[SampleMeta]:
    """The samples; reports the progress after every `every` of them, and at the end."""
    done = 0
    for done, sample in enumerate(found.samples, 1):
        yield sample
        if tell is not None and done % every == 0:
            tell(variant, done, found.total)
    if tell is not None and done % every:
        tell(variant, done, done)
