"""Random LAmbdaPACK programs: nested loops with triangular, strided and tree bounds, conditions, and affine indices."""

from __future__ import annotations

from hypothesis import strategies as st

OPERATORS = ["==", "!=", "<", "<=", ">", ">="]


def integer(draw, names, *, depth=1):
    """An affine expression over `names`, sometimes with a quotient, a remainder, a power or an extreme."""
    kind = draw(st.integers(0, 11))
    name = draw(st.sampled_from(names))
    k = draw(st.integers(-2, 3))
    levels = [n for n in names if n.startswith("v")]
    if kind <= 1:
        return str(k)
    if kind <= 4:
        return name if k == 0 else f"{name} + {k}" if k > 0 else f"{name} - {-k}"
    if kind == 5:
        return f"{draw(st.integers(-2, 3))} * {name} + {k}"
    if kind == 6:
        return f"{name} - {draw(st.sampled_from(names))} + {k}"
    if kind == 7:
        return f"({name} + {k}) // {draw(st.integers(2, 3))}"
    if kind == 8:
        return f"({name} + {k}) % {draw(st.integers(2, 3))}"
    if kind == 9 and levels:
        return f"{name} + 2**{draw(st.sampled_from(levels))}"
    if kind == 10 and depth:
        first, second = integer(draw, names, depth=0), integer(draw, names, depth=0)
        return f"{draw(st.sampled_from(['min', 'max']))}({first}, {second})"
    return f"ceil_log2({name} + {abs(k)})" if kind == 11 else name


def condition(draw, names):
    """A comparison, or two joined."""
    one = f"{integer(draw, names)} {draw(st.sampled_from(OPERATORS))} {integer(draw, names)}"
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return f"{one} {draw(st.sampled_from(['and', 'or']))} {condition(draw, names)}"
    return f"not ({one})" if kind == 1 else one


def loop(draw, names, variable):
    """A variable and start, stop, step of a loop: full, triangular, strided, or the levels of a tree (named v…)."""
    size = draw(st.sampled_from(["N", "M"]))
    kind = draw(st.integers(0, 6))
    levels = [n for n in names if n.startswith("v")]
    if kind == 0:
        return f"v{variable}", ("0", f"ceil_log2({draw(st.sampled_from(names))} + 1)", "1")
    if kind == 1 and levels:
        return f"i{variable}", (str(draw(st.integers(0, 1))), size, f"2**({draw(st.sampled_from(levels))} + 1)")
    if kind == 2:
        return f"i{variable}", (integer(draw, names), f"{size} + 1", str(draw(st.integers(2, 3))))
    if kind == 3:
        return f"i{variable}", (integer(draw, names), f"{integer(draw, names)} + {size}", "1")
    if kind == 4:
        return f"i{variable}", (draw(st.sampled_from(names)), f"{size} + 1", "1")
    return f"i{variable}", ("0", size, "1")


@st.composite
def programs(draw):
    """The text of a program with sizes N and M, an input A of rank 2, and matrices W0, W1, … that its statements write."""
    lines, ranks, counter = [], {"A": 2}, [0]
    starts: dict[str, tuple[str, str]] = {}

    def new_matrix(rank):
        name = f"W{len(ranks)}"
        ranks[name] = rank
        return name

    def written(loops, names):
        """Indices that differ between iterations, mostly: triangular with ±1 on the diagonal."""
        if not loops or draw(st.integers(0, 5)) == 0:
            return [integer(draw, names) for _ in range(max(len(loops), 1))]
        parts = []
        for k, name in enumerate(loops):
            earlier = f" + {integer(draw, loops[:k], depth=0)}" if k and draw(st.integers(0, 3)) == 0 else ""
            parts.append(f"{draw(st.sampled_from(['', '', '', '9 - ']))}{name}{earlier}")
        return parts

    def read(names, visible):
        """A tile that a statement above has written in the same iteration, or any tile."""
        if visible and draw(st.integers(0, 2)):
            return draw(st.sampled_from(visible))
        matrix = draw(st.sampled_from(sorted(ranks)))
        return f"{matrix}[{', '.join(integer(draw, names) for _ in range(ranks[matrix]))}]"

    def statement(names, loops, visible, indent):
        """A call of a kernel; returns the tiles that it writes."""
        inputs = ["A[0, 0]"] if draw(st.booleans()) else []
        given = [*inputs, *(read(names, visible) for _ in range(draw(st.integers(1 - len(inputs), 2))))]
        targets = []
        for _ in range(draw(st.sampled_from([1, 1, 2]))):
            old = [m for m in ranks if m != "A" and ranks[m] == max(len(loops), 1)]
            index = written(loops, names)
            name = draw(st.sampled_from(old)) if old and draw(st.integers(0, 4)) == 0 else new_matrix(len(index))
            targets.append(f"{name}[{', '.join(index)}]")
        targets = list(dict.fromkeys(targets))
        lines.append(f"{indent}{', '.join(targets)} = {'pair' if len(targets) == 2 else 'combine'}({', '.join(given)})")
        return targets

    def chain(loops, visible, indent):
        """Each tile of a new matrix from the one before along one loop; the first from the input."""
        along = draw(st.sampled_from(loops))
        start, step = starts[along]
        name, more = new_matrix(len(loops)), [draw(st.sampled_from(visible))] if visible else []
        before = [f"{v} - {step}" if v == along else v for v in loops]
        target, given = f"{name}[{', '.join(loops)}]", ", ".join([f"{name}[{', '.join(before)}]", *more])
        lines.append(f"{indent}if {along} > {start}:")
        lines.append(f"{indent}    {target} = combine({given})")
        lines.append(f"{indent}else:")
        lines.append(f"{indent}    {target} = combine(A[0, 0])")
        return [target]

    def block(names, loops, visible, indent, depth):
        for _ in range(draw(st.integers(1, 2 if depth else 3))):
            kind = draw(st.integers(0, 7))
            counter[0] += 1
            if depth < 3 and (kind <= 2 or not depth):
                variable, (start, stop, step) = loop(draw, names, counter[0])
                starts[variable] = (start, step)
                lines.append(f"{indent}for {variable} in range({start}, {stop}, {step}):")
                block([*names, variable], [*loops, variable], visible, indent + "    ", depth + 1)
            elif kind == 3:
                lines.append(f"{indent}if {condition(draw, names)}:")
                statement(names, loops, visible, indent + "    ")
                if draw(st.booleans()):
                    lines.append(f"{indent}else:")
                    statement(names, loops, visible, indent + "    ")
            elif kind <= 5 and loops:
                visible = [*visible, *chain(loops, visible, indent)]
            else:
                if kind == 6:
                    lines.append(f"{indent}s{counter[0]} = {integer(draw, names)}")
                    names = [*names, f"s{counter[0]}"]
                visible = [*visible, *statement(names, loops, visible, indent)]

    block(["N", "M"], [], [], "    ", 0)
    matrices = "".join(f", {m}: Temporary" for m in ranks if m != "A")
    used = any("A[" in line for line in lines)
    start = f"def random({'A: Input' if used else 'A: Temporary'}{matrices}, N: Size, M: Size):"
    return "\n".join([start, *([] if used else ["    A[0, 0] = combine()"]), *lines])
