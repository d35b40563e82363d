"""When a late peer counts as failed."""

from hypothesis import given
from hypothesis import strategies as st

from ephemeron.training.worker.recovery.failure_detector import FailureDetector
from ephemeron.training.worker.recovery.fencing import Claim
from ephemeron.training.worker.timeouts import Timeouts


def detector(*, lifetime_s=900.0, **known):
    timeouts = Timeouts(least_s=20.0, **known)
    timeouts.listen(0.0)
    return timeouts, FailureDetector(timeouts, lifetime_s=lifetime_s, cold_start_s=3.0, checkpoint_every=2)


def test_a_peer_that_was_never_heard_is_silent():
    _, failures = detector()
    assert failures.is_silent(1, 5, now_s=0.0)


def test_silence_counts_from_the_last_message():
    timeouts, failures = detector()
    timeouts.record_message(1, 100.0, 0.5)
    assert not failures.is_silent(1, 5, now_s=117.9)
    assert failures.is_silent(1, 5, now_s=118.0)


def test_slow_iterations_lengthen_the_timeout_up_to_a_share_of_the_lifetime():
    timeouts, failures = detector(lifetime_s=500.0)
    timeouts.record_message(1, 100.0, 6.0)  # 60 s
    assert not failures.is_silent(1, 5, now_s=153.9)
    timeouts.record_message(1, 100.0, 30.0)  # 300 s, but no more than 100 s
    assert not failures.is_silent(1, 5, now_s=189.9)
    assert failures.is_silent(1, 5, now_s=190.0)


def test_the_waits_of_predecessors_count():
    timeouts, failures = detector()
    timeouts.load(waited=[(1, 5, 15.0)])
    timeouts.record_message(1, 1.0, 0.5)
    assert not failures.is_silent(1, 5, now_s=2.0)
    assert failures.is_silent(1, 5, now_s=4.1)
    assert not failures.is_silent(1, 6, now_s=4.1)


def test_progress_is_what_is_new_since_the_last_observation():
    _, failures = detector()
    assert failures.observe(1, 0, now_s=10.0)
    assert not failures.observe(1, 0, now_s=40.0)
    assert failures.observe(1, 3, now_s=70.0)
    assert failures.progress_seen == {1: 3}


def test_an_observation_of_a_predecessor_counts():
    _, failures = detector()
    failures.progress_seen[1] = 7
    assert not failures.observe(1, 7, now_s=10.0)


def test_observations_within_half_a_timeout_are_one():
    _, failures = detector()
    assert failures.recent_observation(1, 0.0) is None
    failures.observe(1, 4, now_s=10.0)
    assert failures.recent_observation(1, 19.9) is True
    assert failures.recent_observation(1, 20.0) is None


def test_a_replacement_has_time_to_start_and_to_repeat_iterations():
    _, failures = detector(typical_s=30.0)  # 3 s and four iterations
    claim = Claim(at_s=100.0, not_after=5)
    assert failures.is_starting(1, 1, claim, 5, now_s=0.0, run_s=222.9)
    assert not failures.is_starting(1, 1, claim, 5, now_s=0.0, run_s=223.0)
    assert failures.is_starting(1, 1, claim, 6, now_s=0.0, run_s=223.0)  # it may repeat one more


def test_that_time_doubles_with_each_replacement_in_vain():
    _, failures = detector()
    for tries, seconds in ((3, 144.0), (4, 288.0)):
        claim = Claim(at_s=0.0, not_after=5, tries=tries)
        assert failures.is_starting(1, 1, claim, 5, now_s=0.0, run_s=seconds - 0.1)
        assert not failures.is_starting(1, 1, claim, 5, now_s=0.0, run_s=seconds)


@given(ahead=st.floats(0.1, 1e6))
def test_a_claim_from_the_future_is_as_old_as_its_first_reading(ahead):
    _, failures = detector()
    claim = Claim(at_s=ahead, not_after=5, tries=3)
    assert failures.is_starting(1, 1, claim, 5, now_s=50.0, run_s=0.0)
    assert failures.is_starting(1, 1, claim, 5, now_s=193.9, run_s=0.0)
    assert not failures.is_starting(1, 1, claim, 5, now_s=194.0, run_s=0.0)
