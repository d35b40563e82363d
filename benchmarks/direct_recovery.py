"""Recovery and hand-off over direct channels on this machine: seconds without a complete iteration.

    python -m benchmarks.direct_recovery [--json] [--epochs 60] [--repeats 3] [--channel direct]

The digits example with four functions, real processes. Recovery: a function kills itself with SIGKILL in the middle of an
iteration; seconds from then until all ranks have completed that iteration. The second death of a run finds a warm
environment. Hand-off: a function timeout that the run passes several times; the longest interval between the ends of two
iterations around a hand-off, less the median interval.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.common import environment, write
from ephemeron.events import Event, FaultFired, Invoked, Loaded, Progress, Started
from ephemeron.training.driver import configure, train
from ephemeron.training.job import load_job, parse_fault

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"
WORKERS = 4
EPOCHS = 60


class Timeline:
    """When all ranks had completed each iteration."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._done: dict[int, dict[int, float]] = defaultdict(dict)

    def note(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Progress):
            self._done[event.iteration].setdefault(event.rank, event.t)

    def completed(self) -> dict[int, float]:
        """By iteration, the time at which the last rank had completed it."""
        return {t: max(by.values()) for t, by in sorted(self._done.items()) if len(by) == WORKERS}


def run(channel: str, *, epochs: int, faults: tuple[str, ...] = (), timeout_s: float | None = None) -> tuple[Timeline, str]:
    """One run: its timeline and its weights."""
    job = dataclasses.replace(load_job(JOB), epochs=epochs)
    job = dataclasses.replace(job, limits=dataclasses.replace(job.limits, budget_usd=None))
    timeline = Timeline()
    c = configure(
        job, platform="local", channel=channel, workers=WORKERS, aggregators=WORKERS, function_timeout_s=timeout_s, checkpoint_every=25
    )
    result = train(job, c, faults=[parse_fault(f) for f in faults], on_event=timeline.note).raise_if_failed()
    return timeline, str(result.summary.weights_sha256)


def recoveries(timeline: Timeline) -> list[dict[str, Any]]:
    """Seconds from each death to the end of its iteration, and where they went."""
    done, found = timeline.completed(), []
    for fault in (e for e in timeline.events if isinstance(e, FaultFired)):
        after = [e for e in timeline.events if getattr(e, "rank", None) == fault.rank and getattr(e, "attempt", -1) > fault.attempt]
        first = {kind: next((e.t for e in after if isinstance(e, kind)), None) for kind in (Invoked, Started, Loaded)}
        began = next((e for e in after if isinstance(e, Started)), None)
        found.append(
            {
                "iteration": fault.iteration,
                "resumed_at": next((e.iteration for e in after if isinstance(e, Loaded)), None),
                "warm": began is not None and not began.cold,
                "seconds": round(done[fault.iteration] - fault.t, 4),
                "until_s": {kind.__name__.lower(): None if t is None else round(t - fault.t, 4) for kind, t in first.items()},
            }
        )
    return found


def pauses(timeline: Timeline) -> list[dict[str, Any]]:
    """Intervals between iterations around each hand-off of all ranks."""
    done = timeline.completed()
    intervals = {t: done[t] - done[t - 1] for t in done if t - 1 in done}
    usual = median(intervals.values())
    begins = sorted({e.iteration for e in timeline.events if isinstance(e, Loaded) and e.attempt})
    near = [max(intervals.get(t + d, 0.0) for d in (-1, 0, 1)) for t in begins]
    return [{"iteration": t, "pause_s": round(at - usual, 4), "usual_s": round(usual, 4)} for t, at in zip(begins, near, strict=True)]


@click.command()
@click.option("--epochs", default=EPOCHS, show_default=True, help="Length of a run.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each kind.")
@click.option("--channel", default="direct", show_default=True, help="Address.")
@click.option("--timeout-s", default=8.0, show_default=True, help="Function timeout of the runs with hand-offs.")
@click.option("--json", "as_json", is_flag=True)
def main(epochs: int, repeats: int, channel: str, timeout_s: float, as_json: bool) -> None:
    """Measures recovery and hand-off."""
    deaths_at = [(rank, t * epochs // EPOCHS) for rank, t in ((2, 150), (1, 400), (3, 650))]
    faults = tuple(f"kill:rank={rank},iteration={t},phase=compute" for rank, t in deaths_at)
    deaths: list[dict[str, Any]] = []
    hand_offs: list[dict[str, Any]] = []
    weights = set()
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        for _ in range(repeats):
            timeline, sha = run(channel, epochs=epochs, faults=faults)
            deaths += recoveries(timeline)
            weights.add(sha)
            timeline, sha = run(channel, epochs=epochs, timeout_s=timeout_s)
            hand_offs += pauses(timeline)
            weights.add(sha)
    warm = [d["seconds"] for d in deaths if d["warm"]]
    out = {
        "environment": environment(),
        "channel": channel,
        "workers": WORKERS,
        "same_weights": len(weights) == 1,
        "recovery_s": {"median": median(d["seconds"] for d in deaths), "warm_median": median(warm) if warm else None},
        "pause_s": {"median": median(h["pause_s"] for h in hand_offs)} if hand_offs else None,
        "deaths": deaths,
        "hand_offs": hand_offs,
    }
    lines = [f"{'iteration':>9} {'resumed':>8} {'warm':>5} {'seconds':>8}"]
    lines += [f"{d['iteration']:>9} {d['resumed_at']:>8} {d['warm']!s:>5} {d['seconds']:>8.3f}  {d['until_s']}" for d in deaths]
    lines += [f"hand-off at {h['iteration']}: pause {1000 * h['pause_s']:.0f} ms" for h in hand_offs]
    if as_json:
        write(out)
    else:
        click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
