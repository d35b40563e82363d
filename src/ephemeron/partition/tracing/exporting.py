"""Programs by non-strict `torch.export` with a dynamic batch size.

Of the tracers tried on eight models, this one kept dropout, batch statistics and tied weights exactly on seven. The eighth branches on
data, and its branching module becomes an opaque node here. A trace takes 1 to 5 seconds per model.
"""

from __future__ import annotations

import copy
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ephemeron.partition.tracing.diagnosis import diagnosed
from ephemeron.partition.tracing.opaque import Interceptor, OpaqueCall
from ephemeron.partition.tracing.program import Constant, Input, Leaf, Ref, State, TracedProgram, TracedStep


class CannotTrace(Exception):
    """A tracer failed; another may not. `module`: path of the module whose code was running; `remedy`: if known."""

    def __init__(self, reason: str, *, module: str | None = None, remedy: str = "") -> None:
        super().__init__(reason)
        self.module, self.remedy = module, remedy

    @classmethod
    def of(cls, e: BaseException, model: nn.Module) -> CannotTrace:
        """Exception with the line of the model's code at which a tracer failed."""
        found = diagnosed(e, model)
        return cls(f"{found.line}: {found.reason}" if found.line else found.reason, module=found.module, remedy=found.remedy)


def export_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object], *, opaque: Sequence[str] = (), open_batch: bool = True
) -> TracedProgram:
    """Program of a model, whose state does not change.

    Args:
        model: in training mode.
        args, kwargs: an example batch, on the model's device.
        opaque: paths of modules that become opaque nodes.
        open_batch: whether the batch size is dynamic.

    Raises:
        CannotTrace: with the reason, and the module that caused it, if known.
    """
    model = copy.deepcopy(model)
    names = canonical_names(model)
    interceptor = Interceptor(model, opaque)
    try:
        calls = interceptor.record(args, kwargs)
        smaller = _smaller_calls(interceptor, args, kwargs, calls) if open_batch else None
        if open_batch and calls and smaller is None:
            raise CannotTrace("shapes of opaque calls do not follow the batch size")
        collection: Any = torch.export.ShapesCollection
        shapes: Any = collection()
        if open_batch:
            for t in batched(args, kwargs):
                shapes[t] = {0: torch.export.Dim.AUTO}
        with _quiet(), interceptor.replacing(calls, smaller) as operators:
            made = torch.export.export(model, args, kwargs, dynamic_shapes=shapes if open_batch else None, strict=False)
    except CannotTrace:
        raise
    except Exception as e:
        raise CannotTrace.of(e, model) from e
    return _program(made, operators, names, tree_leaves((args, kwargs)), opaque=bool(calls))


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Canonical name by name: the first name of a parameter or buffer in `named_parameters` and `named_buffers`."""
    first: dict[int, str] = {}
    names = {}
    for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(t), name)
    return names


def batched(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors whose first size is that of the first tensor, the batch size."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    return [t for t in tensors if t.shape[0] == tensors[0].shape[0]]


def with_less(args: tuple[Any, ...], kwargs: dict[str, object]) -> tuple[tuple[Any, ...], dict[str, object]] | None:
    """The batch without its last sample; None if it has one or two."""
    found = batched(args, kwargs)
    if not found or found[0].shape[0] < 3:
        return None
    ids = {id(t) for t in found}
    less: tuple[tuple[Any, ...], dict[str, object]] = tree_map(lambda t: t[:-1] if id(t) in ids else t, (args, kwargs))
    return less


def _smaller_calls(
    interceptor: Interceptor, args: tuple[Any, ...], kwargs: dict[str, object], calls: Sequence[OpaqueCall]
) -> tuple[OpaqueCall, ...] | None:
    less = with_less(args, kwargs)
    if less is None or not calls:
        return None
    try:
        smaller = interceptor.record(*less)
    except Exception:  # noqa: BLE001 - the model accepts no other batch size
        return None
    same = len(smaller) == len(calls) and all(
        a.module == b.module and a.tensors == b.tensors and [len(x[0]) for x in _shapes(a)] == [len(x[0]) for x in _shapes(b)]
        for a, b in zip(calls, smaller, strict=True)
    )
    return smaller if same else None


def _shapes(call: OpaqueCall) -> list[Any]:
    return [s for s, t in zip(call.made, call.tensors, strict=True) if t]


def _program(
    made: torch.export.ExportedProgram, operators: Mapping[Any, OpaqueCall], names: Mapping[str, str], given: list[Any], *, opaque: bool
) -> TracedProgram:
    signature = made.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = dict(signature.inputs_to_lifted_tensor_constants)
    constants: dict[str, object] = {}
    found: dict[torch.fx.Node, Leaf] = {}
    inputs: list[Input] = []
    steps: list[TracedStep] = []
    outputs: tuple[Any, ...] = ()

    def leaf(node: torch.fx.Node) -> Any:
        return found[node]

    for node in made.graph.nodes:
        if node.op == "placeholder":
            if node.name in states:
                found[node] = State(names[states[node.name]])
            elif node.name in tensors:
                constants[tensors[node.name]] = made.constants[tensors[node.name]]
                found[node] = Constant(tensors[node.name])
            elif node.name in signature.inputs_to_lifted_custom_objs:
                raise CannotTrace(f"{node.name} is a script object")
            else:
                found[node] = Ref(node.name)
                inputs.append(_input(node, given[len(inputs)]))
        elif node.op == "get_attr":
            constants[node.target] = getattr(made.graph_module, node.target)
            found[node] = Constant(node.target)
        elif node.op == "call_function":
            found[node] = Ref(node.name)
            steps.append(_step(node, leaf, operators))
        elif node.op == "output":
            flat = torch.fx.node.map_arg(node.args[0], leaf)
            outputs = tuple(flat)[len(flat) - len(signature.user_outputs) :]
    return TracedProgram(
        tracer="torch.export" + (" with opaque nodes" if opaque else ""),
        inputs=tuple(inputs),
        steps=tuple(_without_echoes(_without_asserts(steps))),
        outputs=outputs,
        in_spec=made.call_spec.in_spec,
        out_spec=made.call_spec.out_spec,
        constants=constants,
    )


def _input(node: torch.fx.Node, given: Any) -> Input:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return Input(name=node.name, shape=None, value=given)
    return Input(name=node.name, shape=tuple(int(d) if isinstance(d, int) else None for d in val.shape))


def _step(node: torch.fx.Node, leaf: Any, operators: Mapping[Any, OpaqueCall]) -> TracedStep:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    origin = str(stack[-1][0]) if stack and not str(stack[-1][0]).startswith("_empty") else ""
    args = torch.fx.node.map_arg(tuple(node.args), leaf)
    kwargs = torch.fx.node.map_arg(dict(node.kwargs), leaf)
    call = operators.get(node.target)
    if call is not None:
        return TracedStep(
            name=node.name,
            target=call.function,
            args=_plain(args),
            module=call.module,
            origin=call.module if call.module is not None else origin,
            shape=call.shape,
        )
    target: Any = node.target
    return TracedStep(name=node.name, target=target, args=_plain(args), kwargs=_plain(kwargs), origin=origin)


def _plain(tree: Any) -> Any:
    """Arguments with plain lists and dicts instead of fx's immutable ones."""
    if isinstance(tree, tuple):
        return tuple(_plain(t) for t in tree) if not hasattr(tree, "_fields") else tree
    if isinstance(tree, list):
        return [_plain(t) for t in tree]
    if isinstance(tree, Mapping):
        return {k: _plain(t) for k, t in tree.items()}
    return tree


_ASSERTS = ("_assert_scalar", "_assert_tensor_metadata", "_assert_async", "sym_constrain_range_for_size")


def _without_asserts(steps: list[TracedStep]) -> list[TracedStep]:
    """Steps without checks of sizes and dtypes, which `Input.shape` replaces, and without comparisons used only by them."""
    steps = [s for s in steps if not any(name in str(s.target) for name in _ASSERTS)]
    compare = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
    read = {leaf.name for s in steps for leaf in _refs(s)}
    return [s for s in steps if s.target not in compare or s.name in read]


def _without_echoes(steps: list[TracedStep]) -> list[TracedStep]:
    """Steps without copies of a buffer onto itself, which export adds at the end for buffers that the model changed in place.

    They change no values, but count as a change, and autograd would refuse tensors that were saved before.
    """
    same: dict[str, State] = {}
    kept = []
    for s in steps:
        first = s.args[0] if s.args else None
        state = first if isinstance(first, State) else same.get(first.name) if isinstance(first, Ref) else None
        changes = isinstance(s.target, torch._ops.OpOverload) and s.target._schema.is_mutable
        if s.target is torch.ops.aten.copy_.default and state and s.args[1] in [Ref(n) for n in same if same[n] == state]:
            continue
        if changes and state is not None:
            same[s.name] = state
        kept.append(s)
    return kept


def _refs(step: TracedStep) -> list[Ref]:
    flat, _ = tree_flatten((list(step.args), dict(step.kwargs)), is_leaf=lambda x: isinstance(x, Ref))
    return [x for x in flat if isinstance(x, Ref)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the exporter's long messages; failures are reported once, if all tracers fail."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = log.disabled
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = before
