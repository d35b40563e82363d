"""Checkpoints of a pipeline as two safetensors files: the original model's state, and the optimisers' state. No pickle.

    folder/model.safetensors        all names of the original's state_dict(), including those of tied parameters
    folder/optimizer.safetensors    state by original parameter name; numbers and options in the metadata

Neither contains stages, so a checkpoint can be loaded into another placement or without a pipeline. Both contain the iteration;
files of different iterations (after a crash between the two) are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ephemeron.errors import JobError
from ephemeron.partition.runtime.optimizer_step import Options

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_FORMAT = "ephemeron-pipeline-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptimizerState:
    """Optimiser state of all devices, by original parameter name."""

    states: Mapping[str, Mapping[str, Any]]
    """Tensors and plain values."""
    options: Mapping[str, Options]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCheckpoint:
    """State from which training continues."""

    iteration: int
    """Next iteration."""
    seed: int
    model: Mapping[str, torch.Tensor]
    optimizer: PipelineOptimizerState


def save(folder: Path, checkpoint: PipelineCheckpoint) -> None:
    """Write both files, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": _FORMAT, "iteration": str(checkpoint.iteration), "seed": str(checkpoint.seed)}
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, object]] = {}
    for name, state in checkpoint.optimizer.states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[json.dumps([name, key])] = value
            else:
                plain.setdefault(name, {})[key] = value
    _write(folder / MODEL, checkpoint.model, about)
    words = {"plain": json.dumps(plain), "options": json.dumps(_grouped(checkpoint.optimizer.options))}
    _write(folder / OPTIMIZER, tensors, {**about, **words})


def load(folder: Path) -> PipelineCheckpoint:
    """Read both files.

    Raises:
        JobError: a file is absent, damaged, no checkpoint of a pipeline, or of another iteration than the other; names it.
    """
    model, about = _read(folder / MODEL)
    tensors, of_optimizer = _read(folder / OPTIMIZER)
    if about["iteration"] != of_optimizer["iteration"]:
        raise JobError(
            f"{folder}: the model is of iteration {about['iteration']}, its optimiser of {of_optimizer['iteration']}",
            remedy="load an older checkpoint that is whole",
        )
    states: dict[str, dict[str, object]] = {n: dict(s) for n, s in json.loads(of_optimizer["plain"]).items()}
    for key, t in tensors.items():
        name, what = json.loads(key)
        states.setdefault(name, {})[what] = t
    options = {n: o for names, o in json.loads(of_optimizer["options"]) for n in names}
    return PipelineCheckpoint(
        iteration=int(about["iteration"]),
        seed=int(about["seed"]),
        model=model,
        optimizer=PipelineOptimizerState(states=states, options=options),
    )


def _grouped(options: Mapping[str, Options]) -> list[tuple[list[str], Options]]:
    """Names grouped by equal options; most parameters have the same."""
    groups: dict[str, tuple[list[str], Options]] = {}
    for name, own in options.items():
        groups.setdefault(json.dumps(own, sort_keys=True), ([], own))[0].append(name)
    return list(groups.values())


def _write(path: Path, tensors: Mapping[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write tensors; tied names get a copy each, because the format does not share memory."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({n: t.detach().to("cpu").clone().contiguous() for n, t in tensors.items()}, new, metadata=about)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as e:
        raise JobError(f"{path} cannot be read: {e}", remedy="give a folder that save() has written") from e
    if about.get("format") != _FORMAT:
        raise JobError(f"{path} is no checkpoint of a pipeline", remedy="give a folder that save() has written")
    return tensors, about
