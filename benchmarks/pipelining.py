"""Split models trained on two processes over a throttled link: the schedule simulator's predictions compared with measurements.

    python -m benchmarks.pipelining --json

The models are a convolutional net, a transformer, and a model whose layers wait instead of computing. The last one shows the
overhead of the runtime over the prediction even where two processes do not get two processors. Operators are measured
(`profile_model`), links are measured (`measure_here`, with a throttle in both directions), `place` finds the stages of a 1F1B
pipeline, and the same stages run under each schedule, in turn, round after round. Predictions:

- `by_operators`: the simulator on the operator graph, whose times are those of the whole batch divided by the number of
  micro-batches;
- `by_stages`: the simulator on stages measured as a whole at the size of a micro-batch, with both processes at work and as
  many micro-batches in flight where the schedule overlaps them (`measure_stages`). It is the mean of replays in which each
  pass takes the time of one of those measured, plus one step of the optimiser, which the simulator leaves out;
- `by_least_of_stages`: the simulator on the least time measured of each pass, compared with the least step: undisturbed times.

A measured step is a step as the parent process sees it: inputs handed out, all passes, the update. Goals: predicted by stages
within 10 % of measured, and 1F1B at least 1.5 times as fast as plain where the prediction says so.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.common import SEED, condensed, environment, write
from ephemeron.partition import Device, PlacementPlan, Schedule, SearchBudget, Topology, place, replay
from ephemeron.partition.costs import Throttle, measure_here
from ephemeron.partition.costs.profile import profile_model
from ephemeron.partition.runtime import Pipeline
from ephemeron.partition.runtime.stage_costs import StageSamples, StageTimes, measure_stages, stage_graph, stage_placement
from ephemeron.partition.tracing import ModelSplit, split, trace

DEVICES = ("left", "right")
SPEEDUP, ERROR = 1.5, 0.10
BURSTS = 8
"""Measurements of stages between steps."""
DRAWS = 100
"""Replays with other times of passes."""
GOALS = {"predicted by stages against measured": ERROR, "1f1b against plain, where the model says so": SPEEDUP}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(h)))


class Convolutions(nn.Module):
    """Residual net of equal blocks on pictures of 24 × 24."""

    def __init__(self, width: int = 40, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    """Causal transformer of six layers on 64 words."""

    def __init__(self, width: int = 128, layers: int = 6, words: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class Pause(torch.autograd.Function):
    """Layer that takes a time for each sample, in both passes, without using a processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds * x.shape[0])
        return x + 0.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds * grad.shape[0])
        return grad * 1.0, None


class Paced(nn.Module):
    """Layers that wait as long as an accelerator would compute, with one weight each."""

    def __init__(self, width: int = 16384, layers: int = 8, seconds: float = 1.25e-3) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Pause.apply(x * weight, self.seconds)
        return x


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    model: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[Any, Any], torch.Tensor]


def tasks(batch: int) -> tuple[Task, ...]:
    draw = torch.Generator().manual_seed(SEED)
    words = torch.randint(0, 512, (batch, 65), generator=draw)

    def next_word(result: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(result.flatten(0, 1), targets.flatten())

    return (
        Task(
            name="convolutions",
            model=Convolutions,
            inputs=torch.randn(batch, 3, 24, 24, generator=draw),
            targets=torch.randint(0, 10, (batch,), generator=draw),
            loss=nn.functional.cross_entropy,
        ),
        Task(name="transformer", model=Transformer, inputs=words[:, :-1].contiguous(), targets=words[:, 1:].contiguous(), loss=next_word),
        Task(
            name="paced",
            model=Paced,
            inputs=torch.randn(batch, 16384, generator=draw),
            targets=torch.randn(batch, 16384, generator=draw),
            loss=nn.functional.mse_loss,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16, help="steps of each schedule that count")
    parser.add_argument("--latency-ms", type=float, default=1.0)
    parser.add_argument("--megabytes-s", type=float, default=100.0)
    parser.add_argument("--models", nargs="+", default=["convolutions", "transformer", "paced"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    schedules = {
        "plain": Schedule(),
        "gpipe": Schedule(kind="gpipe", micro_batches=arguments.micro_batches),
        "1f1b": Schedule(kind="1f1b", micro_batches=arguments.micro_batches),
    }
    throttle = Throttle(latency_s=arguments.latency_ms / 1e3, bandwidth_bytes_s=arguments.megabytes_s * 1e6)
    rows = [measured(task, schedules, throttle, arguments.rounds) for task in tasks(arguments.batch) if task.name in arguments.models]
    result = {
        **environment(),
        "benchmark": "pipelining",
        "batch": arguments.batch,
        "micro_batches": arguments.micro_batches,
        "link": {"latency_s": throttle.latency_s, "bandwidth_bytes_s": throttle.bandwidth_bytes_s},
        "goals": GOALS,
        "rows": rows,
    }
    if arguments.json:
        write(result)
    else:
        show(rows)


def measured(task: Task, schedules: dict[str, Schedule], throttle: Throttle, rounds: int) -> dict[str, Any]:
    """Profiles, plans and predicts; then runs steps of all schedules in turn, and measures the stages again between them."""
    torch.manual_seed(SEED)
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    model = task.model()
    tracing = trace(model, (task.inputs,), steps=1)
    profile = profile_model(tracing.model, (task.inputs,), optimizer=sgd, loss=lambda result: task.loss(result, task.targets), repeats=5)
    topology = _topology(throttle)
    plan = place(profile.graph, topology, schedule=schedules["1f1b"], budget=SearchBudget(time_limit_s=10))
    parts = split(tracing.model, plan.placement, stages=plan.stages)
    costs = [_stage_costs(parts, task, sgd, schedules)]
    steps: dict[str, list[float]] = {n: [] for n in schedules}
    with ExitStack() as stack:
        pipes = {
            n: stack.enter_context(
                Pipeline(
                    split(tracing.model, plan.placement, stages=plan.stages),
                    schedule=s,
                    optimizer=sgd,
                    loss=task.loss,
                    where="processes",
                    links={(a, b): throttle for a in DEVICES for b in DEVICES if a != b},
                )
            )
            for n, s in schedules.items()
        }
        for k in range(rounds + 1):  # the first is a warm-up
            for name, pipe in pipes.items():
                step = pipe.step(task.inputs, task.targets)
                if k:
                    steps[name].append(step.took_s)
            if k and k * BURSTS % rounds < BURSTS:  # in turns, so that both see the same load of the machine
                costs.append(_stage_costs(parts, task, sgd, schedules))
    return _row(task, plan, profile, topology, parts, costs, schedules, steps)


def _topology(throttle: Throttle) -> Topology:
    devices = [Device(name=n, kind="cpu", memory_bytes=1 << 33) for n in DEVICES]
    throttles = {(a, b): throttle for a in DEVICES for b in DEVICES if a != b}
    return asyncio.run(measure_here(devices, throttles=throttles, repeats=5)).topology


def _stage_costs(parts: ModelSplit, task: Task, sgd: Any, schedules: dict[str, Schedule]) -> dict[str, StageSamples]:
    """Stages by schedule: one at a time at the whole batch, or together at a micro-batch."""
    size = task.inputs.shape[0] // schedules["1f1b"].micro_batches
    settings = {"loss": task.loss, "optimizer": sgd}
    whole = measure_stages(parts, task.inputs, task.targets, together=False, repeats=3, **settings)
    part = measure_stages(parts, task.inputs[:size], task.targets[:size], together=True, schedule=schedules["1f1b"], repeats=7, **settings)
    return {n: whole if s.kind == "plain" else part for n, s in schedules.items()}


def _row(
    task: Task,
    plan: PlacementPlan,
    profile: Any,
    topology: Topology,
    parts: ModelSplit,
    costs: Sequence[dict[str, StageSamples]],
    schedules: dict[str, Schedule],
    steps: dict[str, list[float]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, schedule in schedules.items():
        operators_s = replay(profile.graph, topology, plan.placement, schedule=schedule, stages=plan.stages).iteration_s
        samples = _joined([c[name] for c in costs])
        stages_s = expected_s(parts, samples, topology, schedule)
        least_s = predicted_s(parts, samples.times(min), topology, schedule)
        took_s = statistics.median(steps[name])
        found[name] = {
            "by_operators_s": round(operators_s, 4),
            "by_stages_s": round(stages_s, 4),
            "by_least_of_stages_s": round(least_s, 4),
            "measured_s": condensed(steps[name]),
            "error_by_operators": round(operators_s / took_s - 1, 4),
            "error_by_stages": round(stages_s / took_s - 1, 4),
            "error_by_stages_of_mean": round(stages_s / statistics.fmean(steps[name]) - 1, 4),
            "error_by_least": round(least_s / min(steps[name]) - 1, 4),
        }
    return {
        "model": task.name,
        "operators": len(profile.graph.nodes),
        "parts_over_whole": round(profile.times.ratio, 3),
        "stages": [len(s.spec.operators) for s in parts.stages],
        "bottleneck_gap": round(plan.gap, 4),
        "schedules": found,
        "plain_over_1f1b": {
            "by_operators": _ratio(found, lambda s: s["by_operators_s"]),
            "by_stages": _ratio(found, lambda s: s["by_stages_s"]),
            "by_least_of_stages": _ratio(found, lambda s: s["by_least_of_stages_s"]),
            "measured_median": _ratio(found, lambda s: s["measured_s"]["median"]),
            "measured_least": _ratio(found, lambda s: s["measured_s"]["least"]),
        },
        "links": [
            {"source": k.source, "target": k.target, "latency_s": round(k.latency_s, 6), "bytes_s": round(k.bandwidth_bytes_s)}
            for k in topology.links
        ],
    }


def _joined(samples: Sequence[StageSamples]) -> StageSamples:
    """Samples of all bursts together."""
    return StageSamples(rows=tuple(tuple(row for s in samples for row in s.rows[i]) for i in range(len(samples[0].rows))))


def _ratio(found: dict[str, Any], value: Callable[[Any], float]) -> float:
    return round(value(found["plain"]) / value(found["1f1b"]), 3)


def expected_s(parts: ModelSplit, samples: StageSamples, topology: Topology, schedule: Schedule) -> float:
    """Mean over replays with measured times, drawn anew for each pass."""
    rng, times = Random(SEED), samples.times(statistics.fmean)
    return statistics.fmean(predicted_s(parts, times, topology, schedule, takes=samples.drawn(rng)) for _ in range(DRAWS))


def predicted_s(parts: ModelSplit, times: StageTimes, topology: Topology, schedule: Schedule, *, takes: Any = None) -> float:
    """Seconds of the simulated iteration plus the update of the device that ends last."""
    graph = stage_graph(parts, times, micro_batches=schedule.micro_batches)
    done = replay(graph, topology, stage_placement(parts), schedule=schedule, takes=takes)
    home = stage_placement(parts)
    ends: dict[str, float] = {}
    for span in done.spans:
        if isinstance(span.resource, str):
            ends[span.resource] = max(ends.get(span.resource, 0.0), span.end_s)
    return max(ends[home[f"stage {i}"]] + update_s for i, update_s in enumerate(times.update_s))


def show(rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    for row in rows:
        table = Table(title=f"{row['model']}: plain over 1f1b {row['plain_over_1f1b']}")
        for column in ("schedule", "operators", "stages", "measured", "error", "least: stages", "measured", "error"):
            table.add_column(column)
        for name, s in row["schedules"].items():
            table.add_row(
                name,
                f"{s['by_operators_s']:.3f}",
                f"{s['by_stages_s']:.3f}",
                f"{s['measured_s']['median']:.3f}",
                f"{s['error_by_stages']:+.1%}",
                f"{s['by_least_of_stages_s']:.3f}",
                f"{s['measured_s']['least']:.3f}",
                f"{s['error_by_least']:+.1%}",
            )
        console.print(table)


if __name__ == "__main__":
    main()
