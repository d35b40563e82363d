"""Lower bounds on time and cost of whole blocks of configurations, from tables.

A block is a column (an option at a quota, or at several), an interval of W, one of K, and intervals of B^a and B^n. With
D samples, G the global batch and n = ⌈D/G⌉ iterations in an epoch, an epoch lasts at least as long as each of two chains
that run side by side. With s seconds per sample and the exchange's e and o seconds these are

    through the aggregators        s·D·B^a/G + n·(s·b + e)
    through the others             s·D·B^n/G + n·(s·b + o)

and therefore at least as long as their mean, weighted by K and W − K, in which B^a and B^n no longer occur: the samples
are shared out, s·D/W, for any batches. So one term bounds a block with all its batches, and n from the largest
global batch that memory and the limit allow. The cost of functions is bounded by W times the same, where W cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ephemeron.training.planner.model.lives import Handing, dies_too_early, least_lives
from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.search.space import Space
from ephemeron.training.planner.search.tables import FIRST, PLACE, Tables

INTEGERS = ("column", "w_level", "w_index", "k_level", "k_index", "asked")
FLOATS = ("x0", "x1", "y0", "y1", "seconds", "usd")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of one `Tables`: columns of two arrays, so that taking some of them is two calls, not twelve.

    W runs from (index << level) + 1 to (index + 1) << level, and so does K. B^a is at least `x0` and at most `x1`, B^n at
    least `y0` and at most `y1`; 0: from 1 on, and as far as is allowed. `seconds` and `usd` are the lower bounds, `asked`
    the bits of the targets that search the block (`targets.Targets`).
    """

    integers: Array
    """Rows `INTEGERS`."""
    floats: Array
    """Rows `FLOATS`."""

    @staticmethod
    def of(column: Array, w_level: Array, w_index: Array, k_level: Array, k_index: Array) -> Blocks:
        """Blocks with every batch, not bounded yet, which no target searches."""
        n = len(column)
        return Blocks(np.array([column, w_level, w_index, k_level, k_index, np.zeros(n)], dtype=np.int64), np.zeros((6, n)))

    column = property(lambda self: self.integers[0])
    w_level = property(lambda self: self.integers[1])
    w_index = property(lambda self: self.integers[2])
    k_level = property(lambda self: self.integers[3])
    k_index = property(lambda self: self.integers[4])
    asked = property(lambda self: self.integers[5])
    x0 = property(lambda self: self.floats[0])
    x1 = property(lambda self: self.floats[1])
    y0 = property(lambda self: self.floats[2])
    y1 = property(lambda self: self.floats[3])
    seconds = property(lambda self: self.floats[4])
    usd = property(lambda self: self.floats[5])

    def having(self, **rows: Array) -> Blocks:
        """The same blocks with other values in some rows, by their names."""
        integers, floats = self.integers, self.floats
        if any(name in INTEGERS for name in rows):
            integers = integers.copy()
        if any(name in FLOATS for name in rows):
            floats = floats.copy()
        for name, value in rows.items():
            if name in INTEGERS:
                integers[INTEGERS.index(name)] = value
            else:
                floats[FLOATS.index(name)] = value
        return Blocks(integers, floats)

    def take(self, which: Array) -> Blocks:
        if which.dtype == bool:
            which = np.flatnonzero(which)
        return Blocks(self.integers.take(which, axis=1), self.floats.take(which, axis=1))

    def __len__(self) -> int:
        return int(self.integers.shape[1])

    @staticmethod
    def joined(parts: list[Blocks]) -> Blocks:
        if len(parts) == 1:
            return parts[0]
        return Blocks(np.concatenate([p.integers for p in parts], axis=1), np.concatenate([p.floats for p in parts], axis=1))


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of W, K and batches in blocks, restricted to each other and to the limits."""

    w0: Array
    w1: Array
    k0: Array
    k1: Array
    x0: Array
    x1: Array
    y0: Array
    y1: Array
    some: Array
    """Whether anything is left."""

    def take(self, which: Array) -> Ranges:
        if which.dtype == bool:
            which = np.flatnonzero(which)
        return Ranges(*[getattr(self, name).take(which) for name in Ranges.__slots__])


def ranges(t: Tables, b: Blocks, largest: Array | float, most: float) -> Ranges:
    """Args: `largest`: global batch, of all or of each; `most`: W."""
    family = t.family[b.column]
    tied = t.tied[b.column]
    limit = np.array([[f.least, min(f.most, most), f.most_k] for f in t.families], dtype=float).T[:, family]
    w0 = np.maximum((b.w_index << b.w_level) + 1.0, limit[0])
    w1 = np.minimum(((b.w_index + 1) << b.w_level).astype(float), np.minimum(limit[1], largest))
    k0 = (b.k_index << b.k_level) + 1.0
    k1 = np.minimum(((b.k_index + 1) << b.k_level).astype(float), limit[2])
    w0 = np.where(tied, w0, np.maximum(w0, k0 + 1))
    k0, k1 = np.where(tied, w0, k0), np.where(tied, w1, np.minimum(k1, w1 - 1))
    memory = t.largest_batch[b.column]
    x0, y0 = np.maximum(b.x0, 1.0), np.maximum(b.y0, 1.0)
    x1 = np.where(b.x1 > 0, b.x1, np.inf)
    x1 = np.minimum(np.minimum(x1, np.floor(largest / w0)), memory)
    if t.unequal:
        y0 = np.maximum(y0, x0)
        fewest = np.maximum(w0 - k1, 1.0)
        y1 = np.where(b.y1 > 0, b.y1, np.inf)
        y1 = np.minimum(np.minimum(y1, np.floor((largest - x0 * k0) / fewest)), memory)
        if t.synchronous.size:
            reach = t.synchronous.max(axis=1)[b.column]
            single = b.k_level == 0
            exact = t.synchronous[b.column, np.minimum(np.where(single, b.k_index, 0), t.synchronous.shape[1] - 1)]
            y1 = np.minimum(y1, x1 + np.where(single, exact, reach))
        x1 = np.minimum(x1, y1)
    else:
        y0, y1 = x0, x1
    some = (w0 <= w1) & (k0 <= k1) & (x0 <= x1) & (y0 <= y1)
    return Ranges(w0, w1, k0, k1, x0, x1, y0, y1, some)


def pace(t: Tables, b: Blocks, r: Ranges) -> tuple[Array, Array]:
    """Least seconds of an exchange, and of ranks that do not aggregate (0 where they have no batch of their own)."""
    at = t.place[b.column] + _within(t, b)
    a1, b1, a2, b2 = (np.take(x, at) for x in (t.lines if not t.unequal else (*t.lines[:2], *t.lines[:2])))
    seconds = np.maximum(a1 + b1 * r.w0, a2 + b2 * r.w0)
    few = np.flatnonzero((r.w0 < FIRST) & ~t.tied[b.column])
    if len(few):
        w0, w1, column = r.w0[few], r.w1[few], b.column[few]
        two, three = np.where(w0 <= 2, t.small[column, 0], np.inf), np.where(w1 >= 3, t.small[column, 1], np.inf)
        more = np.where(w1 >= FIRST, np.maximum(a1[few] + b1[few] * FIRST, a2[few] + b2[few] * FIRST), np.inf)
        seconds[few] = np.minimum(np.minimum(two, three), more)
    return seconds, (np.take(t.lines[2], at) if t.unequal else np.zeros_like(seconds))


def _within(t: Tables, b: Blocks) -> Array:
    """Index of each block in its row of a table of K."""
    return np.asarray(np.minimum(t.offset[b.k_level] + b.k_index, t.width[b.column]))


def bound(space: Space, t: Tables, b: Blocks, r: Ranges, largest: Array | float) -> tuple[Array, Array]:
    """Least seconds and US dollars of everything in a block; infinite if it is empty."""
    c = np.take(t.constants, b.column, axis=1)

    def of(name: str) -> Array:
        return c[PLACE[name]]  # type: ignore[no-any-return]

    honest = space.published is None
    samples, terms = float(space.workload.samples), space.options[t.families[0].option].terms
    epochs = terms.epochs
    w0, w1, k0 = r.w0, np.maximum(r.w1, r.w0), r.k0
    e, o = pace(t, b, r)
    s, sb = of("sample_s"), of("batch_s")
    most = np.minimum(r.x1 * k0 + r.y1 * (w1 - k0), r.y1 * w1) if t.unequal else r.x1 * w1
    n = samples / np.minimum(most, largest)
    n = np.maximum(np.ceil(n * (1 - 1e-12)), 1.0) if honest else n
    late = of("late_s")
    if t.unequal:
        late = np.where(k0 > 1, late, 0.0)
    own = of("own_s") + late
    if t.unequal:
        ratio = r.y1 / r.x0
        through = s * samples / (ratio * w1 - (ratio - 1) * k0) + n * (sb + e)
        if honest:
            shrink = np.minimum(1.0, r.x1 / r.y0)
            beside = s * samples / (w1 - (1 - shrink) * k0) + n * (sb + o)
            part = np.where(e >= o, k0 / w1, np.minimum(r.k1 / w0, 1.0))
            mean = s * samples / w1 + n * (sb + o + part * (e - o))
            of_all = s * samples + n * (w0 * sb + k0 * e + np.maximum(w0 - r.k1, 1.0) * o)
            # n ≥ D/G: one quotient per chain, which is monotone in its own batch, so that its ends bound it.
            least, most_x = sb + e, np.minimum(r.x1, r.y1)
            rest = r.y1 * (w1 - k0)
            through = np.maximum(
                through, samples * np.minimum((s * r.x0 + least) / (r.x0 * k0 + rest), (s * most_x + least) / (most_x * k0 + rest))
            )
            least, near = sb + o, np.clip(r.x1, r.y0, r.y1)
            beside = np.maximum(
                beside,
                samples
                * np.minimum(
                    (s * near + least) / (np.minimum(r.x1, near) * k0 + near * (w1 - k0)), (s * r.y1 + least) / (most_x * k0 + rest)
                ),
            )
            chains = np.maximum(through, beside)
            epoch, all_epoch = np.maximum(chains, mean), np.maximum(of_all, w0 * chains)
            each = np.maximum(s * r.x0 + e, s * r.y0 + o) + sb + own
        else:
            epoch, all_epoch = through, w0 * through
            each = through
    else:
        epoch = s * samples / w1 + n * (sb + e)
        all_epoch = s * samples + n * w0 * (sb + e)
        each = s * r.x0 + sb + e + own
    load = t.load[t.load_row[b.column], np.minimum(w1, t.load.shape[1]).astype(int) - 1]
    load = load + of("setup_s") + of("setup_each_s") * (w0 - 1)
    if honest:
        start = np.maximum(of("cold_s"), w0 * of("start_each_s"))
        once = start + load + of("fixed_s") + epochs * n * own
        seconds = once + epochs * (epoch + of("evaluate_s") / w1 + of("evaluate_each_s"))
        work = w0 * once + epochs * (all_epoch + of("evaluate_s") + w0 * of("evaluate_each_s"))
    else:
        seconds = epochs * (load + epoch)
        work = epochs * (w0 * load + all_epoch)
    iterations = epochs * n
    pieces = np.take(t.pieces, t.pieces_place[b.column] + _within(t, b))
    puts, gets = pieces * w0, pieces * np.maximum(of("gets_by_w") * w0 + of("gets_more"), 0.0)
    usd = work * of("gb_usd") + iterations * (puts * of("put_usd") + gets * of("get_usd")) + of("extra_usd")
    usd = usd + iterations * np.maximum(of("moved_by_w") * w0 + of("moved_more"), 0.0) * of("mb_usd")
    usd = usd + iterations * np.maximum(of("direct_usd_by_w") * w0 + of("direct_usd_more"), 0.0)
    if honest:
        usd = usd + w0 * (of("start_usd") + np.floor(iterations / terms.checkpoint_every) * of("put_usd"))
        hourly = np.maximum(of("hourly_usd") + w0 * of("hourly_each_usd"), of("least_hourly_usd"))
        usd = usd + seconds * (of("per_s_usd") + hourly)
        mine = np.flatnonzero(r.some & (seconds > of("brief_s")))
        if len(mine):
            some = t, b.column[mine], c[LIVES].take(mine, axis=1), r.take(mine), epochs
            loops = epochs * (epoch + n * own)[mine], epochs * (all_epoch / w0 + n * own)[mine]
            evaluation = (of("evaluate_s") / w1 + of("evaluate_each_s"))[mine]
            more_s, more_usd = _lives(*some, each[mine], load[mine], iterations[mine], *loops, evaluation)
            seconds[mine] += more_s
            usd[mine] += more_usd
    empty = ~r.some | (of("low_mb") * w0 > (space.total_memory_mb or np.inf)) | (t.largest_batch[b.column] < 1)
    return np.where(empty, np.inf, seconds), np.where(empty, np.inf, usd)


LIVES = slice(PLACE["cold_s"], PLACE["init_s"] + 1)
"""Rows of the constants that `_lives` reads."""


def _lives(
    t: Tables,
    column: Array,
    c: Array,
    r: Ranges,
    epochs: int,
    each: Array,
    load: Array,
    iterations: Array,
    loop: Array,
    work: Array,
    evaluation: Array,
) -> tuple[Array, Array]:
    """Least seconds and US dollars that hand-offs add to blocks; infinite where the timeout is too short.

    Args:
        column, c, r: of the blocks: column of the tables, `LIVES` of its constants, ranges.
        epochs: of the run.
        each, load, iterations, loop: of the block, at least: seconds of an iteration that is whole, and of loading; how many
            iterations there are, and what all of them take.
        work: what is billed of a function for them, at least.
        evaluation: seconds of one, at least.
    """

    def of(name: str) -> Array:
        return c[PLACE[name] - LIVES.start]  # type: ignore[no-any-return]

    # A column of several quotas: one at which moving the state takes least is not looked for.
    known = t.first[column] == t.last[column]
    hand = Handing(
        life_s=of("life_s"),
        first_load_s=load,
        load_s=np.where(known, np.maximum(load - of("init_s"), 0.0), 0.0),
        write_s=of("write_s"),
        read_s=of("read_s"),
        request_s=of("request_s"),
        cold_s=np.maximum(of("cold_s"), r.w0 * of("start_each_s")),
        warm_s=of("warm_s"),
        waits=r.w0 > 1,
    )
    both = least_lives(hand, each, iterations, whole=iterations - epochs, loop_s=loop, billed_s=work)
    seconds = np.minimum(*(x.seconds for x in both))
    usd = r.w0 * np.minimum(*(x.billed_s * of("gb_usd") + x.relays * of("invoke_usd") for x in both))
    dies = dies_too_early(hand, each, iterations, evaluation)
    return tuple(np.where(dies, np.inf, np.where(known, x, 0.0)) for x in (seconds, usd))  # type: ignore[return-value]
