"""Programs of models that `torch.export` does not accept: symbolic tracing with whole modules, or the model as one opaque node.

Symbolic tracing (`torch.fx`) runs the model's code on proxies and does not trace into modules of `torch.nn`, so layers keep their behaviour
in training and evaluation. It loses buffers changed by the model's own code and branches on `self.training`, which the check detects. One
opaque node for the whole model is always correct, and cannot be split.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_structure

from ephemeron.partition.tracing.exporting import CannotTrace, canonical_names
from ephemeron.partition.tracing.opaque import Interceptor
from ephemeron.partition.tracing.program import Constant, Input, Ref, State, TracedProgram, TracedStep
from ephemeron.user_code import line_of


class _Method:
    """Call of a tensor method."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, self.__qualname__)(*args, **kwargs)


class _Tracer(fx.Tracer):
    def __init__(self, opaque: Sequence[str]) -> None:
        super().__init__()
        self.opaque = frozenset(opaque)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or super().is_leaf_module(m, module_qualified_name)


def symbolic_program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object], *, opaque: Sequence[str] = ()) -> TracedProgram:
    """Program of a model whose arguments are tensors or plain values without nesting.

    Raises:
        CannotTrace: with the reason.
    """
    names = canonical_names(model)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        plain = {k: v for k, v in bound.arguments.items() if not isinstance(v, torch.Tensor)}
        clone = copy.deepcopy(model)  # the tracer adds constants to it
        graph = _Tracer(opaque).trace(clone, concrete_args=plain or None)
        made = copy.deepcopy(model)(*args, **kwargs)
    except Exception as e:
        raise CannotTrace.of(e, model) from e
    flat, spec = tree_flatten((args, kwargs))
    keys = [*list(bound.arguments)[: len(args)], *kwargs]
    if len(flat) != len(keys):
        raise CannotTrace("an argument nests several tensors")
    found: dict[fx.Node, Any] = {}
    taken = iter(bound.arguments.items())
    constants: dict[str, object] = {}
    inputs = [_given(key, value) for key, value in zip(keys, flat, strict=True)]
    steps: list[TracedStep] = []
    outputs: tuple[Any, ...] = ()

    def leaf(node: fx.Node) -> Any:
        return found[node]

    for node in graph.nodes:
        if node.op == "placeholder":
            key, value = next(taken)
            found[node] = Ref(key) if isinstance(value, torch.Tensor) else value
        elif node.op == "get_attr":
            name = str(node.target)
            if name in names:
                found[node] = State(names[name])
            else:
                constants[name] = operator.attrgetter(name)(clone)
                found[node] = Constant(name)
        elif node.op == "output":
            outputs, out_spec = _flat_output(fx.node.map_arg(node.args[0], leaf), made)
        else:
            found[node] = Ref(node.name)
            steps.append(_step(node, leaf))
    return TracedProgram(
        tracer="torch.fx", inputs=tuple(inputs), steps=tuple(steps), outputs=outputs, in_spec=spec, out_spec=out_spec, constants=constants
    )


def opaque_program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> TracedProgram:
    """Program with the whole model as one opaque node.

    Raises:
        CannotTrace: the model fails on its example batch; with the reason.
    """
    interceptor = Interceptor(model, [""])
    try:
        (call,) = interceptor.record(args, kwargs)
    except Exception as e:
        raise CannotTrace(f"{line_of(e)}") from e
    flat, spec = tree_flatten((args, kwargs))
    inputs = tuple(_given(f"input_{i}", value) for i, value in enumerate(flat))
    tensors = [Ref(i.name) for i in inputs if i.shape is not None]
    step = TracedStep(name="model", target=None, args=(tensors,), module="", shape=call.shape)
    steps, outputs, k = [step], list[Any](), 0
    for value, is_tensor in zip(call.made, call.tensors, strict=True):
        if is_tensor:
            steps.append(TracedStep(name=f"output_{k}", target=operator.getitem, args=(Ref("model"), k)))
            outputs.append(Ref(f"output_{k}"))
            k += 1
        else:
            outputs.append(value)
    return TracedProgram(
        tracer="one opaque node", inputs=inputs, steps=tuple(steps), outputs=tuple(outputs), in_spec=spec, out_spec=call.spec
    )


def _given(name: str, value: Any) -> Input:
    if not isinstance(value, torch.Tensor):
        return Input(name=name, shape=None, value=value)
    return Input(name=name, shape=tuple(None if d == 0 else int(n) for d, n in enumerate(value.shape)))


def _flat_output(tree: Any, made: Any) -> tuple[tuple[Any, ...], Any]:
    flat, spec = tree_flatten(tree, is_leaf=lambda x: isinstance(x, (Ref, State, Constant)))
    if spec != tree_structure(made):
        raise CannotTrace("symbolic tracing does not keep the type of the result")
    return tuple(flat), spec


def _step(node: fx.Node, leaf: Any) -> TracedStep:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    origin = str(stack[-1][0]) if stack else ""
    args, kwargs = fx.node.map_arg(tuple(node.args), leaf), fx.node.map_arg(dict(node.kwargs), leaf)
    args, kwargs = tuple(args), dict(kwargs)
    if node.op == "call_module":
        return TracedStep(name=node.name, target=None, args=args, kwargs=kwargs, module=str(node.target), origin=str(node.target))
    target: Any = _Method(str(node.target)) if node.op == "call_method" else node.target
    return TracedStep(name=node.name, target=target, args=args, kwargs=kwargs, origin=origin)
