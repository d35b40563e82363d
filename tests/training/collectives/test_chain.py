"""Each contribution has one place in a shard's chain of versions."""

from ephemeron.training.collectives.arrived import Marks, VersionChain
from ephemeron.training.collectives.pace import PeerPace


def test_marks_travel_as_one_sequence():
    marks = Marks((0, 3), (1, 5))
    assert Marks.of(marks.numbers) == marks
    assert list(marks.folded(1)) == [3, 4]
    assert marks.contributions == 3


def test_a_version_in_a_gap_ends_where_the_next_one_begins():
    chain = VersionChain([2, 4])
    assert chain.bound(2) is None
    chain.found(5, (5, 9))
    chain.found(4, (4, 6))
    assert [chain.bound(v) for v in (2, 3, 4, 5)] == [(4, 6), (4, 6), (5, 9), None]


def test_another_attempt_s_version_counts_instead_of_what_was_folded():
    chain = VersionChain([3, 7])
    chain.take_over(Marks((2, 4), (3, 5)))
    assert chain.folded == [3, 5]


def test_a_silent_peer_is_late_once_in_a_timeout():
    pace = PeerPace(0.0)
    assert not pace.is_late(20.0, 20.0)
    assert pace.is_late(20.1, 20.0)
    assert not pace.is_late(30.0, 20.0)
    assert pace.is_late(40.2, 20.0)
    pace.record(42.0)
    assert not pace.is_late(61.0, 20.0)
