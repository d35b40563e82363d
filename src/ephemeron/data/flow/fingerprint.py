"""Identity of a loader's state: flow, version, dataset, steps and view. A state with another identity is refused.

Number of samples, seed and order are in the state of the stream itself. Batch size, ranks and number of loaders are not
part of it: a state may be resumed with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError

WHOLE = "all"
_WORDS = {
    "flow": "flow", "version": "flow version", "dataset": "dataset", "steps": "steps", "view": "subset or split",
    "samples": "number of samples", "seed": "seed", "shuffle": "order (shuffle, sampling)",
}  # fmt: skip


def fingerprint(flow: FlowDescription, chosen: Indices | None) -> dict[str, Any]:
    """Identity of a view of a flow. JSON-able.

    Args:
        flow: a flow with its source and resolved version.
        chosen: indices of the view's samples in the dataset; None: all of them.
    """
    view = WHOLE if chosen is None else xxhash.xxh3_64_hexdigest(np.ascontiguousarray(chosen, dtype="<i8").tobytes())
    return {
        "flow": flow.name, "version": flow.version, "dataset": str(flow.source), "steps": [s.name for s in flow.steps],
        "view": view,
    }  # fmt: skip


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compares the identity in a state with that of the loader.

    Args:
        state: the saved state.
        own: identity of this loader.

    Raises:
        JobError: the state is malformed or has another identity; the message names the first difference.
    """
    for key, mine in own.items():
        words = _WORDS.get(key, key)
        if key not in state:
            raise JobError(
                f"the state says nothing of its {words}", remedy="load what state_dict() of a flow's loader gave"
            )
        theirs = state[key]
        if theirs != mine:
            raise JobError(
                f"the state is of another {words}: {key} = {theirs!r}, this loader has {mine!r}",
                remedy="resume with the flow, data, split, seed and order that the state was saved with",
            )
