"""The page of a plan: what was chosen, what it will take, what else there is, and what all of it rests on.

In the style of a run's report, and like it one file that needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from markupsafe import Markup

from ephemeron.rendering.page import card, document, header, items, legend, scrolled, side_by_side, table, tiled
from ephemeron.rendering.palette import PHASE_COLOURS
from ephemeron.rendering.svg import Scale, el, joined, path, text
from ephemeron.training.planner import vm_baseline
from ephemeron.training.planner.plan import Alternative, Choice, Plan, Predicted, SearchReport
from ephemeron.training.planner.uncertainty import sentences
from ephemeron.training.planner.vm_baseline import uncounted_words
from ephemeron.training.report.headline import usd
from ephemeron.training.report.prediction import quantity
from ephemeron.training.report.scatter import Scatter, ScatterLabels, ScatterMark, functions, scatter
from ephemeron.units import human_count, human_seconds

WIDTH, HEIGHT = 1160, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 26, 44

_PATH = (
    "What one function after the other has to wait for: the longest chain, not the sum over functions. "
    "It is compared with what a run measures at its end."
)
_MACHINES = (
    "One process on one machine or container, with the global batch: boot, download, and compute that scales perfectly over "
    "its vCPUs. That is optimistic for the machine; setting it up costs nothing here, and neither does leaving it on. A spot "
    "machine may be taken away at any time, which is not counted; arm64 is taken for as fast."
)
_COMPARED = (
    "Within the limits or not: the cheapest, the fastest, a single function, and the knee, before which time is cheap and after "
    "which money buys little. Differences are from the chosen one."
)
_SURE = (
    "The choice is proved for the profile. Here what the profile is not sure of is drawn anew within its intervals, and the "
    "configurations of this page are compared again."
)
_FRONT = (
    "Each point is a configuration of functions that no other beats in both time and cost, labelled workers × memory "
    "in MB. Between the points there is nothing to choose; the line only guides the eye."
)


def html(plan: Plan) -> str:
    """The whole page."""
    s = scatter(plan)
    name = plan.profile.workload or "plan"
    parts = [_header(plan, name), _tiles(plan)]
    advice = [*plan.advice, *vm_baseline.sentences(plan.gpus, plan.beyond, plan.choice.predicted.cost_usd)]
    if advice:
        parts.append(card("Advice", items(advice)))
    beyond = f" Beyond the picture: {'; '.join(s.beyond)}." if s.beyond else ""
    parts += [
        card("Time and cost", picture(plan) + _front_table(plan), (_FRONT if s.front else "") + beyond),
        side_by_side(card("Time by phase", _phases(plan.choice.predicted), _PATH), card("Cost", _costs(plan.choice.predicted))),
    ]
    if len(plan.compared) > 1:
        parts.append(card("What to choose between", _choices(plan, plan.compared), _COMPARED))
    sure = [*sentences(plan.uncertainty), *(f"extrapolated: {words}" for words in plan.extrapolated)]
    if sure:
        parts.append(card("How sure this is", items(sure), _SURE))
    if plan.alternatives:
        parts.append(card("Alternatives", _choices(plan, plan.alternatives), "Differences are from the chosen one."))
    if plan.machines:
        parts.append(card("The same job on one machine", _machines(plan), f"{_MACHINES} {uncounted_words(plan.machines)}"))
    parts += [card("Configuration", _settings(_configuration(plan))), card("What this rests on", _settings(_provenance(plan)))]
    return document(f"plan · {name}", parts)


def picture(plan: Plan) -> Markup:
    """Legend and picture of time and cost."""
    s = scatter(plan)
    return _legend(s) + scrolled(_picture(s))


def _header(plan: Plan, name: str) -> Markup:
    c, p = plan.choice, plan.choice.predicted
    aim = "least cost" if plan.minimise == "cost" else f"least {plan.minimise}"
    summary = f"{functions(c)} will take {human_seconds(p.seconds)} and cost {usd(p.cost_usd)}."
    return header("ephemeron plan", name, summary, pill=aim, pill_style="finished", place=plan.profile.platform)


def _tiles(plan: Plan) -> Markup:
    c, p = plan.choice, plan.choice.predicted
    deadline, budget = plan.limits.deadline_s, plan.limits.budget_usd
    batch = _global_batch(plan)
    n = f"{p.iterations:,}"
    each = f"{human_seconds(p.seconds / p.iterations)} per iteration" if p.iterations else ""
    sizes = f"{c.batch_size_aggregator} per aggregator, {c.batch_size_nonaggregator} per other"
    same = c.workers == c.aggregators or c.batch_size_aggregator == c.batch_size_nonaggregator
    return tiled(
        [
            ("Time", human_seconds(p.seconds), f"deadline {human_seconds(deadline)}" if deadline else "no deadline"),
            ("Cost", usd(p.cost_usd), f"{p.cost_usd / budget:.0%} of the budget" if budget else "no budget"),
            ("Functions", f"{c.workers} × {c.memory_mb} MB", f"{p.memory_mb:,.0f} MB are needed"),
            ("Aggregators", f"{c.aggregators}", f"{c.pattern}, {c.sync}"),
            ("Global batch", f"{batch:,}", f"{c.batch_size_aggregator} per function" if same else sizes),
            ("Iterations", n, f"{each}, {c.local_steps} local steps" if c.local_steps > 1 else each),
            ("Bound by", str(plan.binding), "a limit" if plan.binding in ("deadline", "budget") else ""),
            ("Search", plan.search.method, _proof(plan.search)),
        ]
    )


def _global_batch(plan: Plan) -> int:
    c = plan.choice
    return c.batch_size_aggregator * c.aggregators + c.batch_size_nonaggregator * (c.workers - c.aggregators)


def _proof(search: SearchReport) -> str:
    if search.optimal:
        return "proven the best"
    return "nothing is proven" if search.gap is None else f"at most {search.gap:.1%} from the best"


def _legend(s: Scatter) -> Markup:
    keys = [("dot blue", "front")] if s.front else []
    keys.append(("dot orange", "chosen"))
    keys += [("dot amber", "one virtual machine")] if s.machines else []
    drawn = []
    for style, words in keys:
        shape = _diamond(7, 6, style) if style == "dot amber" else el("circle", cx=7, cy=6, r=4.5, class_=style)
        swatch = el("svg", shape, viewBox="0 0 14 12", width=14, height=12, aria_hidden="true")
        drawn.append((swatch, words))
    return legend(drawn)


def _diamond(x: float, y: float, style: str, *inside: str) -> Markup:
    return el("path", *inside, d=f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5Z", class_=style)


def _picture(s: Scatter) -> Markup:
    x = Scale(s.time.lo, s.time.hi, LEFT, WIDTH - RIGHT, s.time.log)
    y = Scale(s.cost.lo, s.cost.hi, HEIGHT - BOTTOM, TOP, s.cost.log)
    out = [_grid(s, x, y), _limits(s, x, y)]
    if len(s.front) > 1:
        out.append(el("path", d=path([(m.seconds, m.cost_usd) for m in s.front], x, y), class_="line blue faint"))
    labels = ScatterLabels()
    chosen = x(s.choice.seconds), y(s.choice.cost_usd)
    words = f"{s.choice.label} MB"
    labels.room(*chosen, words, letter=7.5)
    for m in s.machines:
        at = x(m.seconds), y(m.cost_usd)
        out.append(_diamond(*at, "dot amber", el("title", m.words)))
        out.append(_beside(m, *at, labels))
    for m in s.front:
        at = x(m.seconds), y(m.cost_usd)
        out.append(el("circle", el("title", m.words), cx=at[0], cy=at[1], r=4.5, class_="dot blue"))
        if (m.seconds, m.cost_usd) != (s.choice.seconds, s.choice.cost_usd):
            out.append(_beside(m, *at, labels))
    title = el("title", s.choice.words)
    out.append(el("circle", title, cx=chosen[0], cy=chosen[1], r=8, class_="dot orange"))
    right = chosen[0] > WIDTH - 140
    out.append(text(chosen[0] + (-12 if right else 12), chosen[1] - 10, words, class_="chosen", text_anchor="end" if right else "start"))
    return el("svg", *out, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img", aria_label="cost by time")


def _beside(m: ScatterMark, x: float, y: float, labels: ScatterLabels) -> Markup:
    """The label of a point, if there is room for it."""
    if not labels.room(x, y, m.label):
        return Markup("")
    if x + 6.8 * len(m.label) + 9 > WIDTH:
        return text(x - 9, y - 7, m.label, text_anchor="end")
    return text(x + 8, y - 7, m.label)


def _grid(s: Scatter, x: Scale, y: Scale) -> Markup:
    out, floor = [], HEIGHT - BOTTOM
    for value, name in s.cost.ticks:
        out.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        out.append(text(LEFT - 8, y(value) + 4, name, text_anchor="end"))
    for value, name in s.time.ticks:
        out.append(el("line", x1=x(value), x2=x(value), y1=TOP, y2=floor, class_="grid"))
        out.append(text(x(value), floor + 18, name, text_anchor="middle"))
    out.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, class_="axis"))
    log = [f"{name} (log)" if r.log else name for name, r in (("cost", s.cost), ("time", s.time))]
    out.append(text(LEFT - 8, TOP - 11, log[0], class_="title", text_anchor="end" if not s.cost.log else "middle"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, log[1], class_="title", text_anchor="middle"))
    return joined(out)


def _limits(s: Scatter, x: Scale, y: Scale) -> Markup:
    out = []
    if s.deadline_s:
        at = x(s.deadline_s)
        out.append(el("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="budget"))
        out.append(text(at, TOP - 8, f"deadline {human_seconds(s.deadline_s)}", class_="bad", text_anchor="middle"))
    if s.budget_usd:
        at = y(s.budget_usd)
        out.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="budget"))
        out.append(text(WIDTH - RIGHT, at - 6, f"budget {usd(s.budget_usd)}", class_="bad", text_anchor="end"))
    return joined(out)


def _front_table(plan: Plan) -> Markup:
    if not plan.front:
        return Markup("")
    return el("details", el("summary", f"all {len(plan.front)} configurations of the front"), _choices(plan, plan.front))


def _choices(plan: Plan, rows: Sequence[Choice]) -> Markup:
    said = any(isinstance(r, Alternative) for r in rows)
    head = ["workers", "memory", "K", "batch", "pattern", "sync", "compression", "time", "", "cost", ""]
    base = plan.choice.predicted
    body = []
    for r in rows:
        p = r.predicted
        batches = dict.fromkeys((r.batch_size_aggregator, r.batch_size_nonaggregator))
        cells = [
            r.workers,
            f"{r.memory_mb} MB",
            r.aggregators,
            " / ".join(map(str, batches)),
            r.pattern,
            r.sync,
            r.compression,
            human_seconds(p.seconds),
            _off(p.seconds, base.seconds),
            usd(p.cost_usd),
            _off(p.cost_usd, base.cost_usd),
        ]
        body.append([*([r.why if isinstance(r, Alternative) else ""] if said else []), *cells])
    return table(["", *head] if said else head, body, words=1 if said else 0)


def _off(value: float, base: float) -> str:
    if not base or value == base:
        return ""
    share = value / base - 1
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+.0%}"


def _bar(share: float, style: str) -> Markup:
    rect = el("rect", x=0, y=0, width=max(0.0, min(100.0, 100 * share)), height=10, class_=style)
    return el("svg", rect, viewBox="0 0 100 10", width=220, height=12, class_="bar", preserveAspectRatio="none", aria_hidden="true")


def _phases(p: Predicted) -> Markup:
    longest = max([*p.phases_s.values(), 1e-12])
    rows = []
    for phase, seconds in p.phases_s.items():
        style = phase if phase in PHASE_COLOURS else "wait"
        share = f"{seconds / p.seconds:.0%}" if p.seconds else ""
        rows.append([phase, quantity(seconds, "s"), share, _bar(seconds / longest, style)])
    return table(["", "seconds", "share", ""], rows)


def _costs(p: Predicted) -> Markup:
    words = {
        "functions": "GB-seconds",
        "storage": "bytes and servers",
        "requests": f"{human_count(p.invocations, 'invocation', grouped=True)}, {human_count(p.puts, 'put', grouped=True)}, {human_count(p.gets, 'get', grouped=True)}, {human_count(p.polls, 'poll', grouped=True)}",
    }
    rows = [[name, words.get(name, ""), usd(cost), f"{cost / p.cost_usd:.0%}" if p.cost_usd else ""] for name, cost in p.cost.items()]
    rows.append(["sum", "", usd(p.cost_usd), ""])
    return table(["", "quantity", "cost", "share"], rows, words=2, style="last-sum")


def _machines(plan: Plan) -> Markup:
    base = plan.choice.predicted
    rows = []
    for m in plan.machines:
        cells = [human_seconds(m.seconds), _off(m.seconds, base.seconds), usd(m.cost_usd), _off(m.cost_usd, base.cost_usd)]
        remarks = [] if m.fits else [" ", el("small", "too little memory", class_="bad")]
        remarks += [] if m.verified else [" ", el("small", "price not verified")]
        rows.append([joined([m.name, *remarks]), *cells])
    chosen = [joined([functions(plan.choice), " ", el("small", "chosen")]), human_seconds(base.seconds), "", usd(base.cost_usd), ""]
    return table(["", "time", "", "cost", ""], [*rows, chosen], style="last-sum")


def _configuration(plan: Plan) -> dict[str, object]:
    return {f.name: getattr(plan.choice, f.name) for f in fields(Choice) if f.name != "predicted"}


def _provenance(plan: Plan) -> dict[str, object]:
    s = plan.search
    told: dict[str, object] = {f.name: getattr(plan.profile, f.name) for f in fields(plan.profile)}
    told["limits"] = {f.name: v for f in fields(plan.limits) if (v := getattr(plan.limits, f.name)) is not None} or "none"
    told["search"] = f"{s.method}: {s.evaluated:,} evaluated, {s.pruned:,} excluded by bounds, in {human_seconds(s.seconds)}; {_proof(s)}"
    return told


def _settings(values: Mapping[str, object]) -> Markup:
    rows = [[k, el("code", _word(v))] for k, v in values.items() if v not in (None, "", [], ())]
    return table([], rows, words=2, style="settings")


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_word(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
