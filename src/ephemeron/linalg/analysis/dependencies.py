"""Dependencies of a program at given sizes, without the graph (NumPyWren, survey 2.4, algorithms 1 and 2).

For a tile that was written, every statement that reads its matrix gives a system: the loops' bounds, the conditions, and
one equation per index. Its integer solutions are the tasks downstream. The statements are few, so the time of a query depends on the
program's text and on the number of its results, not on the number of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations

from ephemeron.linalg.analysis.compilation import Access, Domain, domains_of
from ephemeron.linalg.analysis.propagation import Steps
from ephemeron.linalg.analysis.solver import first_solution, number_of_solutions, solutions
from ephemeron.linalg.analysis.system import System
from ephemeron.linalg.language.expressions import evaluate
from ephemeron.linalg.language.program import Assign, For, KernelCall, Node, Program, Role, Tile, TileReference


class Analysis:
    """Tasks of a program, and what depends on what, as a `TaskGraph`.

    Memory does not depend on the sizes, and neither does the time of a query, apart from the number of its results and the square of the
    depth of the program's trees. Results are right for programs that `verify` accepts.

    Args:
        program: the program.
        sizes: number of tiles, by name of the size.

    Raises:
        JobError: a size is missing, unknown or not positive.
    """

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self.program = program
        self.sizes: Mapping[str, int] = program.check_sizes(sizes)
        self.steps = Steps()
        self.domains = domains_of(program, self.sizes, self.steps)
        self._inputs = frozenset(m.name for m in program.matrices if m.role is Role.INPUT)
        self._reading: dict[str, list[tuple[Domain, list[Access]]]] = {}
        self._writing: dict[str, list[tuple[Domain, Access]]] = {}
        for domain in self.domains:
            by_matrix: dict[str, list[Access]] = {}
            for access in domain.reads:
                by_matrix.setdefault(access.reference.matrix, []).append(access)
            for matrix, accesses in by_matrix.items():
                self._reading.setdefault(matrix, []).append((domain, accesses))
            for access in domain.writes:
                self._writing.setdefault(access.reference.matrix, []).append((domain, access))

    def count(self) -> int:
        """Number of tasks, in closed form."""
        return sum(self.counts.values())

    @cached_property
    def counts(self) -> dict[int, int]:
        """Number of tasks of each kernel call, by line."""
        made = dict.fromkeys(self.program.calls, 0)
        for domain in self.domains:
            made[domain.call.line] += number_of_solutions(domain.system.copy(), self.steps)
        return made

    def start_nodes(self) -> Iterator[Node]:
        """Tasks without upstream tasks: those of statements that read inputs alone, or nothing."""
        for domain in self.domains:
            if all(access.reference.matrix in self._inputs for access in domain.reads):
                for indices in solutions(domain.system.copy(), domain.loops, self.steps):
                    yield Node(domain.call.line, indices)

    def start_count(self) -> int:
        """Number of tasks without upstream tasks, in closed form."""
        return sum(
            number_of_solutions(domain.system.copy(), self.steps)
            for domain in self.domains
            if all(access.reference.matrix in self._inputs for access in domain.reads)
        )

    def call(self, node: Node) -> KernelCall:
        """The kernel call of `node`; `KeyError` where the program has none at its line."""
        return self.program.calls[node.line]

    def bindings(self, node: Node) -> dict[str, int]:
        """Values of sizes, loop variables and assigned scalars at `node`."""
        values, indices = dict(self.sizes), iter(node.indices)
        for scope in self.program.enclosing[node.line]:
            if isinstance(scope, For):
                values[scope.variable] = next(indices)
            elif isinstance(scope, Assign):
                values[scope.name] = evaluate(scope.value, values)
        return values

    def reads(self, node: Node) -> tuple[Tile, ...]:
        """Tiles that `node` reads, in the order of the kernel's arguments."""
        return self._tiles(self.call(node).reads, node)

    def writes(self, node: Node) -> tuple[Tile, ...]:
        """Tiles that `node` writes, in the order of the kernel's outputs."""
        return self._tiles(self.call(node).outputs, node)

    def writer(self, matrix: str, index: tuple[int, ...]) -> Node | None:
        """The task that writes a tile; None where no task does."""
        for domain, access in self._writing.get(matrix, ()):
            found = first_solution(equated(domain.system, [access], index), domain.loops, self.steps)
            if found is not None:
                return Node(domain.call.line, found)
        return None

    def upstream(self, node: Node) -> tuple[Node, ...]:
        """Tasks that write what `node` reads, each once, sorted."""
        tiles = {tile for tile in self.reads(node) if tile[0] not in self._inputs}
        return tuple(sorted({w for tile in tiles if (w := self.writer(*tile)) is not None}))

    def upstream_count(self, node: Node) -> int:
        """Number of tasks in `upstream(node)`."""
        return len(self.upstream(node))

    def downstream(self, node: Node) -> tuple[Node, ...]:
        """Tasks that read what `node` writes, each once, sorted."""
        return tuple(sorted({reader for tile in self.writes(node) for reader in self.readers(*tile)}))

    def readers(self, matrix: str, index: tuple[int, ...]) -> Iterator[Node]:
        """Tasks that read a tile, each once, produced as they are consumed."""
        for domain, accesses in self._reading.get(matrix, ()):
            for place, access in enumerate(accesses):
                for found in solutions(equated(domain.system, [access], index), domain.loops, self.steps):
                    node = Node(domain.call.line, found)
                    if not place or not self._reads_before(node, accesses[:place], index):
                        yield node

    def reader_count(self, matrix: str, index: tuple[int, ...]) -> int:
        """Number of tasks that read a tile, in closed form: a task that reads it twice counts once."""
        total = 0
        for domain, accesses in self._reading.get(matrix, ()):
            for size in range(1, len(accesses) + 1):
                sign = 1 if size % 2 else -1
                for chosen in combinations(accesses, size):
                    total += sign * number_of_solutions(equated(domain.system, chosen, index), self.steps)
        return total

    def verify(self) -> None:
        """Check bounds, single assignment, and that each tile is written before it is read, at these sizes.

        Raises:
            ProgramError: a rule is broken; names file, line, column and, where one was found, a task.
        """
        from ephemeron.linalg.analysis.verification import verify

        verify(self)

    def _tiles(self, references: Sequence[TileReference], node: Node) -> tuple[Tile, ...]:
        values = self.bindings(node)
        return tuple((r.matrix, tuple(evaluate(e, values) for e in r.indices)) for r in references)

    def _reads_before(self, node: Node, accesses: list[Access], index: tuple[int, ...]) -> bool:
        values = self.bindings(node)
        return any(tuple(evaluate(e, values) for e in a.reference.indices) == index for a in accesses)


def equated(system: System, accesses: Sequence[Access], index: tuple[int, ...]) -> System:
    """A copy of `system` in which each of `accesses` names the tile at `index`."""
    made = system.copy()
    for access in accesses:
        made.equations += [form.plus(-k) for form, k in zip(access.indices, index, strict=True)]
    return made
