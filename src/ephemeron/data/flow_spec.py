"""Specification of a job's flow for functions. Separate from `flow`, which functions without one need not import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPart:
    """A flow function, and the dataset that it reads."""

    target: str
    """`module:function`."""
    samples: int
    """Samples of the dataset, used or not."""
    version: str = ""
    """Version of the dataset in its store."""
    store: str | None = None
    """URL; None: the flow has a dataset of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Specification with which a function reads its share. JSON-able."""

    train: FlowPart
    test: FlowPart
    options: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    collate: str | None = None
    on_error: str = "fail"
    loaders: int = 1
    prefetch_mb: float = 64.0
    sample_nbytes: int = 0
    """Bytes of a sample in a batch, after all steps."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FlowSpec:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**raw, "train": FlowPart(**raw["train"]), "test": FlowPart(**raw["test"])})

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the flow functions."""
        return {**({} if self.path is None else {"path": Path(self.path)}), **self.options}
