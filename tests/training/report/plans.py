"""Plans made by hand, as a planner would make them: prices and coefficients are invented, proportions are not."""

from __future__ import annotations

import dataclasses
from typing import Any

from ephemeron.training.planner.plan import Alternative, Choice, MachineEstimate, Plan, PlanLimits, PlanSource, Predicted, SearchReport


def predicted(seconds: float = 152.3, cost_usd: float = 0.0123, **more: Any) -> Predicted:
    shares = {"start": 0.01, "load": 0.02, "compute": 0.5, "upload": 0.15, "aggregate": 0.17, "download": 0.15, "relay": 0}
    values: dict[str, Any] = {
        "memory_mb": 1404.0,
        "iterations": 345,
        "phases_s": {name: share * seconds for name, share in shares.items()},
        "cost": {"functions": 0.8 * cost_usd, "storage": 0.02 * cost_usd, "requests": 0.18 * cost_usd},
        "invocations": 8,
        "puts": 6_000,
        "gets": 11_000,
        "polls": 1_300,
    }
    return Predicted(seconds=seconds, cost_usd=cost_usd, **(values | more))


def choice(workers: int = 8, seconds: float = 152.3, cost_usd: float = 0.0123, **more: Any) -> Choice:
    values: dict[str, Any] = {
        "memory_mb": 1792,
        "aggregators": max(1, workers // 4),
        "batch_size_aggregator": 60,
        "batch_size_nonaggregator": 64,
        "pattern": "k-reduce",
        "sync": "bsp",
        "channel": "objects",
        "compression": "none",
        "predicted": predicted(seconds, cost_usd, invocations=workers),
    }
    return Choice(workers=workers, **(values | more))


def alternative(why: str, c: Choice) -> Alternative:
    return Alternative(why=why, **{f.name: getattr(c, f.name) for f in dataclasses.fields(c)})


def plan(**more: Any) -> Plan:
    """A front of nine choices; the second cheapest was chosen, because of the deadline."""
    sizes = [(w, 40 + 900 / w, 0.0052 + 0.0009 * w) for w in (48, 32, 24, 16, 12, 8, 6, 4, 2)]
    front = [choice(w, s, usd) for w, s, usd in sizes]
    chosen = choice(4, *sizes[7][1:])
    near = [
        ("next best", choice(6, *sizes[6][1:])),
        ("one worker more", choice(5, 245, 0.0098)),
        ("one worker less", choice(3, 390, 0.0086)),
        ("memory one step up", choice(4, 260, 0.0091, memory_mb=1920)),
        ("memory one step down", choice(4, 281, 0.0090, memory_mb=1664)),
    ]
    values: dict[str, Any] = {
        "choice": chosen,
        "search": SearchReport(method="two-stage", seconds=0.84, evaluated=18_200, pruned=3_412_000, optimal=True, gap=0.0),
        "minimise": "cost",
        "limits": PlanLimits(deadline_s=300.0, budget_usd=0.04, max_global_batch=512),
        "binding": "deadline",
        "alternatives": tuple(alternative(why, c) for why, c in near),
        "advice": (
            "The deadline of 300 s costs 28%: without it, 2 functions would take 8 min 10 s for $0.007.",
            "Uploads and downloads take 30% of the time; int8 compression would take half of that away.",
        ),
        "machines": (
            MachineEstimate(name="c7i.xlarge", seconds=210.0, cost_usd=0.0104),
            MachineEstimate(name="m5.large", seconds=431.0, cost_usd=0.0115),
            MachineEstimate(name="c7i.8xlarge", seconds=81.0, cost_usd=0.0321),
            MachineEstimate(name="c7i.large", seconds=380.0, cost_usd=0.0094, fits=False),
        ),
        "front": tuple(front),
        "profile": PlanSource(
            workload="resnet50-cifar10",
            platform="aws-lambda, objects",
            as_of="2025-06-01",
            source="AWS Lambda pricing page, x86, US East (N. Virginia)",
        ),
    }
    return Plan(**(values | more))


def wide() -> Plan:
    """Two decades of cost, three of time, no limits."""
    front = [choice(w, 20 + 6000 / w**1.3, 0.003 * w**1.2) for w in (256, 128, 64, 32, 16, 8, 4, 2, 1)]
    return plan(front=tuple(front), choice=front[-1], limits=PlanLimits(), machines=(), binding="compute")


def bare() -> Plan:
    """What can be left out is."""
    return plan(alternatives=(), advice=(), machines=(), front=(), profile=PlanSource(), limits=PlanLimits())


SUMMARY: dict[str, Any] = {
    "run_id": "digits-20260101-0001",
    "status": "finished",
    "seconds": 140.0,
    "cost_usd": 0.0119,
    "workers": 8,
    "aggregators": 2,
    "memory_mb": 1792,
    "batch_size_aggregator": 60,
    "batch_size_nonaggregator": 64,
    "stages": 1,
    "replicas": 8,
    "micro_batches": 1,
    "schedule": None,
    "pattern": "k-reduce",
    "sync": "bsp",
    "channel": "folder",
    "exchange": "gradients",
    "compression": "none",
    "iterations": 345,
    "invocations": 8,
    "metrics": {"loss": 0.1, "accuracy": 0.9},
    "traffic": {"puts": 5900, "gets": 11100, "polls": 0, "deletes": 5000, "lists": 0, "bytes_up": 10, "bytes_down": 20},
    "weights_sha256": None,
    "platform": "local",
    "budget_usd": None,
    "prices": "x, 2025-06-01",
    "billed": {"gb_seconds": 600.0, "requests": 8, "storage_usd": 0.0023},
    "phases_s": {"load": 16.0, "compute": 600.0, "upload": 160.0, "aggregate": 44.0, "download": 168.0, "wait": 203.0},
}
"""`result.json` of the run of `choice()`."""
