"""Shapes of a kernel's outputs from those of its arguments. A kernel that is not named here returns tiles like its first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ephemeron.linalg.kernels.reflectors import BLOCK
from ephemeron.linalg.language.kernel import Kernel
from ephemeron.linalg.matrices.stored import Shape


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
