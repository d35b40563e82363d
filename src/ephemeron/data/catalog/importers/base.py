"""What an importer is: a function from a source to variants whose samples are yielded one by one.

It copies nothing. It reads what it has to (annotations, headers, labels), checks it, and says which file is wrong and
why. Metadata is yielded as it goes, so that a data set of millions needs the memory of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.config.typed import near
from ephemeron.data.catalog.importers.defects import Defects
from ephemeron.data.catalog.importers.source import ImportSource
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.errors import JobError

Tell = Callable[[str, int, int | None], None]
"""`(what, done, total)`: called now and then with how far it is; `total` is None while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What to import."""

    source: ImportSource
    variant: str | None
    """The user's name for it; None: `train`, or all that the source itself tells apart."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the kind; all that it knows are there."""
    defects: Defects = field(default_factory=Defects)
    """Where samples go that are none."""

    def single(self, found: FoundFiles) -> dict[str, FoundFiles]:
        """For kinds without splits of their own."""
        return {self.variant or "train": found}

    def split(self, found: Mapping[str, Callable[[], FoundFiles]]) -> dict[str, FoundFiles]:
        """For kinds that have some: all, or the one asked for.

        Raises:
            JobError: it has no such split.
        """
        if self.variant is not None and self.variant not in found:
            raise JobError(f"{self.source.url} has no {self.variant!r}", remedy=f"it has {', '.join(found)}")
        return {name: make() for name, make in found.items() if self.variant in (None, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """A variant that an importer found."""

    samples: Iterable[SampleMeta]
    decoders: Mapping[str, Mapping[str, Any]]
    total: int | None = None
    """How many samples there will be, if that is known before they are yielded."""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """A kind of source."""

    kind: str
    find: Callable[[ImportRequest], dict[str, FoundFiles]]
    options: Mapping[str, str] = field(default_factory=dict)
    """Name -> default; what they mean is in the help of the command line."""

    def filled(self, options: Mapping[str, str]) -> dict[str, str]:
        """The options, with defaults for the others.

        Raises:
            JobError: one is unknown.
        """
        for name in options:
            if name not in self.options:
                remedy = near(name, self.options, what="it takes") if self.options else "it takes none"
                raise JobError(f"import kind {self.kind!r} has no option {name!r}", remedy=remedy)
        return {**self.options, **options}


def counted(found: FoundFiles, variant: str, tell: Tell | None, *, every: int = 1000) -> Iterator[SampleMeta]:
    """The samples, telling every so many of them how far it is, and at the end."""
    done = 0
    for done, sample in enumerate(found.samples, 1):
        yield sample
        if tell is not None and done % every == 0:
            tell(variant, done, found.total)
    if tell is not None and done % every:
        tell(variant, done, done)
