"""Bytes and time to equal accuracy between two regions with skewed data, simulated: per-step exchange, AMA(8), and DiLoCo with compression.

The target is the accuracy that all sides reach: the least of their best ones, less half a point. Bytes are metered by the regions. Goals: at least 200 times fewer
bytes than per-step exchange and 25 times fewer than AMA(8); at 10 Mbit/s and 100 ms at least 5 times faster to the target than AMA(8); at 100 Mbit/s never
slower. An iteration takes 10 ms, as on a GPU: the link, not the functions, is what limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.geo_worlds import Point, Wan, Workload, as_json, curve, job_of, regions, workplace

WORKLOAD = Workload(model="lenet", samples=3072, test=1024, epochs=10, lr=0.02, iteration_s=0.01)
SIDES = {
    "per step": ("sma", 1, "none"),
    "ama 8": ("ama", 8, "none"),
    "diloco 32 int4": ("diloco:lr=0.8,momentum=0.5", 32, "int4"),
    "diloco 32 top 5 %, two bits": ("diloco:lr=0.8,momentum=0.5", 32, "topk2:0.05"),
}
"""By side: policy, H and compression."""
OURS = "diloco 32 int4"
LINKS = {"10 Mbit/s, 100 ms": Wan(mbit_s=10.0, latency_s=0.1), "100 Mbit/s, 30 ms": Wan(mbit_s=100.0, latency_s=0.03)}
MARGIN = 0.005


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Points at the target by link and side, and ratios."""
    found: dict[str, Any] = {}
    with workplace() as folder:
        for link, wan in LINKS.items():
            if quick and found:
                break
            job = job_of(folder, WORKLOAD, 0, wan, skewed=True)
            # Per-step exchange is synchronous: its accuracy and bytes are the same on both links, and its time is the longest.
            sides = {n: s for n, s in SIDES.items() if n != "per step" or not found}
            curves = {}
            for name, (sync, every, compression) in sides.items():
                result = regions(job, WORKLOAD, sync=sync, every=every, compression=compression, functions=1)
                curves[name] = curve(result)
                say(f"{link}, {name}: {', '.join(f'{p.accuracy:.4f}' for p in curves[name])}; {curves[name][-1]}")
            target = min(max(p.accuracy for p in points) for points in curves.values()) - MARGIN
            reached = {name: _first(points, target) for name, points in curves.items()}
            found[link] = {
                "target": round(target, 4), "sides": {name: as_json(point) for name, point in reached.items()},
                "ratios": _ratios(reached),
            }  # fmt: skip
            say(f"{link}: accuracy {target:.4f}; {found[link]['ratios']}")
    return {"simulated": True, "model": WORKLOAD.model, "skewed": True, "links": found}


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
