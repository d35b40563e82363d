"""Tracing of any `nn.Module`: several tracers, whose results are checked; the first that trains like the original is used.

1. `torch.export` with a dynamic batch size; modules that it cannot trace become opaque nodes, one after the other;
2. the same with a fixed batch size;
3. `torch.fx` with whole layers;
4. the model as one opaque node, which cannot be split.

The check is necessary: on eight models, symbolic tracing lost a buffer silently, and export drops the backward pass of custom functions.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError, TraceMismatch
from ephemeron.partition.tracing.check import Loss, TracingCheck, check, fresh, mean_square, one_step, seeded
from ephemeron.partition.tracing.exporting import CannotTrace, export_program
from ephemeron.partition.tracing.fx_trace import opaque_program, symbolic_program
from ephemeron.partition.tracing.nesting import opaque_types, register_dataclasses
from ephemeron.partition.tracing.program import TracedProgram
from ephemeron.partition.tracing.traced import Traced
from ephemeron.user_code import line_of

_log = logging.getLogger(__name__)

_MOST_OPAQUE = 16
_CACHE_REMEDY = "build the model, or call it, with use_cache=False"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """A traced model, with the result of the check and the failures of other tracers."""

    model: Traced
    checked: TracingCheck
    opaque: tuple[str, ...]
    """Paths of opaque modules."""
    failures: tuple[str, ...] = field(default=())
    """Reasons of earlier tracers that failed, with the line of the model's code, if known."""
    remedy: str = ""
    """Change with which more of the model could be traced, if known."""

    @property
    def splittable(self) -> bool:
        """Whether the model has more than one node."""
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
    """Traced and checked model in training mode; the original does not change (NetSplit, section 4.1).

    Args:
        model: in the dtype of the training.
        args, kwargs: an example batch. The batch size is dynamic if it is 3 or more.
        opaque: paths of modules that become opaque nodes.
        loss: for the check; by default the mean square of all floating results.
        steps: of the check.

    Raises:
        JobError: the model fails on the example, `opaque` names no module, or no tracer yields an equal model; names the operators.
    """
    paths = dict(model.named_modules())
    for path in opaque:
        if path not in paths:
            raise JobError(f"opaque = {path!r} is no module of the model", remedy="use a path of named_modules()")
    given, named = tuple(args), dict(kwargs or {})
    clone = copy.deepcopy(model).train()
    register_dataclasses((given, named))
    hidden = _register_results(clone, given, named)
    _refuse_what_fails(clone, given, named, loss or mean_square)
    failures = [*hidden]
    remedies = dict.fromkeys([_CACHE_REMEDY] if any("Cache" in h for h in hidden) else [])
    kept = list(opaque)
    for attempt in _attempts(clone, given, named, kept, lambda e: _note(e, failures, remedies)):
        try:
            program = attempt()
            made = Traced(program, clone, given, named, loss=loss)
            checked = check(clone, made, given, named, loss=loss, steps=steps)
        except CannotTrace as e:
            _note(e, failures, remedies)
        except TraceMismatch as e:
            _log.info("trace differs from the model: %s", e)
            failures.append(str(e))
        else:
            _log.info("%s traced by %s, %d steps", type(model).__name__, program.tracer, len(program.steps))
            made.__dict__["evaluates"] = checked.evaluation
            modules = dict.fromkeys(s.module for s in program.steps if s.module is not None and s.shape is not None)
            return Tracing(model=made, checked=checked, opaque=tuple(modules), failures=tuple(failures), remedy="; ".join(remedies))
    raise JobError(
        f"{type(model).__name__} cannot be traced: " + "; ".join(failures),
        remedy="; ".join(remedies) or "name modules that should be opaque with opaque=[…]",
    )


def _attempts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object], kept: list[str], note: Callable[[CannotTrace], None]
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
    """Program by export; a module that makes it fail becomes opaque, and the export is repeated."""
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
            f"{type(model).__name__} cannot be trained on its example batch: {line_of(e)[:300]}",
            remedy="give an example that the model accepts",
        ) from e


def _register_results(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> list[str]:
    """Register dataclasses that the model returns; messages about results that may hide tensors."""
    clone = copy.deepcopy(model)
    given, named = fresh((args, kwargs))
    try:
        with seeded(0), torch.no_grad():
            result = clone(*given, **named)
    except Exception:  # noqa: BLE001 - `_refuse_what_fails` reports it
        return []
    register_dataclasses(result)
    return [f"the result holds {kind}, which hides its tensors" for kind in dict.fromkeys(opaque_types(result))]


def _note(e: CannotTrace, failures: list[str], remedies: dict[str, None]) -> None:
    reason = str(e) if e.module is None else f"module {e.module or 'itself'}: {e}"
    if reason not in failures:
        _log.info("tracer failed: %s", reason)
        failures.append(reason)
    if e.remedy:
        remedies[e.remedy] = None
