"""Updates that do not count: by their norms alone, alike wherever they are judged."""

import math

import pytest

from ephemeron.regions.communicator import NormQuarantine, QuarantinedUpdate, Update


def update(round: int, norm: float, *, region: str = "oslo", fragment: int = 0) -> Update:
    return Update(region=region, fence=1, fragment=fragment, round=round, samples=8, norm=norm, payload=b"")


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_refused_from_the_first_round_on(norm: float) -> None:
    found = NormQuarantine().judge(update(1, norm))
    assert isinstance(found, QuarantinedUpdate)
    assert (found.region, found.round) == ("oslo", 1)
    assert "region oslo" in str(found)


def test_an_outlier_is_refused_and_does_not_move_the_median() -> None:
    quarantine = NormQuarantine()
    assert [quarantine.judge(update(n, 1.0 + n / 10)) for n in range(1, 6)] == [None] * 5
    for n in range(6, 30):
        assert quarantine.judge(update(n, 1000.0)) is not None
    assert quarantine.judge(update(30, 2.0)) is None


def test_regions_and_fragments_are_judged_apart() -> None:
    quarantine = NormQuarantine()
    for n in range(1, 6):
        assert quarantine.judge(update(n, 1.0)) is None
        assert quarantine.judge(update(n, 500.0, region="rome")) is None
        assert quarantine.judge(update(n, 500.0, fragment=1)) is None


def test_the_norm_as_decoded_counts_and_not_the_one_that_the_sender_claims() -> None:
    assert NormQuarantine().judge(update(1, 1.0), norm=math.nan) is not None


def test_a_saved_state_decides_as_the_one_that_it_was_saved_from() -> None:
    first = NormQuarantine()
    for n in range(1, 6):
        first.judge(update(n, float(n)))
    second = NormQuarantine(state=first.state())
    for n, norm in ((6, 31.0), (7, 29.0), (8, math.inf)):
        assert (first.judge(update(n, norm)) is None) == (second.judge(update(n, norm)) is None)
    assert first.state() == second.state()
