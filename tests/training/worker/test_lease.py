"""Whether an attempt still acts for its rank."""

from hypothesis import given
from hypothesis import strategies as st

from ephemeron.training.worker.recovery.fencing import Lease


def lease(attempt=3):
    return Lease(rank=2, attempt=attempt, tries=1)


def test_the_next_attempt_supersedes_unless_it_is_the_own_successor():
    own = lease()
    assert own.fencing_attempt == 4
    own.has_successor = True
    assert own.fencing_attempt == 5


def test_the_claim_for_a_successor_keeps_the_count_of_replacements():
    claim = lease().claim_for_successor(12.5, not_after=7)
    assert (claim.at_s, claim.not_after, claim.tries) == (12.5, 7, 1)


@given(fenced=st.booleans(), finished=st.booleans(), stopped=st.booleans())
def test_a_superseded_attempt_says_so_before_anything_else(fenced, finished, stopped):
    outcome = lease().exit_after_timeout(fenced=fenced, finished=finished, stopped=stopped)
    wanted = [name for name, there in (("fenced", fenced), ("finished", finished), ("stopped", stopped)) if there]
    assert outcome == (wanted[0] if wanted else None)


def test_of_several_waits_that_end_at_once_one_passes_the_lease_on():
    own = lease()
    assert [own.pass_on() for _ in range(3)] == [True, False, False]
    assert own.passed_on
