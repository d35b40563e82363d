"""What `ephemeron train --dry-run` shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ephemeron.cli.terminal import make_console
from ephemeron.config.typed import plain
from ephemeron.units import human_bytes, human_count, human_metric, human_seconds, human_usd

if TYPE_CHECKING:
    from ephemeron.training.driver.dry_runs import DryRun


def show(found: DryRun, *, as_json: bool) -> None:
    """Prints a dry run as a few lines, or as one line of JSON."""
    if as_json:
        click.echo(json.dumps(plain(found)))
        return
    console = make_console()
    for name, text in _lines(found):
        console.print(f"{name:<12}{text}", soft_wrap=True, highlight=False, markup=False)


def _lines(found: DryRun) -> Iterator[tuple[str, str]]:
    c, r, e = found.configuration, found.first_steps, found.estimate
    yield "program", f"{found.program}: {human_count(found.parameters, 'trained parameter')}"
    yield ("data", f"{human_count(found.samples, 'training sample')}, {human_count(found.test_samples, 'evaluation sample')}")
    if r is not None:
        losses = ", ".join("not finite" if loss is None else human_metric(loss) for loss in r.losses)
        yield ("two steps", f"loss {losses}; {human_count(r.samples, 'sample')} in {human_seconds(r.step_s)} on {r.device}")
        for name in r.metrics[-1] if r.metrics else ():
            yield "", f"{name} {', '.join(human_metric(m[name]) for m in r.metrics if name in m)}"
        known = [f"{name} {human_metric(value)}" for name, value in r.evaluation.items() if value is not None]
        if r.evaluation:
            yield "evaluation", f"{', '.join(known) or 'no metrics'} after them, in {human_seconds(r.evaluation_s)}"
        yield "repeated", "the same to the last bit, also from a saved and restored state"
        yield "memory", f"{r.peak_mb:.0f} MB of {c.memory_mb} MB"
    sent = human_bytes(found.code_bytes + found.initial_bytes)
    exchanged = "" if r is None else f"; each exchanges {human_bytes(r.vector_mb * 1e6)} an iteration"
    yield "would send", f"{sent} of code and weights to each function{exchanged}"
    yield (
        "would start",
        (
            f"{human_count(c.workers, 'function')} of {c.memory_mb} MB on {c.platform}, {c.pattern} with "
            f"{human_count(c.aggregators, 'aggregator')}, {c.sync}, through {c.channel}: "
            f"{human_count(found.iterations, 'iteration')} in {human_count(found.epochs, 'epoch')}"
        ),
    )
    if e is not None:
        yield (
            "would take",
            f"about {human_seconds(e.seconds)}, {human_seconds(e.iteration_s)} an iteration (steps as measured here, exchange as between AWS Lambda and S3)",
        )
        yield (
            "would cost",
            f"about {human_usd(e.cost_usd)} at AWS prices: functions {human_usd(e.functions_usd)}, requests {human_usd(e.requests_usd)}",
        )
    for note in found.notes:
        yield "note", note
    yield "", "nothing was started or paid for"
