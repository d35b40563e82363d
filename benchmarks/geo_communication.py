"""Communication between regions, simulated: figure 3, and table 7 with figures 10 and 11 of Cloudless-Training.

Models are as large as the paper's. Iteration times are those of its text: of figure 3 from its shares (a T4's is also in table 1), of table 7
from its speed-ups: with a share c of the time in communication, of which a policy saves d, the speed-up is 1 / (1 - c·d).

The paper counts communication as the time of one exchange times their number (table 3); `communication_s` does so, with the time of an exchange measured
where regions wait for each one. Our regions compute while updates are under way, as those of the paper do not; `waited_s` is the time that is left, and
`speed` that of the whole run. Their baseline waits, so two are given: steps of every iteration exchanged while regions wait (`waiting`), and ours (`asgd`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.geo_worlds import Wan, Workload, job_of, regions, waited_s, workplace

MBIT_S = 100.0
"""Between Shanghai and Chongqing (section 4)."""
FIGURE_3 = {"CPU": (2.077, 64.9), "GPU (T4)": (0.062, 98.4)}
"""By device, seconds of an iteration, and the share of communication that the paper states, in percent."""
RESNET18 = 12_000_000
"""Parameters: 48 MB."""
TABLE_7 = {
    "lenet": (105_000, 0.295, 1.2, {"asgd-ga 4": 48.3, "ama 4": 46.0, "asgd-ga 8": 64.3, "ama 8": 60.8}),
    "resnet": (152_000, 0.51, 1.2, {"asgd-ga 4": 52.7, "ama 4": 52.7, "asgd-ga 8": 70.1, "ama 8": 56.7}),
    "deepfm": (596_000, 0.345, 1.7, {"asgd-ga 4": 58.4, "ama 4": 58.5, "asgd-ga 8": 72.9, "ama 8": 71.0}),
}
"""By model: parameters, seconds of an iteration, the paper's speed-up, and its reduction of communication time by policy, in percent."""
POLICIES = {
    "waiting": ("sma", 1),
    "asgd": ("asgd", 1),
    "asgd-ga 4": ("asgd-ga", 4),
    "ama 4": ("ama", 4),
    "sma 4": ("sma", 4),
    "asgd-ga 8": ("asgd-ga", 8),
    "ama 8": ("ama", 8),
    "sma 8": ("sma", 8),
    "diloco 8 int4": ("diloco", 8),
}
ITERATIONS = 64


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Both tables."""
    return {"simulated": True, "link_mbit_s": MBIT_S, "figure_3": figure_3(say), "table_7": table_7(quick, say)}


def _run(parameters: int, iteration_s: float, iterations: int, *, sync: str, every: int, compression: str = "none") -> dict[str, Any]:
    """Waiting, whole time without the start of functions, and bytes sent of one region."""
    workload = Workload(
        model="weights",
        samples=iterations * 4,
        test=4,
        epochs=1,
        lr=0.01,
        iteration_s=iteration_s,
        batch_size=2,
        options={"parameters": parameters},
    )
    with workplace() as folder:
        job = job_of(folder, workload, 0, Wan(mbit_s=MBIT_S))
        result = regions(job, workload, sync=sync, every=every, compression=compression, functions=1)
        waited = waited_s(result)
        return {
            "waited_s": round(waited, 3),
            "seconds": round(waited + iterations * iteration_s, 3),
            "bytes_sent": result.summary.regions[0].wan_bytes_sent,
        }


def figure_3(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Share of communication in the training of ResNet18 over two regions."""
    rows = []
    for device, (iteration_s, paper) in FIGURE_3.items():
        each = _run(RESNET18, iteration_s, 4, sync="sma", every=1)
        seldom = _run(RESNET18, iteration_s, 64, sync="diloco:delay=31", every=32, compression="int4")
        row = {
            "device": device,
            "iteration_s": iteration_s,
            "paper_percent": paper,
            "one_way_percent": round(100 / (1 + iteration_s / (4 * RESNET18 * 8 / MBIT_S / 1e6)), 1),
            "ours_every_step_percent": round(100 * each["waited_s"] / each["seconds"], 1),
            "ours_diloco_32_int4_percent": round(100 * seldom["waited_s"] / seldom["seconds"], 1),
        }
        say(
            f"figure 3, {device}: paper {paper} %; {row['one_way_percent']} % by the link alone, ours every step {row['ours_every_step_percent']} %, "
            f"DiLoCo with H = 32, int4, overlapped {row['ours_diloco_32_int4_percent']} %"
        )
        rows.append(row)
    return rows


def table_7(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Communication time and speed by model and policy."""
    rows = []
    for model, (parameters, iteration_s, speed, reductions) in list(TABLE_7.items())[: 1 if quick else None]:
        found = {}
        for name, (sync, every) in POLICIES.items():
            compression = "int4" if name.endswith("int4") else "none"
            found[name] = _run(parameters, iteration_s, ITERATIONS, sync=sync, every=every, compression=compression)
        exchange_s = found["waiting"]["waited_s"] / ITERATIONS
        for name, (_, every) in POLICIES.items():
            own = found[name]
            row = {
                "model": model,
                "policy": name,
                "communication_s": round(exchange_s * -(-ITERATIONS // every), 3),
                "paper_reduction_percent": reductions.get(name),
                "paper_speed": speed if name in reductions and every == 8 else None,
                "reduction_percent": round(100 * (1 - 1 / every), 1),
                **own,
                "speed_over_waiting": round(found["waiting"]["seconds"] / own["seconds"], 3),
                "speed_over_asgd": round(found["asgd"]["seconds"] / own["seconds"], 3),
                "waited_reduction_percent": round(100 * (1 - own["waited_s"] / found["waiting"]["waited_s"]), 1),
            }
            say(
                f"table 7, {model:7} {name:14} waits {own['waited_s']:7.2f} s of {own['seconds']:7.2f} s: -{row['waited_reduction_percent']} % "
                f"(paper -{row['paper_reduction_percent']} %), speed {row['speed_over_waiting']} × waiting, {row['speed_over_asgd']} × asgd"
            )
            rows.append(row)
    return rows
