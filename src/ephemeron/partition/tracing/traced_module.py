"""Steps of a traced model as a trainable `nn.Module`, whose parameters have the names of the original model.

The whole model is such a module, and so is each stage. Steps are interpreted, not compiled, which adds about 4 µs to each call of the original
model.

Random draws come from PyTorch's global generator, as in the original, in the order of the steps. With `draw_from`, each random step has its
own generator, keyed by seed, iteration, micro-batch and the step's name, so that stages may run in any order and in any process with the same
draws.

Evaluation of a model traced in training.

PyTorch's operators take a flag, so the same steps serve both modes: dropout is off, and batch statistics are the running ones. Other
behaviour of the model's code in evaluation is not in a training trace; `check` compares both and reports differences.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from ephemeron.partition.tracing.program import Constant, Leaf, Ref, State, TracedStep, filled, leaves, reads


class _Box:
    """Attributes besides parameters, hidden from `nn.Module`, which would search them for modules."""

    __slots__ = ("constants", "key", "outputs", "random", "root", "steps")

    def __init__(self, steps: Sequence[TracedStep], outputs: Sequence[str], random: Iterable[str]) -> None:
        self.outputs = frozenset(outputs)
        self.steps = {True: _scheduled(steps, self.outputs)}
        self.random = frozenset(random)
        self.key: tuple[int, int, int] | None = None
        self.root: nn.Module | None = None
        self.constants: dict[str, object] = {}


class TracedModule(nn.Module):
    """Steps with their parameters, buffers and modules.

    Args:
        steps: in order.
        outputs: names of values to keep; others are freed after their last reader.
        random: names of steps that draw random numbers.
        constants: by name.
    """

    def __init__(self, *, steps: Sequence[TracedStep], outputs: Sequence[str], random: Iterable[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self._box = _Box(steps, outputs, random)
        used = {r.name for s in steps for r in reads(s) if isinstance(r, Constant)}
        self._box.constants = {name: value for name, value in constants.items() if name in used}

    def hold(self, name: str, value: torch.Tensor, *, persistent: bool = True) -> None:
        """Register a parameter or buffer under its original name."""
        home, leaf = _home(self, name)
        if isinstance(value, nn.Parameter):
            home._parameters[leaf] = value
            return
        home._buffers[leaf] = value
        if not persistent:
            home._non_persistent_buffers_set.add(leaf)

    def hold_module(self, path: str, module: nn.Module) -> None:
        """Register an opaque module under its original path; "" is the whole model, whose content becomes that of this module."""
        if path:
            home, leaf = _home(self, path)
            home._modules[leaf] = module
            return
        self._box.root = module
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set

    def draw_from(self, seed: int | None, *, iteration: int = 0, micro_batch: int = 0) -> None:
        """Let random steps draw from their own generators; None: from the global one."""
        self._box.key = None if seed is None else (seed, iteration, micro_batch)

    def train(self, mode: bool = True) -> TracedModule:
        if self._box.root is not None:
            self._box.root.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> TracedModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        box = self._box
        box.constants = {k: fn(v) if isinstance(v, torch.Tensor) else v for k, v in box.constants.items()}
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        for key, value in self.__dict__.items():
            made.__dict__[key] = _copied_box(value, memo) if isinstance(value, _Box) else copy.deepcopy(value, memo)
        if made._box.root is not None:
            made.hold_module("", made._box.root)
        return made

    def run_steps(self, values: dict[str, object]) -> None:
        """Run the steps. `values` has the inputs, and afterwards the outputs, too."""
        box = self._box
        if self.training not in box.steps:
            box.steps[False] = _scheduled(evaluated([step for step, _ in box.steps[True]]), box.outputs)

        def value(leaf: Leaf) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.name]
            return self.state(leaf.name) if isinstance(leaf, State) else box.constants[leaf.name]

        for step, over in box.steps[self.training]:
            values[step.name] = self.call_step(step, filled(step.args, value), filled(step.kwargs, value))
            for name in over:
                del values[name]

    def call_step(self, step: TracedStep, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        """Result of one call with its arguments."""
        if self._box.key is not None and step.name in self._box.random:
            text = f"{self._box.key}/{step.name}"
            with torch.random.fork_rng():
                torch.manual_seed(xxhash.xxh64_intdigest(text.encode()) >> 1)
                return self._call(step, args, kwargs)
        return self._call(step, args, kwargs)

    def _call(self, step: TracedStep, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        target: Any = step.target if step.module is None else self.module_at(step.module)
        if step.shape is None:
            return target(*args, **kwargs)
        args, kwargs = step.shape.filled(args[0])
        made = torch.utils._pytree.tree_leaves(target(*args, **kwargs))
        return [t for t in made if isinstance(t, torch.Tensor)]

    def state(self, name: str) -> torch.Tensor:
        """Parameter or buffer by its original name."""
        path, _, leaf = name.rpartition(".")
        home = self.module_at(path)
        found: torch.Tensor | None = home._parameters.get(leaf)
        if found is None:
            found = home._buffers[leaf]
        assert found is not None, f"{name} is registered with a value"
        return found

    def module_at(self, path: str) -> nn.Module:
        """Module by its original path."""
        if not path:
            return self if self._box.root is None else self._box.root
        at: nn.Module = self
        for part in path.split("."):
            child = at._modules[part]
            assert child is not None, f"{path} is registered with a module"
            at = child
        return at


def _home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    at: Any = module
    for part in path.split(".") if path else ():
        if at._modules.get(part) is None:
            at._modules[part] = nn.Module()
        at = at._modules[part]
    return at, leaf


def _scheduled(steps: Sequence[TracedStep], outputs: frozenset[str]) -> list[tuple[TracedStep, tuple[str, ...]]]:
    """Steps with the values that no later step reads."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        last[step.name] = i
        for leaf in (*leaves(step.args), *leaves(step.kwargs)):
            if isinstance(leaf, Ref):
                last[leaf.name] = i
    over: list[list[str]] = [[] for _ in steps]
    for name, i in last.items():
        if name not in outputs:
            over[i].append(name)
    return [(step, tuple(names)) for step, names in zip(steps, over, strict=True)]


def _copied_box(box: _Box, memo: dict[int, Any]) -> _Box:
    made = _Box.__new__(_Box)
    made.outputs, made.random, made.key, made.constants = box.outputs, box.random, box.key, box.constants
    made.steps = dict(box.steps)
    made.root = copy.deepcopy(box.root, memo)
    return made


# -- evaluation of a model traced in training ---------------------------------------------------------------------


_FLAGS = {"train": False, "training": False, "dropout_p": 0.0}
_COUNTERS = ("num_batches_tracked",)


def evaluated(steps: Sequence[TracedStep]) -> list[TracedStep]:
    """Steps in evaluation mode."""
    counters: set[str] = set()
    made = []
    for step in steps:
        if _counts(step, counters):
            counters.add(step.name)
        else:
            made.append(_evaluated(step))
    return made


def _counts(step: TracedStep, counters: set[str]) -> bool:
    """Whether a step only counts batches."""
    if not (isinstance(step.target, torch._ops.OpOverload) and step.target._schema.is_mutable):
        return False
    changed = next(leaves(step.args[:1]), None)
    if isinstance(changed, State):
        return changed.name.rpartition(".")[2] in _COUNTERS
    return isinstance(changed, Ref) and changed.name in counters


def _evaluated(step: TracedStep) -> TracedStep:
    target = step.target
    if not isinstance(target, torch._ops.OpOverload):
        return step
    args, kwargs = list(step.args), dict(step.kwargs)
    for i, a in enumerate(target._schema.arguments):
        if a.name in _FLAGS:
            if a.name in kwargs:
                kwargs[a.name] = _FLAGS[a.name]
            elif i < len(args):
                args[i] = _FLAGS[a.name]
    if (tuple(args), kwargs) == (step.args, dict(step.kwargs)):
        return step
    return _with(step, tuple(args), kwargs)


def _with(step: TracedStep, args: tuple[Any, ...], kwargs: dict[str, object]) -> TracedStep:
    return TracedStep(name=step.name, target=step.target, args=args, kwargs=kwargs, module=step.module, origin=step.origin)
