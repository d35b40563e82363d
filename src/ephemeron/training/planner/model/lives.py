"""Hand-off of a function to its successor: its time, and the iterations computed until then. Pure.

Workers decide by these rules, and the performance model counts by them: both call the functions of the first part. A function
checks the time left of its timeout after every iteration, and hands off after the first one at which another iteration and
the hand-off might not fit. Its successor is started some whole iterations before, so that it has loaded by then.

An evaluation is a unit of work like an iteration: a function that might not end it hands off before it begins it, and its
successor, which has a whole life, evaluates.

All arguments are floats or arrays that broadcast against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ephemeron.training.planner.model.rates import Array

LEAST_CLOSING_S = 0.5
CLOSING_REQUESTS = 12
"""Requests in a row that a function may make that waits until its timeout: to name the suspect, and to start a successor."""
ROUNDING = 1e-9
SHARE, FIRST_SHARE = 1 / 3, 1 / 2
"""Shares of a timeout that a successor may wait for its predecessor; the second for the first successor, whose cold start
would delay all ranks."""
SPARE = 0.5
"""Share of an iteration by which the next one may take longer than usual."""
TOGETHER = 0.25
"""Share of an iteration: a rank this near to its own hand-off hands off with the others, so that the run stops only once."""
WARM_START_S = 0.3
"""Estimated seconds of a warm start."""


def closing_s(life_s: Array | float, write_s: Array | float, request_s: Array | float) -> Array:
    """Seconds that a hand-off may take: writing the state, or being replaced in the middle of a wait."""
    life_s, write_s, request_s = map(np.asarray, (life_s, write_s, request_s))
    least = np.minimum(LEAST_CLOSING_S, 0.03 * life_s)
    return np.asarray(np.maximum(np.maximum(least, 2 * write_s), CLOSING_REQUESTS * request_s))


def reserve_s(life_s: Array | float, iteration_s: Array | float, closing: Array | float) -> Array:
    """Seconds that another iteration and a hand-off may take: with less time left, a function hands off."""
    return np.asarray(np.maximum(np.minimum(1.0, 0.05 * np.asarray(life_s)), (1 + SPARE) * np.asarray(iteration_s) + closing))


def leaving_s(life_s: Array | float, iteration_s: Array | float, closing: Array | float) -> Array:
    """Seconds left below which a function hands off with the others: somewhat more, but never in the first half of its timeout."""
    reserve = reserve_s(life_s, iteration_s, closing)
    together = np.minimum(reserve + TOGETHER * np.asarray(iteration_s), 0.5 * np.asarray(life_s))
    return np.asarray(np.maximum(reserve, together))


def iterations_until(left_s: Array | float, iteration_s: Array | float, leaving: Array | float) -> Array:
    """Iterations after which less than `leaving` seconds of `left_s` are left; 0: it is time now."""
    return np.asarray(np.maximum(np.floor((np.asarray(left_s) - leaving) / iteration_s) + 1, 0.0))


def until_hand_off(
    left_s: Array | float,
    iteration_s: Array | float,
    leaving: Array | float,
    *,
    between: Array | float,
    evaluation_s: Array | float,
    evaluation_leaving: Array | float,
    every: Array | float,
) -> Array:
    """Iterations until a hand-off, with evaluations between them.

    Args:
        left_s, iteration_s, leaving: as above.
        between: iterations until the next evaluation, at least 1.
        evaluation_s: of one; 0: there is none.
        evaluation_leaving: see `leaving_s`, of an evaluation.
        every: iterations between two evaluations. Those after the next one count as if they were spread evenly.
    """
    plain, evaluation = iterations_until(left_s, iteration_s, leaving), np.asarray(evaluation_s)
    then_s = np.asarray(left_s) - np.asarray(between) * iteration_s
    later = between + iterations_until(then_s - evaluation, iteration_s + evaluation / every, leaving)
    later = np.where(then_s < evaluation_leaving, between, later)
    return np.asarray(np.where((evaluation > 0) & (plain >= between), later, plain))


def ahead(
    life_s: Array | float,
    iteration_s: Array | float,
    leaving: Array | float,
    *,
    lead_s: Array | float,
    stop_s: Array | float,
    share: float = SHARE,
) -> Array:
    """Iterations by which a successor is started before it is needed.

    Args:
        life_s, iteration_s, leaving: as above.
        lead_s: until it has loaded.
        stop_s: between its predecessor's last iteration and its own first.
        share: of the iterations that fit a life that may pass meanwhile.

    Returns:
        As many as loading takes, but not more than that share: a successor's life passes while it waits, and is billed.
        0: it is started when its predecessor has computed its last iteration.
    """
    fit = iterations_until(np.asarray(life_s) - stop_s, iteration_s, leaving)
    return np.asarray(np.minimum(np.ceil(np.asarray(lead_s) / iteration_s), np.floor(share * fit + ROUNDING)))


def stop_s(write_s: Array | float, request_s: Array | float) -> Array:
    """Estimated seconds for which a hand-off stops the run if the successor has loaded: writing, notifying, reading."""
    return np.asarray(2 * np.asarray(write_s) + 2 * np.asarray(request_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Handing:
    """Times of invocations and hand-offs on a platform, in seconds."""

    life_s: Array | float
    """Timeout of a function, without its start."""
    first_load_s: Array | float
    """From the start of a first function until it computes."""
    load_s: Array | float
    """From the start of a successor until it has loaded everything but the state."""
    write_s: Array | float
    """Upload of a checkpoint."""
    read_s: Array | float
    request_s: Array | float
    """Upload of a tiny object."""
    cold_s: Array | float
    """Start of the first successor, whose predecessor has left no environment."""
    warm_s: Array | float
    """Start of all others."""
    waits: Array | bool = True
    """Whether the rank waits for other ranks, and therefore has to end before its timeout."""
    mixed: Array | bool = False
    """Whether, under HAP, only some of the aggregators' first successors find an environment that others have left a moment before:
    these wait for the rest in their first iteration."""

    def take(self, which: Array) -> Handing:
        """Some of many."""
        all_of = ((f.name, np.asarray(getattr(self, f.name))) for f in fields(self))
        return Handing(**{name: x[which] if x.ndim else x for name, x in all_of})

    @property
    def tell_s(self) -> Array:
        """Seconds from a predecessor's last iteration until its successor knows the next one."""
        return np.asarray(self.write_s) + self.request_s

    @property
    def asked_s(self) -> Array:
        """Seconds from a successor's start until it knows its first iteration, if that is published by then."""
        return np.asarray(self.load_s) + self.request_s

    def closing(self) -> Array:
        """See `closing_s`."""
        return closing_s(self.life_s, self.write_s, self.request_s)


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of one rank."""

    relays: Array
    """Number of hand-offs."""
    stops_s: Array
    """Seconds for which all hand-offs together stop the run."""
    twice_s: Array
    """Seconds for which two functions of the rank are billed at once, all hand-offs together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluations of a run, equally many iterations apart, the last one at its end."""

    number: int = 0
    seconds: Array | float = 0.0
    """Of one, on each function."""


NO_EVALUATIONS = Evaluations()
MOST_FOLLOWED = 64
"""Evaluations whose places in lives are followed one by one; of those after them the mean is taken."""


def lives_of(h: Handing, iteration_s: Array, iterations: Array, evaluations: Evaluations = NO_EVALUATIONS) -> Lives:
    """The lives of a rank that computes so many iterations of one length, and evaluates in between."""
    leaving = leaving_s(h.life_s, iteration_s, h.closing())

    def successor(start_s: Array | float, early: Array) -> tuple[Array, Array, Array, Array]:
        """Of a successor: seconds that pass before it computes, iterations that it computes, seconds for which it stops the run, and for
        which it is billed besides."""
        waited = early * iteration_s
        until = np.maximum(start_s + h.asked_s - waited, h.tell_s) + h.read_s
        passed_s = waited + until - start_s
        return passed_s, _computed(h, iteration_s, leaving, passed_s), h.request_s + until, waited + h.tell_s

    first, early = _first(h, iteration_s, leaving)
    once_s, second, stop_once, twice_once = successor(h.cold_s, early)
    each_s, later, stop_each, twice_each = successor(h.warm_s, _ahead(h, iteration_s, leaving, WARM_START_S, SHARE))
    once = np.where(iterations > first, 1.0, 0.0)
    more = np.ceil(np.maximum(iterations - first - second, 0.0) / later)
    together_s = iterations * iteration_s + evaluations.number * np.asarray(evaluations.seconds)
    if evaluations.number and np.any(which := np.asarray(h.life_s < h.first_load_s + together_s + h.closing())):
        count = np.broadcast_to(once + more, np.broadcast_shapes(which.shape, np.shape(once + more))).copy()
        which = np.broadcast_to(which, count.shape)

        def some(x: Array | float) -> Array:
            return np.asarray(np.broadcast_to(np.asarray(x, dtype=float), count.shape)[which])

        lives = _Between(
            life_s=some(h.life_s),
            iteration_s=some(iteration_s),
            evaluation_s=some(evaluations.seconds),
            leaving=some(leaving),
            reserve=some(reserve_s(h.life_s, evaluations.seconds, h.closing())),
            first_s=some(h.first_load_s),
            passed=((some(once_s), some(second)), (some(each_s), some(later))),
        )
        count[which] = np.maximum(count[which], lives.relays(some(iterations), evaluations.number))
        once = np.minimum(count, 1.0)
        more = count - once
    return Lives(once + more, once * stop_once + more * stop_each, once * twice_once + more * twice_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Between:
    """Places of evaluations in the lives of a rank; arrays of one shape."""

    life_s: Array
    iteration_s: Array
    evaluation_s: Array
    leaving: Array
    """Of an iteration."""
    reserve: Array
    """Of an evaluation."""
    first_s: Array
    """Seconds of the first life that pass before it computes."""
    passed: tuple[tuple[Array, Array], tuple[Array, Array]]
    """Of the second life, and of each later one: such seconds, and iterations that it computes where it does nothing else."""

    def relays(self, iterations: Array, evaluations: int) -> Array:
        """Number of hand-offs."""
        left, count, past = self.life_s - self.first_s, np.zeros_like(iterations), np.zeros_like(iterations)
        done, followed = np.zeros_like(iterations), min(evaluations, MOST_FOLLOWED)
        for number in range(1, followed + 1):
            if number == followed // 2 + 1:
                past = count
            until = np.floor(iterations * number / evaluations)
            rest = until - done
            least = np.where(done > 0, 0.0, 1.0)
            now = np.minimum(np.maximum(iterations_until(left, self.iteration_s, self.leaving), least), rest)
            (once_s, second), (each_s, later) = self.passed
            after = rest - now
            first_s, capacity = np.where(count > 0, each_s, once_s), np.where(count > 0, later, second)
            more = np.ceil(np.maximum(after - capacity, 0.0) / later)
            in_last = np.where(more > 0, after - capacity - (more - 1) * later, after)
            passed = np.where(more > 0, each_s, first_s) + in_last * self.iteration_s
            left = np.where(after > 0, self.life_s - passed, left - now * self.iteration_s)
            count = count + np.where(after > 0, 1 + more, 0.0)
            hands_off = left < self.reserve  # before it evaluates
            left = np.where(hands_off, self.life_s - np.where(count > 0, each_s, once_s), left) - self.evaluation_s
            count, done = count + hands_off, until
        return count + (count - past) / max(followed - followed // 2, 1) * (evaluations - followed)


def dies_too_early(h: Handing, iteration_s: Array, iterations: Array | float, evaluation_s: Array | float = 0.0) -> Array:
    """Whether a function ends before it has done an iteration, or an evaluation.

    Once true, true for more and longer iterations, evaluations and loading.
    """
    tells = h.request_s + h.tell_s + h.request_s  # the last one deletes what the new checkpoint replaces
    closing = h.closing()
    needed = iteration_s + np.where(h.waits, np.maximum(closing, tells), tells)
    passed = np.maximum(h.asked_s, h.tell_s - h.warm_s) + h.read_s
    _, early = _first(h, iteration_s, leaving_s(h.life_s, iteration_s, closing))
    cold = np.where(np.asarray(h.mixed) & (early == 0), np.maximum(h.cold_s - h.warm_s, 0.0), 0.0)
    later = (h.life_s < passed + needed + cold) & (np.asarray(iterations) > 1)
    alone = h.life_s < passed + needed - iteration_s + evaluation_s  # in a life of its own
    together = h.life_s < h.first_load_s + needed - iteration_s + iterations * iteration_s + evaluation_s
    evaluates = (np.asarray(evaluation_s) > 0) & alone & together
    return np.asarray((h.life_s < h.first_load_s + needed) | later | evaluates)


def _computed(h: Handing, iteration_s: Array, leaving: Array, passed_s: Array | float) -> Array:
    """Iterations of a life of which some seconds have passed before the first."""
    return np.maximum(iterations_until(np.asarray(h.life_s) - passed_s, iteration_s, leaving), 1.0)


def _ahead(h: Handing, iteration_s: Array, leaving: Array, start_s: Array | float, share: float) -> Array:
    lead, stop = start_s + 2 * np.asarray(h.load_s), stop_s(h.write_s, h.request_s)
    return ahead(h.life_s, iteration_s, leaving, lead_s=lead, stop_s=stop, share=share)


def _first(h: Handing, iteration_s: Array, leaving: Array) -> tuple[Array, Array]:
    """Iterations of a first life, and by how many of them its successor is started ahead."""
    count = _computed(h, iteration_s, leaving, h.first_load_s)
    return count, np.minimum(_ahead(h, iteration_s, leaving, h.cold_s, FIRST_SHARE), count - 1)


@dataclass(frozen=True, slots=True)
class Least:
    """Lower bounds on the lives of a rank."""

    relays: Array
    seconds: Array
    """Seconds that hand-offs add to the iterations."""
    billed_s: Array
    """Seconds that hand-offs add to the billed time of the rank."""


def least_lives(h: Handing, iteration_s: Array, iterations: Array, *, whole: Array, loop_s: Array, billed_s: Array) -> tuple[Least, Least]:
    """Lower bounds for any iterations that are no fewer and no shorter.

    Lives of whole iterations are no monotone function of an iteration's length: where iterations are slightly longer, one fewer
    may pass while a successor loads. These bounds leave out that they are whole.

    Args:
        h: its life is given, all else may be longer, but for what writing, reading and requests take.
        iteration_s, iterations: of the longest ones, and how many there are.
        whole: how many of them are as long as that, at least.
        loop_s: all iterations together.
        billed_s: what is billed for these.

    Returns:
        Bounds that hold where iterations are so short that a successor has the time to load, and bounds that hold where they
        are not. Of both, the lower one holds.
    """
    each, lead = np.asarray(iteration_s), WARM_START_S + 2 * np.asarray(h.load_s)
    useful = np.maximum(h.life_s - h.closing(), 1e-9)
    many = np.ceil(loop_s / np.where(h.waits, useful, h.life_s) * (1 - ROUNDING)) - 1

    def fitting(passed: Array | float, length: Array) -> Array:
        return np.maximum((useful - passed) / length - SPARE, 1.0)

    def of(passed: Array | float, waited: Array | float, length: Array) -> Least:
        first = fitting(h.first_load_s, length)
        rest = np.maximum(iterations - first - fitting(h.asked_s + h.read_s, length), 0.0) / fitting(passed, length)
        relays = np.where(iterations > first * (1 + ROUNDING), 1.0, 0.0) + np.ceil(rest * (1 - ROUNDING))
        relays = np.maximum(relays, many)
        stops = relays * (h.request_s + h.tell_s + h.read_s)
        twice = relays * h.tell_s + np.maximum(relays - 1, 0.0) * waited
        longer, dearer = (np.maximum(whole * length - x, 0.0) for x in (loop_s, billed_s))
        return Least(relays, stops + longer, stops + twice + dearer)

    # Up to this length, that share of what fits a life lasts as long as loading does: see `ahead`.
    spared = useful - stop_s(h.write_s, h.request_s) - np.minimum(1.0, 0.05 * np.asarray(h.life_s))
    longest = np.maximum((spared - lead / SHARE) / (1 / SHARE + SPARE + TOGETHER), 0.0)
    waited = np.maximum(lead, each)
    soon = of(waited + h.tell_s + h.read_s - h.warm_s, waited, each)
    soon = Least(*(np.where(each > longest, np.inf, x) for x in (soon.relays, soon.seconds, soon.billed_s)))
    return soon, of(h.asked_s + h.read_s, 0.0, np.maximum(each, longest))
