"""Exchange times and constants of every (K, M), tabulated once per search: what lower bounds are made of.

The time of an exchange depends on K and M through the size of a shard, and grows with W along at most two straight
lines: so a table of two lines per (K, M), read off the model itself at four W, replaces a model evaluation per (W, K, M).
Each table carries its minima over aligned blocks of 2^l values of K, and can be merged over quotas, so that a bound for
a whole block of configurations costs what it costs for one.

A column is one (family, quota); a family holds candidates that are bounded alike: an option with K < W or with K = W.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.performance.model import (
    CONTROL_EVERY_S,
    DOWN,
    START_PUTS,
    START_READS,
    TINY_MB,
    UP,
    exchange,
    kept_mb,
    published,
    usable_mb,
)
from ephemeron.performance.profile import Array
from ephemeron.planning.space import Option, Space

FIRST = 4
"""The least W from which on an exchange follows its lines; W = 2 and 3 have tables of their own."""


@dataclass(frozen=True, slots=True)
class Family:
    """Candidates that are bounded alike."""

    option: int
    tied: bool
    """K = W; else K < W."""
    unequal: bool
    """B^n may exceed B^a."""
    least: int
    """W."""
    most: int
    """W."""
    most_k: int


def families(space: Space) -> list[Family]:
    """All of a space's, equal batches first."""
    found = []
    most = space.most_workers
    named = {(o.terms.pattern, o.terms.compression, o.platform.name) for o in space.options if o.terms.sync == "bsp"}
    for i, o in enumerate(space.options):
        low, high = o.workers(most)
        pattern = o.terms.pattern
        if pattern in ("standalone", "scatter-reduce"):
            found.append(Family(i, True, False, low, high, high))
            continue
        many = pattern not in ("all-reduce", "parameter-server")
        found.append(Family(i, False, o.unequal, 2, high, high - 1 if many else 1))
        # Where everybody aggregates, HAP is BSP.
        if many and not (o.unequal and (pattern, o.terms.compression, o.platform.name) in named):
            found.append(Family(i, True, False, 2, high, high))
    return sorted((f for f in found if f.most >= f.least), key=lambda f: f.unequal)


CONSTANTS = (
    "sample_s", "batch_s", "own_s", "late_s", "fixed_s", "evaluate_s", "evaluate_each_s", "cold_s", "start_each_s", "gb_usd",
    "low_mb", "put_usd", "get_usd", "gets_by_w", "gets_more", "start_usd", "per_s_usd", "mb_usd", "hourly_usd",
    "hourly_each_usd", "least_hourly_usd", "moved_by_w", "moved_more", "invoke_usd", "extra_usd",
)  # fmt: skip
"""Rows of `Tables.constants`; each is a lower bound for every quota of the column."""
PLACE = {name: i for i, name in enumerate(CONSTANTS)}


@dataclass(frozen=True, slots=True)
class Tables:
    """Columns of one kind of family."""

    unequal: bool
    families: tuple[Family, ...]
    family: Array
    """Of every column."""
    first: Array
    """Index of a column's first quota, and of its last one."""
    last: Array
    offset: Array
    """Where each level begins."""
    lines: tuple[Array, ...]
    """Pace is at least a1 + b1·W and a2 + b2·W: columns × (level, block of K)."""
    small: Array
    """The same for W = 2 and W = 3."""
    other: Array
    """Of those who do not aggregate, under HAP; empty elsewhere."""
    pieces: Array
    """Puts per iteration and worker."""
    load: Array
    """Seconds to load everything: columns × W from 1 on."""
    constants: Array
    """`CONSTANTS` × columns."""
    largest_batch: Array
    """By memory."""
    synchronous: Array
    """Spare samples of 3-22, where B^n is bounded by it: columns × K, at the largest W; else empty."""

    def merged(self, groups: Array) -> Tables:
        """Columns merged into groups: minima of what bounds from below.

        Args:
            groups: where each group of adjacent columns begins; a group stays within one family.
        """

        ends = np.append(groups[1:], len(self.family)) - 1

        def least(x: Array, axis: int = 0) -> Array:
            if axis or not x.size:
                return np.minimum.reduceat(x, groups, axis=axis) if x.size else x
            # Of wide rows this is several times as fast as `reduceat`.
            return np.stack([x[a : b + 1].min(axis=0) for a, b in zip(groups, ends, strict=True)])

        synchronous = np.maximum.reduceat(self.synchronous, groups) if self.synchronous.size else self.synchronous
        return Tables(
            self.unequal, self.families, self.family[groups], self.first[groups], self.last[ends], self.offset,
            tuple(least(x) for x in self.lines), least(self.small), least(self.other), least(self.pieces), least(self.load),
            least(self.constants, 1), np.maximum.reduceat(self.largest_batch, groups), synchronous,
        )  # fmt: skip


def tabulate(space: Space, of: Sequence[Family], first: int, last: int, largest: int) -> list[Tables]:
    """Tables of all families over the quotas from `first` to `last`, those with unequal batches apart.

    Args:
        largest: W that any query may ask for.
    """
    known: dict[Any, Any] = {}
    found = []
    quotas = space.quotas[first : last + 1, None]
    for unequal in (False, True):
        mine = tuple(f for f in of if f.unequal == unequal)
        if mine:
            found.append(_tables(space, mine, unequal, quotas, first, min(largest, max(f.most for f in mine)), known))
    return found


def _tables(
    space: Space, mine: tuple[Family, ...], unequal: bool, m: Array, first: int, most: int, known: dict[Any, Any]
) -> Tables:
    quotas = m[:, 0]
    n = max(min(max(f.most_k for f in mine), most), 1)
    wide = len(quotas) * len(mine)
    lines = tuple(np.full((wide, n), np.inf) for _ in range(4))
    small, other = np.full((wide, 2), np.inf), np.full((wide, n) if unequal else (wide, 0), np.inf)
    pieces, load = np.full((wide, n), np.inf), np.zeros((wide, most))
    constants = np.zeros((len(CONSTANTS), wide))
    capped = space.model == "published" and unequal
    synchronous = np.zeros((wide, n) if capped else (wide, 0))
    usable = np.ones(wide, dtype=bool)
    for i, f in enumerate(mine):
        o, at = space.options[f.option], slice(i * len(quotas), (i + 1) * len(quotas))
        k = np.arange(1, min(f.most_k, n) + 1, dtype=float)[None, :]
        rows = slice(0, k.size)
        if f.tied:
            e, others, puts = _pace(space, o, k, k, m, known)
            lines[0][at, rows] = lines[2][at, rows] = np.maximum(e, others)
            lines[1][at, rows] = lines[3][at, rows] = 0.0
            small[at] = 0.0
            pieces[at, rows] = puts / k
            if f.least > 1:
                lines[0][at, 0] = lines[2][at, 0] = np.inf
        else:
            for line, (intercept, slope) in zip(
                (0, 2), _lines(space, o, k, m, float(most), known, unequal), strict=True
            ):
                lines[line][at, rows], lines[line + 1][at, rows] = intercept, slope
            near = np.maximum(k + 1, FIRST)
            _, others, puts = _pace(space, o, near, k, m, known)
            pieces[at, rows] = puts / near
            if unequal:
                other[at, rows] = others
            for w in (2, 3):
                few = np.arange(1.0, min(w, f.most_k + 1))[None, :]
                e, others, _ = _pace(space, o, np.full_like(few, w), few, m, known)
                small[at, w - 2] = (e if unequal else np.maximum(e, others)).min(axis=1)
            if capped:
                synchronous[at, rows] = space.synchronous(o, np.full_like(k, float(most)), m, k, np.zeros_like(k))
        load[at], constants[:, at] = _loading(space, o, m, most), _constants(space, o, f, quotas)
        usable[at] = usable_mb(space.workload, o.platform, quotas) + space.workload.m > 0
    batch = np.tile(space.workload.largest_batch(quotas), len(mine))
    batch = np.where(usable, np.minimum(batch, 1e9), 0.0)
    index = np.tile(np.arange(first, first + len(quotas)), len(mine))
    offset, levels = _levels(n)
    pyramids = [_pyramid(x, levels) for x in (lines[:2] if unequal else lines)]  # one line, where batches are unequal
    return Tables(
        unequal, mine, np.repeat(np.arange(len(mine)), len(quotas)), index, index, offset,
        (*pyramids, *pyramids)[:4], small, _pyramid(other, levels) if unequal else other,
        _pyramid(pieces, levels), load, constants, batch, synchronous,
    )  # fmt: skip


def _levels(n: int) -> tuple[Array, int]:
    sizes = [n]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return np.cumsum([0, *sizes[:-1]]), len(sizes)


def _pyramid(table: Array, levels: int) -> Array:
    """A table, and beside it its minima over pairs of K, pairs of pairs, and so on."""
    sizes = [table.shape[1]]
    for _ in range(levels - 1):
        sizes.append(-(-sizes[-1] // 2))
    out = np.empty((len(table), sum(sizes)))
    out[:, : sizes[0]] = table
    at = 0
    for size, half in itertools.pairwise(sizes):
        below, above = out[:, at : at + size], out[:, at + size : at + size + half]
        pairs = size // 2
        np.minimum(below[:, 0 : 2 * pairs : 2], below[:, 1 : 2 * pairs : 2], out=above[:, :pairs])
        above[:, pairs:] = below[:, 2 * pairs :]
        at += size
    return out


def _lines(
    space: Space, o: Option, k: Array, m: Array, most: float, known: dict[Any, Any], unequal: bool
) -> list[tuple[Array, Array]]:
    """Two lines below the pace as a function of W: intercepts and slopes.

    Both chains of an exchange are convex in W, so that a line through two neighbouring points is below every other one.
    """
    near, far = np.maximum(k + 1, FIRST), np.maximum(most, np.maximum(k + 1, FIRST) + 2)
    here, there = _pace(space, o, near, k, m, known), _pace(space, o, near + 1, k, m, known)
    straight = _line(near, here[0], there[0])
    if unequal:
        return [straight, straight]
    if o.terms.pattern == "pipelined":
        return [straight, _line(far, _pace(space, o, far, k, m, known)[0], _pace(space, o, far + 1, k, m, known)[0])]
    return [straight, _line(near, here[1], there[1])]


def _line(w: Array, here: Array, there: Array) -> tuple[Array, Array]:
    slope = there - here
    return here - slope * w, slope


def _pace(space: Space, o: Option, w: Array, k: Array, m: Array, known: dict[Any, Any]) -> tuple[Array, Array, Array]:
    """Seconds of an exchange and of those who do not aggregate, and puts; straight from the model."""
    t = o.terms
    if space.model == "published":
        one = np.ones_like(w)
        p = published(space.workload, o.platform, t, workers=w, memory_mb=m, aggregators=k, batch=one, other_batch=one)
        return p.iteration_s - space.workload.compute_s(1.0, m), np.zeros_like(p.seconds), k * w
    reduced = t.pattern in ("k-reduce", "all-reduce", "scatter-reduce")
    key = (id(o.platform), reduced or t.pattern, t.sync, t.compression, w.tobytes(), k.tobytes())
    if key not in known:
        e = exchange(space.workload, o.platform, t, workers=w, aggregators=k, memory_mb=m)
        known[key] = e.seconds, e.other_s, e.puts
    # Those who aggregate do the same under BSP and HAP.
    return known[key]  # type: ignore[no-any-return]


def _loading(space: Space, o: Option, m: Array, most: int) -> Array:
    """Seconds until the loop begins, cold start aside, by W: with equal batches exactly, else at least."""
    w, p = space.workload, o.platform
    workers = np.arange(1, most + 1, dtype=float)[None, :]
    if space.model == "published":
        return p.seconds("down", w.model_mb + w.dataset_mb / workers, m)
    tiny = p.seconds("down", TINY_MB, m)
    share = usable_mb(w, p, m) / p.mb_per_vcpu
    own = p.seconds("up", TINY_MB, m) + tiny + p.seconds("down", w.model_mb, m) + w.first_cpu_s / share
    return np.asarray(own + np.maximum(p.seconds("down", w.dataset_mb / workers, m), tiny))


def _constants(space: Space, o: Option, f: Family, m: Array) -> Array:
    w, p, t = space.workload, o.platform, o.terms
    usable = usable_mb(w, p, m) if space.model == "honest" else m
    with np.errstate(divide="ignore"):
        sample = np.where(usable + w.m > 0, w.a / np.maximum(usable + w.m, 1e-9), np.inf)
    found: dict[str, Array | float] = {
        "sample_s": sample,
        "batch_s": sample * w.b,
        "gb_usd": m / 1024 * p.price_gb_s,
        "low_mb": m,
    }
    server = t.pattern == "parameter-server"
    gets = (0.0, 0.0) if t.pattern == "standalone" else (1.0, 0.0) if server else (2.0, -2.0)
    if space.model == "published":
        found |= {
            "put_usd": p.price_put, "get_usd": p.price_get, "gets_by_w": gets[0], "gets_more": gets[1], "mb_usd": p.price_mb,
            "moved_by_w": 3 * w.model_mb, "moved_more": -2 * w.model_mb,
            "extra_usd": t.epochs * 2 * w.dataset_mb * p.price_mb,
        }  # fmt: skip
    else:
        share = usable / p.mb_per_vcpu
        tiny_up, tiny_down = p.seconds("up", TINY_MB, m), p.seconds("down", TINY_MB, m)
        finish = p.seconds("up", w.model_mb, m) + (0.0 if f.most == 1 else tiny_up + tiny_down)
        polls = p.polls_per_get if p.poll_s > 0 else 0.0
        kept, more = (float(kept_mb(w, t, np.array(x))) / 1000 for x in ((1.0, 1.0) if f.most == 1 else (2.0, 3.0)))
        up, down = UP[t.compression], DOWN[t.compression]
        many = t.pattern not in ("standalone", "parameter-server")
        found |= {
            "own_s": w.step_s + w.apply_s / share, "late_s": w.lockstep_cpu_s / share if f.most > 1 else 0.0,
            "fixed_s": finish, "evaluate_s": sample * w.test_samples / 3,
            "evaluate_each_s": sample * w.b if w.test_samples else 0.0,
            "cold_s": p.cold_start_s, "start_each_s": p.start_each_s, "put_usd": p.price_put,
            "get_usd": p.price_get * (1 + polls), "gets_by_w": gets[0], "gets_more": gets[1],
            "start_usd": p.price_invocation + p.price_put * (START_PUTS + 3) + p.price_get * (START_READS + 1) + 2 * w.model_mb * p.price_mb,
            "per_s_usd": p.price_get / CONTROL_EVERY_S + p.price_server_hour / 3600, "mb_usd": p.price_mb,
            "hourly_usd": (kept - 2 * (more - kept)) * p.price_gb_hour / 3600,
            "hourly_each_usd": (more - kept) * p.price_gb_hour / 3600,
            "least_hourly_usd": p.least_kept_gb * p.price_gb_hour / 3600,
            "moved_by_w": w.model_mb * (2 * up + down) if many else 2 * w.model_mb if server else 0.0,
            "moved_more": -2 * w.model_mb * up if many else 0.0, "invoke_usd": p.price_invocation,
            "extra_usd": 3 * p.price_put + w.dataset_mb * p.price_mb,
        }  # fmt: skip
    table = np.zeros((len(CONSTANTS), len(m)))
    for name, value in found.items():
        table[PLACE[name]] = value
    return table
