"""The flow of a job, as functions get it. Apart from `flow`, so that functions without one need not import that package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ephemeron.config.typed import build

SERVICE_VARIABLE = "EPHEMERON_DATA_SERVICE"
"""Environment variable with `HOST:PORT` of the data service that functions read flows through; its token: `EPHEMERON_DATA_TOKEN`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProvider:
    """An object of the user's code whose methods `train_data` and `evaluation_data` return datasets or flows."""

    target: str
    """`module:Class`, or a function that returns the object."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPart:
    """A flow function, and the dataset that it was found to read."""

    target: str
    """`module:function`, or the name of a provider's method."""
    samples: int
    """Samples in the dataset, whether used or not."""
    version: str = ""
    """Version of the dataset in its store."""
    store: str | None = None
    """URL; None: the flow brings a dataset of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Everything that a function needs to read its share, as JSON."""

    train: FlowPart
    test: FlowPart
    provider: DataProvider | None = None
    """Object whose methods the parts are; None: they are functions."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the flow functions, from the job."""
    path: str | None = None
    collate: str | None = None
    on_error: str = "fail"
    loaders: int = 1
    prefetch_mb: float = 64.0
    pairs: bool = True
    """Whether every batch is a pair of inputs and targets."""
    sample_nbytes: int = 0
    """Bytes of a sample in a batch, after all steps."""

    @classmethod
    def from_json(cls, raw: object) -> FlowSpec:
        """The inverse of `dataclasses.asdict`.

        Raises:
            JobError: a key is unknown or missing, or a value has another type.
        """
        return build(cls, raw, where="flow")

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments of the flow functions."""
        return {**({} if self.path is None else {"path": Path(self.path)}), **self.options}
