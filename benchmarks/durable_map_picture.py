"""Cost, time and the client's memory of durable maps by their number of items as a picture, from results of `benchmarks.durable_map`.

    python -m benchmarks.durable_map_picture benchmarks/results/durable_map.json docs/pictures/map-costs.png

The part `again` has to be in the file, with first calls.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ephemeron.rendering.png import Panel, write_png
from ephemeron.training.report.charts import Axis, ChartLine, chart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file with the part again")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text()).get("again", [])
    firsts = [(row["items"], row["first"]) for row in rows if "first" in row]
    if len(firsts) < 2:
        parser.error(f"{arguments.results} has fewer than two first calls; python -m benchmarks.durable_map --parts again measures them")
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    below = "Maps of an empty function on two functions of this machine; list price of the functions and the store."
    panels = [
        _panel("Cost", "USD", firsts, "cost_usd"),
        _panel("Time", "s", firsts, "seconds"),
        _panel("Memory of the client", "MB", firsts, "peak_mb", is_proportional=False),
    ]
    write_png(arguments.picture, "What a durable map of so many items takes", below, [panels])


def _panel(title: str, unit: str, firsts: list[tuple[int, dict[str, Any]]], name: str, *, is_proportional: bool = True) -> Panel:
    points = tuple((math.log10(items), float(first[name])) for items, first in firsts)
    lines = [ChartLine(label="measured", points=points, colour="blue", marks=tuple(f"{y:g} {unit}" for _, y in points))]
    values = [y for _, y in points]
    low, high = (0.0, 1.25 * max(values))
    ticks = [(high * n / 4, f"{high * n / 4:.3g}") for n in range(5)]
    if is_proportional:
        (last, items), most = (values[-1], firsts[-1][0]), math.log10
        line = tuple((most(n), last * n / items) for n, _ in firsts)
        lines.append(ChartLine(label="proportional to the items", points=line, colour="grey", dashed=True))
        values += [y for _, y in line]
        low, high = 10.0 ** math.floor(most(min(values))), 10.0 ** math.ceil(most(max(values)))
        ticks = [(10.0**n, f"{10.0**n:g}") for n in range(round(most(low)), round(most(high)) + 1)]
    across = [(math.log10(items), f"{items:,}") for items, _ in firsts]
    axis = Axis(title=unit, lo=low, hi=high, ticks=ticks, log=is_proportional)
    return title, chart(lines, across, (across[0][0], across[-1][0]), "items", axis, None)


if __name__ == "__main__":
    main()
