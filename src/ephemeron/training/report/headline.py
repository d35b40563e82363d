"""Numbers and words at the head of a report: the result where it speaks, the events where it does not.

`result.json` is written by the client of the run and may be absent, partial or older than the events, so
it is parsed here, once, into `Headline`; nothing behind this module sees the dict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.events import GroupStarted
from ephemeron.training.report.metrics import EvaluationPoint
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.units import human_bytes, human_count, human_seconds

Result = Mapping[str, Any]

_NOT_CONFIGURATION = frozenset(
    {"run_id", "status", "seconds", "cost_usd", "iterations", "invocations", "metrics", "traffic", "billed"} | {"phases_s"}
)
"""Keys of the result that state what came out, not what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Key figures of a run."""

    run_id: str
    job: str
    status: str
    seconds: float
    cost_usd: float
    storage_usd: float
    """Part of the cost that only the result knows."""
    budget_usd: float | None
    workers: int
    aggregators: int
    memory_mb: int
    regions: tuple[GroupStarted, ...]
    """Groups of functions, each with its quota; empty: there is one group."""
    iterations: int
    planned_iterations: int
    trains: bool
    """Whether it has iterations; other runs have a timeline only."""
    tasks: int | None
    """Tasks with a result; None: it has none."""
    accuracy: float | None
    others: tuple[tuple[str, float], ...]
    """Further metrics of the last evaluation, by name."""
    test_loss: float | None
    train_loss: float | None
    gb_seconds: float
    invocations: int
    configuration: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, story: RunSummary, result: Result | None) -> Headline:
        """Puts the two sources together. While a resumed run goes on, the result is of its earlier part: not used."""
        r: Result = result or {}
        if story.status == "running" and story.resumes:
            r = {k: v for k, v in r.items() if k not in _NOT_CONFIGURATION}
        run, final = story.run, story.learning.final
        configuration = _configuration(story, r)
        storage = _number(r, "billed.storage_usd") or 0.0
        return cls(
            run_id=run.run_id if run else str(r.get("run_id", "unknown run")),
            job=run.job if run else "",
            status=story.status if story.status != "running" else str(r.get("status", "running")),
            seconds=_number(r, "seconds") or story.seconds,
            cost_usd=_number(r, "cost_usd") or story.spending.total_usd,
            storage_usd=storage,
            budget_usd=_number(r, "budget_usd") or _budget(run.configuration if run else {}),
            workers=int(_number(r, "workers") or (run.workers if run else len(story.lanes))),
            aggregators=int(_number(r, "aggregators") or (run.aggregators if run else 0)),
            memory_mb=int(_number(r, "memory_mb") or (run.memory_mb if run else 0)),
            regions=tuple(region.started for region in story.regions),
            iterations=int(_number(r, "iterations") or story.learning.iterations),
            planned_iterations=run.iterations if run else 0,
            trains=run is None or run.iterations > 0,
            tasks=None if (tasks := _number(r, "tasks")) is None else int(tasks),
            accuracy=_first(_number(r, "metrics.accuracy"), final.accuracy if final else None),
            others=_others(r, final),
            test_loss=_first(_number(r, "metrics.loss"), final.loss if final else None),
            train_loss=story.learning.last_loss,
            gb_seconds=_number(r, "billed.gb_seconds") or story.spending.gb_seconds,
            invocations=len(story.invocations) or int(_number(r, "invocations") or 0),
            configuration=configuration,
        )

    @property
    def quotas(self) -> str:
        """`4 × 512 MB`, of each region."""
        if not self.regions:
            return f"{self.workers} × {self.memory_mb} MB"
        return ", ".join(f"{region.name} {region.workers} × {region.memory_mb} MB" for region in self.regions)

    @property
    def summary(self) -> str:
        """One sentence."""
        who = f"{self.workers} function{'s' if self.workers != 1 else ''}"
        who += f" ({self.quotas})" if self.regions else f" of {self.memory_mb} MB"
        of = f" of {self.planned_iterations:,}" if self.planned_iterations > self.iterations else ""
        done = f"{self.iterations:,}{of} iteration{'s' if (of or self.iterations != 1) else ''}"
        bill = f"in {human_seconds(self.seconds)} for {usd(self.cost_usd)}"
        ending = "" if self.test_loss is None else f": test loss {self.test_loss:.4g}"
        if self.accuracy is not None:
            ending = f": accuracy {self.accuracy:.3f}"
        elif self.others:
            ending = f": {self.others[0][0]} {self.others[0][1]:.4g}"
        if not self.trains and self.tasks is None:
            return f"{f'{who} at most, ' if self.workers else ''}{human_count(self.invocations, 'invocation')} {bill}; {self.status}."
        if not self.seconds and not self.iterations:
            return f"{who} {'were' if self.workers != 1 else 'was'} asked for; nothing has happened yet."
        if self.tasks is not None:
            return f"{who} did {human_count(self.tasks, 'task')} {bill}; {self.status}."
        if not self.iterations:
            return f"{who} finished no iteration {bill}."
        if self.status == "running":
            return f"{who} trained {done} so far, {bill}{ending}."
        if self.status == "failed":
            return f"{who} trained {done} before the run failed, {bill}{ending}."
        if self.status == "stopped":
            return f"{who} trained {done} before the run was stopped, {bill}{ending}."
        return f"{who} trained {done} {bill}{ending}."


def _others(result: Result, final: EvaluationPoint | None) -> tuple[tuple[str, float], ...]:
    """Metrics beside loss and accuracy, from the result or else the last evaluation."""
    told = result.get("metrics")
    known = told if isinstance(told, Mapping) else final.metrics if final else {}
    named = ((str(name), value) for name, value in known.items() if name not in ("loss", "accuracy"))
    return tuple((name, float(value)) for name, value in named if isinstance(value, (int, float)))


def usd(amount: float) -> str:
    """Three significant digits below a dollar: `0.00182 -> '$0.00182'`."""
    if abs(amount) >= 1:
        return f"${amount:,.2f}"
    if not amount:
        return "$0"
    digits = max(2, 2 - math.floor(math.log10(abs(amount))))
    text = f"{amount:.{digits}f}".rstrip("0")
    return "$" + text.ljust(text.index(".") + 3, "0")


def compact(n: float) -> str:
    """Large counts: `12345 -> '12.3k'`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(n) >= size:
            return f"{n / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{n:g}"


def learning_note(story: RunSummary) -> str:
    """Remark on an unusual loss curve; empty if there is none."""
    n = story.learning.not_finite
    return f"{n} iteration{'s' if n != 1 else ''} had a loss that is not a finite number." if n else ""


def cost_mix(story: RunSummary) -> str:
    """`12% compute, 88% requests`, or nothing where nothing was paid."""
    s = story.spending
    if not s.total_usd:
        return ""
    return f"{s.compute_usd / s.total_usd:.0%} compute, {s.requests_usd / s.total_usd:.0%} requests"


def moved(story: RunSummary) -> str:
    """Bytes through the channel."""
    t = story.spending.traffic
    direct = f"; {human_bytes(t.direct_bytes_sent)} sent directly" if t.direct_bytes else ""
    return f"{human_bytes(t.bytes_up)} up, {human_bytes(t.bytes_down)} down{direct}"


def _first(a: float | None, b: float | None) -> float | None:
    return b if a is None else a


def _number(r: Result, path: str) -> float | None:
    """The finite number at `a.b`; None if there is none."""
    value: Any = r
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _budget(configuration: Result) -> float | None:
    return _number(configuration, "budget_usd") or _number(configuration, "limits.budget_usd")


def _configuration(story: RunSummary, r: Result) -> tuple[tuple[str, str], ...]:
    run = story.run
    told: dict[str, Any] = {}
    if run:
        told |= {"job": run.job, "platform": run.platform, "workers": run.workers, "aggregators": run.aggregators}
        told |= {"memory_mb": run.memory_mb, "epochs": run.epochs, "iterations": run.iterations}
        told |= {"samples": run.samples, **run.configuration}
    told |= {k: v for k, v in r.items() if k not in _NOT_CONFIGURATION}
    if story.regions:  # each has functions of its own size, in its own table
        told |= dict.fromkeys(("memory_mb", "generations", "regions"))
    return tuple((k, _word(v)) for k, v in told.items() if v not in (None, ""))


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
