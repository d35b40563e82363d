"""Programs run in this process, one task after another, on a dictionary of tiles: the reference for every other execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ephemeron.errors import JobError, MatrixError
from ephemeron.linalg.analysis.interface import TaskGraph
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, described
from ephemeron.linalg.language.expressions import Constant, Name, Operation, evaluate
from ephemeron.linalg.language.kernel import load_kernel
from ephemeron.linalg.language.program import Node, Program, Role, Tile, TileReference

Array = np.ndarray[Any, np.dtype[Any]]


def run_node(graph: TaskGraph, node: Node, tiles: Mapping[Tile, Array]) -> dict[Tile, Array]:
    """The tiles that one task writes.

    Args:
        graph: the program at its sizes.
        node: the task.
        tiles: at least the tiles that it reads.

    Raises:
        MatrixError: the kernel cannot go on with these values; names the task and its tiles.
    """
    call, values = graph.call(node), graph.bindings(node)
    given = iter(graph.reads(node))
    arguments = [tiles[next(given)] if isinstance(argument, TileReference) else evaluate(argument, values) for argument in call.arguments]
    options = {
        name: evaluate(option, values) if isinstance(option, Constant | Name | Operation) else option for name, option in call.options
    }
    kernel = load_kernel(dict(graph.program.kernels)[call.kernel])
    try:
        made = kernel.run(*arguments, **options)
    except MatrixError as error:
        targets = ", ".join(described(tile) for tile in graph.writes(node))
        raise error.at(f"{graph.program.name}, task {node}, {targets}") from None
    return dict(zip(graph.writes(node), made, strict=True))


def interpret(
    program: Program, sizes: Mapping[str, int], inputs: Mapping[str, Mapping[tuple[int, ...], Array]]
) -> dict[str, dict[tuple[int, ...], Array]]:
    """Run all tasks in the order of the text.

    Args:
        program: the program.
        sizes: number of tiles, by name of the size.
        inputs: tiles of every input, by name of the matrix and index.

    Returns:
        Tiles of every output, by name of the matrix and index.

    Raises:
        JobError: a size or an input is wrong.
        MatrixError: a kernel cannot go on with the values of a tile.
    """
    graph = UnrolledGraph(program, sizes)
    return interpret_order(graph, graph.nodes, inputs)


def interpret_order(
    graph: TaskGraph, order: Iterable[Node], inputs: Mapping[str, Mapping[tuple[int, ...], Array]]
) -> dict[str, dict[tuple[int, ...], Array]]:
    """Like `interpret`, with the tasks in a given order, in which each follows all upstream tasks."""
    roles = {m.name: m.role for m in graph.program.matrices}
    wanted = {name for name, role in roles.items() if role is Role.INPUT}
    if set(inputs) != wanted:
        raise JobError(f"{graph.program.name} is given {', '.join(sorted(inputs))}", remedy=f"its inputs are {', '.join(sorted(wanted))}")
    tiles: dict[Tile, Array] = {(name, index): tile for name, found in inputs.items() for index, tile in found.items()}
    for node in order:
        tiles |= run_node(graph, node, tiles)
    outputs: dict[str, dict[tuple[int, ...], Array]] = {name: {} for name, role in roles.items() if role is Role.OUTPUT}
    for (name, index), tile in tiles.items():
        if name in outputs:
            outputs[name][index] = tile
    return outputs
