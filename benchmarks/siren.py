"""Learned schedules of functions beside grid search, the exact static plan, a bound, and EC2 clusters: figures 13 to 15 of SIREN.

    python -m benchmarks.siren [--json] [--parts oracle,13,14,15] [--steps 2000] [--models lenet] [--into results.json]

Everything is simulated, as in the paper's figure 13. Losses come from runs of LeNet, a convolutional network and a linear one on scikit-learn's
digits with real gradients in virtual time, under HSP. Times and costs are those of the performance model for an epoch of MNIST's size: 60,000
samples in as many iterations as the digits have, with the CPU time per sample that is measured on this machine, on AWS Lambda with S3 at the
built-in prices. Part `oracle` compares the environment with simulated runs whose functions change with each epoch.

EC2 clusters have one worker in each instance at the paper's prices (0.1, 0.2 and 0.4 USD an hour), all its vCPUs at work without loss, and
the time of a reduction over its network; they are there when the training begins. Their losses follow the same curve. Figure 15 has them
with one thread at work, and with start and least charge, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import environment, write
from benchmarks.siren_oracle import against_simulator
from ephemeron.errors import PlanInfeasible
from ephemeron.functions.base import Limits
from ephemeron.training.job import ComputeModel, DataSpec, EarlyStopping, Job, Simulation, Target
from ephemeron.training.planner.model.profile import Profile, Workload
from ephemeron.training.profiling.simulated import world_profile
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren.baselines import Chooser, StaticPlan, grid_search, outcome_of, static_plan, static_seconds
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, Noise
from ephemeron.tuning.siren.epoch_model import EpochModel, MeasuredEpochs
from ephemeron.tuning.siren.fitting import measured_run, world_sizes
from ephemeron.tuning.siren.learning import chooser, compare, learn
from ephemeron.tuning.siren.loss_curve import fit_curve
from ephemeron.tuning.siren.policy import SavedPolicy
from ephemeron.tuning.siren.schedules import asked, listed, programmed

MODELS: dict[str, tuple[float, float]] = {"lenet": (0.1, 0.12), "cnn": (0.05, 0.12), "linear": (0.01, 0.17)}
"""By model: learning rate of SGD, which does not depend on the number of functions, and target loss."""
DIGITS, TEST, BATCH, EPOCHS = 1437, 360, 16, 20
SAMPLES = 60_000
MOST, AGGREGATORS = 8, 2
QUOTAS = (512, 768, 1024, 1280, 1536, 1792, 2048)
"""SIREN's functions have up to 3 GB; these models compute in one thread, so 2 GB bring all that there is."""
MEMORY_MB, MB_PER_VCPU = 1792, 1769
INSTANCES = {"m4.large": (2, 0.1, 56.0), "m4.xlarge": (4, 0.2, 94.0), "m4.2xlarge": (8, 0.4, 125.0)}
"""vCPUs, USD an hour (survey 2.3), and MB/s of its network (450, 750 and 1,000 Mbit/s)."""
CLUSTERS = (2, 4, 6, 8)
PAPER: dict[str, dict[str, float]] = {
    "13": {"less_time_than_grid": 0.36, "at_budget_usd": 300, "learned_after_iterations": 200},
    "14": {"learned_after_iterations": 150},
    "15": {"lenet": 0.40, "cnn": 0.394, "linear": 0.443},
}
GOALS = {"less_time_than_grid": 0.40, "over_bound": 0.05}
BUDGETS = (3.0, 6.0, 12.0)
"""Budgets as multiples of the least cost of a static configuration."""
AGAIN = tuple(range(5000, 5400))
"""Noisy runs by which what is used is compared with the grid: neither chosen nor judged by them before."""
START_S, LEAST_CHARGE_S = 60.0, 60.0
"""Seconds until the instances of a cluster are there, a low estimate, and seconds that EC2 charges at least (Linux, since 2017)."""


def job_of(model: str, cpu_s: float, **changes: Any) -> Job:
    """A model on the digits, whose iterations take the CPU time of `SAMPLES / DIGITS` times as many samples.

    Args:
        model: its name.
        cpu_s: CPU seconds of a sample.
        changes: of the job.
    """
    rate, target = MODELS[model]
    values: dict[str, Any] = {
        "epochs": EPOCHS,
        "early_stopping": EarlyStopping(threshold=target),
        "code": (Path(__file__).parent,),
        "simulation": Simulation(compute=ComputeModel(a=cpu_s * SAMPLES / DIGITS * MB_PER_VCPU, b=2.0, m=0.0)),
    }
    return Job(
        name=model,
        model=Target(target=f"siren_models:{model}"),
        optimizer=Target(target="SGD", options={"lr": rate}),
        data=DataSpec(sampling="global"),
        **(values | changes),
    )


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


def runs_of(model: str) -> dict[str, Any]:
    """Simulated runs with real gradients and fixed functions, as they are stored."""
    cpu_s, model_mb = cpu_s_per_sample(model)
    job = job_of(model, cpu_s, early_stopping=EarlyStopping(threshold=0.9 * MODELS[model][1]))
    found: dict[str, Any] = {"cpu_s_per_sample": cpu_s, "model_mb": model_mb, "runs": {}}
    for w in itertools.chain(*world_sizes(1, MOST)):
        run = measured_run(job, workers=w, memory_mb=MEMORY_MB, sync="hsp", batch_size=BATCH, aggregators=AGGREGATORS)
        click.echo(f"{model}, {w} functions: {[round(x, 3) for x in run.losses]}", err=True)
        found["runs"][str(w)] = {
            "losses": [round(x, 5) for x in run.losses],
            "start": round(run.start, 5),
            "seconds": round(run.epochs.seconds, 4),
            "usd": run.epochs.cost_usd,
        }
    return found


def spec_of(model: str, raw: dict[str, Any]) -> EnvironmentSpec:
    """The environment of a model under a budget that never binds.

    Args:
        model: its name.
        raw: see `runs_of`.
    """
    runs = {int(w): run for w, run in raw["runs"].items()}
    inside, outside = world_sizes(1, MOST)
    curve = fit_curve(
        {w: runs[w]["losses"] for w in inside},
        start=float(np.mean([r["start"] for r in runs.values()])),
        samples=DIGITS,
        batch_size=BATCH,
        held_out={w: runs[w]["losses"] for w in outside},
    )
    job = job_of(model, raw["cpu_s_per_sample"])
    compute = job.simulation.compute
    assert isinstance(compute, ComputeModel)
    workload = Workload(
        name=model,
        model_mb=raw["model_mb"],
        a=compute.a,
        b=compute.b,
        m=compute.m,
        memory_slope_mb=0.1 * SAMPLES / DIGITS,
        memory_base_mb=420.0,
        dataset_mb=0.4,
        samples=DIGITS,
        test_samples=TEST,
        vcpus=1.0,
    )
    profile = Profile(workload=workload, platform=world_profile(job.simulation, Limits()))
    bounds = ActionBounds(most_workers=MOST, quotas_mb=QUOTAS)
    epochs = {w: MeasuredEpochs(workers=w, memory_mb=MEMORY_MB, seconds=r["seconds"], cost_usd=r["usd"]) for w, r in runs.items()}
    plain = EpochModel(profile, bounds, batch_size=BATCH, aggregators=AGGREGATORS)
    seconds, cost = plain.corrected([epochs[w] for w in inside], [epochs[w] for w in outside]).corrections
    return EnvironmentSpec(
        job=model,
        profile=profile,
        curve=curve,
        target_loss=MODELS[model][1],
        budget_usd=1e6,
        epochs=2 * EPOCHS,
        batch_size=BATCH,
        aggregators=AGGREGATORS,
        bounds=bounds,
        noise=Noise(loss_spread=curve.scatter),
        reference_s=1.0,
        seconds=seconds,
        cost=cost,
    )


def said_of(spec: EnvironmentSpec) -> dict[str, Any]:
    """Errors of an environment in a run that was not fitted."""
    c = spec.curve
    return {
        "target_loss": spec.target_loss,
        "loss_error": round(c.error, 3),
        "epochs_error": round(c.epochs_error, 3),
        "scatter": round(c.scatter, 3),
        "epoch_s_error": round(spec.seconds.error, 4),
        "epoch_usd_error": round(spec.cost.error, 4),
        "held_out_functions": list(c.held_out),
        "speed": round(c.speed, 3),
        "spread": round(c.spread, 3),
    }


def cheapest_usd(spec: EnvironmentSpec) -> float:
    """Least mean cost of a static configuration that reaches the target."""
    env = Environment(spec)
    return min(usd for s, usd in (static_seconds(env, e) for e in env.table.values()) if math.isfinite(s))


def compared(spec: EnvironmentSpec, steps: int | None) -> tuple[dict[str, Any], SavedPolicy | None] | None:
    """One budget: static configurations, bounds, the dynamic programme's schedules, and a learned one.

    Args:
        spec: with the budget.
        steps: epochs of PPO; None: no policy is trained.

    Returns:
        None: no static configuration reaches the target within the budget.
    """
    began = time.process_time()
    try:
        static = static_plan(spec)
    except PlanInfeasible:
        return None
    policy: SavedPolicy | None = None
    if steps is None:
        spec = dataclasses.replace(spec, reference_s=static.outcome.seconds)
        programme = programmed(spec, static)
        c, table, fixed = compare(spec, None, static, programme), programme.table, programme.fixed
    else:
        policy, _ = learn(spec, steps=steps)
        c, table, fixed = policy.comparison, policy.table, policy.fixed
    grid = grid_search(spec)
    choose: dict[str, Chooser] = {
        "static": _always(c.static_workers, c.static_memory_mb),
        "programme": asked(table),
        "list": listed(spec, fixed),
    }
    if policy is not None:
        choose["network"] = chooser(spec, policy.network)
    used = outcome_of(spec, choose[c.used.name], AGAIN)
    again_s = static.outcome.seconds
    row: dict[str, Any] = {
        "budget_usd": round(spec.budget_usd, 5),
        "static": [c.static_workers, c.static_memory_mb],
        "static_s": round(static.outcome.seconds, 1),
        "grid": _static(grid),
        "bound_s": round(c.bound_s, 1),
        "least_s": round(c.least_s, 1),
        "used": c.used.name,
        "schedules": {x.name: [round(x.seconds, 1), round(x.reached, 4)] for x in c.candidates},
        "list": [list(x) for x in fixed],
        "used_s": round(used.counted_s(again_s), 1),
        "used_reached": round(used.reached, 4),
        "used_usd": round(used.cost_usd, 5),
        "used_over_bound": round(used.counted_s(again_s) / c.bound_s - 1, 4),
        "used_over_least": round(used.counted_s(again_s) / c.least_s - 1, 4),
    }
    if policy is not None:
        row |= {"imitated": policy.training.imitated, "rewards": list(policy.training.rewards)}
    if grid is not None:
        grid_s = outcome_of(spec, _always(grid.workers, grid.memory_mb), AGAIN).counted_s(again_s)
        row |= {
            "grid_again_s": round(grid_s, 1),
            "less_time_than_grid": round(1 - used.counted_s(again_s) / grid_s, 4),
            "bound_less_than_grid": round(1 - c.bound_s / grid_s, 4),
            "least_less_than_grid": round(1 - c.least_s / grid_s, 4),
        }
    return row | {"cpu_s": round(time.process_time() - began, 1)}, policy


def _always(workers: int, memory_mb: int) -> Chooser:
    """The choices of a static configuration."""
    return lambda env: env.table[workers, memory_mb]


def _static(found: StaticPlan | None) -> Any:
    return None if found is None else [found.workers, found.memory_mb, round(found.outcome.seconds, 1), round(found.outcome.cost_usd, 5)]


def epochs_of(policy: SavedPolicy) -> list[list[float]]:
    """Functions, memory and loss of each epoch of a mean run by the dynamic programme's schedule, which the policy imitates."""
    env = Environment(policy.environment, noisy=False)
    choose, over = asked(policy.table), False
    while not over:
        over = env.advance(choose(env))[2]
    return [[e.workers, e.memory_mb, round(e.loss, 4)] for e in env.history]


class Figures:
    """The paper's figures, with the policy of each model for its largest budget kept for the comparison with the simulator.

    Args:
        specs: environments, by model.
        steps: epochs of PPO of each policy.
        factors: budgets of figures 13 and 14 as multiples of the least cost of a static configuration.
        trained: those of them for which policies are trained.
    """

    def __init__(self, specs: dict[str, EnvironmentSpec], steps: int, factors: list[float], trained: list[float]) -> None:
        self.specs, self.steps, self.factors, self.trained = specs, steps, factors, trained
        self._known: dict[tuple[str, float], tuple[dict[str, Any], SavedPolicy | None] | None] = {}
        self.policies: dict[str, SavedPolicy] = {}

    def _compared(self, model: str, budget_usd: float, *, trained: bool) -> tuple[dict[str, Any], SavedPolicy | None] | None:
        key = (model, budget_usd)
        if key in self._known:
            return self._known[key]
        spec = dataclasses.replace(self.specs[model], budget_usd=budget_usd)
        self._known[key] = found = compared(spec, self.steps if trained else None)
        if found is not None and found[1] is not None and (model not in self.policies or found[0]["used"] != "static"):
            self.policies[model] = found[1]
        click.echo(f"{model} {budget_usd:.5f}: {found and found[0]}", err=True)
        return found

    def figure_13(self, model: str) -> dict[str, Any]:
        """Time against budget, total reward of static numbers of functions, functions by epoch, and the learning curve."""
        least, rows, rewards, by_epoch = cheapest_usd(self.specs[model]), [], {}, {}
        for factor in self.factors:
            found = self._compared(model, factor * least, trained=factor in self.trained)
            if found is None:
                continue
            row, policy = found
            rows.append({"budget_factor": factor, **row})
            if policy is None:
                continue
            described, budget = policy.environment, f"{policy.environment.budget_usd:.5f}"
            rewards[budget] = static_rewards(described)
            by_epoch[budget] = epochs_of(policy)
        best = max(rows, key=lambda r: r.get("less_time_than_grid", -1.0), default=None)
        return {
            "ours": rows,
            "static_rewards": rewards,
            "best_less_time_than_grid": best and best.get("less_time_than_grid"),
            "functions_by_epoch": by_epoch,
        }

    def figure_14(self, model: str) -> dict[str, Any]:
        """A model on twelve clusters, and by learned schedules within multiples of the least cost of functions."""
        spec, clusters = self.specs[model], {}
        for instance, count in itertools.product(INSTANCES, CLUSTERS):
            found = cluster(spec, instance, count)
            clusters[f"{instance} x {count}"] = None if found is None else [round(found[0], 1), round(found[1], 5)]
        least, ours, by_epoch = cheapest_usd(spec), [], {}
        for factor in self.factors:
            row = self._compared(model, factor * least, trained=factor in self.trained)
            if row is not None:
                ours.append({"budget_factor": factor, **row[0]})
                if row[1] is not None:
                    by_epoch[f"{row[1].environment.budget_usd:.5f}"] = epochs_of(row[1])
        return {"paper": PAPER["14"], "model": model, "clusters": clusters, "ours": ours, "functions_by_epoch": by_epoch}

    def figure_15(self) -> dict[str, Any]:
        """Each model on eight m4.2xlarge, and by functions for the same money, where that is enough for any.

        Three ways of counting: seconds of the training with all vCPUs at work, as in the paper; with one thread at work in each worker; and
        with the start of the instances and their least charge. Functions have the dynamic programme's schedules.
        """
        found: dict[str, Any] = {}
        for model, spec in self.specs.items():
            least = cheapest_usd(spec)
            said: dict[str, Any] = {"paper_less_time": PAPER["15"].get(model), "least_usd_of_functions": round(least, 5)}
            for name, on in _counted(spec).items():
                row = None if least > on[1] else self._compared(model, on[1], trained=False)
                said[name] = {
                    "ec2_s": round(on[0], 1),
                    "ec2_usd": round(on[1], 5),
                    "ours": row and row[0],
                    "less_time": None if row is None else round(1 - row[0]["used_s"] / on[0], 4),
                }
            found[model] = said
        return found


def _counted(spec: EnvironmentSpec, instance: str = "m4.2xlarge", count: int = 8) -> dict[str, tuple[float, float]]:
    """Seconds and US dollars of a training on a cluster, by what is counted; empty: the target is not reached."""
    whole, single = cluster(spec, instance, count), cluster(spec, instance, count, vcpus=1)
    if whole is None or single is None:
        return {}
    price = INSTANCES[instance][1] * count / 3600
    return {
        "all vCPUs": whole,
        "one thread each": single,
        "one thread each, with start and least charge": (single[0] + START_S, max(LEAST_CHARGE_S, single[0]) * price),
    }


def static_rewards(spec: EnvironmentSpec) -> dict[str, float]:
    """Mean total reward of numbers of functions that do not change."""
    env, sums = Environment(spec, noisy=False), {}
    for w in sorted({2**i for i in range(6)} & set(env.workers)):
        cost = env.chosen(w, MEMORY_MB)
        found = outcome_of(spec, lambda _, cost=cost: cost)  # type: ignore[misc]
        sums[str(w)] = round(spec.bonus * (2 * found.reached - 1) - float(np.mean(found.runs)) / spec.reference_s, 3)
    return sums


def cluster(spec: EnvironmentSpec, instance: str, count: int, *, vcpus: int | None = None) -> tuple[float, float] | None:
    """Seconds and US dollars of a training on a cluster; None: the target is not reached.

    A worker in each instance has a batch as a function has; a reduction moves the parameters there and back over every network. `vcpus` of an
    instance are at work, without loss; None: all.
    """
    all_vcpus, hour_usd, mb_s = INSTANCES[instance]
    vcpus = vcpus or all_vcpus
    w = spec.profile.workload
    whole = dataclasses.replace(w, vcpus=float(vcpus))
    iterations = math.ceil(w.samples / (spec.batch_size * count))
    compute = float(whole.compute_s(spec.batch_size, MB_PER_VCPU * vcpus))
    exchange = 2 * w.model_mb / mb_s * (count - 1) / count * 2 if count > 1 else 0.0
    wanted = spec.curve.epochs_to(spec.target_loss, count, spec.epochs)
    if not math.isfinite(wanted):
        return None
    epochs = math.ceil(wanted - 1e-9)
    seconds = epochs * (iterations * (compute + exchange) + float(whole.evaluation_s(w.test_samples / count, MB_PER_VCPU * vcpus)))
    return seconds, seconds * hour_usd * count / 3600


@click.command()
@click.option("--parts", default="oracle,13,14,15", show_default=True)
@click.option("--steps", default=2_000, show_default=True, help="Epochs of PPO of each policy.")
@click.option("--models", default="lenet,cnn,linear", show_default=True)
@click.option("--losses", type=click.Path(path_type=Path), help="Results of an earlier run, whose simulated runs are used.")
@click.option("--budgets", default=",".join(map(str, BUDGETS)), show_default=True, help="Multiples of the least static cost.")
@click.option("--trained", default="6", show_default=True, help="Those of the budgets for which a policy is trained.")
@click.option("--into", type=click.Path(path_type=Path), help="Results file whose figures of these models are replaced.")
@click.option("--json", "as_json", is_flag=True)
def main(parts: str, steps: int, models: str, losses: Path | None, budgets: str, trained: str, into: Path | None, as_json: bool) -> None:
    """Compares learned schedules with static ones, a bound and clusters."""
    wanted, factors = parts.split(","), [float(x) for x in budgets.split(",")]
    stored = {} if losses is None else json.loads(losses.read_text())["simulated_runs"]
    runs = {m: stored.get(m) or runs_of(m) for m in models.split(",")}
    specs = {m: spec_of(m, raw) for m, raw in runs.items()}
    out: dict[str, Any] = {
        "environment": environment(),
        "goals": GOALS,
        "simulated": True,
        "steps": steps,
        "trained_budgets": trained,
        "samples_of_an_epoch": SAMPLES,
        "models": {m: said_of(spec) for m, spec in specs.items()},
    }
    click.echo(f"models: {out['models']}", err=True)
    figures = Figures(specs, steps, factors, [float(x) for x in trained.split(",") if x])
    out["simulated_runs"] = runs
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "13": lambda: {"paper": PAPER["13"]} | {m: figures.figure_13(m) for m in specs},
        "14": lambda: figures.figure_14("lenet"),
        "15": figures.figure_15,
        "oracle": lambda: {
            m: against_simulator(job_of(m, raw["cpu_s_per_sample"]), specs[m], figures.policies.get(m)) for m, raw in runs.items()
        },
    }
    for part, made in found.items():
        if part in wanted and (part != "14" or "lenet" in specs):
            out[part] = made()
            if into is not None:
                known = json.loads(into.read_text()) if into.exists() else {}
                into.write_text(json.dumps(_merged(known, out), indent=1) + "\n")
    if as_json:
        write(out)
    else:
        _printed(out)


def _merged(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Results with those of other models added."""
    found = known | new
    for part in ("models", "13", "15", "oracle", "simulated_runs"):
        if part in known or part in new:
            found[part] = known.get(part, {}) | new.get(part, {})
    return found


def _printed(out: dict[str, Any]) -> None:
    for model in out["models"]:
        for row in out.get("13", {}).get(model, {}).get("ours", []):
            click.echo(
                f"13 {model:6} budget {row['budget_usd']:8.5f} grid {row.get('grid_again_s')} s bound {row['bound_s']} s, of reliable schedules "
                f"{row['least_s']} s used: {row['used']}, {row['used_s']} s: {row.get('less_time_than_grid', 0):.1%} less than the grid "
                f"(paper: 36 %), {row['used_over_least']:.1%} over the bound of reliable schedules"
            )
    for name, found in out.get("14", {}).get("clusters", {}).items():
        click.echo(f"14 {name:14} {found}")
    for row in out.get("14", {}).get("ours", []):
        click.echo(f"14 functions      {[row['used_s'], row['used_usd']]}")
    for model, ways in out.get("15", {}).items():
        for name, row in ways.items():
            if isinstance(row, dict):
                ours = row["ours"] and row["ours"]["used_s"]
                click.echo(
                    f"15 {model:7} m4.2xlarge x 8, {name}: {row['ec2_s']} s for {row['ec2_usd']} USD, functions {ours} s: {row['less_time']} less "
                    f"(paper: {ways['paper_less_time']})"
                )
    for model, row in out.get("oracle", {}).items():
        click.echo(f"oracle {model:6} {row}")


if __name__ == "__main__":
    main()
