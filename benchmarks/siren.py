"""Learned schedules of functions beside grid search, the exact static plan, a bound, and EC2 clusters: figures 13 to 15 of SIREN.

    python -m benchmarks.siren [--json] [--parts oracle,13,14,15] [--steps 8000]

Everything is simulated, as in the paper's figure 13. Losses come from runs of LeNet, a convolutional network and a linear one on scikit-learn's
digits with real gradients in virtual time, under HSP. Times and costs are those of the performance model for an epoch of MNIST's size: 60,000
samples in as many iterations as the digits have, with the CPU time per sample that is measured on this machine, on AWS Lambda with S3 at the
built-in prices. Part `oracle` compares the environment with simulated runs whose functions change with each epoch.

EC2 clusters have one worker in each instance at the paper's prices (0.1, 0.2 and 0.4 USD an hour), all its vCPUs at work without loss, and
the time of a reduction over its network; they are there when the training begins. Their losses follow the same curve.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import environment, write
from benchmarks.siren_oracle import against_simulator
from ephemeron.errors import PlanInfeasible
from ephemeron.training.job import ComputeModel, DataSpec, EarlyStopping, Job, Simulation, Target
from ephemeron.training.planner.model.builtin import builtin_platform
from ephemeron.training.planner.model.profile import Profile, Workload
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren.baselines import StaticPlan, grid_search, outcome_of, static_seconds
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, Noise
from ephemeron.tuning.siren.fitting import MeasuredRun, measured_run, world_sizes
from ephemeron.tuning.siren.learning import chooser, learn
from ephemeron.tuning.siren.loss_curve import LossCurve, fit_curve
from ephemeron.tuning.siren.policy import SavedPolicy

MODELS: dict[str, tuple[str, float, float]] = {
    "digits": ("Adam", 0.001, 0.3), "lenet": ("SGD", 0.05, 0.5), "cnn": ("SGD", 0.05, 0.4), "linear": ("SGD", 0.1, 0.4),
}  # fmt: skip
"""By model: optimiser, learning rate, target loss. `digits`: losses of the network of `examples/digits`, times of `cnn`."""
DIGITS, BATCH, EPOCHS = 1437, 16, 15
SAMPLES = 60_000
IN_ALL = round(SAMPLES / DIGITS * BATCH)
"""Batch with which an epoch of `SAMPLES` has as many iterations as one of the digits."""
MOST, AGGREGATORS = 8, 2
QUOTAS = tuple(range(512, 3009, 128))
"""SIREN's functions have up to 3 GB."""
INSTANCES = {"m4.large": (2, 0.1, 56.0), "m4.xlarge": (4, 0.2, 94.0), "m4.2xlarge": (8, 0.4, 125.0)}
"""vCPUs, USD an hour (survey 2.3), and MB/s of its network (450, 750 and 1,000 Mbit/s)."""
CLUSTERS = (2, 4, 6, 8)
PAPER: dict[str, dict[str, float]] = {
    "13": {"less_time_than_grid": 0.36, "at_budget_usd": 300, "learned_after_iterations": 200},
    "14": {"learned_after_iterations": 150},
    "15": {"lenet": 0.40, "cnn": 0.394, "linear": 0.443},
}
GOALS = {"less_time_than_grid": 0.40, "over_bound": 0.05}
BUDGETS = (1.1, 1.4, 2.0, 3.0)
"""Budgets as multiples of the least cost of a static configuration."""


def job_of(model: str, **changes: Any) -> Job:
    """A model on the digits."""
    optimizer, rate, target = MODELS[model]
    digits = Path(__file__).parents[1] / "examples" / "digits"
    own = model == "digits"
    return Job(
        name=model, model=Target(target="model:build" if own else f"siren_models:{model}"), optimizer=Target(target=optimizer, options={"lr": rate}),
        data=DataSpec(sampling="global"), epochs=EPOCHS, code=(digits if own else Path(__file__).parent,),
        early_stopping=EarlyStopping(threshold=0.9 * target), simulation=Simulation(compute=ComputeModel(a=10.0, b=2.0, m=0.0)), **changes,
    )  # fmt: skip


def cpu_s_per_sample(model: str) -> tuple[float, float]:
    """CPU seconds of a training step per sample, on one thread, and MB of the parameters."""
    import torch

    from benchmarks import siren_models

    torch.set_num_threads(1)
    net = getattr(siren_models, model)()
    x, y = torch.rand(64, 64), torch.randint(0, 10, (64,))
    taken = []
    for _ in range(12):
        began = time.thread_time()
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        taken.append(time.thread_time() - began)
    return float(np.quantile(taken, 0.25)) / 64, sum(p.numel() for p in net.parameters()) * 4 / 1e6


def stored_curve(model: str, file: Path) -> tuple[LossCurve, dict[str, Any]]:
    """The loss curve of a model from losses of an earlier run of this benchmark."""
    raw = json.loads(file.read_text())
    raw = raw.get("losses", raw)[model]
    runs = {int(w): losses for w, losses in raw["losses"].items()}
    inside, outside = world_sizes(1, MOST)
    curve = fit_curve(
        {w: runs[w] for w in inside}, start=float(np.mean(list(raw["start"].values()))), samples=DIGITS, batch_size=BATCH,
        held_out={w: runs[w] for w in outside},
    )  # fmt: skip
    said = {
        "losses": raw["losses"],
        "error": round(curve.error, 3),
        "epochs_error": round(curve.epochs_error, 3),
        "scatter": round(curve.scatter, 3),
    }
    return curve, said


def curve_of(model: str) -> tuple[LossCurve, dict[str, Any], dict[int, MeasuredRun]]:
    """The loss curve of a model, and the runs that it is of."""
    inside, outside = world_sizes(1, MOST)
    runs = {}
    for w in (*inside, *outside):
        runs[w] = measured_run(
            job_of(model), workers=w, memory_mb=1792, sync="hsp", batch_size=BATCH, aggregators=AGGREGATORS
        )
        click.echo(f"{model}, {w} functions: {[round(x, 3) for x in runs[w].losses]}", err=True)
    curve = fit_curve(
        {w: runs[w].losses for w in inside}, start=float(np.mean([r.start for r in runs.values()])), samples=DIGITS,
        batch_size=BATCH, held_out={w: runs[w].losses for w in outside},
    )  # fmt: skip
    said = {
        "losses": {str(w): [round(x, 4) for x in r.losses] for w, r in runs.items()}, "error": round(curve.error, 3),
        "epochs_error": round(curve.epochs_error, 3), "scatter": round(curve.scatter, 3),
    }  # fmt: skip
    return curve, said, runs


def spec_of(model: str, curve: LossCurve, compute: float = 1.0) -> tuple[EnvironmentSpec, dict[str, float]]:
    """The environment of a model under a budget that never binds."""
    cpu_s, model_mb = cpu_s_per_sample("cnn" if model == "digits" else model)
    workload = Workload(
        name=model, model_mb=model_mb, a=compute * cpu_s * 1769, b=2.0, m=0.0, memory_slope_mb=0.1, memory_base_mb=420.0, dataset_mb=47.0,
        samples=SAMPLES, test_samples=10_000, vcpus=1.0,
    )  # fmt: skip
    found = EnvironmentSpec(
        job=model, profile=Profile(workload=workload, platform=builtin_platform("aws-lambda-s3")), curve=curve,
        target_loss=MODELS[model][2], budget_usd=1e6, epochs=4 * EPOCHS, batch_size=IN_ALL, aggregators=AGGREGATORS,
        bounds=ActionBounds(most_workers=MOST, quotas_mb=QUOTAS), noise=Noise(loss_spread=curve.scatter), reference_s=1.0,
    )  # fmt: skip
    return found, {"cpu_s_per_sample": round(cpu_s, 6), "model_mb": round(model_mb, 3)}


def cheapest_usd(spec: EnvironmentSpec) -> float:
    """Least mean cost of a static configuration that reaches the target."""
    env = Environment(spec)
    return min(usd for s, usd in (static_seconds(env, e) for e in env.table.values()) if math.isfinite(s))


def compared(spec: EnvironmentSpec, steps: int) -> tuple[dict[str, Any], SavedPolicy] | None:
    """One budget: static configurations, the dynamic programme, its bound, and a learned schedule."""
    try:
        policy, _ = learn(spec, steps=steps)
    except PlanInfeasible:
        return None
    c, grid = policy.comparison, grid_search(spec)
    row: dict[str, Any] = {
        "budget_usd": round(spec.budget_usd, 5), "static": [c.static_workers, c.static_memory_mb], "static_s": round(c.static_s, 1),
        "grid": _static(grid), "bound_s": round(c.bound_s, 1), "programme_s": round(c.programme_s, 1),
        "programme_reached": c.programme_reached, "learned_s": round(c.learned_s, 1), "learned_reached": c.learned_reached,
        "used": "learned" if c.learned_is_better else "static", "used_s": round(c.learned_s if c.learned_is_better else c.static_s, 1),
        "training_s": policy.training.seconds, "rewards": list(policy.training.rewards),
    }  # fmt: skip
    row["used_over_bound"] = round(row["used_s"] / c.bound_s - 1, 4)
    if grid is not None:
        row |= {
            "less_time_than_grid": round(1 - row["used_s"] / grid.outcome.seconds, 4),
            "bound_less_than_grid": round(1 - c.bound_s / grid.outcome.seconds, 4),
        }
    return row, policy


def _static(found: StaticPlan | None) -> Any:
    return (
        None
        if found is None
        else [found.workers, found.memory_mb, round(found.outcome.seconds, 1), round(found.outcome.cost_usd, 5)]
    )


def epochs_of(policy: SavedPolicy) -> list[list[float]]:
    """Functions, memory and loss of each epoch of a mean run by a policy."""
    env = Environment(policy.environment, noisy=False)
    choose, over = chooser(policy.environment, policy.network), False
    while not over:
        over = env.advance(choose(env))[2]
    return [[e.workers, e.memory_mb, round(e.loss, 4)] for e in env.history]


def figure_13(spec: EnvironmentSpec, steps: int, factors: list[float]) -> dict[str, Any]:
    """Time against budget, total reward of static numbers of functions, functions by epoch, and the learning curve."""
    least, rows, policies = cheapest_usd(spec), [], []
    for factor in factors:
        found = compared(dataclasses.replace(spec, budget_usd=factor * least), steps)
        if found is not None:
            rows.append({"budget_factor": factor, **found[0]})
            policies.append(found[1])
            click.echo(f"13: {rows[-1]}", err=True)
    rewards = {}
    for policy in policies:
        described = policy.environment
        env, sums = Environment(described, noisy=False), {}
        for w in (1, 2, 4, 8, 16):
            cost = env.chosen(w, 1792)
            found_s = outcome_of(described, lambda _, cost=cost: cost)  # type: ignore[misc]
            mean_s = float(np.mean(found_s.runs))
            sums[str(w)] = round(described.bonus * (2 * found_s.reached - 1) - mean_s / described.reference_s, 3)
        rewards[f"{described.budget_usd:.5f}"] = sums
    best = max(rows, key=lambda r: r.get("less_time_than_grid", -1.0), default=None)
    return {
        "paper": PAPER["13"], "ours": rows, "static_rewards": rewards, "best_less_time_than_grid": best and best.get("less_time_than_grid"),
        "functions_by_epoch": {f"{p.environment.budget_usd:.5f}": epochs_of(p) for p in policies},
    }  # fmt: skip


def cluster(spec: EnvironmentSpec, instance: str, count: int) -> tuple[float, float] | None:
    """Seconds and US dollars of a training on a cluster; None: the target is not reached.

    A worker in each instance has a batch as a function has; a reduction moves the parameters there and back over every network.
    """
    vcpus, hour_usd, mb_s = INSTANCES[instance]
    w = spec.profile.workload
    iterations = math.ceil(w.samples / (spec.batch_size * count))
    compute = float(w.compute_s(spec.batch_size, 1769.0 * vcpus))
    exchange = 2 * w.model_mb / mb_s * (count - 1) / count * 2 if count > 1 else 0.0
    wanted = spec.curve.epochs_to(spec.target_loss, count, spec.epochs)
    if not math.isfinite(wanted):
        return None
    epochs = math.ceil(wanted - 1e-9)
    seconds = epochs * (
        iterations * (compute + exchange) + float(w.evaluation_s(w.test_samples / count, 1769.0 * vcpus))
    )
    return seconds, seconds * hour_usd * count / 3600


def figure_14(spec: EnvironmentSpec, steps: int) -> dict[str, Any]:
    """LeNet on twelve clusters and by learned schedules at the clusters' costs and above."""
    clusters = {}
    for instance, count in itertools.product(INSTANCES, CLUSTERS):
        found = cluster(spec, instance, count)
        clusters[f"{instance} x {count}"] = None if found is None else [round(found[0], 1), round(found[1], 5)]
    least, ours, by_epoch = cheapest_usd(spec), [], {}
    for factor in (1.2, 2.0):
        row = compared(dataclasses.replace(spec, budget_usd=factor * least), steps)
        if row is not None:
            ours.append({"budget_factor": factor, **row[0]})
            by_epoch[f"{row[1].environment.budget_usd:.5f}"] = epochs_of(row[1])
            click.echo(f"14: {ours[-1]}", err=True)
    return {"paper": PAPER["14"], "clusters": clusters, "ours": ours, "functions_by_epoch": by_epoch}


def figure_15(specs: dict[str, EnvironmentSpec], steps: int) -> dict[str, Any]:
    """Each model on eight m4.2xlarge, and by a learned schedule for the same money, where that is enough for any."""
    found: dict[str, Any] = {}
    for model, spec in specs.items():
        on = cluster(spec, "m4.2xlarge", 8)
        assert on is not None
        least = cheapest_usd(spec)
        row = None if least > on[1] else compared(dataclasses.replace(spec, budget_usd=on[1]), steps)
        found[model] = {
            "paper_less_time": PAPER["15"].get(model), "ec2_s": round(on[0], 1), "ec2_usd": round(on[1], 5),
            "least_usd_of_functions": round(least, 5), "ours": row and row[0],
            "less_time": row and round(1 - row[0]["used_s"] / on[0], 4),
        }  # fmt: skip
        click.echo(f"15: {model} {found[model]}", err=True)
    return found


@click.command()
@click.option("--parts", default="oracle,13,14,15", show_default=True)
@click.option("--steps", default=8_000, show_default=True, help="Epochs of PPO of each policy.")
@click.option("--models", default="lenet,cnn,linear", show_default=True)
@click.option(
    "--losses",
    type=click.Path(path_type=Path),
    help="Losses of an earlier run, instead of simulating (without oracle).",
)
@click.option(
    "--budgets", default=",".join(map(str, BUDGETS)), show_default=True, help="Multiples of the least static cost."
)
@click.option("--compute", default=1.0, show_default=True, help="Multiple of the CPU time that is measured.")
@click.option("--json", "as_json", is_flag=True)
def main(parts: str, steps: int, models: str, losses: Path | None, budgets: str, compute: float, as_json: bool) -> None:
    """Compares learned schedules with static ones, a bound and clusters."""
    wanted, factors = parts.split(","), [float(x) for x in budgets.split(",")]
    out: dict[str, Any] = {
        "environment": environment(), "goals": GOALS, "simulated": True, "steps": steps, "compute": compute, "samples_of_an_epoch": SAMPLES, "models": {},
    }  # fmt: skip
    specs: dict[str, EnvironmentSpec] = {}
    for model in models.split(","):
        if losses is not None:
            curve, said = stored_curve(model, losses)
        else:
            curve, said, runs = curve_of(model)
        specs[model], costs = spec_of(model, curve, compute)
        if "oracle" in wanted and losses is None and "oracle" not in out:
            out["oracle"] = against_simulator(
                job_of(model), curve, runs, model_mb=costs["model_mb"], batch=BATCH, aggregators=AGGREGATORS
            )
            click.echo(f"oracle: {out['oracle']}", err=True)
        out["models"][model] = {**said, **costs, "target_loss": MODELS[model][2]}
    if "13" in wanted:
        out["13"] = figure_13(specs.get("cnn") or next(iter(specs.values())), steps, factors)
    if "14" in wanted:
        out["14"] = figure_14(specs.get("lenet") or next(iter(specs.values())), steps)
    if "15" in wanted:
        out["15"] = figure_15(specs, steps)
    if as_json:
        write(out)
        return
    for row in out.get("13", {}).get("ours", []):
        click.echo(
            f"13 budget {row['budget_usd']:9.4f} grid {row['grid'] and row['grid'][2]} s static {row['static_s']} s bound {row['bound_s']} s "
            f"learned {row['learned_s']} s used {row['used']}: {row.get('less_time_than_grid', 0):.1%} less than the grid (paper: 36 %)"
        )
    for name, found in out.get("14", {}).get("clusters", {}).items():
        click.echo(f"14 {name:14} {found}")
    for row in out.get("14", {}).get("ours", []):
        click.echo(f"14 functions      {[row['used_s'], row['budget_usd']]} at most")
    for model, row in out.get("15", {}).items():
        click.echo(
            f"15 {model:7} less time than m4.2xlarge x 8 for the same money: {row['less_time']} (paper: {row['paper_less_time']})"
        )


if __name__ == "__main__":
    main()
