"""From any `nn.Module` to a traced one: tracers in turn, each result checked, the first that trains like the original wins.

1. `torch.export`, batch size open; modules that it cannot look into become opaque nodes, one after the other;
2. the same with the batch size fixed;
3. `torch.fx`, layers kept whole;
4. the model as one opaque node, which cannot be split.

A conversion without a check is worth nothing: on eight models, symbolic tracing lost a buffer silently, and export forgets the
backward pass of custom functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError, TraceMismatch
from ephemeron.partition.tracing.check import Checked, Loss, check, fresh, mean_square, one_step, seeded
from ephemeron.partition.tracing.exporting import CannotTrace, export_program
from ephemeron.partition.tracing.fx_trace import opaque_program, symbolic_program
from ephemeron.partition.tracing.nesting import register_dataclasses, strangers
from ephemeron.partition.tracing.program import TracedProgram
from ephemeron.partition.tracing.traced import Traced

_MOST_OPAQUE = 16
_CACHE_REMEDY = "build the model, or call it, with use_cache=False"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """A traced model, and how it came to be."""

    model: Traced
    checked: Checked
    opaque: tuple[str, ...]
    """Paths of modules that were kept as they are."""
    failures: tuple[str, ...] = field(default=())
    """Why earlier tracers were not taken, each with the line of the model's code at which it gave up, where there is one."""
    remedy: str = ""
    """What would make more of the model visible, where that is known."""

    @property
    def splittable(self) -> bool:
        """Whether there is more than one node."""
        return self.opaque != ("",)


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    opaque: Sequence[str] = (),
    loss: Loss | None = None,
    steps: int = 3,
) -> Tracing:
    """Traces a model in training mode and checks the result; the model itself does not change (NetSplit, section 4.1).

    Args:
        model: in the dtype in which it is to be trained.
        args, kwargs: an example batch. Its first size may differ later, if it is 3 or more.
        opaque: paths of modules not to look into.
        loss: for the check; by default the mean square of all floating results.
        steps: of the check.

    Raises:
        JobError: the model fails on the example, `opaque` names no module, or no tracer gives an equal model; names the operators.
    """
    paths = dict(model.named_modules())
    for path in opaque:
        if path not in paths:
            raise JobError(f"opaque = {path!r} is no module of the model", remedy="use a path of named_modules()")
    given, named = tuple(args), dict(kwargs or {})
    twin = copy.deepcopy(model).train()
    register_dataclasses((given, named))
    hidden = _register_results(twin, given, named)
    _refuse_what_fails(twin, given, named, loss or mean_square)
    failures = [*hidden]
    remedies = dict.fromkeys([_CACHE_REMEDY] if any("Cache" in h for h in hidden) else [])
    kept = list(opaque)
    for attempt in _attempts(twin, given, named, kept, lambda e: _note(e, failures, remedies)):
        try:
            program = attempt()
            made = Traced(program, twin, given, named, loss=loss)
            checked = check(twin, made, given, named, loss=loss, steps=steps)
        except CannotTrace as e:
            _note(e, failures, remedies)
        except TraceMismatch as e:
            failures.append(str(e))
        else:
            made.__dict__["evaluates"] = checked.evaluation
            modules = dict.fromkeys(s.module for s in program.steps if s.module is not None and s.shape is not None)
            return Tracing(
                model=made, checked=checked, opaque=tuple(modules), failures=tuple(failures), remedy="; ".join(remedies)
            )
    raise JobError(
        f"{type(model).__name__} cannot be traced: " + "; ".join(failures),
        remedy="; ".join(remedies) or "name the modules not to look into with opaque=[…]",
    )


def _attempts(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, object],
    kept: list[str],
    note: Callable[[CannotTrace], None],
) -> Sequence[Callable[[], TracedProgram]]:
    return (
        lambda: _with_opaque(model, args, kwargs, kept, note, open_batch=True),
        lambda: _with_opaque(model, args, kwargs, kept, note, open_batch=False),
        lambda: symbolic_program(model, args, kwargs, opaque=kept),
        lambda: opaque_program(model, args, kwargs),
    )


def _with_opaque(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, object],
    kept: list[str],
    note: Callable[[CannotTrace], None],
    *,
    open_batch: bool,
) -> TracedProgram:
    """Exports; a module that stands in the way is kept as it is, and it is tried again."""
    while True:
        try:
            return export_program(model, args, kwargs, opaque=kept, open_batch=open_batch)
        except CannotTrace as e:
            if not e.module or e.module in kept or len(kept) >= _MOST_OPAQUE:
                raise
            note(e)
            kept[:] = [k for k in kept if not k.startswith(f"{e.module}.")] + [e.module]


def _refuse_what_fails(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object], loss: Loss) -> None:
    try:
        one_step(copy.deepcopy(model), args, kwargs, loss, 0)
    except JobError:
        raise
    except Exception as e:
        raise JobError(
            f"{type(model).__name__} cannot be trained on its example batch: {type(e).__name__}: {str(e)[:300]}",
            remedy="give an example that the model takes",
        ) from e


def _register_results(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> list[str]:
    """Dataclasses that the model returns become nests of tensors; says what it returns that cannot be looked into."""
    twin = copy.deepcopy(model)
    given, named = fresh((args, kwargs))
    try:
        with seeded(0), torch.no_grad():
            result = twin(*given, **named)
    except Exception:  # noqa: BLE001 - it is refused with the reason in a moment
        return []
    register_dataclasses(result)
    return [f"the result holds {kind}, which hides its tensors" for kind in dict.fromkeys(strangers(result))]


def _note(e: CannotTrace, failures: list[str], remedies: dict[str, None]) -> None:
    told = str(e) if e.module is None else f"module {e.module or 'itself'}: {e}"
    if told not in failures:
        failures.append(told)
    if e.remedy:
        remedies[e.remedy] = None
