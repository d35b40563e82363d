"""Dependencies of a program at given sizes, without the graph (NumPyWren, survey 2.4, algorithms 1 and 2).

For a tile that was written, every statement that reads its matrix gives a system: the loops' bounds, the conditions, and
one equation per index. Its integer solutions are the tasks downstream. The statements are few, so the time of a query depends on the
program's text and on the number of its results, not on the number of tiles.

Rules of LAmbdaPACK checked at given sizes of any magnitude, by solving systems over pairs of tasks.

- Bounds: no task has an index below zero, or at least the declared number of tiles.
- Single assignment: no two tasks write one tile.
- Order: every tile that a task reads is written by a task before it in the order of the text. The pairs of a reader and its
  writer are counted in closed form and compared with the number of readers. So the graph has no cycle, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice

from ephemeron.errors import ProgramError
from ephemeron.linalg.analysis.compilation import Access, Domain, domains_of
from ephemeron.linalg.analysis.propagation import Steps
from ephemeron.linalg.analysis.solver import first_solution, number_of_solutions, solutions
from ephemeron.linalg.analysis.system import Linear, System
from ephemeron.linalg.analysis.unrolled import described
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


# -- rules of LAmbdaPACK checked at given sizes of any magnitude --------------------------------------------------


_TRIES = 20_000  # tasks that are looked at for an example of a tile that is not written


def verify(analysis: Analysis) -> None:
    """Check the program of `analysis` at its sizes.

    Raises:
        ProgramError: a rule is broken; names file, line, column and, where one was found, a task.
    """
    for domain in analysis.domains:
        for access in (*domain.reads, *domain.writes):
            _check_bounds(analysis, domain, access)
    _check_single_assignment(analysis)
    _check_order(analysis)


def _check_bounds(analysis: Analysis, domain: Domain, access: Access) -> None:
    matrix = analysis.program.matrix(access.reference.matrix)
    for place, form in enumerate(access.indices):
        violations = [(form * -1).plus(-1)]
        if matrix.extents is not None:
            violations.append(form.plus(-evaluate(matrix.extents[place], analysis.sizes)))
        for violation in violations:
            system = domain.system.copy()
            system.inequalities.append(violation)
            found = first_solution(system, [*domain.loops, *access.indices], analysis.steps)
            if found is not None:
                tile = (matrix.name, found[len(domain.loops) :])
                raise ProgramError(
                    f"{access.reference} is {described(tile)} at {_at(analysis, domain, found)}: out of bounds",
                    location=access.reference.location,
                )


def _check_single_assignment(analysis: Analysis) -> None:
    writes = [(domain, access) for domain in analysis.domains for access in domain.writes]
    for k, (domain, access) in enumerate(writes):
        for other_domain, other in writes[: k + 1]:
            if other.reference.matrix != access.reference.matrix:
                continue
            system, loops, other_loops = _pair(domain, access, other_domain, other)
            same_call = domain.call is other_domain.call
            cases = _before(loops, other_loops, len(loops)) if same_call else iter([([], [])])
            if other is not access and same_call:
                equal = [a - b for a, b in zip(loops, other_loops, strict=True)]
                cases = iter([*cases, *_before(other_loops, loops, len(loops)), (equal, [])])
            for equations, inequalities in cases:
                case = _with(system, equations, inequalities)
                wanted = [*loops, *access.indices]
                found = first_solution(case, wanted, analysis.steps)
                if found is not None:
                    tile = (access.reference.matrix, found[len(loops) :])
                    raise ProgramError(
                        f"{access.reference} writes {described(tile)} at {_at(analysis, domain, found)}, and"
                        f" {other.reference} at line {other.reference.location.line} writes it too",
                        location=access.reference.location,
                        remedy="each tile is written once",
                    )


def _check_order(analysis: Analysis) -> None:
    inputs = {m.name for m in analysis.program.matrices if m.role is Role.INPUT}
    writes = [(domain, access) for domain in analysis.domains for access in domain.writes]
    for reader in analysis.domains:
        total = number_of_solutions(reader.system.copy(), analysis.steps)
        for read in reader.reads:
            if read.reference.matrix in inputs:
                continue
            covered = 0
            for writer, write in writes:
                if write.reference.matrix == read.reference.matrix:
                    covered += _pairs_in_order(analysis, reader, read, writer, write)
            if covered != total:
                raise _unwritten(analysis, reader, read)


def _pairs_in_order(analysis: Analysis, reader: Domain, read: Access, writer: Domain, write: Access) -> int:
    system, loops, writer_loops = _pair(reader, read, writer, write)
    common = _common_loops(analysis, reader, writer)
    cases = list(_before(writer_loops, loops, common))
    if writer.call.line < reader.call.line:
        cases.append(([writer_loops[k] - loops[k] for k in range(common)], []))
    return sum(number_of_solutions(_with(system, *case), analysis.steps) for case in cases)


def _pair(first: Domain, access: Access, second: Domain, other: Access) -> tuple[System, list[Linear], list[Linear]]:
    """A system over a task of each domain that name one tile, and both tasks' loops."""
    system, by = first.system.joined(second.system)
    for mine, theirs in zip(access.indices, other.indices, strict=True):
        system.equations.append(mine - theirs.shifted(by))
    return system, list(first.loops), [form.shifted(by) for form in second.loops]


def _before(first: list[Linear], second: list[Linear], common: int) -> Iterator[tuple[list[Linear], list[Linear]]]:
    """Disjoint cases, equations and inequalities, in which `first` is lexicographically less in the `common` loops."""
    for place in range(common):
        equal = [first[k] - second[k] for k in range(place)]
        yield equal, [(second[place] - first[place]).plus(-1)]


def _with(system: System, equations: list[Linear], inequalities: list[Linear]) -> System:
    made = system.copy()
    made.equations += equations
    made.inequalities += inequalities
    return made


def _common_loops(analysis: Analysis, first: Domain, second: Domain) -> int:
    """Number of loops around both kernel calls."""
    scopes = (analysis.program.enclosing[d.call.line] for d in (first, second))
    mine, theirs = ([s.line for s in path if isinstance(s, For)] for path in scopes)
    return sum(1 for a, b in zip(mine, theirs, strict=False) if a == b)


def _unwritten(analysis: Analysis, reader: Domain, read: Access) -> ProgramError:
    wanted = [*reader.loops, *read.indices]
    for found in islice(solutions(reader.system.copy(), wanted, analysis.steps), _TRIES):
        tile = (read.reference.matrix, found[len(reader.loops) :])
        if analysis.writer(*tile) is None:
            return ProgramError(
                f"{read.reference} reads {described(tile)} at {_at(analysis, reader, found)}, which is never written",
                location=read.reference.location,
            )
    return ProgramError(
        f"{read.reference} reads tiles that are not written before, with {_sizes(analysis)}", location=read.reference.location
    )


def _at(analysis: Analysis, domain: Domain, found: tuple[int, ...]) -> str:
    loops = analysis.program.loop_variables(domain.call.line)
    return ", ".join([_sizes(analysis), *(f"{n} = {v}" for n, v in zip(loops, found, strict=False))])


def _sizes(analysis: Analysis) -> str:
    return ", ".join(f"{n} = {v}" for n, v in analysis.sizes.items())
