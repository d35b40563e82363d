"""The whole graph of a program at given sizes, by running its loops: for pictures, small sizes and tests.

Time and memory grow with the number of tasks. Shares no code with `analysis`, whose results it checks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

from ephemeron.errors import ProgramError
from ephemeron.linalg.language.expressions import evaluate, holds
from ephemeron.linalg.language.program import Assign, For, KernelCall, Node, Program, Role, Statement, Tile, TileReference


def walk(program: Program, sizes: Mapping[str, int]) -> Iterator[tuple[Node, dict[str, int]]]:
    """Every task with its bindings, in the order of the text: an order in which a task follows all upstream tasks."""

    def block(body: tuple[Statement, ...], values: dict[str, int], indices: tuple[int, ...]) -> Iterator[tuple[Node, dict[str, int]]]:
        values = dict(values)
        for statement in body:
            if isinstance(statement, KernelCall):
                yield Node(statement.line, indices), dict(values)
            elif isinstance(statement, Assign):
                values[statement.name] = evaluate(statement.value, values)
            elif isinstance(statement, For):
                yield from loop(statement, values, indices)
            else:
                side = statement.body if holds(statement.condition, values) else statement.orelse
                yield from block(side, values, indices)

    def loop(statement: For, values: dict[str, int], indices: tuple[int, ...]) -> Iterator[tuple[Node, dict[str, int]]]:
        start, stop, step = (evaluate(e, values) for e in (statement.start, statement.stop, statement.step))
        for value in range(start, stop, step):
            yield from block(statement.body, {**values, statement.variable: value}, (*indices, value))

    return block(program.body, dict(sizes), ())


def has_more_tasks(program: Program, sizes: Mapping[str, int], most: int) -> bool:
    """Whether a program has more than so many tasks. Takes time for these at most."""
    return next(itertools.islice(walk(program, sizes), most, None), None) is not None


def located(reference: TileReference, values: Mapping[str, int]) -> Tile:
    """The tile that `reference` names where names have `values`."""
    return reference.matrix, tuple(evaluate(e, values) for e in reference.indices)


class UnrolledGraph:
    """All tasks of a program, with their edges, as a `TaskGraph`.

    Args:
        program: the program.
        sizes: number of tiles, by name of the size.

    Raises:
        JobError: a size is missing, unknown or not positive.
        ProgramError: a tile is written twice.
    """

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self.program = program
        self.sizes = program.check_sizes(sizes)
        self._bindings = dict(walk(program, self.sizes))
        self._writers: dict[Tile, Node] = {}
        self._readers: defaultdict[Tile, dict[Node, None]] = defaultdict(dict)
        for node in self._bindings:
            for reference, tile in zip(self.call(node).outputs, self.writes(node), strict=True):
                if tile in self._writers:
                    raise ProgramError(f"{reference} writes {tile} a second time", location=reference.location)
                self._writers[tile] = node
            for tile in self.reads(node):
                self._readers[tile][node] = None

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every task, in the order of the text."""
        return tuple(self._bindings)

    def count(self) -> int:
        """Number of tasks."""
        return len(self._bindings)

    def start_nodes(self) -> Iterator[Node]:
        """Tasks without upstream tasks."""
        return (node for node in self._bindings if not self.upstream(node))

    def call(self, node: Node) -> KernelCall:
        """The kernel call of `node`."""
        return self.program.calls[node.line]

    def bindings(self, node: Node) -> dict[str, int]:
        """Values of sizes, loop variables and assigned scalars."""
        return dict(self._bindings[node])

    def reads(self, node: Node) -> tuple[Tile, ...]:
        """Tiles that `node` reads."""
        return tuple(located(r, self._bindings[node]) for r in self.call(node).reads)

    def writes(self, node: Node) -> tuple[Tile, ...]:
        """Tiles that `node` writes."""
        return tuple(located(r, self._bindings[node]) for r in self.call(node).outputs)

    def writer(self, matrix: str, index: tuple[int, ...]) -> Node | None:
        """The task that writes a tile."""
        return self._writers.get((matrix, index))

    def upstream(self, node: Node) -> tuple[Node, ...]:
        """Tasks that write what `node` reads."""
        return tuple(sorted({w for tile in self.reads(node) if (w := self._writers.get(tile)) is not None}))

    def upstream_count(self, node: Node) -> int:
        """Number of upstream tasks."""
        return len(self.upstream(node))

    def downstream(self, node: Node) -> tuple[Node, ...]:
        """Tasks that read what `node` writes."""
        return tuple(sorted({r for tile in self.writes(node) for r in self._readers.get(tile, ())}))

    def readers(self, matrix: str, index: tuple[int, ...]) -> Iterator[Node]:
        """Tasks that read a tile."""
        return iter(self._readers.get((matrix, index), ()))

    def reader_count(self, matrix: str, index: tuple[int, ...]) -> int:
        """Number of tasks that read a tile."""
        return len(self._readers.get((matrix, index), ()))


def chain_orders(graph: UnrolledGraph) -> dict[Node, int]:
    """Rank of each task by the number of tasks on the longest chain that it begins: the longest first (critical path first, as in HLFET
    of Adam, Chandy and Dickson 1974), then in the order of the text. Pure in program and sizes: all functions find the same."""
    length: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        length[node] = 1 + max((length[each] for each in graph.downstream(node)), default=0)
    ranked = sorted(graph.nodes, key=lambda node: -length[node])
    return {node: rank for rank, node in enumerate(ranked)}


# -- bounds -------------------------------------------------------------------------------------------------------


def check_unrolled(program: Program, sizes: Mapping[str, int]) -> None:
    """Check every access of `program` at `sizes`; time grows with the number of tasks.

    Raises:
        ProgramError: an index is out of bounds, a tile is written twice, or read without having been written before.
    """
    written: set[Tile] = set()
    extents = {m.name: None if m.extents is None else [evaluate(e, sizes) for e in m.extents] for m in program.matrices}
    given = ", ".join(f"{n} = {v}" for n, v in sizes.items())
    inputs = {m.name for m in program.matrices if m.role is Role.INPUT}

    def check_bounds(reference: TileReference, tile: Tile, at: str) -> None:
        limits = extents[reference.matrix]
        for place, index in enumerate(tile[1]):
            if index < 0 or (limits is not None and index >= limits[place]):
                shape = "" if limits is None else f", which has {' × '.join(map(str, limits))} tiles"
                raise ProgramError(
                    f"{reference} is {described(tile)} at {at}: outside {reference.matrix}{shape}", location=reference.location
                )

    for node, values in walk(program, sizes):
        call = program.calls[node.line]
        here = {n: v for n, v in values.items() if n not in sizes}
        at = ", ".join([given, *(f"{n} = {v}" for n, v in here.items())])
        try:
            read = [(r, located(r, values)) for r in call.reads]
            wrote = [(r, located(r, values)) for r in call.outputs]
        except ArithmeticError as error:
            raise ProgramError(f"{error} at {at}", location=call.location) from None
        for reference, tile in [*read, *wrote]:
            check_bounds(reference, tile, at)
        for reference, tile in read:
            if reference.matrix not in inputs and tile not in written:
                raise ProgramError(f"{reference} reads {described(tile)} at {at}, which is not written before", location=reference.location)
        for reference, tile in wrote:
            if tile in written:
                raise ProgramError(
                    f"{reference} writes {described(tile)} at {at}, which is written already",
                    location=reference.location,
                    remedy="each tile is written once",
                )
            written.add(tile)


def described(tile: Tile) -> str:
    """A tile as text."""
    return f"{tile[0]}[{', '.join(map(str, tile[1]))}]"
