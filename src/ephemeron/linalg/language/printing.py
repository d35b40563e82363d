"""A program as text, in the style of figure 17 (survey 2.4). The text is Python, and parses to an equal program."""

from __future__ import annotations

from collections.abc import Iterator

from ephemeron.linalg.language.expressions import Constant
from ephemeron.linalg.language.program import Assign, For, KernelCall, Program, Statement


def program_text(program: Program) -> str:
    """The program's text: line n of it is the line that statements and nodes carry as `line`."""
    roles = {m.name: m.role.value for m in program.matrices}
    signature = ", ".join(f"{name}: {roles.get(name, 'Size')}" for name in program.parameters)
    lines = [f"def {program.name}({signature}):"]
    for matrix in program.matrices:
        if matrix.extents is not None:
            lines.append(f"    tiles({', '.join([matrix.name, *map(str, matrix.extents)])})")
    lines += [f"    {line}" for line in body_lines(program.body)]
    return "\n".join(lines) + "\n"


def body_lines(body: tuple[Statement, ...]) -> Iterator[str]:
    """Lines of a block, without the indentation of the block itself."""
    for statement in body:
        if isinstance(statement, KernelCall):
            yield call_text(statement)
        elif isinstance(statement, Assign):
            yield f"{statement.name} = {statement.value}"
        elif isinstance(statement, For):
            yield f"for {statement.variable} in {range_text(statement)}:"
            yield from (f"    {line}" for line in body_lines(statement.body))
        else:
            yield f"if {statement.condition}:"
            yield from (f"    {line}" for line in body_lines(statement.body))
            if statement.orelse:
                yield "else:"
                yield from (f"    {line}" for line in body_lines(statement.orelse))


def call_text(call: KernelCall) -> str:
    """One kernel call."""
    given = [str(a) for a in call.arguments]
    given += [f"{k}={v!r}" if isinstance(v, bool | int | float | str) else f"{k}={v}" for k, v in call.options]
    return f"{', '.join(map(str, call.outputs))} = {call.kernel}({', '.join(given)})"


def range_text(loop: For) -> str:
    """`range(…)` of a loop, as short as Python allows."""
    parts = [str(loop.start), str(loop.stop), str(loop.step)]
    if loop.step == Constant(1):
        parts = parts[1:2] if loop.start == Constant(0) else parts[:2]
    return f"range({', '.join(parts)})"
