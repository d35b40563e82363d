"""What functions are told of a job's flow. Apart from `flow`, so that functions without one need not import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPart:
    """A flow function, and the dataset that it was found to read."""

    target: str
    """`module:function`."""
    samples: int
    """Of the dataset, whether used or not."""
    version: str = ""
    """Of the dataset in its store."""
    store: str | None = None
    """URL; None: the flow brings a dataset of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """What a function has to know to read its share. JSON-able."""

    train: FlowPart
    test: FlowPart
    options: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    collate: str | None = None
    on_error: str = "fail"
    loaders: int = 1
    prefetch_mb: float = 64.0
    sample_nbytes: int = 0
    """Of a sample in a batch, after all steps."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FlowSpec:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**raw, "train": FlowPart(**raw["train"]), "test": FlowPart(**raw["test"])})

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the flow functions."""
        return {**({} if self.path is None else {"path": Path(self.path)}), **self.options}
