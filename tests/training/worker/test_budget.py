"""Time and cost left to an invocation."""

import pytest

from ephemeron.events import Traffic
from ephemeron.prices import Prices
from ephemeron.training.worker.budget import Budget

PRICES = Prices(name="p", as_of="2025-01-01", gb_second_usd=0.01, invocation_usd=0.5, put_usd=0.001, get_usd=0.0)


def budget(**values):
    return Budget(**{"began_s": 100.0, "deadline_s": 130.0, "memory_mb": 2048, "workers": 4, "prices": PRICES, "limit_usd": 3.0, **values})


def test_time_left_ends_at_the_deadline():
    assert budget().time_left_s(112.5) == 17.5
    assert budget().time_left_s(131.0) == -1.0


def test_cost_is_memory_time_requests_and_earlier_invocations():
    meter = budget(spent_before_usd=0.25)
    assert meter.spent_usd(100.0, Traffic()) == pytest.approx(0.75)
    assert meter.spent_usd(105.0, Traffic(puts=20)) == pytest.approx(0.25 + 0.5 + 10 * 0.01 + 0.02)


def test_a_rank_may_spend_its_share_of_the_budget():
    meter = budget()  # 0.75 $ for each of four ranks
    assert not meter.is_exceeded(112.0, Traffic())
    assert meter.is_exceeded(112.5, Traffic())
    assert not budget(limit_usd=None).is_exceeded(1e9, Traffic())


def test_others_count_with_what_they_have_said():
    """An aggregator that reads for all costs more than the others: four times its cost is not the run's."""
    meter = budget()
    for rank in (1, 2, 3):
        meter.record(rank, 0.3, 110.0)
    own, since = meter.spent_usd(112.5, Traffic()), 2 * 2.5 * 0.01
    assert meter.run_usd(112.5, Traffic()) == pytest.approx(own + 3 * (0.3 + since))
    assert not meter.is_exceeded(112.5, Traffic())
    meter.record(2, 0.1, 111.0)  # late
    assert meter.run_usd(112.5, Traffic()) == pytest.approx(own + 3 * (0.3 + since))


def test_those_that_have_said_nothing_count_like_those_that_have():
    meter = budget()
    meter.record(1, 0.2, 110.0)
    assert meter.run_usd(110.0, Traffic()) == pytest.approx(meter.spent_usd(110.0, Traffic()) + 3 * 0.2)


def test_functions_of_the_next_generation_are_paid_from_the_budget():
    meter = budget()
    before = meter.run_usd(105.0, Traffic())
    assert before == pytest.approx(4 * meter.spent_usd(105.0, Traffic()))
    meter.start_ahead(105.0, workers=10, memory_mb=1024)
    assert meter.run_usd(105.0, Traffic()) == pytest.approx(before)
    assert meter.run_usd(107.0, Traffic()) == pytest.approx(before + 4 * 2 * 2 * 0.01 + 10 * 2 * 0.01)


def test_a_stop_is_paid_from_the_budget():
    meter = budget()
    assert not meter.is_exceeded(110.0, Traffic())
    assert not meter.is_exceeded(110.0, Traffic(), stopping_s=2.4)
    assert meter.is_exceeded(110.0, Traffic(), stopping_s=2.6)
    meter.start_ahead(110.0, workers=1, memory_mb=1024)
    assert meter.is_exceeded(110.0, Traffic(), ahead_stopping_s=20.1)
    assert not meter.is_exceeded(110.0, Traffic(), ahead_stopping_s=19.9)
