"""Lines that show a run where there is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from ephemeron.cli.progress import Display
from ephemeron.events import Evaluated, Note, Progress, RunEnded, RunStarted
from ephemeron.prices import load_prices
from ephemeron.training.driver.progress import EVERY_S, PrintedProgress

STARTED = RunStarted(
    t=0, run_id="r", job="j", workers=2, aggregators=1, memory_mb=1, iterations=9, epochs=1, samples=9, platform="local", notes=["n"]
)


def iteration(number: int, **metrics: float) -> list[Progress]:
    done = {"epoch": 0, "samples": 5, "version": 0, "loss": 1.0}
    return [Progress(t=number, rank=r, attempt=0, iteration=number, metrics={n: v + r for n, v in metrics.items()}, **done) for r in (0, 1)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(*later: list[Progress]) -> list[str]:
    """Lines of a run whose iterations take a third of `EVERY_S` each."""
    lines: list[str] = []
    clock = Clock()
    progress = PrintedProgress(load_prices("objects"), lines.append, clock)
    progress.on_event(STARTED)
    for events in later:
        for event in events:
            progress.on_event(event)
        clock.now += EVERY_S / 3
    return lines


def test_a_line_for_what_is_logged_now_and_then_and_one_every_so_often() -> None:
    lines = shown(*(iteration(i, **({"val": 2.0} if i == 1 else {})) for i in range(6)))
    assert lines[:2] == ["run r on local: 2 functions, 9 iterations", "note: n"]
    assert [line.split("  ")[:3] for line in lines[2:]] == [
        ["iteration 2/9", "loss 1.0000", "val 2.5000"],
        ["iteration 4/9", "loss 1.0000", "val 2.5000"],
    ]


def test_what_every_iteration_reports_has_no_line_each() -> None:
    assert len(shown(*(iteration(i, lr=0.1) for i in range(4)))) == 4, "the start with its note, the first report, and a later one"


def test_evaluations_notes_and_the_end_are_shown() -> None:
    part = [Evaluated(t=2, rank=r, attempt=0, epoch=1, iteration=1, samples=5, sums={"loss": (5.0, 5), "f1": (4.0, 5)}) for r in (0, 1)]
    again = [Note(t=2, level="warning", text="careful"), Note(t=3, level="warning", text="careful")]
    lines = shown(iteration(0), part, again, [RunEnded(t=5, status="finished")])
    assert lines[2:4] == ["epoch 1  iteration 1  test loss 1.0000  f1 0.8000  2.0 s", "warning: careful"]
    assert lines[4].startswith("finished after 5.0 s, 1 iteration: $")


def test_the_command_line_shows_what_is_logged() -> None:
    file = io.StringIO()
    display = Display(Console(file=file, width=400))
    for event in (STARTED, *iteration(0), *iteration(1, val=2.0)):
        display.on_event(event)
    assert "iteration 2/9  loss 1.0000  val 2.5000" in file.getvalue()
