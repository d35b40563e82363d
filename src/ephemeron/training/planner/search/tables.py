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
from functools import cached_property
from typing import Any

import numpy as np

from ephemeron.training.planner.model.direct_links import ENDPOINT_LISTS, ENDPOINT_PUTS
from ephemeron.training.planner.model.exchange import DOWN, TINY_MB, UP, exchange
from ephemeron.training.planner.model.lives import closing_s
from ephemeron.training.planner.model.prediction import CONTROL_EVERY_S, START_PUTS, START_READS, kept_mb, state_mb, usable_mb
from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.search.space import Option, Space

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
        if o.tied:
            found.append(Family(i, True, False, low, high, high))
            continue
        many = pattern not in ("all-reduce", "parameter-server")
        found.append(Family(i, False, o.unequal, 2, high, high - 1 if many else 1))
        # With K = W, HAP is BSP.
        if many and not (o.unequal and (pattern, o.terms.compression, o.platform.name) in named):
            found.append(Family(i, True, False, 2, high, high))
    return sorted((f for f in found if f.most >= f.least), key=lambda f: f.unequal)


CONSTANTS = (
    "sample_s",
    "batch_s",
    "own_s",
    "late_s",
    "fixed_s",
    "evaluate_s",
    "evaluate_each_s",
    "low_mb",
    "put_usd",
    "get_usd",
    "gets_by_w",
    "gets_more",
    "start_usd",
    "per_s_usd",
    "mb_usd",
    "hourly_usd",
    "hourly_each_usd",
    "least_hourly_usd",
    "moved_by_w",
    "moved_more",
    "extra_usd",
    "brief_s",
    "direct_usd_by_w",
    "direct_usd_more",
    "setup_s",
    "setup_each_s",
    "cold_s",
    "start_each_s",
    "gb_usd",
    "invoke_usd",
    "life_s",
    "warm_s",
    "write_s",
    "read_s",
    "request_s",
    "init_s",
)
"""Rows of `Tables.constants`; each is a lower bound for every quota of the column. No function hands off within `brief_s`."""
PLACE = {name: i for i, name in enumerate(CONSTANTS)}


@dataclass(frozen=True)
class Tables:
    """Columns of one kind of family."""

    unequal: bool
    families: tuple[Family, ...]
    family: Array
    """Index of every column's family."""
    first: Array
    """Index of a column's first quota, and of its last one."""
    last: Array
    offset: Array
    """Begin of each level."""
    stacks: tuple[Array, ...]
    """`lines` by family: tables × distinct quotas × (level, block of K)."""
    row: Array
    """Row of every column in its family's stack: quotas at which nothing gets faster share a row."""
    small: Array
    """Pace at W = 2 and W = 3: columns × 2."""
    puts: tuple[Array, ...]
    """Puts per iteration and worker, by family and (level, block of K)."""
    load: Array
    """Seconds to load everything: (platform, quota) × W from 1 on."""
    load_row: Array
    """Row of every column in `load`."""
    constants: Array
    """`CONSTANTS` × columns."""
    largest_batch: Array
    """Largest batch of every column that its memory holds."""
    synchronous: Array
    """Spare samples of 3-22, where B^n is bounded by it: columns × K, at the largest W; else empty."""

    @cached_property
    def lines(self) -> tuple[Array, ...]:
        """Pace is at least a1 + b1·W and a2 + b2·W; with unequal batches a third table, of those who do not aggregate."""
        return tuple(np.concatenate([x[i].ravel() for x in self.stacks]) for i in range(len(self.stacks[0])))

    @cached_property
    def place(self) -> Array:
        """Begin of each column's row in `lines`."""
        begins = np.cumsum([0, *(x[0].size for x in self.stacks[:-1])])
        wide = np.array([x.shape[2] for x in self.stacks])
        return np.asarray(begins[self.family] + self.row * wide[self.family])

    @cached_property
    def tied(self) -> Array:
        """Whether K = W, of every column."""
        return np.array([f.tied for f in self.families])[self.family]

    @cached_property
    def width(self) -> Array:
        """Index of the last entry of each column's row."""
        return np.array([x.shape[2] - 1 for x in self.stacks])[self.family]

    @cached_property
    def pieces(self) -> Array:
        """`puts` one after another."""
        return np.concatenate(self.puts)

    @cached_property
    def pieces_place(self) -> Array:
        """Begin of each column in `pieces`."""
        return np.asarray(np.cumsum([0, *(len(x) for x in self.puts[:-1])])[self.family])

    def merged(self, groups: Array) -> Tables:
        """Columns merged into groups: minima of what bounds from below.

        Args:
            groups: where each group of adjacent columns begins; a group stays within one family.
        """
        ends = np.append(groups[1:], len(self.family)) - 1
        family = self.family[groups]
        stacks, row = [], np.zeros(len(groups), dtype=int)
        for i, x in enumerate(self.stacks):
            mine = family == i
            found, row[mine] = _merged(x, self.row[groups[mine]], self.row[ends[mine]])
            stacks.append(found)
        load, load_row = _merged(self.load, self.load_row[groups], self.load_row[ends])
        synchronous = np.maximum.reduceat(self.synchronous, groups) if self.synchronous.size else self.synchronous
        return Tables(
            self.unequal,
            self.families,
            family,
            self.first[groups],
            self.last[ends],
            self.offset,
            tuple(stacks),
            row,
            np.minimum.reduceat(self.small, groups),
            self.puts,
            load,
            load_row,
            np.minimum.reduceat(self.constants, groups, axis=1),
            np.maximum.reduceat(self.largest_batch, groups),
            synchronous,
        )


def _merged(x: Array, first: Array, last: Array) -> tuple[Array, Array]:
    """Minima over intervals of rows, the last axis but one; equal intervals once. Also which is whose."""
    intervals = {pair: i for i, pair in enumerate(sorted(set(zip(first.tolist(), last.tolist(), strict=True))))}
    found = np.stack([x[..., a : b + 1, :].min(axis=-2) for a, b in intervals], axis=-2)
    return found, np.array([intervals[pair] for pair in zip(first.tolist(), last.tolist(), strict=True)])


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


def _tables(space: Space, mine: tuple[Family, ...], unequal: bool, m: Array, first: int, most: int, known: dict[Any, Any]) -> Tables:
    quotas = m[:, 0]
    n = max(min(max(f.most_k for f in mine), most), 1)
    offset, levels = _levels(n)
    wide = len(quotas) * len(mine)
    stacks, puts = [], []
    loads: dict[int, tuple[int, Array]] = {}
    row, load_row = np.zeros(wide, dtype=int), np.zeros(wide, dtype=int)
    small, constants = np.full((wide, 2), np.inf), np.zeros((len(CONSTANTS), wide))
    capped = space.published is not None and unequal
    synchronous = np.zeros((wide, n) if capped else (wide, 0))
    usable, batch = np.ones(wide, dtype=bool), np.zeros(wide)
    for i, f in enumerate(mine):
        o, at = space.options[f.option], slice(i * len(quotas), (i + 1) * len(quotas))
        few_m, row[at] = _distinct(space, o, m)
        k = np.arange(1, min(f.most_k, n) + 1, dtype=float)[None, :]
        # A family of a single K needs no minima over several.
        stack = np.full((3 if unequal else 4, len(few_m), n if k.size > 1 else 1), np.inf)
        rows = slice(0, k.size)
        if f.tied:
            e, others, written = _pace(space, o, k, k, few_m, known)
            stack[0, :, rows] = stack[2, :, rows] = np.maximum(e, others)
            stack[1, :, rows] = stack[3, :, rows] = 0.0
            small[at] = 0.0
            pieces = written / k
            if f.least > 1:
                stack[0, :, 0] = stack[2, :, 0] = np.inf
        else:
            for line, (intercept, slope) in enumerate(_lines(space, o, k, few_m, float(most), known, unequal)):
                stack[2 * line, :, rows], stack[2 * line + 1, :, rows] = intercept, slope
            near = np.maximum(k + 1, FIRST)
            _, others, written = _pace(space, o, near, k, few_m, known)
            pieces = written / near
            if unequal:
                stack[2, :, rows] = others
            for w in (2, 3):
                few = np.arange(1.0, min(w, f.most_k + 1))[None, :]
                e, others, _ = _pace(space, o, np.full_like(few, w), few, few_m, known)
                small[at, w - 2] = (e if unequal else np.maximum(e, others)).min(axis=1)[row[at]]
            if capped:
                synchronous[at, rows] = space.synchronous(o, np.full_like(k, float(most)), m, k, np.zeros_like(k))
        several = k.size > 1
        stacks.append(_pyramid(stack, levels) if several else stack)
        each = np.full((1, n if several else 1), np.inf)
        each[:, rows] = pieces[:1]
        puts.append(_pyramid(each, levels)[0] if several else each[0])
        begins = loads.setdefault(id(o.platform), (len(loads) * len(quotas), _loading(space, o, m, most)))[0]
        load_row[at] = begins + np.arange(len(quotas))
        constants[:, at] = _constants(space, o, f, quotas)
        batch[at] = space.largest_batch(o, quotas)
        usable[at] = usable_mb(space.workload, o.platform, quotas) + space.workload.m > 0
    batch = np.where(usable, np.minimum(batch, 1e9), 0.0)
    index = np.tile(np.arange(first, first + len(quotas)), len(mine))
    return Tables(
        unequal,
        mine,
        np.repeat(np.arange(len(mine)), len(quotas)),
        index,
        index,
        offset,
        tuple(stacks),
        row,
        small,
        tuple(puts),
        np.concatenate([x for _, x in loads.values()]),
        load_row,
        constants,
        batch,
        synchronous,
    )


def _distinct(space: Space, o: Option, m: Array) -> tuple[Array, Array]:
    """Quotas at which exchanges take different times, and the row of every quota among them.

    Beyond the last measured quota transfers get no faster, and folding and sending do not where CPUs are not used any more.
    """
    flat = o.platform.transfer[-1].memory_mb
    if o.platform.direct is not None:
        flat = max(flat, o.platform.mb_per_vcpu)
    if space.workload.fold_s_per_mb:
        flat = max(flat, space.workload.vcpus * o.platform.mb_per_vcpu or np.inf)
    last = min(int(np.searchsorted(m[:, 0], flat)), len(m) - 1)
    return m[: last + 1], np.minimum(np.arange(len(m)), last)


def _levels(n: int) -> tuple[Array, int]:
    sizes = [n]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return np.cumsum([0, *sizes[:-1]]), len(sizes)


def _pyramid(table: Array, levels: int) -> Array:
    """A table, and beside it its minima over pairs of K, pairs of pairs, and so on. K is the last axis."""
    sizes = [table.shape[-1]]
    for _ in range(levels - 1):
        sizes.append(-(-sizes[-1] // 2))
    out = np.empty((*table.shape[:-1], sum(sizes)))
    out[..., : sizes[0]] = table
    at = 0
    for size, half in itertools.pairwise(sizes):
        below, above = out[..., at : at + size], out[..., at + size : at + size + half]
        pairs = size // 2
        np.minimum(below[..., 0 : 2 * pairs : 2], below[..., 1 : 2 * pairs : 2], out=above[..., :pairs])
        above[..., pairs:] = below[..., 2 * pairs :]
        at += size
    return out


def _lines(space: Space, o: Option, k: Array, m: Array, most: float, known: dict[Any, Any], unequal: bool) -> list[tuple[Array, Array]]:
    """Two lines below the pace as a function of W: intercepts and slopes.

    Both chains of an exchange are convex in W, so that a line through two neighbouring points is below every other one.
    """
    near, far = np.maximum(k + 1, FIRST), np.maximum(most, np.maximum(k + 1, FIRST) + 2)
    here, there = _pace(space, o, near, k, m, known), _pace(space, o, near + 1, k, m, known)
    straight = _line(near, here[0], there[0])
    if unequal:
        return [straight]
    if o.terms.pattern == "pipelined":
        return [straight, _line(far, _pace(space, o, far, k, m, known)[0], _pace(space, o, far + 1, k, m, known)[0])]
    return [straight, _line(near, here[1], there[1])]


def _line(w: Array, here: Array, there: Array) -> tuple[Array, Array]:
    slope = there - here
    return here - slope * w, slope


def _pace(space: Space, o: Option, w: Array, k: Array, m: Array, known: dict[Any, Any]) -> tuple[Array, Array, Array]:
    """Seconds of an exchange and of those who do not aggregate, and puts; straight from the model."""
    t = o.terms
    if space.published is not None:
        one = np.ones_like(w)
        p = space.published(space.workload, o.platform, t, workers=w, memory_mb=m, aggregators=k, batch=one, other_batch=one)
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
    if space.published is not None:
        return p.seconds("down", w.model_mb + w.dataset_mb / workers, m)
    tiny = p.seconds("down", TINY_MB, m)
    share = usable_mb(w, p, m) / p.mb_per_vcpu
    own = p.seconds("up", TINY_MB, m) + tiny + p.seconds("down", w.model_mb, m) + w.first_cpu_s / share
    return np.asarray(own + np.maximum(p.seconds("down", w.dataset_mb / workers, m), tiny))


def _constants(space: Space, o: Option, f: Family, m: Array) -> Array:
    w, p, t = space.workload, o.platform, o.terms
    usable = usable_mb(w, p, m) if space.published is None else m
    with np.errstate(divide="ignore"):
        sample = np.where(usable + w.m > 0, w.a / np.maximum(usable + w.m, 1e-9), np.inf)
    found: dict[str, Array | float] = {"sample_s": sample, "batch_s": sample * w.b, "gb_usd": m / 1024 * p.price_gb_s, "low_mb": m}
    server = t.pattern == "parameter-server"
    gets = (0.0, 0.0) if t.pattern == "standalone" else (1.0, 0.0) if server else (2.0, -2.0)
    if space.published is not None:
        found |= {
            "put_usd": p.price_put,
            "get_usd": p.price_get,
            "gets_by_w": gets[0],
            "gets_more": gets[1],
            "mb_usd": p.price_mb,
            "moved_by_w": 3 * w.model_mb,
            "moved_more": -2 * w.model_mb,
            "extra_usd": t.epochs * 2 * w.dataset_mb * p.price_mb,
        }
    else:
        share = usable / p.mb_per_vcpu
        tiny_up, tiny_down = p.seconds("up", TINY_MB, m), p.seconds("down", TINY_MB, m)
        finish = p.seconds("up", w.model_mb, m) + (0.0 if f.most == 1 else tiny_up + tiny_down)
        polls = p.polls_per_get if p.poll_s > 0 else 0.0
        kept, more = (float(kept_mb(w, p, t, np.array(x))) / 1000 for x in ((1.0, 1.0) if f.most == 1 else (2.0, 3.0)))
        up, down = UP[t.compression], DOWN[t.compression]
        life, write = t.lifetime_s or p.lifetime_s, p.seconds("up", state_mb(w), m)
        many = t.pattern not in ("standalone", "parameter-server")
        found |= {
            "own_s": w.step_s + w.apply_s / share,
            "late_s": w.lockstep_s(p) / share if f.most > 1 else 0.0,
            "fixed_s": finish,
            "evaluate_s": sample * w.test_samples / 3 / w.local_steps,
            "evaluate_each_s": sample * w.b / w.local_steps if w.test_samples else 0.0,
            "cold_s": p.cold_start_s,
            "start_each_s": p.start_each_s,
            "put_usd": p.price_put,
            "get_usd": p.price_get * (1 + polls),
            "gets_by_w": gets[0],
            "gets_more": gets[1],
            "start_usd": p.price_invocation
            + p.price_put * (START_PUTS + 3)
            + p.price_get * (START_READS + 1)
            + 2 * w.model_mb * p.price_mb,
            "per_s_usd": p.price_get / CONTROL_EVERY_S + p.price_server_hour / 3600,
            "mb_usd": p.price_mb,
            "hourly_usd": (kept - 2 * (more - kept)) * p.price_gb_hour / 3600,
            "hourly_each_usd": (more - kept) * p.price_gb_hour / 3600,
            "least_hourly_usd": p.least_kept_gb * p.price_gb_hour / 3600,
            "moved_by_w": w.model_mb * (2 * up + down) if many else 2 * w.model_mb if server else 0.0,
            "moved_more": -2 * w.model_mb * up if many else 0.0,
            "invoke_usd": p.price_invocation,
            "extra_usd": 3 * p.price_put + w.dataset_mb * p.price_mb,
            "life_s": life,
            "brief_s": 0.25 * (life - closing_s(life, write, tiny_up)),
            "warm_s": p.warm_start_s,
            "write_s": write,
            "read_s": p.seconds("down", state_mb(w), m),
            "request_s": tiny_up,
            "init_s": p.seconds("down", w.model_mb, m),
        }
        if p.direct is not None and f.most > 1:
            found |= _direct_constants(space, o, found)
    table = np.zeros((len(CONSTANTS), len(m)))
    for name, value in found.items():
        table[PLACE[name]] = value
    return table


def _direct_constants(space: Space, o: Option, found: dict[str, Array | float]) -> dict[str, Array | float]:
    """Constants of functions with direct links that differ from those of the store alone."""
    w, p, t, links = space.workload, o.platform, o.terms, o.platform.direct
    assert links is not None
    up, down = w.model_mb * UP[t.compression], w.model_mb * DOWN[t.compression]
    mb = min(2 * up, up + down)  # for each of W - 1 ranks, at least: in one phase everybody sends W - 1 vectors
    stored, linked = 2 * links.failure * mb, (1 - links.failure) * mb * links.price_mb
    start = ENDPOINT_PUTS * p.price_put + ENDPOINT_LISTS * p.price_list + p.price_get
    return {
        "gets_by_w": 1.0,
        "gets_more": 0.0,
        "moved_by_w": stored,
        "moved_more": -stored,
        "direct_usd_by_w": linked,
        "direct_usd_more": -linked,
        "start_usd": found["start_usd"] + start,
        "per_s_usd": found["per_s_usd"] + links.price_service_hour / 3600,
        "setup_s": links.setup_s,
        "setup_each_s": links.setup_each_s,
    }
