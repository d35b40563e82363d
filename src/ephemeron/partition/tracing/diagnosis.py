"""Diagnosis of a failed trace: the line of the model's code, the reason, and a remedy.

Tracers fail deep inside PyTorch, with messages about internal symbols. The cause is the innermost line of the traceback that is neither in
PyTorch nor in this library.
"""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

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
