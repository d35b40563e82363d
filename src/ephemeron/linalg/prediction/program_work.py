"""Work of a program at given sizes: per statement the number of its tasks, in closed form, and operations and bytes of one of them.

Of a statement with few tasks they are the mean over all; of others those of that one of the first tasks which reads most. Tiles that
tasks write at borders count as whole ones. So operations and bytes are slightly too many, the less so the more tiles there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.solver import number_of_solutions, solutions
from ephemeron.linalg.language.expressions import Constant, Name, Operation, evaluate
from ephemeron.linalg.language.kernel import Kernel, load_kernel
from ephemeron.linalg.language.program import Node, Program, Tile, TileReference
from ephemeron.linalg.matrices.stored import Shape, StoredMatrix, Tiles
from ephemeron.linalg.prediction.kernel_shapes import output_shapes

_FEW = 200
"""Tasks of a statement over all of which the mean is taken."""
_SOME = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """Tasks of one statement."""

    line: int
    kernel: str
    tasks: int
    flops: float
    """Of one task."""
    bytes_read: float
    """By one task."""
    bytes_written: float
    """By one task."""
    tiles_read: float
    """By one task."""
    tiles_written: int
    edges: float
    """Tasks that one of them waits for."""


class ProgramWork:
    """Work of a program.

    Args:
        program: the program.
        sizes: numbers of tiles.
        matrices: inputs and outputs by the program's names.
        families: shapes of a tile of each input that is no stored matrix.
        itemsize: bytes of a value.
    """

    def __init__(
        self, program: Program, sizes: Mapping[str, int], matrices: Mapping[str, Tiles], families: Mapping[str, Shape], itemsize: int
    ) -> None:
        self.program, self.analysis, self.itemsize = program, Analysis(program, sizes), itemsize
        self._stored = {name: each for name, each in matrices.items() if isinstance(each, StoredMatrix)}
        self._families = dict(families)
        self._kernels = {name: load_kernel(path) for name, path in program.kernels}
        self._outputs: dict[int, tuple[Shape, ...]] = {}
        """Shapes of what a representative task writes, by line."""
        self._first: dict[int, Node] = {}
        shapes = [each.tile_shape(0, 0) for each in self._stored.values()]
        self._usual: Shape = max(shapes, key=lambda s: s[0] * s[1], default=(1, 1))
        found: list[tuple[list[Node], int]] = []
        for domain in self.analysis.domains:
            tasks = number_of_solutions(domain.system.copy(), self.analysis.steps)
            if not tasks:
                continue
            each = solutions(domain.system.copy(), domain.loops, self.analysis.steps)
            nodes = [Node(domain.call.line, indices) for indices in islice(each, tasks if tasks <= _FEW else _SOME)]
            found.append((nodes, tasks))
            self._first[nodes[0].line] = min([self._first.get(nodes[0].line, nodes[0]), *nodes])  # reads no later one
        self.statements = [self._work(nodes, tasks) for nodes, tasks in found]

    def tile_shape(self, matrix: str) -> Shape:
        """Shape of a tile of an output that is no stored matrix: the largest that a statement writes."""
        found = [
            shapes[place]
            for line, shapes in self._outputs.items()
            for place, reference in enumerate(self.program.calls[line].outputs)
            if reference.matrix == matrix
        ]
        return max(found, key=lambda s: s[0] * s[1], default=self._usual)

    def _work(self, nodes: list[Node], tasks: int) -> TaskWork:
        if tasks > len(nodes):
            nodes = [max(nodes, key=lambda node: len(set(self.analysis.reads(node))))]
        call = self.analysis.call(nodes[0])
        kernel, written = self._kernels[call.kernel], self._written(nodes[0])
        flops = 0.0
        sizes: list[int] = []
        for node in nodes:
            arguments, options = self._call(node)
            flops += kernel.flops(*arguments, **options) if kernel.flops is not None else _guess(kernel, arguments)
            sizes += [self._bytes(tile) for tile in dict.fromkeys(self.analysis.reads(node))]
        n = len(nodes)
        return TaskWork(
            line=call.line,
            kernel=call.kernel,
            tasks=tasks,
            flops=(4.0 if self._is_complex else 1.0) * flops / n,
            bytes_read=sum(sizes) / n,
            bytes_written=float(sum(s[0] * s[1] * self.itemsize for s in written)),
            tiles_read=sum(size > 0 for size in sizes) / n,
            tiles_written=len(written),
            edges=sum(map(self.analysis.upstream_count, nodes)) / n,
        )

    @property
    def _is_complex(self) -> bool:
        return any(np.dtype(each.dtype).kind == "c" for each in self._stored.values())

    def _call(self, node: Node) -> tuple[list[Any], dict[str, Any]]:
        call, values = self.analysis.call(node), self.analysis.bindings(node)
        reads = iter(self.analysis.reads(node))
        arguments = [
            self._shape(next(reads)) if isinstance(argument, TileReference) else evaluate(argument, values) for argument in call.arguments
        ]
        options = {
            name: evaluate(option, values) if isinstance(option, Constant | Name | Operation) else option for name, option in call.options
        }
        return arguments, options

    def _written(self, node: Node) -> tuple[Shape, ...]:
        """Shapes of what a statement's first task writes."""
        if node.line not in self._outputs:
            self._outputs[node.line] = (self._usual,) * len(self.program.calls[node.line].outputs)  # while it is sought
            arguments, options = self._call(self._first[node.line])
            kernel = self._kernels[self.program.calls[node.line].kernel]
            self._outputs[node.line] = output_shapes(kernel, arguments, options)
        return self._outputs[node.line]

    def _shape(self, tile: Tile) -> Shape:
        matrix, index = tile
        if (known := self._stored.get(matrix)) is not None:
            i, j = index
            return known.tile_shape(i, j)
        writer = self.analysis.writer(matrix, index)
        if writer is None or writer.line not in self._first:
            return self._families.get(matrix, self._usual)
        place = [each[0] for each in self.analysis.writes(writer)].index(matrix)
        return self._written(writer)[place]

    def _bytes(self, tile: Tile) -> int:
        known = self._stored.get(tile[0])
        if known is not None and not known.is_stored(*tile[1]):
            return 0
        rows, columns = self._shape(tile)
        return rows * columns * self.itemsize


def _guess(kernel: Kernel, arguments: list[Any]) -> float:
    """Operations of a kernel that does not say how many it takes: those of a product of its first tiles."""
    shapes = [each for each in arguments if isinstance(each, tuple)]
    rows, columns = shapes[0] if shapes else (1, 1)
    return float(2 * rows * columns * max(rows, columns))
