"""Time of each operator's forward and backward pass on this device (NetSplit, section 4.4).

NetSplit wraps each module and adds a virtual successor, because PyTorch has no hook for the beginning of a backward pass. Here every
operator is detached from autograd's graph and run like a stage of its own. So both passes have a beginning and an end, also in
parallel branches, and functions are measured as well as modules. All forward passes run first, then all backward passes with the
true gradients, as in training, so that caches are in the same state. The overhead of a backward call is measured on an empty call
and subtracted, because a stage makes one such call and not one per operator.

Results are medians and quartiles, which one interrupted run does not distort.

Estimated time of operators from their operations and bytes: the same numbers on every machine and at every launch.

MeasuredTopology times (`times`) are more accurate, but differ from run to run. The cut of a model must not: otherwise two launches of one
job would not give the same bits. So PyTorch's counter counts operations while the example batch runs, bytes are the sizes of the
tensors read and written, and a roofline of one vCPU gives seconds.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from ephemeron.errors import JobError
from ephemeron.partition.tracing.check import Loss, mean_square
from ephemeron.partition.tracing.operators import Operator, front_numbers, operators
from ephemeron.partition.tracing.program import Ref, leaves
from ephemeron.partition.tracing.traced import Traced
from ephemeron.partition.tracing.traced_module import TracedModule

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTiming:
    """Median and quartiles of one pass over all repetitions, in seconds."""

    median_s: float
    low_s: float
    high_s: float

    @property
    def spread_s(self) -> float:
        """Interquartile range."""
        return self.high_s - self.low_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Measured times of a model on one kind of device, for its example batch."""

    device: str
    forward: Mapping[str, OperatorTiming]
    """By operator."""
    backward: Mapping[str, OperatorTiming]
    """By operator."""
    whole_forward: OperatorTiming
    """Time of the whole traced model, to compare the sum with."""
    whole_backward: OperatorTiming
    repeats: int
    passes: tuple[Mapping[str, tuple[float, float]], ...] = ()
    """By repetition: seconds of the forward and backward pass, by operator."""

    @property
    def ratio(self) -> float:
        """Sum over operators and both passes, divided by the whole model's time; 1 if times add up."""
        parts = sum(t.median_s for t in (*self.forward.values(), *self.backward.values()))
        return parts / (self.whole_forward.median_s + self.whole_backward.median_s)


def measure_times(
    traced: Traced,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    repeats: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Times of a model, operator by operator and as a whole, on a copy.

    Args:
        traced: on the device to be measured.
        args, kwargs: a batch on that device; times are for its size.
        loss: of the result.
        repeats: number of measured passes, at least 3.
        warmup: passes before these.
        clock: seconds.

    Raises:
        JobError: too few repetitions.
    """
    if repeats < 3:
        raise JobError(f"repeats = {repeats} gives no quartiles", remedy="use 3 or more")
    loss = loss or mean_square
    clone = copy.deepcopy(traced)
    clone.train()
    bench = _Bench(clone, loss, clock)
    _log.info("measuring %d operators on %s, %d passes", len(bench.operators), bench.device, warmup + repeats)
    rows = [bench.run(tuple(args), dict(kwargs or {})) for _ in range(warmup + repeats)][warmup:]
    empty_s = median(bench.empty_s() for _ in range(50))
    passes = tuple({n: (f, max(0.0, r.backward[n] - empty_s) if r.backward[n] else 0.0) for n, f in r.forward.items()} for r in rows)
    return Times(
        device=bench.device.type,
        forward={n: _timing([p[n][0] for p in passes]) for n in passes[0]},
        backward={n: _timing([p[n][1] for p in passes]) for n in passes[0]},
        passes=passes,
        whole_forward=_timing([r.whole_forward for r in rows]),
        whole_backward=_timing([r.whole_backward for r in rows]),
        repeats=repeats,
    )


@dataclass(slots=True, kw_only=True)
class _TimeRow:
    forward: dict[str, float]
    backward: dict[str, float]
    whole_forward: float = 0.0
    whole_backward: float = 0.0


class _Bench:
    def __init__(self, traced: Traced, loss: Loss, clock: Callable[[], float]) -> None:
        self.traced, self.loss, self.clock = traced, loss, clock
        self.device = next((p.device for p in traced.parameters()), torch.device("cpu"))
        self.operators = operators(traced)
        self.numbers = front_numbers(traced)
        every = {s.name for s in traced.program.steps}
        self.front = self._piece(self.numbers, every)
        known = {s.name for s in self.numbers}
        self.pieces = {o.name: self._piece([s for s in o.steps if s.name not in known], set(o.outputs)) for o in self.operators}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, object]) -> _TimeRow:
        row = _TimeRow(forward={}, backward={})
        args, kwargs = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, (args, kwargs))
        begun = self._now()
        result = self.traced(*args, **kwargs)
        row.whole_forward = self._now() - begun
        value = self.loss(result)
        begun = self._now()
        torch.autograd.backward([value])
        row.whole_backward = self._now() - begun
        self.traced.zero_grad(set_to_none=True)
        self._apart(self.traced.named_inputs(args, kwargs), row)
        return row

    def empty_s(self) -> float:
        """Seconds of an empty backward pass."""
        leaf = torch.ones((), device=self.device, requires_grad=True)
        made, gradient = leaf.view_as(leaf), torch.ones((), device=self.device)
        begun = self._now()
        torch.autograd.grad([made], [leaf], [gradient])
        return self._now() - begun

    def _apart(self, store: dict[str, object], row: _TimeRow) -> None:
        self.front.run_steps(store)
        entered: dict[str, dict[str, torch.Tensor]] = {}
        left: dict[str, dict[str, torch.Tensor]] = {}
        for o in self.operators:
            leaf_of = {n: _leaf(store[n]) for n in (*o.inputs, *self._loose(o)) if n in store}
            changed = self._changed(o)
            own = {n: t.clone() if n in changed and isinstance(t, torch.Tensor) else t for n, t in leaf_of.items()}
            own |= {s.name: store[s.name] for s in self.numbers}
            if o.name in store:
                own[o.name] = store[o.name]
            begun = self._now()
            self.pieces[o.name].run_steps(own)
            row.forward[o.name] = self._now() - begun
            if not self.pieces[o.name]._box.steps[True]:
                row.forward[o.name] = 0.0
            made = {s.name: own[s.name] for s in o.steps if s.name in own}
            store |= made
            entered[o.name] = {n: t for n, t in leaf_of.items() if isinstance(t, torch.Tensor) and t.requires_grad}
            left[o.name] = {n: t for n, t in made.items() if isinstance(t, torch.Tensor) and t.requires_grad}
        self._back(store, entered, left, row)

    def _back(self, store: Any, entered: Any, left: Any, row: _TimeRow) -> None:
        ends = {r.name: _leaf(store[r.name]) for r in leaves(list(self.traced.program.outputs)) if isinstance(r, Ref)}
        torch.autograd.backward([self.loss(self.traced.result({**store, **ends}))])
        gradients = {n: t.grad for n, t in ends.items() if isinstance(t, torch.Tensor) and t.grad is not None}
        for o in reversed(self.operators):
            out = [(t, gradients[n]) for n, t in left[o.name].items() if n in gradients]
            own = [p for n in o.states if (p := self.traced.state(n)).requires_grad]
            into = list(entered[o.name].items())
            row.backward[o.name] = 0.0
            if not out or not (into or own):
                continue
            begun = self._now()
            found = torch.autograd.grad([t for t, _ in out], [*(t for _, t in into), *own], [g for _, g in out], allow_unused=True)
            row.backward[o.name] = self._now() - begun
            for (name, _), g in zip(into, found, strict=False):
                if g is not None:
                    gradients[name] = gradients[name] + g if name in gradients else g

    def _piece(self, steps: Sequence[Any], outputs: set[str]) -> TracedModule:
        made = TracedModule(
            steps=steps,
            outputs=sorted(outputs | {i.name for i in self.traced.program.inputs}),
            random=(),
            constants=self.traced.program.constants,
        )
        made.__dict__["state"] = self.traced.state
        made.__dict__["module_at"] = self.traced.module_at
        return made

    def _loose(self, o: Operator) -> set[str]:
        """Values of other operators that it reads."""
        own = {s.name for s in o.steps}
        return {r.name for s in o.steps for r in leaves([list(s.args), dict(s.kwargs)]) if isinstance(r, Ref)} - own

    def _changed(self, o: Operator) -> set[str]:
        seen = self.traced.observation
        storages = {x for s in o.steps for x in seen.side_effects[s.name].changed}
        return {n for n in o.inputs if seen.values[n].storage in storages}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return tree_map(_leaf, value) if tree_leaves(value) and isinstance(value, (tuple, list)) else value


def _timing(seconds: Sequence[float]) -> OperatorTiming:
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return OperatorTiming(median_s=middle, low_s=low, high_s=high)


# -- estimated time of operators from their operations and bytes --------------------------------------------------


FLOP_S, BYTES_S = 2e10, 5e9
"""Rates of one vCPU: about a third of the peak of AVX2, and its share of the memory bandwidth. Only their ratio to each other and to
the network's bandwidth affects the cut of a model."""


def estimated_s(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Seconds of each operator's forward pass over an example batch, on one vCPU."""
    clone = copy.deepcopy(traced)
    seconds: dict[str, float] = {}
    plain = clone.call_step

    def seen(step: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        with FlopCounterMode(display=False) as counter:
            made = plain(step, args, kwargs)
        touched = sum(t.nbytes for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor))
        seconds[step.name] = counter.get_total_flops() / FLOP_S + touched / BYTES_S
        return made

    clone.__dict__["call_step"] = seen
    with torch.random.fork_rng(), torch.no_grad():
        clone.run_steps(clone.named_inputs(tuple(args), dict(kwargs or {})))
    return {o.name: sum(seconds[s.name] for s in o.steps) for o in operators(traced, ties="apart")}
