"""Work of a program at given sizes: per statement the number of its tasks, in closed form, and operations and bytes of one of them.

Of a statement with few tasks they are the mean over all; of others those of that one of the first tasks which reads most. Tiles that
tasks write at borders count as whole ones. So operations and bytes are slightly too many, the less so the more tiles there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.solver import number_of_solutions, solutions
from ephemeron.linalg.kernels.orthogonal import BLOCK
from ephemeron.linalg.language.expressions import Constant, Name, Operation, evaluate
from ephemeron.linalg.language.kernel import Kernel, load_kernel
from ephemeron.linalg.language.program import Node, Program, Tile, TileReference
from ephemeron.linalg.matrices.stored import Shape, StoredMatrix, Tiles

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


# -- shapes of a kernel's outputs from those of its arguments -----------------------------------------------------


def output_shapes(kernel: Kernel, arguments: list[Any], options: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Shapes of the outputs.

    Args:
        kernel: that is called.
        arguments: shapes of tiles, and integers as they are.
        options: by name.
    """
    rule = _RULES.get(kernel.name)
    if rule is not None:
        return rule(*arguments, **options)
    first = next((shape for shape in arguments if isinstance(shape, tuple)), (1, 1))
    return (first,) * kernel.outputs


def _multiply(a: Shape, b: Shape, *, adjoint_a: bool = False, adjoint_b: bool = False) -> tuple[Shape, ...]:
    return ((a[1] if adjoint_a else a[0], b[0] if adjoint_b else b[1]),)


def _copy(a: Shape, *, adjoint: bool = False) -> tuple[Shape, ...]:
    return ((a[1], a[0]) if adjoint else a,)


def _merge(a: Shape, p: Shape, b: Shape, q: Shape) -> tuple[Shape, ...]:
    k = min(a[0] + b[0], a[1])
    return (k, a[1]), (k, 2)


def _leaf(a: Shape) -> tuple[Shape, ...]:
    k = min(a)
    return (a[0], k), (min(BLOCK, k), k), (k, a[1])


def _thin_pair(r: Shape, s: Shape) -> tuple[Shape, ...]:
    k = min(r[0] + s[0], r[1])
    return (r[0], k), (s[0], k), (k, r[1])


def _columns(rows: int, p: Shape, q: Shape) -> tuple[Shape, ...]:
    return ((min(rows, p[1] + q[1]), p[1] + q[1]),)


def _rows_of(a: Shape, i: int, *, top: int, height: int, total: int) -> tuple[Shape, ...]:
    return ((min(height, total - i * height), a[1]),)


_RULES: dict[str, Callable[..., tuple[Shape, ...]]] = {
    "multiply": _multiply,
    "copy": _copy,
    "solve_lower": lambda t, b, **options: (b,),
    "solve_lower_adjoint": lambda t, b, **options: (b,),
    "solve_upper": lambda t, b: (b,),
    "solve_right_lower_adjoint": lambda t, b: (b,),
    "pivot_candidates": lambda a, tile: ((min(a), a[1]), (min(a), 2)),
    "merge_candidates": _merge,
    "factor_pivots": lambda a, places, top, row: ((max(a[0], top[0]), a[0]), a, (max(a[0], top[0]), 2)),
    "gather_pivots": lambda a, pivots, *tiles: ((pivots[0], a[1]),),
    "qr_leaf": _leaf,
    "apply_leaf": lambda v, t, c, **options: (c,),
    "qr_pair": lambda r, s: (s, (min(BLOCK, r[1]), r[1]), r),
    "apply_pair": lambda v, t, c, d, **options: (c, d),
    "qr_below": lambda r, s: (s, (min(BLOCK, r[1]), r[1]), r),
    "apply_below": lambda v, t, c, d, **options: (c, d),
    "below_columns": lambda v, t: ((v[1], v[1]), v),
    "apply_below_to_upper": lambda v, t, c: (c, (v[0], c[1])),
    "apply_below_to_lower": lambda v, t, d: ((v[1], d[1]), d),
    "apply_leaf_padded": lambda v, t, c: ((v[0], c[1]),),
    "thin_qr": lambda a: ((a[0], min(a)), (min(a), a[1])),
    "thin_qr_pair": _thin_pair,
    "lq_leaf": lambda a: _leaf((a[1], a[0])),
    "apply_leaf_right": lambda v, t, c: (c,),
    "apply_pair_right": lambda v, t, c, d: (c, d),
    "pad_rows": lambda b, v: ((v[0], b[1]),),
    "zero_rows": lambda v, b: ((v[0], b[1]),),
    "leading_svd": lambda a, k: ((a[0], k), (1, k), (k, a[1])),
    "identity_like": lambda a: ((a[0], a[0]),),
    "small_svd": lambda a: ((a[0], min(a)), (1, min(a)), (min(a), a[1])),
    "thin_triangle": lambda a: ((min(a), a[1]),),
    "add_rows": lambda r, a: ((min(r[0] + a[0], r[1]), r[1]),),
    "pair_triangle": lambda p, q: _columns(p[0], p, q),
    "extend_triangle": lambda r, p, q: _columns(r[0] + p[0], p, q),
    "right_vectors": lambda r: ((r[1], r[1]),),
    "rotate_pair": lambda p, q, j: (p, q),
    "column_norms": lambda a, **options: ((1, a[1]),),
    "rows_of": _rows_of,
    "rows_of_pair": lambda a, b, i, **options: _rows_of(a, i, **options),
    "zero_block": lambda a, b: ((a[1], b[1]),),
}


# -- speed of a function on kernels -------------------------------------------------------------------------------


_SHARES = {
    "cholesky_factor": 0.4,
    "solve_lower": 0.5,
    "solve_lower_adjoint": 0.5,
    "solve_upper": 0.5,
    "solve_right_lower_adjoint": 0.5,
    "pivot_candidates": 0.35,
    "merge_candidates": 0.35,
    "factor_pivots": 0.4,
    "eliminate_rows": 0.5,
    "exchange_and_update": 0.8,
    "qr_leaf": 0.5,
    "qr_pair": 0.35,
    "apply_leaf": 0.65,
    "apply_pair": 0.6,
    "leaf_columns": 0.65,
    "apply_leaf_padded": 0.65,
    "qr_below": 0.5,
    "apply_below": 0.8,
    "below_columns": 0.8,
    "apply_below_to_upper": 0.8,
    "apply_below_to_lower": 0.8,
    "thin_qr": 0.3,
    "thin_qr_pair": 0.3,
    "thin_triangle": 0.3,
    "add_rows": 0.3,
    "pair_triangle": 0.3,
    "extend_triangle": 0.3,
    "small_svd": 0.25,
    "right_vectors": 0.25,
}
"""Of the rate of matrix products, for tiles of some hundred rows with OpenBLAS; others: all of it."""
_EDGE, _PRODUCTS, _LARGER = 64, 200, 1.3
"""Products this small run on one thread, whatever the number of threads of BLAS here; larger ones are as many times as fast."""


def share(kernel: str) -> float:
    """Speed of a kernel, as a share of that of matrix products."""
    return _SHARES.get(kernel, 1.0)


@lru_cache(maxsize=1)
def product_flops() -> float:
    """Floating-point operations in float64 that one core of this machine makes in a second: measured, for some 30 ms of CPU time."""
    a = np.random.default_rng(0).standard_normal((_EDGE, _EDGE))
    a @ a
    best = 0.0
    for _ in range(8):
        began = time.thread_time()
        for _ in range(_PRODUCTS // 2):
            a @ a
        best = max(best, _EDGE**3 * _PRODUCTS / max(time.thread_time() - began, 1e-6))
    return _LARGER * best
