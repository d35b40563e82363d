"""Placement of models on devices compared with its baselines: `python -m benchmarks.placement`.

**Iteration**: seconds of one iteration with a single batch, replayed by the schedule simulator for every method; the proved
bound, the gap, the solver's time. Random branching and chain-like graphs (see `benchmarks.graphs`) on three unequal devices, with
tensors whose transfers take about a tenth of the operators' time (light) and half of it (heavy). Pesto and NetSplit are
solved as published, that is with 2n groups; m-ETF and m-SCT as published, too (one pass, mean link), and in addition with both
passes and true links (`improved`). Plans that do not fit the devices' memory are reported and not compared.

**Published**: NetSplit's own program with every operator separate instead of 2n groups: time of its optimum and of its replay.

**Throughput**: seconds per micro-batch of the busiest device or link, 1F1B with 8 micro-batches.

**Models**: generated graphs after NetSplit's table 6-3 on the topology of table 6-2; times are assumed, see `benchmarks.graphs`.

**Recompute**: pipelines of the same models with activations kept and recomputed: seconds per micro-batch and the memory needed.

**Public** (with `--peers FOLDER`, a checkout of the code of "Efficient Algorithms for Device Placement of DNN Graph Operators"):
its workloads, with and without a proof, beside its own dynamic program; see `benchmarks.placement_peers`. CPU seconds are those
of `place` with all baselines.

**Never worse**: random instances; each baseline is run and replayed separately, and must not be better than the plan.
`violations` counts baselines that are, and proofs that a peer contradicts. It has to be 0, and the process ends with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import environment, write
from benchmarks.graphs import THESIS, branching, chain, thesis_model, three_devices, three_gpus
from benchmarks.placement_peers import placed_beside, public_tasks
from ephemeron.errors import PlanInfeasible
from ephemeron.partition import Graph, PlacementPlan, Schedule, SearchBudget, Topology, place, replay
from ephemeron.partition.costs.table import Costs, costs_of
from ephemeron.partition.placement.baselines import even_split, m_etf, m_sct, m_topo, netsplit, pesto
from ephemeron.partition.placement.milp_model import iteration_program

PARTS = ("iteration", "published", "throughput", "models", "recompute", "never_worse", "public")
PEERS = ("m-TOPO", "m-ETF", "m-SCT", "Pesto")
IMPROVED = (*PEERS, "m-ETF, both passes and true links", "m-SCT, both passes and true links")
PIPELINED = Schedule(kind="1f1b", micro_batches=8)
HEAVY = {"light": 0.1, "heavy": 0.5}
GOALS = {
    "gap, branching, 60 nodes, light": 0.05,
    "gap, branching, 200 nodes, light": 0.15,
    "gap, chains": 0.01,
    "gap, throughput, 1000 nodes": 0.01,
    "shorter than the best of m-TOPO, m-ETF, m-SCT, Pesto on branching graphs": 0.15,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--nodes", nargs="+", type=int, default=[60, 200, 1000])
    parser.add_argument("--seeds", type=int, default=3, help="graphs of each kind and size")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds of each placement")
    parser.add_argument("--workers", type=int, default=2, help="threads of CP-SAT")
    parser.add_argument("--instances", type=int, default=500, help="for never_worse")
    parser.add_argument("--jobs", type=int, default=1, help="placements at once; give each --workers cores")
    parser.add_argument("--peers", type=Path, help="checkout with workloads and program of the part `public`")
    arguments = parser.parse_args()
    budget = SearchBudget(time_limit_s=arguments.limit_s, workers=arguments.workers)
    begun_s = time.monotonic()
    rows = list(_measured(list(_tasks(arguments)), budget, arguments.instances, arguments.jobs))
    result = {
        **environment(),
        "benchmark": "placement",
        "limit_s": arguments.limit_s,
        "workers": arguments.workers,
        "jobs": arguments.jobs,
        "goals": GOALS,
        "rows": rows,
        "medians": medians(rows),
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    if arguments.json:
        write(result)
    else:
        show(result)
    if any(row.get("violations") for row in rows):
        sys.exit(1)


def _tasks(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Parts and their graphs, in the order of the parts."""
    for part in arguments.parts:
        if part in ("iteration", "throughput", "published"):
            for setting in _settings(arguments.nodes, arguments.seeds):
                if part != "published" or (setting[1] <= 200 and setting[3] == "light"):
                    yield part, setting
        elif part == "models":
            yield from ((part, (name, objective)) for name in THESIS for objective in ("iteration", "throughput"))
        elif part == "recompute":
            yield from ((part, name) for name in THESIS)
        elif part == "public":
            yield from ((part, task) for task in public_tasks(arguments.peers))
        else:
            yield part, None


def _measured(tasks: list[tuple[str, Any]], budget: SearchBudget, instances: int, jobs: int) -> Iterator[dict[str, Any]]:
    measure = partial(_measure, budget=budget, instances=instances)
    with contextlib.ExitStack() as stack:
        rows: Iterator[dict[str, Any]] = map(measure, tasks)
        if jobs > 1:
            pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
            rows = stack.enter_context(pool).map(measure, tasks)
        for row in rows:
            print({k: v for k, v in row.items() if k != "methods"}, file=sys.stderr, flush=True)
            yield row


def _measure(task: tuple[str, Any], *, budget: SearchBudget, instances: int) -> dict[str, Any]:
    part, what = task
    if part in ("iteration", "throughput"):
        kind, nodes, _, heavy = what
        row = _placed(_graph(*what), part, budget)
        return {"part": part, "kind": kind, "nodes": nodes, "tensors": heavy, **row}
    if part == "published":
        kind, nodes, _, heavy = what
        assert budget.time_limit_s is not None
        return {"part": part, "kind": kind, "nodes": nodes, **published(_graph(*what), budget.time_limit_s)}
    if part == "models":
        name, objective = what
        row = placed(thesis_model(name), three_gpus(), objective, budget)
        return {"part": part, "kind": name, "nodes": THESIS[name][0], "objective": objective, **row}
    if part == "recompute":
        return {"part": part, "kind": what, "nodes": THESIS[what][0], **recomputed(what, budget)}
    if part == "public":
        return {"part": part, **placed_beside(*what, budget)}
    return {"part": part, **never_worse(instances)}


def _settings(sizes: Sequence[int], seeds: int) -> list[tuple[str, int, int, str]]:
    return [
        (kind, nodes, seed, heavy)
        for nodes in sizes
        for kind in ("branching", "chain")
        for heavy in HEAVY
        for seed in range(seeds if nodes < 1000 else 1)
    ]


def _graph(kind: str, nodes: int, seed: int, heavy: str) -> Graph:
    return {"branching": branching, "chain": chain}[kind](nodes, seed, heavy=HEAVY[heavy])


def _placed(graph: Graph, objective: str, budget: SearchBudget) -> dict[str, Any]:
    return placed(graph, three_devices(graph), objective, budget)


def placed(graph: Graph, topology: Topology, objective: str, budget: SearchBudget) -> dict[str, Any]:
    """One placement, with the result of every method."""
    schedule = PIPELINED if objective == "throughput" else Schedule()
    try:
        plan: PlacementPlan = place(graph, topology, objective=objective, schedule=schedule, budget=budget)  # type: ignore[arg-type]
    except PlanInfeasible as e:
        return {"graph": graph.name, "refused": str(e)}
    methods: dict[str, Any] = {}
    for c in plan.candidates:
        known = methods.get(c.name)
        new = {"value_s": _rounded(c.value_s), "iteration_s": _rounded(c.iteration_s), "over_bytes": c.over_bytes}
        if known is None or _rank(new) < _rank(known):
            methods[c.name] = new

    def shorter_than(names: Sequence[str]) -> float | None:
        fits = [methods[n]["value_s"] for n in names if methods[n]["over_bytes"] == 0]
        values = [v for v in fits if v is not None]
        return round(1 - plan.value_s / min(values), 4) if values else None

    return {
        "graph": graph.name,
        "method": plan.method,
        "value_s": _rounded(plan.value_s),
        "bound_s": _rounded(plan.bound_s),
        "gap": round(plan.gap, 5),
        "iteration_s": _rounded(plan.iteration_s),
        "solver_s": round(plan.solver_s, 2),
        "shorter_than_best_peer": shorter_than(PEERS),
        "shorter_than_improved_peers": shorter_than(IMPROVED),
        "methods": methods,
    }


def _rank(method: dict[str, Any]) -> tuple[int, float]:
    value = method["value_s"]
    return method["over_bytes"], float("inf") if value is None else value


def _rounded(value: float) -> float | None:
    return None if value == float("inf") else float(f"{value:.6g}")


def published(graph: Graph, limit_s: float) -> dict[str, Any]:
    """Time of NetSplit's optimum by its own program, and of its plan in a replay."""
    topology = three_devices(graph)
    costs = costs_of(graph, topology)
    program = iteration_program(costs, costs.clusters, cuts=False)
    solution = program.program.solve(time_limit_s=limit_s, gap=1e-3)
    where = program.where(solution)
    if where is None:
        return {"graph": graph.name, "claimed_s": None}
    done = replay(graph, topology, costs.placement(where))
    claimed_s = solution.value * program.scale_s
    return {
        "graph": graph.name,
        "claimed_s": _rounded(claimed_s),
        "claimed_bound_s": _rounded(solution.bound * program.scale_s),
        "replayed_s": _rounded(done.iteration_s),
        "longer": round(done.iteration_s / claimed_s - 1, 3),
    }


def recomputed(name: str, budget: SearchBudget) -> dict[str, Any]:
    """Time and memory with and without recomputation."""
    graph, topology = thesis_model(name), three_gpus()
    row: dict[str, Any] = {"graph": graph.name}
    for label, schedule in (("kept", PIPELINED), ("again", replace(PIPELINED, recompute=True))):
        try:
            plan = place(graph, topology, schedule=schedule, budget=budget)
        except PlanInfeasible as e:
            row[label] = {"refused": str(e)}
            continue
        row[label] = {
            "value_s": _rounded(plan.value_s),
            "gap_share": round(plan.gap, 5),
            "iteration_s": _rounded(plan.iteration_s),
            "needed_gb": round(sum(plan.reserved_bytes.values()) / 1e9, 2),
            "largest_gb": round(max(plan.reserved_bytes.values()) / 1e9, 2),
            "solver_s": round(plan.solver_s, 2),
        }
    return row


def never_worse(instances: int) -> dict[str, Any]:
    """Random instances with a small search budget, half of them pipelined."""
    budget = SearchBudget(time_limit_s=None, annealing_steps=500, program_nodes=5, constraint_work=0.05)
    methods: dict[str, Callable[[Costs], list[int]]] = {
        "even split": even_split,
        "m-TOPO": m_topo,
        "m-ETF": m_etf,
        "m-SCT": m_sct,
        "m-ETF, improved": lambda costs: m_etf(costs, passes="both", true_links=True),
        "m-SCT, improved": lambda costs: m_sct(costs, passes="both", true_links=True),
        "Pesto": lambda costs: pesto(costs, node_limit=5),
        "NetSplit": lambda costs: netsplit(costs, node_limit=5),
    }
    rng = Random("never worse")
    compared, worse, refused = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0), 0
    shorter: list[float] = []
    for k in range(instances):
        make = branching if k % 4 < 2 else chain
        graph = make(rng.randint(6, 24), k, heavy=rng.choice([0.1, 0.5, 1.0]))
        topology = three_devices(graph, room=rng.choice([1.25, 2.0, 3.0]))
        objective = "iteration" if k % 2 else "throughput"
        schedule = PIPELINED if objective == "throughput" else Schedule()
        costs = costs_of(graph, topology, micro_batches=schedule.micro_batches)
        try:
            value_s = place(graph, topology, objective=objective, schedule=schedule, budget=budget).value_s  # type: ignore[arg-type]
        except PlanInfeasible:
            value_s, refused = float("inf"), refused + 1
        best = float("inf")
        for name, method in methods.items():
            done = replay(graph, topology, costs.placement(method(costs)), schedule=schedule)
            if done.fits and (objective == "iteration" or done.stages):
                compared[name] += 1
                theirs_s = done.iteration_s if objective == "iteration" else done.bottleneck_s
                worse[name] += value_s > theirs_s * (1 + 1e-12)
                best = min(best, theirs_s)
        if best < float("inf"):
            shorter.append(1 - value_s / best)
    return {
        "instances": instances,
        "refused": refused,
        "compared": compared,
        "worse": worse,
        "violations": sum(worse.values()),
        "shorter_than_best_median": round(statistics.median(shorter), 4) if shorter else None,
    }


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results by part, kind, size and tensors."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "gap" in row and row["part"] in ("iteration", "throughput"):
            groups.setdefault((row["part"], row["kind"], row["nodes"], row["tensors"]), []).append(row)
    found = []
    for (part, kind, nodes, tensors), group in groups.items():
        gains = [r["shorter_than_best_peer"] for r in group if r["shorter_than_best_peer"] is not None]
        found.append(
            {
                "part": part,
                "kind": kind,
                "nodes": nodes,
                "tensors": tensors,
                "n": len(group),
                "gap": statistics.median(r["gap"] for r in group),
                "shorter_than_best_peer": statistics.median(gains) if gains else None,
                "solver_s": statistics.median(r["solver_s"] for r in group),
            }
        )
    return found


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    table = Table("part", "graph", "value s", "bound s", "gap", "shorter than peers", "solver s", "method")
    for row in result["rows"]:
        if "gap" in row:
            gain = row["shorter_than_best_peer"]
            table.add_row(
                row["part"],
                f"{row['graph']} {row.get('tensors', row.get('objective', ''))}",
                f"{row['value_s']:.5g}",
                f"{row['bound_s']:.5g}",
                f"{row['gap']:.2%}",
                "none fits" if gain is None else f"{gain:.1%}",
                f"{row['solver_s']:.1f}",
                row["method"],
            )
        else:
            table.add_row(row["part"], str(row.get("graph", "")), *[""] * 5, str({k: v for k, v in row.items() if k != "part"}))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
