"""Bytes and time to equal accuracy between two regions with skewed data, simulated: per-step exchange, AMA(8), and DiLoCo with compression.

The target of a seed is the accuracy that all its sides reach: the least of their best ones, less half a point. All sides are evaluated four times an epoch. Bytes are metered by the regions, since virtual time has no
kernel counters; `geo_counters` has these for the same policies. Goals: at least 200 times fewer bytes than per-step exchange and 25 times fewer than AMA(8); at 10 Mbit/s and 100 ms at least 5 times faster to the
target than AMA(8); at 100 Mbit/s never slower. An iteration takes 10 ms, as on a GPU: the link, not the functions, is what limits. Evaluations take no
time. A region of DiLoCo trains on while a round is under way (`delay`), as AMA's does: H and delay are those that the link needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.geo_worlds import Point, Wan, Workload, as_json, curve, in_processes, job_of, regions, workplace

WORKLOAD = Workload(model="lenet", samples=3072, test=1024, epochs=5, lr=0.02, iteration_s=0.01)
EVALUATE_EVERY = 24
"""Iterations: a quarter of an epoch. Accuracy looked at once an epoch would say no more than in which epoch a side has come to the target."""
EVALUATION_S = WORKLOAD.iteration_s * WORKLOAD.test / 3 / WORKLOAD.batch_size
"""A forward pass is a third of a step."""
PER_STEP, AMA = ("sma", 1, "none"), ("ama", 8, "none")
LINKS = {
    "10 Mbit/s, 100 ms": (
        Wan(mbit_s=10.0, latency_s=0.1),
        {
            "per step": PER_STEP,
            "ama 8": AMA,
            "diloco int4": ("diloco:lr=1,momentum=0.3,delay=31", 32, "int4"),
            "diloco top 5 %, two bits": ("diloco:lr=1,momentum=0.3,delay=23", 24, "topk2:0.05"),
        },
    ),
    "100 Mbit/s, 30 ms": (
        Wan(mbit_s=100.0, latency_s=0.03),
        {
            "ama 8": AMA,
            "diloco int4": ("diloco:lr=1,momentum=0.3,delay=8", 12, "int4"),
            "diloco top 5 %, two bits": ("diloco:lr=1,momentum=0.3,delay=8", 12, "topk2:0.05"),
        },
    ),
}
"""By link, and by side: policy, H and compression. Per-step exchange is synchronous: its accuracy and bytes are the same on both links, and its time is the longest."""
MARGIN = 0.005
SEEDS = (0, 1, 2)
"""Policies were chosen with others."""


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Points at the target by link, seed and side, and medians of the ratios."""
    found: dict[str, Any] = {}
    for link, (wan, sides) in LINKS.items():
        if quick and found:
            break
        seeds = SEEDS[:1] if quick else SEEDS
        points = in_processes(_curve, [(wan, side, seed) for seed in seeds for side in sides.values()])
        runs = [_seed(link, seed, {name: next(points) for name in sides}, say) for seed in seeds]
        names = dict.fromkeys(name for run in runs for name in run["ratios"])
        ratios = {name: [run["ratios"][name] for run in runs if name in run["ratios"]] for name in names}
        found[link] = {
            "policies": {name: list(side) for name, side in sides.items()},
            "seeds": runs,
            "medians": {name: _medians([run["sides"][name] for run in runs]) for name in sides},
            "ratios": {name: {"median": statistics.median(v), "by_seed": v} for name, v in ratios.items()},
        }
        say(f"{link}: {found[link]['ratios']}")
    return {"simulated": True, "model": WORKLOAD.model, "skewed": True, "evaluate_every": EVALUATE_EVERY, "links": found}


def _curve(wan: Wan, side: tuple[str, int, str], seed: int) -> list[Point]:
    sync, every, compression = side
    with workplace() as folder:
        job = job_of(folder, WORKLOAD, seed, wan, skewed=True, evaluate_every=f"{EVALUATE_EVERY} steps")
        result = regions(job, WORKLOAD, sync=sync, every=every, compression=compression, functions=1)
        return curve(result, evaluation_s=EVALUATION_S)


def _seed(link: str, seed: int, curves: dict[str, list[Point]], say: Callable[[str], None]) -> dict[str, Any]:
    for name, points in curves.items():
        say(f"{link}, seed {seed}, {name}: {', '.join(f'{p.accuracy:.4f}' for p in points)}; {points[-1]}")
    target = min(max(p.accuracy for p in points) for points in curves.values()) - MARGIN
    reached = {name: _first(points, target) for name, points in curves.items()}
    return {
        "seed": seed,
        "target": round(target, 4),
        "sides": {name: as_json(point) for name, point in reached.items()},
        "by_evaluation": {
            name: [{"seconds": round(p.seconds, 2), "wan_bytes": p.wan_bytes, "accuracy": round(p.accuracy, 4)} for p in points]
            for name, points in curves.items()
        },
        "ratios": _ratios(reached),
    }


def _medians(points: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Seconds and bytes to the target, of the seeds in which a side reaches it."""
    reached = [point for point in points if point is not None]
    medians = {key: statistics.median(point[key] for point in reached) for key in ("seconds", "wan_bytes") if reached}
    return {"reached": len(reached), "of": len(points)} | {key: round(value, 2) for key, value in medians.items()}


def _first(points: list[Point], target: float) -> Point | None:
    return next((point for point in points if point.accuracy >= target), None)


def _ratios(reached: dict[str, Point | None]) -> dict[str, float]:
    """How many times the bytes and the seconds of each side of DiLoCo the others take."""
    ratios = {}
    for ours in (name for name in reached if name.startswith("diloco")):
        for other in ("per step", "ama 8"):
            if (a := reached.get(other)) is not None and (b := reached[ours]) is not None and b.wan_bytes:
                ratios[f"bytes, {other} / {ours}"] = round(a.wan_bytes / b.wan_bytes, 1)
                ratios[f"seconds, {other} / {ours}"] = round(a.seconds / b.seconds, 2)
    return ratios
