"""Initial weights from a file: `init = "weights.safetensors"` in a job. Names that match are loaded, and others are reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ephemeron.errors import JobError
from ephemeron.training.driver.trained import read_weights
from ephemeron.units import human_count

if TYPE_CHECKING:
    from torch import nn

_NAMED = 5


def load_initial(model: nn.Module, path: Path) -> str:
    """Loads the tensors of a file into a model, by name.

    Returns:
        A line that says what was loaded, what the file lacks, and what it has beyond that.

    Raises:
        JobError: the file cannot be read, a shape differs, or no name matches.
    """
    import torch

    if not path.exists():
        raise JobError(f"init: {path} does not exist")
    found = read_weights(path)
    own = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    matching = [name for name in own if name in found]
    if not matching:
        raise JobError(
            f"init: no name in {path.name} is one of the model: it has {_some(list(found))}, the model {_some(list(own))}",
            remedy="give weights of this model, or rename them",
        )
    wrong = [
        f"{name} is {list(found[name].shape)}, in the model {list(own[name].shape)}"
        for name in matching
        if found[name].shape != own[name].shape
    ]
    if wrong:
        raise JobError(
            f"init: {human_count(len(wrong), 'tensor')} of {path.name} {'has' if len(wrong) == 1 else 'have'} another shape: {_some(wrong, '; ')}",
            remedy="change the model, or leave these tensors out of the file",
        )
    with torch.no_grad():
        for name in matching:
            own[name].copy_(found[name])
    loaded = {id(own[name]) for name in matching}
    missing = [name for name, tensor in own.items() if name not in found and id(tensor) not in loaded]  # or tied to one
    unexpected = [name for name in found if name not in own]
    parts = [f"{path.name}: {human_count(len(matching), 'tensor')} loaded"]
    if missing:
        parts.append(f"{len(missing)} of the model not in the file: {_some(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} of the file not in the model: {_some(unexpected)}")
    return "; ".join(parts)


def _some(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(names[:_NAMED]) + (f"{separator}…" if len(names) > _NAMED else "")
