"""Timeouts of peers follow from iteration times."""

from ephemeron.training.worker.timeouts import Timeouts


def test_ten_times_the_slowest_iteration_and_never_less_than_the_least():
    timeouts = Timeouts(least_s=20.0)
    assert timeouts.timeout_s() == 20.0
    timeouts.begin(0.0)
    timeouts.end(1.0, busy_s=0.5)
    assert timeouts.timeout_s() == 20.0
    timeouts.begin(1.0)
    timeouts.end(6.0, busy_s=4.0)
    assert timeouts.timeout_s() == 40.0
    assert timeouts.typical_s == 0.7 * 1.0 + 0.3 * 5.0


def test_one_s_own_computing_counts_before_any_iteration_is_over():
    timeouts = Timeouts(least_s=20.0)
    timeouts.record_compute(22.0)
    assert timeouts.timeout_s() == 220.0


def test_waiting_for_a_dead_peer_lengthens_no_timeout():
    timeouts = Timeouts(least_s=20.0)
    timeouts.begin(0.0)
    timeouts.mark_disturbed()
    timeouts.end(500.0, busy_s=1.0)
    assert (timeouts.timeout_s(), timeouts.typical_s) == (20.0, 0.0)


def test_peers_say_how_slow_the_run_is():
    timeouts = Timeouts(least_s=20.0)
    timeouts.begin(0.0)
    timeouts.record_message(3, 46.0, 45.0)
    assert timeouts.silence_s(3, 50.0) == 4.0
    assert timeouts.silence_s(2, 50.0) is None
    assert timeouts.timeout_s() == 450.0
    assert timeouts.peer_timeout_s(3, limit_s=180.0) == 180.0


def test_a_peer_that_is_only_seen_to_go_on_is_given_its_own_time():
    timeouts = Timeouts(least_s=20.0)
    timeouts.begin(0.0)
    timeouts.record_progress(3, 46.0, iterations=1)
    assert timeouts.peer_timeout_s(3, limit_s=900.0) == 460.0
    assert timeouts.peer_timeout_s(2, limit_s=900.0) == 20.0


def test_what_was_learned_is_handed_on():
    timeouts = Timeouts(least_s=20.0)
    timeouts.record_message(3, 1.0, 46.0)
    successor = Timeouts(least_s=20.0)
    successor.load(timeouts.state())
    assert successor.timeout_s() == 460.0
    successor.load()
    assert successor.timeout_s() == 460.0


def test_what_predecessors_waited_counts_for_the_same_iteration_of_the_same_rank():
    timeouts = Timeouts(least_s=20.0)
    timeouts.listen(100.0)
    timeouts.load(waited=[(3, 7, 12.5)])
    assert timeouts.waited_s(3, 7, 104.0) == 16.5
    assert timeouts.waited_s(3, 8, 104.0) == 4.0
    assert timeouts.waited_s(2, 7, 104.0) == 4.0
    timeouts.begin(102.0)
    assert timeouts.waited_s(3, 7, 104.0) == 14.5


def test_waits_of_predecessors_end_with_the_iteration_that_they_were_for():
    timeouts = Timeouts(least_s=20.0)
    timeouts.load(waited=[(3, 7, 12.5), (2, 8, 4.0)])
    timeouts.mark_delivered(6)
    assert timeouts.waited_before_s == {(3, 7): 12.5, (2, 8): 4.0}
    timeouts.mark_delivered(7)
    assert timeouts.waited_before_s == {(2, 8): 4.0}


def test_waits_of_predecessors_for_a_rank_end_when_it_goes_on():
    timeouts = Timeouts(least_s=20.0)
    timeouts.listen(100.0)
    timeouts.load(waited=[(3, 7, 12.5), (2, 7, 4.0)])
    timeouts.record_progress(3, 103.0, iterations=1)
    assert timeouts.waited_before_s == {(2, 7): 4.0}
    assert timeouts.waited_s(3, 7, 104.0) == 1.0


def test_the_pace_of_a_peer_is_the_time_of_one_iteration():
    timeouts = Timeouts(least_s=20.0)
    timeouts.listen(100.0)
    timeouts.record_progress(3, 124.0, iterations=4)
    assert timeouts.peer_timeout_s(3, limit_s=900.0) == 60.0


def test_a_wait_takes_at_most_a_fifth_of_an_invocation_or_two_iterations():
    timeouts = Timeouts(least_s=20.0, slowest_s=3.0)
    assert timeouts.limit_s(lifetime_s=100.0, cold_start_s=1.0) == 20.0
    assert timeouts.limit_s(lifetime_s=10.0, cold_start_s=1.0) == 7.0
