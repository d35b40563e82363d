"""Flows as users declare them: descriptions that can be read (DPFlow, definition 3.2 and table 3-1)."""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.view import FlowReader, FlowView, LocalReader


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Flow(FlowDescription):
    """A data flow. It is immutable: `dataset`, `map` and the other methods return another flow, so calls can be chained.

    `prepare_read` passes it to a reader: in this process, in loader processes, or in a service shared by many jobs.
    """

    def prepare_read(self, reader: FlowReader | None = None) -> FlowView:
        """A view of the flow that can be iterated.

        Args:
            reader: decides where samples are loaded; None: in this process.

        Raises:
            JobError: the flow has no dataset.
            DatasetNotFound, DatasetError: the dataset does not exist, or cannot be read.
        """
        return (reader or LocalReader()).read(self)
