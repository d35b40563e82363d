"""Rules of LAmbdaPACK checked at given sizes of any magnitude, by solving systems over pairs of tasks.

- Bounds: no task has an index below zero, or at least the declared number of tiles.
- Single assignment: no two tasks write one tile.
- Order: every tile that a task reads is written by a task before it in the order of the text. The pairs of a reader and its
  writer are counted in closed form and compared with the number of readers. So the graph has no cycle, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ephemeron.errors import ProgramError
from ephemeron.linalg.analysis.compilation import Access, Domain
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.linear import Linear
from ephemeron.linalg.analysis.small_sizes import described
from ephemeron.linalg.analysis.solver import first_solution, number_of_solutions, solutions
from ephemeron.linalg.analysis.system import System
from ephemeron.linalg.language.expressions import evaluate
from ephemeron.linalg.language.program import For, Role

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
