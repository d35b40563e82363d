"""Numbers as people read them."""

from __future__ import annotations

import pytest

from ephemeron.executor.session import Bill
from ephemeron.units import human_count, human_metric


def test_one_is_singular() -> None:
    assert [human_count(n, "task") for n in (0, 1, 2, 1234)] == ["0 tasks", "1 task", "2 tasks", "1234 tasks"]
    assert [human_count(n, "put", grouped=True) for n in (1, 1234)] == ["1 put", "1,234 puts"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.99164, "0.9916"), (-3.0, "-3.0000"), (99999.0, "99999.0000"), (133802391734.3458, "1.338e+11"), (float("inf"), "inf")],
)
def test_large_metrics_have_four_digits(value: float, text: str) -> None:
    assert human_metric(value) == text


def test_a_bill_counts_in_words() -> None:
    bill = Bill(cost_usd=0.5, functions_usd=0.5, storage_usd=0.0, invocations=1, gb_seconds=1.0, tasks=1, prices="list")
    assert str(bill).startswith("$0.500000 for 1 task: 1 invocation, 1.00 GB-s; list")
