"""State of a training program as arrays and plain values: what ranks share, and what is one rank's own.

Initial weights are a state without random generators. A state holds no frozen parameters: those follow from the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ephemeron.config.typed import build, plain
from ephemeron.data.randomness import generator_state, generators_in, set_generator_state
from ephemeron.errors import JobError
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.moving_average import MovingAverage
from ephemeron.training.task.outer_optimizer import OuterOptimizer
from ephemeron.training.task.outputs import Outputs, outputs_of
from ephemeron.training.task.program import Program
from ephemeron.training.task.staleness import ProvisionalSteps
from ephemeron.training.task.state_codec import pack, unpack
from ephemeron.training.task.task import StatefulTask
from ephemeron.training.task.tensors import named_tensors, to_arrays, to_tensor
from ephemeron.training.tensors import Arrays
from ephemeron.training.worker.trainers.torch_state import RandomGenerators, RandomState, TorchTrainerState


@dataclass(slots=True)
class Counters:
    """What a trainer has done so far."""

    steps: int = 0
    """Optimiser steps."""
    versions: int = 0
    """Merged versions that were applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramState:
    """The parts of a trainer whose state is saved, all of which change in place."""

    program: Program
    """Task, model, optimisers and schedulers."""
    counters: Counters
    """Of the trainer."""
    average: MovingAverage
    """Of the parameters."""
    random: RandomState
    """Of the trainer."""
    outer: OuterOptimizer | None
    """Optimiser of deltas, where they are exchanged."""
    own: ProvisionalSteps | None
    """Gradients of this rank that are not applied yet."""
    steps_locally: bool
    """Whether optimisers step with this rank's own gradients, so that their state is its own."""

    def generators(self) -> tuple[Any, ...]:
        """Random generators that task and model hold, which are this rank's own, in the order that every process finds them in."""
        return generators_in(self.program.task, self.program.model)

    @property
    def outputs(self) -> Outputs:
        """Files of the task."""
        return outputs_of(self.program.task)

    # -- shared by all ranks --------------------------------------------------------------------------------

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        """See `Trainer.weights`."""
        with self.average.in_use():
            tensors = {n: t for n, t in self.program.model.state_dict().items() if isinstance(t, torch.Tensor)}
            arrays, bf16 = to_arrays(tensors)
        return arrays, {"bf16": bf16} if bf16 else {}

    def save(self) -> tuple[Arrays, Mapping[str, object]]:
        """See `Trainer.state`."""
        model = self.program.model
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        tensors = {f"w/{n}": t for n, t in named_tensors(model) if n not in frozen}
        tensors |= {f"e/{n}": t for n, t in self.average.values.items()}
        arrays, bf16 = to_arrays(tensors)
        held: dict[str, Any] = {"steps": self.counters.steps, "versions": self.counters.versions}
        held["optimizers"] = self._optimizers()
        held["schedulers"] = [s.scheduler.state_dict() for s in self.program.schedulers]
        if self.outer is not None:
            held["outer"] = self.outer.state()
        return self._packed(arrays, bf16, held)

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        """See `Trainer.load`."""
        state = build(TorchTrainerState, meta, where="state of the trainer")
        bf16 = frozenset(state.bf16)
        prefix = "" if state.random is None else "w/"
        with torch.no_grad():
            for name, tensor in named_tensors(self.program.model):
                if prefix + name in arrays or not prefix:
                    tensor.copy_(to_tensor(arrays[prefix + name], prefix + name in bf16))
        known = {n: f"e/{n}" for n in self.average.values if f"e/{n}" in arrays}
        self.average.load({n: to_tensor(arrays[key], key in bf16) for n, key in known.items()})
        if state.random is None:
            return
        held = unpack(state.program, arrays)
        self.counters.steps, self.counters.versions = held["steps"], held["versions"]
        self._load_optimizers(held["optimizers"], strict=True)
        for each, own in zip(self.program.schedulers, held["schedulers"], strict=True):
            each.scheduler.load_state_dict(own)
        if self.outer is not None:
            self.outer.load(held["outer"])
        if isinstance(self.program.task, StatefulTask):
            self.program.task.load_state_dict(held["task"])
        self.outputs.load(arrays)  # a new generation goes on with the files of rank 0
        if shared:
            return
        if self.own is not None:
            self.own.load(held.get("own", ()))
        self._restore_random(arrays, state.random, held)

    # -- of this rank alone ---------------------------------------------------------------------------------

    def save_private(self) -> tuple[Arrays, Mapping[str, object]]:
        """See `Trainer.private_state`."""
        arrays, bf16 = to_arrays({f"b/{n}": t for n, t in self.program.model.named_buffers()})
        held: dict[str, Any] = {}
        if self.steps_locally:
            held["optimizers"] = self._optimizers()
        return self._packed(arrays, bf16, held)

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        """See `Trainer.load_private`."""
        state = build(TorchTrainerState, meta, where="private state of the trainer")
        assert state.random is not None
        with torch.no_grad():
            for name, buffer in self.program.model.named_buffers():
                buffer.copy_(to_tensor(arrays[f"b/{name}"], f"b/{name}" in state.bf16))
        held = unpack(state.program, arrays)
        self._load_optimizers(held.get("optimizers", ()), strict=False)
        if self.own is not None:
            self.own.load(held.get("own", ()))
        if isinstance(self.program.task, StatefulTask):
            self.program.task.load_state_dict(held["task"])
        self.outputs.load(arrays)
        self._restore_random(arrays, state.random, held)

    # -- parts ----------------------------------------------------------------------------------------------

    def _packed(self, arrays: Arrays, bf16: list[str], held: dict[str, Any]) -> tuple[Arrays, Mapping[str, object]]:
        if self.own is not None:
            held["own"] = self.own.state()
        if isinstance(self.program.task, StatefulTask):
            held["task"] = self.program.task.state_dict()
        held["generators"] = [generator_state(each) for each in self.generators()]
        arrays |= self.outputs.files()
        packed = pack(held, "o", arrays)
        assert isinstance(packed, Mapping)
        random = self.random.save(arrays)
        return arrays, plain(TorchTrainerState(bf16=tuple(bf16), program=packed, random=random))

    def _restore_random(self, arrays: Arrays, generators: RandomGenerators, held: Mapping[str, Any]) -> None:
        own, states = self.generators(), held.get("generators", ())
        if len(own) != len(states):
            raise JobError(
                f"the task has {len(own)} random generators of its own here, and its checkpoint holds {len(states)}",
                remedy="make them all in __init__ or model(), in the same way in every process",
            )
        for each, state in zip(own, states, strict=True):
            set_generator_state(each, state)
        self.random.restore(arrays, generators)

    def _optimizers(self) -> list[dict[str, Any]]:
        with eager_optimizers():
            return [o.state_dict() for o in self.program.optimizers]

    def _load_optimizers(self, states: Any, *, strict: bool) -> None:
        with eager_optimizers():
            for optimizer, own in zip(self.program.optimizers, states, strict=strict):
                optimizer.load_state_dict(own)
