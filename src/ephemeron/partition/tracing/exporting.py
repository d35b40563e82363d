"""Programs by non-strict `torch.export` with a dynamic batch size.

Of the tracers tried on eight models, this one kept dropout, batch statistics and tied weights exactly on seven. The eighth branches on
data, and its branching module becomes an opaque node here. A trace takes 1 to 5 seconds per model.

Diagnosis of a failed trace: the line of the model's code, the reason, and a remedy.

Tracers fail deep inside PyTorch, with messages about internal symbols. The cause is the innermost line of the traceback that is neither in
PyTorch nor in this library.
"""

from __future__ import annotations

import copy
import io
import linecache
import logging
import operator
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

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


# -- diagnosis of a failed trace ----------------------------------------------------------------------------------


_OURS = str(Path(__file__).parents[2])
_FOREIGN = (str(Path(torch.__file__).parent), _OURS, str(Path(sysconfig.get_paths()["stdlib"])))
_DATA = ("datadependent", "data-dependent", "_local_scalar_dense", "unbacked", "bool() of a traced", "symbolically traced variables")
_NUMBERS = ("'Proxy'", "__index__", "object of type Proxy")
_DATA_REMEDY = "branch on sizes instead of values, or move that code to a module of its own, which stays on one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingDiagnosis:
    """Reason why a tracer failed."""

    module: str | None
    """Path of the innermost module with a running `forward`."""
    line: str
    """`file:number: code` of the user's line; empty: none was running."""
    reason: str
    remedy: str
    """Remedy; empty: none is known."""

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        return f"{where}{self.reason}" + (f" ({self.remedy})" if self.remedy else "")


def diagnosed(e: BaseException, model: nn.Module) -> TracingDiagnosis:
    """Diagnosis of an exception that a tracer raised while it ran the model."""
    frames = list(_frames(e))
    lines = [f for f in frames if not f[0].startswith(_FOREIGN) and not f[0].startswith("<")]
    line = f"{Path(lines[-1][0]).name}:{lines[-1][1]}: {linecache.getline(*lines[-1][:2]).strip()}" if lines else ""
    text = f"{type(e).__name__} {e}".lower()
    called = {name for _, _, name in frames}
    if called & {"pack_padded_sequence", "pack_sequence", "pad_packed_sequence"} or "packedsequence" in text or "pack" in line:
        reason = "sequences are packed, whose sizes depend on values of a tensor"
        remedy = "give the layer the padded batch and mask its result, or move packing and layer to a module of their own"
    elif any(word in text for word in _DATA) or any(word.lower() in text for word in _NUMBERS):
        reason = "the code depends on values of a tensor (data-dependent)"
        remedy = _DATA_REMEDY
    elif "cache" in text and ("dynamiccache" in text or "past_key_value" in text):
        reason, remedy = "keys and values are kept in a cache", "build the model, or call it, with use_cache=False"
    else:
        reason, remedy = _first_line(e), ""
    return TracingDiagnosis(module=_running_module(e, model), line=line, reason=reason, remedy=remedy)


def _first_line(e: BaseException) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0].strip()[:200]}" if lines else type(e).__name__


def _chain(e: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = e
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _tracebacks(e: BaseException) -> Iterator[TracebackType]:
    at = e.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def _frames(e: BaseException) -> Iterator[tuple[str, int, str]]:
    """File, line and function, outermost first, of the first exception in the chain with code of the user, else of the last."""
    found: list[tuple[str, int, str]] = []
    for one in _chain(e):
        found = [(t.tb_frame.f_code.co_filename, t.tb_lineno, t.tb_frame.f_code.co_name) for t in _tracebacks(one)]
        if any(not f[0].startswith(_FOREIGN) and not f[0].startswith("<") for f in found):
            break
    return iter(found)


def _running_module(e: BaseException, model: nn.Module) -> str | None:
    """Path of the innermost module whose `forward` was running."""
    paths = {id(m): path for path, m in model.named_modules()}
    found: str | None = None
    for one in _chain(e):
        for at in _tracebacks(one):
            code = at.tb_frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                found = paths.get(id(at.tb_frame.f_locals.get(code.co_varnames[0])), found)
        if found is not None:
            return found
    return None
