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
    """The range of a loop: full, triangular, strided, or the levels of a tree (named v…)."""
    size = draw(st.sampled_from(["N", "M"]))
    kind = draw(st.integers(0, 6))
    levels = [n for n in names if n.startswith("v")]
    if kind == 0:
        return f"v{variable}", f"range(ceil_log2({draw(st.sampled_from(names))} + 1))"
    if kind == 1 and levels:
        return f"i{variable}", f"range({draw(st.integers(0, 1))}, {size}, 2**({draw(st.sampled_from(levels))} + 1))"
    if kind == 2:
        return f"i{variable}", f"range({integer(draw, names)}, {size} + 1, {draw(st.integers(2, 3))})"
    if kind == 3:
        return f"i{variable}", f"range({integer(draw, names)}, {integer(draw, names)} + {size})"
    if kind == 4:
        return f"i{variable}", f"range({draw(st.sampled_from(names))}, {size} + 1)"
    return f"i{variable}", f"range({size})"


@st.composite
def programs(draw):
    """The text of a program with sizes N and M, an input A of rank 2, and matrices W0, W1, … that its statements write."""
    lines, ranks, counter = [], {"A": 2}, [0]

    def written(loops, names):
        """Indices that differ between iterations, mostly: triangular with ±1 on the diagonal."""
        if not loops or draw(st.integers(0, 4)) == 0:
            return [integer(draw, names) for _ in range(max(len(loops), 1))]
        parts = []
        for k, name in enumerate(loops):
            earlier = f" + {integer(draw, loops[:k], depth=0)}" if k and draw(st.booleans()) else ""
            parts.append(f"{draw(st.sampled_from(['', '', '-']))}{name}{earlier}")
        return parts

    def statement(names, loops, indent):
        made = draw(st.integers(0, 3)) == 0
        known = sorted(ranks)
        read = [draw(st.sampled_from(known)) for _ in range(draw(st.integers(1, 3)))]
        parts = []
        for matrix in read:
            candidates = [n for n in names if n not in "NM"] or names
            parts.append([integer(draw, candidates) for _ in range(ranks[matrix])])
        targets = []
        for _ in range(2 if made else 1):
            old = [m for m in known if m != "A" and ranks[m] == max(len(loops), 1)]
            name = draw(st.sampled_from(old)) if old and draw(st.integers(0, 2)) == 0 else f"W{len(ranks)}"
            index = written(loops, names)
            ranks[name] = len(index)
            targets.append(f"{name}[{', '.join(index)}]")
        if len(targets) == 2 and targets[0] == targets[1]:
            targets.pop()
        kernel = "pair" if len(targets) == 2 else "combine"
        given = ", ".join(f"{m}[{', '.join(p)}]" for m, p in zip(read, parts, strict=True))
        lines.append(f"{indent}{', '.join(targets)} = {kernel}({given})")

    def block(names, loops, indent, depth):
        for _ in range(draw(st.integers(1, 2 if depth else 3))):
            kind = draw(st.integers(0, 5))
            counter[0] += 1
            if depth < 3 and (kind <= 2 or not depth):
                variable, bounds = loop(draw, names, counter[0])
                lines.append(f"{indent}for {variable} in {bounds}:")
                block([*names, variable], [*loops, variable], indent + "    ", depth + 1)
            elif depth < 3 and kind == 3:
                lines.append(f"{indent}if {condition(draw, names)}:")
                statement(names, loops, indent + "    ")
                if draw(st.booleans()):
                    lines.append(f"{indent}else:")
                    statement(names, loops, indent + "    ")
            else:
                if kind == 4:
                    lines.append(f"{indent}s{counter[0]} = {integer(draw, names)}")
                    names = [*names, f"s{counter[0]}"]
                statement(names, loops, indent)

    block(["N", "M"], [], "    ", 0)
    matrices = "".join(f", {m}: Temporary" for m in sorted(ranks) if m != "A")
    used = any("A[" in line for line in lines)
    return f"def random({'A: Input' if used else 'A: Temporary'}{matrices}, N: Size, M: Size):\n" + "\n".join(
        ([] if used else ["    A[0, 0] = combine()"]) + lines
    )
