"""Identity of the samples that a loader's state belongs to: flow, version, dataset, steps and view.

A state is refused by a loader of other samples; the message names the first difference. Number of samples, seed and order are in
the state of the stream itself. Batch size, ranks and number of loaders are not part of it: a state may be resumed with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from ephemeron.config.typed import plain
from ephemeron.data.flow.code_content import attributes_of, configured
from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError

WHOLE = "all"
_WORDS = {"version": "flow version", "view": "subset or split"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identity of a view of a flow. Its fields are keys of `FlowLoader.state_dict`."""

    flow: str
    version: int
    dataset: str
    """Name, version and variant; of an object: its class, and a digest of each simple attribute."""
    steps: tuple[str, ...]
    """Names of the steps, and digests of their code and options."""
    view: str
    """Digest of the dataset's numbers of the samples; `all`: the whole dataset."""

    @classmethod
    def of(cls, flow: FlowDescription, chosen: Indices | None) -> Fingerprint:
        """The fingerprint of a view.

        Args:
            flow: with its source, the version resolved.
            chosen: the dataset's numbers of the view's samples; None: all of them.
        """
        view = WHOLE
        if chosen is not None:
            view = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(chosen, dtype="<i8").tobytes())
        steps = tuple(f"{step.name}#{_digest(configured((step.function, step.transform)))}" for step in flow.steps)
        own = None if flow.source is None else flow.source.dataset
        return cls(
            flow=flow.name, version=flow.version, dataset=str(flow.source) if own is None else _described(own), steps=steps, view=view
        )

    def to_json(self) -> dict[str, object]:
        """The fingerprint as part of a state."""
        written: dict[str, object] = plain(self)
        return written

    def check(self, state: Mapping[str, object]) -> None:
        """Compares a state with this fingerprint.

        Raises:
            JobError: it is no state of a loader, or of other samples; the message names the first difference.
        """
        for key, mine in self.to_json().items():
            words = _WORDS.get(key, key)
            if key not in state:
                raise JobError(f"the state does not name its {words}", remedy="load a result of state_dict() of a flow's loader")
            if state[key] != mine:
                raise JobError(
                    f"the state has another {words}: {key} = {state[key]!r}, this loader has {mine!r}",
                    remedy="resume with the flow, data, split, seed and order that the state was saved with",
                )


def _described(dataset: object) -> str:
    """The class of a dataset and its attributes, as digests: they may be secret, or long."""
    found = ", ".join(f"{name}#{_digest(value)}" for name, value in attributes_of(dataset))
    return f"{type(dataset).__name__}({found})"


def _digest(thing: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(thing).encode(errors="surrogatepass"))[:8]
