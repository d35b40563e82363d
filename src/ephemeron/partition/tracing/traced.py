"""The whole traced model: it takes the arguments of the original, returns the same results and trains in the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ephemeron.errors import JobError
from ephemeron.partition.tracing.exporting import canonical_names
from ephemeron.partition.tracing.program import Input, Leaf, Ref, State, TracedProgram, filled
from ephemeron.partition.tracing.side_effects import Observation, observe
from ephemeron.partition.tracing.traced_module import TracedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Example batch of a trace, on which stages are checked before they are trained. Never copied."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    """Loss of the result; None: the mean square."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Example:
        return self


class Traced(TracedModule):
    """A model with known operators, made by `trace`.

    Parameters, buffers and their names are the original's; they are copies.

    Attributes:
        program: the steps.
        observation: their effects on the example batch.
        evaluates: whether it may be used in evaluation.
        example: the example batch of the trace.
    """

    program: TracedProgram
    observation: Observation
    evaluates: bool
    example: Example

    def __init__(
        self,
        program: TracedProgram,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, object],
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        wanted = [o.name for o in program.outputs if isinstance(o, Ref)]
        every = [s.name for s in program.steps]
        super().__init__(steps=program.steps, outputs=wanted, random=every, constants=program.constants)
        self.__dict__.update(program=program, evaluates=True, names=canonical_names(model))
        self.__dict__["example"] = Example(args=args, kwargs=kwargs, loss=loss)
        clone = copy.deepcopy(model)
        modules = tuple(dict.fromkeys(s.module for s in program.steps if s.module is not None))
        if "" not in modules:
            _hold_states(self, clone)
        for path in modules:
            self.hold_module(path, clone.get_submodule(path))
        self.__dict__["observation"] = observe(self, self.named_inputs(args, kwargs))
        self._box.random = frozenset(name for name, effect in self.observation.side_effects.items() if effect.random)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result as of the original.

        Raises:
            JobError: arguments for which the trace does not hold, or evaluation of a model whose trace holds for training only.
        """
        if not self.training and not self.evaluates:
            raise JobError(
                f"the traced {self.program.tracer} model was not found equal to the original in evaluation",
                remedy="load its state_dict() into the original and evaluate that",
            )
        values = self.named_inputs(args, kwargs)
        self.run_steps(values)
        return self.result(values)

    def named_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, object]:
        """Arguments by the names of the program's inputs.

        Raises:
            JobError: structure, shape or plain value differs from the trace; names the input.
        """
        spec = self.program.in_spec
        order = spec.child(1).context if spec.num_children == 2 else list(kwargs)
        if set(order) == set(kwargs):
            kwargs = {k: kwargs[k] for k in order}
        flat, given = tree_flatten((tuple(args), dict(kwargs)))
        if given != spec:
            raise JobError(
                f"arguments of the model are nested as {given}, and were traced as {spec}",
                remedy="call it as in the example batch, or trace it again",
            )
        for i, value in zip(self.program.inputs, flat, strict=True):
            _check_input(i, value)
        return {i.name: value for i, value in zip(self.program.inputs, flat, strict=True)}

    def result(self, values: Mapping[str, Any]) -> Any:
        """Result of the model from values by name."""

        def value(leaf: Leaf) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.name]
            return self.state(leaf.name) if isinstance(leaf, State) else self._box.constants[leaf.name]

        return tree_unflatten([filled(o, value) for o in self.program.outputs], self.program.out_spec)

    def original_state(self) -> dict[str, torch.Tensor]:
        """State dict that the original model loads strictly, with every name of shared parameters."""
        return full_state(self.state_dict(), self.__dict__["names"])


def full_state(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """State with the other names of shared parameters added.

    Args:
        state: by canonical name.
        names: canonical name by any name.
    """
    made = dict(state)
    for name, canonical in names.items():
        if canonical in made:
            made.setdefault(name, made[canonical])
    return made


def _hold_states(module: TracedModule, model: nn.Module) -> None:
    """Register all parameters and buffers in the order of the original under their canonical names; opaque modules have their own."""
    for name, parameter in model.named_parameters():
        module.hold(name, parameter)
    persistent = {id(t) for t in model.state_dict(keep_vars=True).values()}
    for name, buffer in model.named_buffers():
        module.hold(name, buffer, persistent=id(buffer) in persistent)


def _check_input(i: Input, value: Any) -> None:
    if i.shape is None:
        if value is not i.value and value != i.value:
            raise JobError(
                f"input {i.name} of the model = {value!r}, and was traced with {i.value!r}", remedy="trace it again for this value"
            )
        return
    if not isinstance(value, torch.Tensor):
        raise JobError(f"input {i.name} of the model is {type(value).__name__}, and was traced as a tensor")
    shape = tuple(value.shape)
    if len(shape) != len(i.shape) or any(n is not None and n != m for n, m in zip(i.shape, shape, strict=True)):
        traced = " × ".join("any" if n is None else str(n) for n in i.shape) or "a number"
        raise JobError(
            f"input {i.name} of the model is {' × '.join(map(str, shape)) or 'a number'}, and was traced as {traced}",
            remedy="pass that shape, or trace it again with an example of this shape",
        )
