"""Questions that begin from what former ones computed are answered as if each were the first."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import TERMS, profiles

from ephemeron.training.planner.answers import PlanAnswers
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.branch_and_bound import Query, Search
from ephemeron.training.planner.search.pareto import Best
from ephemeron.training.planner.search.space import make_space


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(profiles(), st.sampled_from(["cost", "time"]), st.sampled_from([7, 25, 40]))
def test_every_question_is_answered_as_if_it_were_the_first(profile: Profile, minimise: str, largest: int) -> None:
    terms = [dataclasses.replace(t, epochs=2) for t in TERMS]
    space = make_space(profile, terms, limits=PlanLimits(max_global_batch=largest), memory_step_mb=700, most_workers=6)
    answers = PlanAnswers(space, PlanLimits(), minimise)
    queries = [
        Query(largest_global_batch=answers.wider),
        Query(),
        *(Query(workers=frozenset([w])) for w in (1, 2, 5)),
        Query(workers=frozenset([3]), memory_mb=float(space.quotas[-1]), aggregators=2),
    ]
    for query in queries:
        alone = Best(minimise, PlanLimits())
        Search(space, largest_global_batch=answers.wider).run(alone, query)
        found = answers.ask(minimise, PlanLimits(), query)
        assert (found is None) == (not len(alone.points))
        if found is not None:
            assert abs(found.key(minimise)[0] / alone.value - 1) < 1e-11
            assert query.workers is None or found.workers in query.workers
            assert query.memory_mb is None or (found.memory_mb, found.aggregators) == (query.memory_mb, query.aggregators)
