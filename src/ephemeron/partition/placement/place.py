"""Placement: baselines, search and solvers, all evaluated by the schedule simulator.

The simulator evaluates the proposals of all methods, and the best that fits is the plan. So the result is never worse than any baseline,
independent of the solvers, and their bounds are compared with a value that none of them computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from ephemeron.errors import JobError
from ephemeron.partition.costs.table import Costs, costs_of
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.annealing import AnnealingResult, anneal
from ephemeron.partition.placement.baselines import even_split, m_etf, m_sct, m_topo, netsplit, pesto
from ephemeron.partition.placement.canonical import canonical
from ephemeron.partition.placement.cp_sat import improve
from ephemeron.partition.placement.energetic_bound import energy_bound_s
from ephemeron.partition.placement.list_search import list_search
from ephemeron.partition.placement.milp_model import iteration_program, load_program, path_bound_s
from ephemeron.partition.placement.pipeline import best_pipeline, staging
from ephemeron.partition.placement.plan import Objective, PlacementCandidate, PlacementPlan, SearchBudget, Timer, timer
from ephemeron.partition.placement.sequencing import orders_of
from ephemeron.partition.placement.stages import StagedPlacement, in_flight
from ephemeron.partition.placement.suggestions import no_plan_found, refuse_what_cannot_fit
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Replay, Schedule
from ephemeron.partition.schedule_simulator.simulator import replay
from ephemeron.partition.schedule_simulator.task_graph import check_placement

_log = logging.getLogger(__name__)

DEFAULTS: dict[str, Schedule] = {"throughput": Schedule(kind="1f1b", micro_batches=8), "iteration": Schedule()}
SUGGESTION_S = 10.0
"""Time for suggestions if nothing fits."""
SERIAL = 0.9
"""Share of the bound from which on the longest path dominates; there the relaxed program finds and proves more than annealing."""
FEW_NODES, WARM, COOL = 150, (1.0, 3.0), (0.1, 1.0)
"""First temperatures of annealing; with more nodes it ends too early for high ones."""
PROGRAM_NODES, CONSTRAINT_NODES = 400, 320
"""Limits of nodes for the mixed-integer program of one iteration, and for CP-SAT."""
SEARCHED = 0.8
"""Share of the time for the search of a pipeline, before the baselines."""
SPARED = 0.3
"""Share of the time for the search of one iteration with one device less."""
ROUNDED = 1e-11
"""Relative tolerance, above the effect of units on a sum of times."""
ROOM = (1.0, 0.98, 0.95, 0.9, 0.8)
"""Shares of memory for the program with divisible nodes; rounded to whole nodes, plans need more."""


def place(
    graph: Graph,
    topology: Topology,
    *,
    objective: Objective = "throughput",
    schedule: Schedule | None = None,
    budget: SearchBudget | None = None,
    seeds: Sequence[Mapping[str, str]] = (),
    clock: Callable[[], float] = time.monotonic,
) -> PlacementPlan:
    """Placement of a model's operators on devices.

    Args:
        graph: the model.
        topology: the devices and links.
        objective: `throughput`: the least bottleneck of a pipeline of stages; `iteration`: the shortest iteration of any
            placement; the search is thorough with the whole batch only.
        schedule: of the micro-batches; None: 1F1B with 8 of them, or the whole batch.
        budget: limits and seed.
        seeds: known placements, e.g. of a former topology; the result is not worse than any that fits.
        clock: seconds, for the time limit.

    Returns:
        The best placement found, with a proved lower bound.

    Raises:
        JobError: graph, topology, schedule and seeds do not agree.
        PlanInfeasible: memory does not suffice; names the missing bytes and changes that would fit.
        MissingExtra: SciPy or OR-tools is not installed.
    """
    budget = budget or SearchBudget()
    schedule = schedule or DEFAULTS[objective]
    if objective == "throughput" and schedule.kind == "plain":
        raise JobError(
            "objective throughput does not go with a plain schedule, which has nothing to overlap",
            remedy="take gpipe or 1f1b, or the objective iteration",
        )
    _log.info(
        "placing %d operators on %d devices, objective %s, schedule %s", len(graph.nodes), len(topology.devices), objective, schedule.kind
    )
    form = canonical(graph, topology)
    plan = _placed(form.graph, form.topology, objective, schedule, budget, seeds, clock)
    plan = _as_given(plan, graph, topology, form.unit_s)
    _log.info("placed by %s in %.1f s: value %.6g s, bound %.6g s", plan.method, plan.solver_s, plan.value_s, plan.bound_s)
    return plan


def _as_given(plan: PlacementPlan, graph: Graph, topology: Topology, unit_s: float) -> PlacementPlan:
    """The plan in the caller's order and seconds, simulated again."""
    placement = {n.name: plan.placement[n.name] for n in graph.nodes}
    done = replay(graph, topology, placement, schedule=plan.schedule, orders=plan.orders, stages=plan.stages)
    value_s = done.iteration_s if plan.objective == "iteration" else done.bottleneck_s
    return replace(
        plan,
        placement=placement,
        value_s=value_s,
        bound_s=min(plan.bound_s * unit_s * (1 - ROUNDED) if plan.bound_s < plan.value_s else value_s, value_s),
        iteration_s=done.iteration_s,
        reserved_bytes=done.reserved_bytes,
        peak_bytes=done.peak_bytes,
        candidates=tuple(
            replace(c, value_s=_same(c.value_s * unit_s, value_s), iteration_s=_same(c.iteration_s * unit_s, done.iteration_s))
            for c in plan.candidates
        ),
    )


def _same(seconds: float, known_s: float) -> float:
    """The exact value, if the two differ only by bits that the canonical form drops."""
    return known_s if abs(seconds - known_s) <= ROUNDED * known_s else seconds


def _placed(
    graph: Graph,
    topology: Topology,
    objective: Objective,
    schedule: Schedule,
    budget: SearchBudget,
    seeds: Sequence[Mapping[str, str]],
    clock: Callable[[], float],
) -> PlacementPlan:
    begun_s = clock()
    limit = timer(budget.time_limit_s, clock)
    costs = costs_of(graph, topology, micro_batches=schedule.micro_batches, recompute=schedule.recompute)
    devices = {d.name: d for d in topology.devices}
    for seed in seeds:
        check_placement(graph, devices, seed)
    suggestion_s = None if budget.time_limit_s is None else SUGGESTION_S
    refuse_what_cannot_fit(graph, topology, costs, schedule, timer(suggestion_s, clock))
    trial = PlacementTrial(graph=graph, topology=topology, schedule=schedule, objective=objective, costs=costs)
    for k, seed in enumerate(seeds):
        trial.evaluate(f"seed {k}", costs.where(seed))
    if objective == "throughput":
        # building the programs of some baselines takes longer than proving most pipelines
        bound_s = _throughput(trial, budget, limit.part(SEARCHED))
        _evaluate_baselines(trial, budget, limit)
    else:
        _evaluate_baselines(trial, budget, limit)
        spare = len(topology.devices) > 1 and schedule.micro_batches == 1
        bound_s = _iteration(trial, budget, limit.part(1 - SPARED) if spare else limit)
        if spare and not trial.proved(bound_s):
            _without_least_used(trial, budget, limit)
    best = trial.best
    if best is None or best.replay is None:
        raise no_plan_found(graph, topology, costs, schedule, trial.least_over_bytes(), timer(suggestion_s, clock))
    value_s = best.candidate.value_s
    assert bound_s <= value_s * (1 + 1e-6), f"a bound of {bound_s} s is proved and {value_s} s is simulated"
    return PlacementPlan(
        graph=graph.name,
        topology=topology.name,
        objective=objective,
        schedule=schedule,
        placement=costs.placement(best.where),
        stages=best.replay.stages,
        orders=best.replay.orders() if schedule.micro_batches == 1 else None,
        method=best.candidate.name,
        value_s=value_s,
        bound_s=min(bound_s, value_s),
        iteration_s=best.replay.iteration_s,
        solver_s=clock() - begun_s,
        reserved_bytes=best.replay.reserved_bytes,
        peak_bytes=best.replay.peak_bytes,
        candidates=tuple(j.candidate for j in trial.evaluated),
    )


def _evaluate_baselines(trial: PlacementTrial, budget: SearchBudget, limit: Timer) -> None:
    """Evaluate the baselines. They are made for one batch; for a pipeline they run twice, the second time with the memory of all micro-batches
    in flight."""
    flight = max(in_flight(trial.schedule, len(trial.costs.devices)))
    full = replace(trial.costs, held=tuple(flight * h for h in trial.costs.held))
    trial.evaluate("even split by nodes", even_split(trial.costs))
    trial.evaluate("even split by time", even_split(trial.costs, by="time"))
    for costs in (trial.costs, full) if flight > 1 else (trial.costs,):
        trial.evaluate("m-TOPO", m_topo(costs))
        trial.evaluate("m-ETF", m_etf(costs))
        trial.evaluate("m-ETF, both passes and true links", m_etf(costs, passes="both", true_links=True))
        limit_s = limit.part(0.03).left_s()
        trial.evaluate("m-SCT", m_sct(costs, time_limit_s=limit_s))
        better = m_sct(costs, passes="both", true_links=True, time_limit_s=limit_s)
        trial.evaluate("m-SCT, both passes and true links", better)
        for name, method in (("Pesto", pesto), ("NetSplit", netsplit)):
            where = method(costs, time_limit_s=limit.part(0.05).left_s(), node_limit=budget.program_nodes)
            trial.evaluate(name, where)


def _throughput(trial: PlacementTrial, budget: SearchBudget, limit: Timer) -> float:
    costs, schedule = trial.costs, trial.schedule
    known: list[StagedPlacement] = []
    for j in trial.evaluated:
        if j.candidate.admitted and j.replay is not None:
            as_stages = staging(costs, schedule, j.where, j.replay.stages)
            assert as_stages is not None, "an admitted placement is a pipeline"
            known.append(as_stages)
    searched = best_pipeline(costs, schedule, budget=budget, timer=limit, least=known)
    for found in searched.found:
        trial.evaluate("pipeline search", found.where, stages=found.device_names(costs))
    return searched.bound_s


def _iteration(trial: PlacementTrial, budget: SearchBudget, limit: Timer) -> float:
    costs, parts = trial.costs, trial.schedule.micro_batches
    divided = load_program(costs, costs.clusters, repeats=parts)
    solution = divided.program.solve(time_limit_s=limit.part(0.1).left_s(), node_limit=budget.program_nodes, gap=1e-5)
    way_s = path_bound_s(costs)
    bound_s = max(way_s, solution.bound * divided.scale_s) * (1 - 1e-7)
    if trial.proved(bound_s) or len(costs.devices) == 1:
        return bound_s
    if trial.schedule.recompute:  # pipelines only
        _throughput(trial, budget, limit)
        return bound_s
    if parts > 1:
        _throughput(trial, budget, limit.part(0.5))
        _annealed(trial, budget, limit, Random(budget.seed))
        return bound_s
    energy_s = energy_bound_s(costs, moments=8 if len(costs.nodes) > PROGRAM_NODES else 32)
    bound_s = max(bound_s, energy_s)
    _listed(trial, budget, limit)
    serial = way_s > SERIAL * bound_s
    if len(costs.nodes) <= PROGRAM_NODES:
        bound_s = max(bound_s, _relaxed(trial, budget, limit.part(0.65 if serial else 0.1)))
    elif serial:
        bound_s = max(bound_s, _divided(trial, limit.part(0.65)))
    if trial.proved(bound_s):
        return bound_s
    constraint = len(costs.nodes) <= CONSTRAINT_NODES
    found = _annealed(trial, budget, limit.part(0.5 if constraint else 0.97), Random(budget.seed))
    if trial.proved(bound_s) or found.over_bytes or not constraint:
        return bound_s
    proved = improve(costs, costs.clusters, found.where, found.order, bound_s=bound_s, budget=budget, timer=limit.part(0.97))
    if proved.where is not None:
        trial.evaluate("CP-SAT", proved.where, proved.orders)
    return max(bound_s, proved.bound_s)


def _without_least_used(trial: PlacementTrial, budget: SearchBudget, limit: Timer) -> None:
    """Repeat the search without the least used device, because a superfluous device can make the search worse."""
    best = trial.best
    if best is None or best.replay is None:
        return
    busy: dict[str, float] = dict.fromkeys((d.name for d in trial.topology.devices), 0.0)
    for span in best.replay.spans:
        if isinstance(span.resource, str):
            busy[span.resource] += span.end_s - span.start_s
    least = min(reversed(busy), key=lambda name: busy[name])
    fewer = Topology(
        name=trial.topology.name,
        devices=tuple(d for d in trial.topology.devices if d.name != least),
        links=tuple(k for k in trial.topology.links if least not in (k.source, k.target)),
    )
    costs = costs_of(trial.graph, fewer)
    inner = PlacementTrial(graph=trial.graph, topology=fewer, schedule=trial.schedule, objective=trial.objective, costs=costs)
    _evaluate_baselines(inner, budget, limit)
    _iteration(inner, budget, limit)
    if inner.best is not None and inner.best.replay is not None:
        where = trial.costs.where(costs.placement(inner.best.where))
        trial.evaluate(inner.best.candidate.name, where, inner.best.replay.orders())


def _listed(trial: PlacementTrial, budget: SearchBudget, limit: Timer) -> None:
    """Evaluate list schedules, with their own orders and by the simulator's rule."""
    costs = trial.costs
    known = sorted(trial.evaluated, key=lambda j: (j.candidate.over_bytes, j.candidate.value_s))[:2]
    found = list_search(
        costs,
        rng=Random(budget.seed),
        steps=max(1, budget.annealing_steps // 100),
        timer=limit.part(0.4 if len(costs.nodes) > CONSTRAINT_NODES else 0.1),
        known=[j.where for j in known],
    )
    trial.evaluate("list search", found.where, orders_of(costs, found.where, found.order))
    trial.evaluate("list search", found.where)


def _relaxed(trial: PlacementTrial, budget: SearchBudget, limit: Timer) -> float:
    """Bound and candidate of the published program without co-location."""
    costs = trial.costs
    formulated = iteration_program(costs, costs.clusters)
    solution = formulated.program.solve(time_limit_s=limit.left_s(), node_limit=budget.program_nodes, gap=TIGHT / 2)
    where = formulated.where(solution)
    if where is not None:
        trial.evaluate("relaxed program", where)
    return solution.bound * formulated.scale_s * (1 - 1e-7)


def _divided(trial: PlacementTrial, limit: Timer) -> float:
    """Bound and rounded candidate of the program with divisible nodes, for graphs that are too large for the whole program."""
    costs, bound_s = trial.costs, 0.0
    for share in ROOM:
        within = replace(costs, capacity=tuple(int(share * c) for c in costs.capacity))
        formulated = iteration_program(within, costs.clusters)
        solution = formulated.program.solve(time_limit_s=limit.left_s(), relaxed=True)
        if share == 1.0:
            bound_s = solution.bound * formulated.scale_s * (1 - 1e-7)
        where = formulated.where(solution)
        if where is None or not trial.evaluate("relaxed program, rounded", where).candidate.over_bytes:
            break
    return bound_s


def _annealed(trial: PlacementTrial, budget: SearchBudget, limit: Timer, rng: Random) -> AnnealingResult:
    """Annealing: short runs from the two best candidates at a low and a high temperature (heavy tensors need a high one), then a long one from
    the best."""
    costs = trial.costs
    starts: dict[tuple[int, ...], PlacementEvaluation] = {}
    for j in sorted(trial.evaluated, key=lambda j: (j.candidate.over_bytes, j.candidate.value_s)):
        starts.setdefault(j.where, j)
    runs: list[tuple[AnnealingResult, float]] = []
    for j in list(starts.values())[:2]:
        assert j.replay is not None
        for heat in COOL if len(costs.nodes) > FEW_NODES else WARM:
            found = anneal(
                costs,
                costs.clusters,
                j.where,
                _order(costs, j.replay),
                rng=rng,
                steps=budget.annealing_steps // 10,
                timer=limit.part(0.11),
                heat=heat,
            )
            runs.append((found, heat))
    best, heat = min(runs, key=lambda run: (run[0].over_bytes, run[0].makespan_s))
    long = anneal(costs, costs.clusters, best.where, best.order, rng=rng, steps=budget.annealing_steps // 2, timer=limit, heat=heat)
    for found in (best, long):
        whole = trial.schedule.micro_batches == 1
        trial.evaluate("annealing", found.where, orders_of(costs, found.where, found.order) if whole else None)
    return min((best, long), key=lambda f: (f.over_bytes, f.makespan_s))


def _order(costs: Costs, done: Replay) -> list[int]:
    """All passes by end in a simulation, see `sequencing`, so that tensors are sent in the order of their ends."""
    number = {name: i for i, name in enumerate(costs.nodes)}
    return [
        number[s.what] + (len(costs.nodes) if s.direction == "backward" else 0)
        for s in sorted(done.spans, key=lambda s: s.end_s)
        if isinstance(s.resource, str) and s.micro_batch == 0
    ]


# -- evaluation of proposed placements by the schedule simulator --------------------------------------------------


TIGHT = 1e-4
"""Relative gap at which a plan is proved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEvaluation:
    """A proposed placement with its simulation."""

    candidate: PlacementCandidate
    where: tuple[int, ...]
    """Device by node."""
    replay: Replay | None
    """None: the schedule recomputes and the placement is no pipeline, so it cannot run."""


@dataclass(slots=True)
class PlacementTrial:
    """All placements evaluated so far."""

    graph: Graph
    topology: Topology
    schedule: Schedule
    objective: Objective
    costs: Costs
    evaluated: list[PlacementEvaluation] = field(default_factory=list)

    def evaluate(
        self, name: str, where: Sequence[int], orders: DeviceOrders | None = None, stages: Sequence[str] = ()
    ) -> PlacementEvaluation:
        """Simulation of a placement, which is added to `evaluated`.

        Args:
            name: of the method that proposed it.
            where: device by node.
            orders: of tasks, for the whole batch; None: those of the schedule's rule.
            stages: devices in the order of the pipeline; empty: their order in the graph.
        """
        if self.schedule.recompute and staging(self.costs, self.schedule, where) is None:
            candidate = PlacementCandidate(name=name, value_s=float("inf"), iteration_s=float("inf"), over_bytes=0)
            self.evaluated.append(PlacementEvaluation(candidate=candidate, where=tuple(where), replay=None))
            return self.evaluated[-1]
        done = replay(self.graph, self.topology, self.costs.placement(where), schedule=self.schedule, orders=orders, stages=stages)
        if self.objective == "iteration":
            value_s = done.iteration_s
        else:
            value_s = done.bottleneck_s if done.stages else float("inf")
        candidate = PlacementCandidate(name=name, value_s=value_s, iteration_s=done.iteration_s, over_bytes=sum(done.over_bytes.values()))
        _log.debug("evaluated %s: %s", name, candidate)
        self.evaluated.append(PlacementEvaluation(candidate=candidate, where=tuple(where), replay=done))
        return self.evaluated[-1]

    @property
    def best(self) -> PlacementEvaluation | None:
        """Best placement that can be chosen; None: there is none."""
        admitted = [j for j in self.evaluated if j.candidate.admitted]
        return min(admitted, key=lambda j: (j.candidate.value_s, j.candidate.iteration_s), default=None)

    def least_over_bytes(self) -> dict[str, int] | None:
        """Excess by device of the least overfull placement that can run."""
        found = [j for j in self.evaluated if j.candidate.value_s < float("inf") and j.replay is not None]
        best = min(found, key=lambda j: j.candidate.over_bytes, default=None)
        return None if best is None or best.replay is None else dict(best.replay.over_bytes)

    def proved(self, bound_s: float) -> bool:
        """Whether the best placement is optimal by a lower bound."""
        best = self.best
        return best is not None and bound_s >= best.candidate.value_s * (1 - TIGHT)
