"""What is known of one batch: its tasks, and the results that its log has so far. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ephemeron.functions.tasks.model import TaskResult, TaskSpec

VANISHED = "every executor that began this task ended without a word: killed, or out of memory"


@dataclass(slots=True)
class BatchState:
    """A batch, from the view of one owner."""

    batch: str
    tasks: tuple[TaskSpec, ...]
    final: dict[str, TaskResult] = field(default_factory=dict)
    """Final results by task."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed tries by task."""
    log: list[tuple[TaskResult, ...]] = field(default_factory=list)
    """Parts of the log that were read or written."""
    settled: set[int] = field(default_factory=set)
    """Parts whose results are counted at the edges of their tasks."""

    @property
    def pending(self) -> tuple[TaskSpec, ...]:
        """Tasks without a final result, in order."""
        return tuple(task for task in self.tasks if task.id not in self.final)

    @property
    def is_complete(self) -> bool:
        """Whether all tasks have a final result."""
        return len(self.final) == len(self.tasks)

    def news(self, results: Iterable[TaskResult]) -> list[TaskResult]:
        """Results as they are to be recorded: of tasks without a final one, with their number of tries; dead after the last."""
        of = {task.id: task for task in self.tasks}
        news: dict[str, TaskResult] = {}
        for result in results:
            if result.id not in of or result.id in self.final:
                continue
            if (earlier := news.get(result.id)) is not None and earlier.is_final:
                continue
            tries = self.failures[result.id] + 1
            is_last = result.status == "failed" and tries >= of[result.id].max_tries
            news[result.id] = dataclasses.replace(result, tries=tries, status="dead" if is_last else result.status)
        return list(news.values())

    def absorb(self, results: Iterable[TaskResult]) -> None:
        """Counts one more part of the log."""
        part = tuple(results)
        self.log.append(part)
        for result in part:
            if result.is_final:
                self.final.setdefault(result.id, result)
            else:
                self.failures[result.id] += 1


@dataclass(frozen=True, slots=True)
class EdgeNews:
    """What some results mean for an edge."""

    edge: str
    done: int
    """Inputs that are there now."""
    lost: str
    """Error of an input that will never be; empty: none."""


def edge_news(tasks: Sequence[TaskSpec], results: Iterable[TaskResult]) -> list[EdgeNews]:
    """Edges that the final ones among the results belong to."""
    then = {task.id: task.then for task in tasks if task.then}
    if not then:
        return []
    done: Counter[str] = Counter()
    lost: dict[str, str] = {}
    for result in results:
        if not result.is_final:
            continue
        for edge in then.get(result.id, ()):
            if result.status == "ok":
                done[edge] += 1
            else:
                lost.setdefault(edge, f"its input {result.id} is {result.status}: {result.error}".rstrip(": "))
    return [EdgeNews(edge, done[edge], lost.get(edge, "")) for edge in sorted(done.keys() | lost.keys())]


_INPUT = re.compile(r"its input (\S+) is dead: ")


def failed_first(result: TaskResult) -> TaskResult:
    """The failure that this one follows from, if the task is dead because an input of it is: task and error, which the text of this one repeats. The
    traceback is in the other result alone."""
    task, text = result.id, result.error
    while found := _INPUT.match(text):
        task, text = found[1], text[found.end() :]
    return result if task == result.id else dataclasses.replace(result, id=task, error=text)
