"""Trees of tasks that combine results, with edges of the queue: no result passes the client but the last one.

Leaves map and combine a chunk of items each; every inner node combines the results of up to `fan_in` neighbours. Order is kept, so the
function need not be commutative, only associative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ephemeron.functions.tasks.model import TaskEdge, TaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Tasks of a tree."""

    leaves: tuple[TaskSpec, ...]
    edges: tuple[TaskEdge, ...]
    """In the order in which they are to be connected: towards the root last."""

    @property
    def root(self) -> str:
        """Id of the task that has the result."""
        return self.edges[-1].tasks[0].id if self.edges else self.leaves[0].id


def grow(
    leaves: Sequence[TaskSpec], inner: Callable[[str, tuple[str, ...]], TaskSpec], *, name: str, fan_in: int, output: Callable[[str], str]
) -> Tree:
    """A tree over leaves.

    Args:
        leaves: at least one, in order.
        inner: makes an inner node from its id and the keys of its inputs.
        name: prefix of ids, unique in the queue.
        fan_in: results that a node combines, at least 2.
        output: key under which a task's result is stored.
    """
    level: list[TaskSpec] = list(leaves)
    done: list[TaskSpec] = []
    inside: dict[str, tuple[str, int]] = {}
    """By task of an inner node: its edge, and how many inputs that has."""
    height = 0
    while len(level) > 1:
        above: list[TaskSpec] = []
        for number, at in enumerate(range(0, len(level), fan_in)):
            group = level[at : at + fan_in]
            if len(group) == 1:  # it has no neighbour: it goes one level up as it is
                above.append(group[0])
                continue
            id = f"{name}-{height}-{number}"
            node = inner(id, tuple(output(task.id) for task in group))
            inside[id] = (id, len(group))
            done += [_with_edge(task, id, output) for task in group]
            above.append(node)
        level, height = above, height + 1
    done += level
    by_id = {task.id: task for task in done}
    edges = tuple(TaskEdge(name=edge, inputs=count, tasks=(by_id[id],)) for id, (edge, count) in inside.items())
    return Tree(leaves=tuple(by_id[leaf.id] for leaf in leaves), edges=edges)


def _with_edge(task: TaskSpec, edge: str, output: Callable[[str], str]) -> TaskSpec:
    return replace(task, then=(edge,), output=output(task.id))
