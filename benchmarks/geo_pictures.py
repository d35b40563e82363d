"""Accuracy over time between regions as a picture, from results of `benchmarks.geo`: figure 7 of Cloudless-Training, and time to accuracy on slow links.

    python -m benchmarks.geo_pictures benchmarks/results/geo.json docs/pictures/regions.png

The parts `accuracy` and `traffic` have to be in the file. Both are simulated time with real gradients.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ephemeron.rendering.png import Panel, write_png
from ephemeron.rendering.svg import ticks, time_ticks
from ephemeron.training.report.charts import Axis, ChartLine, chart

MODELS = {"lenet": "LeNet", "resnet": "ResNet", "deepfm": "DeepFM"}
SIDES = {
    ("one cloud", "iid"): ("one cloud, 24 cores", "grey", False),
    ("two regions", "iid"): ("two regions, 12 cores each", "blue", False),
    ("two regions", "skewed"): ("the same, classes skewed", "orange", True),
}
COLOURS = {"per step": "grey", "ama 8": "amber", "diloco top 5 %, two bits": "blue", "diloco int4": "green"}
POLICY = "sma 8"
NAMES = {"per step": "exchange every step", "ama 8": "AMA(8)", "diloco int4": "DiLoCo, int4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file with the parts accuracy and traffic")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    missing = [part for part in ("accuracy", "traffic") if part not in results]
    missing += [f"accuracy of {name}" for name in MODELS if name not in results.get("accuracy", {}).get("models", {})]
    if missing:
        parser.error(f"{arguments.results} has no {', '.join(missing)}; python -m benchmarks.geo --into measures them")
    accuracy = [_accuracy(name, results["accuracy"]["models"][name]["table_4"]) for name in MODELS]
    traffic = [_traffic(link, found) for link, found in results["traffic"]["links"].items()]
    below = (
        "Simulated time, real gradients; test accuracy. Above: after each epoch, 100 Mbit/s, means of three seeds. "
        "Below: MB that a region sends in five epochs."
    )
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    write_png(arguments.picture, "Training in two regions", below, [accuracy, traffic])


def _accuracy(model: str, rows: list[dict[str, Any]]) -> Panel:
    lines = []
    for row in rows:
        if row.get("policy", POLICY) != POLICY:
            continue
        label, colour, dashed = SIDES[row["side"], row["data"]]
        points = tuple((p["seconds"], 100 * p["accuracy"]) for p in row["figure_7"])
        lines.append(ChartLine(label=label, points=points, colour=colour, dashed=dashed, marks=_marks(points)))
    return f"Accuracy of {MODELS[model]}, SMA(8)", _chart(lines)


def _traffic(link: str, found: dict[str, Any]) -> Panel:
    lines = []
    run = found["seeds"][0]
    last = max(points[-1]["seconds"] for name, points in run["by_evaluation"].items() if name == "ama 8")
    for name, each in run["by_evaluation"].items():
        points = tuple((p["seconds"], 100 * p["accuracy"]) for p in each if p["seconds"] <= 1.05 * last)
        if points:
            label = f"{NAMES.get(name, 'DiLoCo, top 5 % in two bits')}: {each[-1]['wan_bytes'] / 1e6:.3g} MB"
            lines.append(ChartLine(label=label, points=points, colour=COLOURS[name], marks=_marks(points)))
    return f"LeNet, {link}, iterations of 10 ms, skewed, one seed", _chart(lines)


def _marks(points: tuple[tuple[float, float], ...]) -> tuple[str, ...]:
    return tuple(f"{y:.1f} % after {x:.1f} s" for x, y in points)


def _chart(lines: list[ChartLine]) -> Any:
    last = max(x for line in lines for x, _ in line.points)
    values = [y for line in lines for _, y in line.points]
    lo, hi = 10.0 * (min(values) // 10), -10.0 * (-max(values) // 10)
    axis = Axis(title="%", lo=lo, hi=hi, ticks=ticks(lo, hi, 5, "{:g}".format))
    return chart(lines, time_ticks(0, last, 5), (0.0, last), "time", axis, None)


if __name__ == "__main__":
    main()
