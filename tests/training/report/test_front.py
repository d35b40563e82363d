"""A plan as people look at it: the terminal, the page and the picture show the same points, and nothing is fetched."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import plans
import pytest
from test_pages import parsed

from ephemeron.errors import MissingExtra
from ephemeron.training.planner.plan import MachineEstimate, Plan, PlanLimits, PlanSource, load_plan
from ephemeron.training.report.pareto import html, png, terminal, write_plan_report
from ephemeron.training.report.scatter import scatter

PLANS = [plans.plan, plans.wide, plans.bare]


@pytest.mark.parametrize("make", PLANS)
def test_page_is_well_formed_and_fetches_nothing(make: Callable[[], Plan]) -> None:
    page = html(make())
    parsed(page)
    assert not re.search(r"https?://|//cdn|@import|url\(|\bsrc=|\bhref=|<script", page)


def test_page_says_what_the_plan_says() -> None:
    plan = plans.plan()
    page = html(plan)
    for words in (
        "resnet50-cifar10",
        "4 functions of 1792 MB will take 4 min 25 s and cost $0.0088",
        "aws-lambda, objects",
        "22% of the budget",
        "deadline 5 min 00 s",
        "one worker less",
        "too little memory",
        "c7i.8xlarge",
        "AWS Lambda pricing page",
        "2025-06-01",
        "3,412,000 excluded by bounds",
        "proven the best",
        "4 invocations, 6,000 puts",
        "int8 compression would take half",
        "all 9 configurations of the front",
    ):
        assert words in page, words
    assert page.count("<circle") == len(plan.front) + 1 + 2, "the front, the chosen one, and their keys"


def test_text_from_outside_is_escaped() -> None:
    evil = "<script>alert('x')</script>&\""
    chosen = plans.choice(pattern=evil, channel=evil)
    plan = plans.plan(
        choice=chosen,
        front=(chosen,),
        alternatives=(plans.alternative(evil, chosen),),
        advice=(evil,),
        machines=(MachineEstimate(name=evil, seconds=100.0, cost_usd=0.01),),
        profile=PlanSource(workload=evil, platform=evil, source=evil, notes=(evil,)),
        binding=evil,
        minimise=evil,
    )
    page = html(plan)
    assert "script" not in parsed(page).seen
    assert "alert('x')</script>" not in page


@pytest.mark.parametrize("make", PLANS)
def test_terminal_fits_and_shows_every_kind_of_mark(make: Callable[[], Plan]) -> None:
    plan = make()
    told = terminal(plan)
    lines = told.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in told
    plot = "\n".join(lines[: next(i for i, line in enumerate(lines) if "└" in line)])
    assert plot.count("◆") == 1
    if plan.front:
        assert "o" in plot
        assert "no other beats" in told
    s = scatter(plan)
    for letter, machine in zip("ABC", s.machines, strict=False):
        assert letter in plot
        assert f"{letter} {machine.words}" in told
    assert ("┊" in plot) == (s.deadline_s is not None)
    assert ("┄" in plot) == (s.budget_usd is not None)


def test_the_fastest_is_left_and_the_cheapest_low() -> None:
    rows = [line for line in terminal(plans.wide()).splitlines() if "│" in line or "┤" in line]
    first = next(i for i, line in enumerate(rows) if "o" in line)
    last = next(i for i, line in enumerate(rows) if "◆" in line)
    assert first < last
    assert rows[first].index("o") < rows[last].index("◆")


def test_axes_are_logarithmic_where_values_differ_by_much() -> None:
    assert scatter(plans.wide()).cost.log
    assert scatter(plans.wide()).time.log
    plain = scatter(plans.plan())
    assert (plain.cost.log, plain.time.log, plain.cost.lo) == (False, False, 0.0)


def test_what_is_far_off_is_told_and_not_drawn() -> None:
    far = MachineEstimate(name="snail", seconds=1e6, cost_usd=9.0)
    small = MachineEstimate(name="dwarf", seconds=100.0, cost_usd=0.01, fits=False)
    s = scatter(plans.plan(machines=(far, small), limits=PlanLimits(deadline_s=1e7, budget_usd=99.0)))
    assert s.machines == ()
    assert (s.deadline_s, s.budget_usd) == (None, None)
    assert [words.split()[0].strip(":") for words in s.beyond] == ["snail", "deadline", "budget"]
    assert "beyond the picture: snail" in terminal(plans.plan(machines=(far,)))
    both = terminal(plans.plan(machines=(far, replace(far, name="slug")), limits=PlanLimits(deadline_s=1e7)))
    assert both.count("beyond the picture") == 1
    assert all(word in both for word in ("snail", "slug", "deadline"))
    assert max(map(len, both.splitlines())) <= 80
    assert "Beyond the picture: snail" in html(plans.plan(machines=(far,)))


def test_many_machines_have_room() -> None:
    many = tuple(MachineEstimate(name=f"m{i}", seconds=200.0, cost_usd=0.02) for i in range(40))
    told = terminal(plans.plan(machines=many))
    assert "Z m25" in told
    told = terminal(plans.plan(machines=many[:3]))
    assert "CAB" in told


@pytest.mark.parametrize("make", PLANS)
def test_picture_is_written(make: Callable[[], Plan], tmp_path: Path) -> None:
    png(make(), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 8_000


def test_files_of_a_plan(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert [p.name for p in write_plan_report(plans.plan(), out)] == ["plan.html", "plan.png", "plan.json"]
    assert load_plan(out / "plan.json") == plans.plan()


def test_without_matplotlib_the_picture_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"ephemeron\[report\]"):
        png(plans.plan(), tmp_path / "a.png")
    assert [p.name for p in write_plan_report(plans.plan(), tmp_path)] == ["plan.html", "plan.json"]
