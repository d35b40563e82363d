"""Faults as text: what the command line takes and what travels to the workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.events import PHASES
from ephemeron.training.job import Fault, parse_fault

numbers = st.integers(0, 10**6)
faults = st.one_of(
    st.builds(Fault, kind=st.just("kill"), rank=numbers, iteration=numbers, phase=st.sampled_from(PHASES), attempt=numbers),
    st.builds(Fault, kind=st.just("drop-put"), rank=numbers, iteration=numbers, attempt=numbers),
    st.builds(Fault, kind=st.just("duplicate"), rank=numbers),
    st.builds(Fault, kind=st.just("delay"), rank=numbers, factor=st.floats(1, 1e300), seconds=st.floats(0, 1e300)),
    st.builds(
        Fault,
        kind=st.just("cut"),
        rank=numbers,
        iteration=numbers,
        attempt=numbers,
        seconds=st.floats(0, 1e300),
        silent=st.integers(0, 1),
        to=st.integers(10**6 + 1, 10**7),
    ),
)


@given(faults)
@settings(deadline=None)
def test_text_and_back(fault):
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=2,iteration=5", Fault(kind="kill", rank=2, iteration=5, phase="compute", attempt=0)),
        ("kill:iteration=5,phase=upload,rank=2,attempt=1", Fault(kind="kill", rank=2, iteration=5, phase="upload", attempt=1)),
        ("duplicate:rank=1", Fault(kind="duplicate", rank=1)),
        ("drop-put:rank=0,iteration=3", Fault(kind="drop-put", rank=0, iteration=3)),
        ("delay:rank=1,factor=10", Fault(kind="delay", rank=1, factor=10.0)),
        ("delay:rank=1,factor=1,seconds=0.5", Fault(kind="delay", rank=1, seconds=0.5)),
        ("cut:rank=0,to=2,iteration=5,seconds=30", Fault(kind="cut", rank=0, to=2, iteration=5, seconds=30.0)),
        ("cut:rank=1,to=0,silent=1,iteration=5,seconds=0.5", Fault(kind="cut", rank=1, iteration=5, seconds=0.5, silent=1)),
    ],
)
def test_the_forms_that_help_shows(text, fault):
    assert parse_fault(text) == fault


def test_text_leaves_out_what_need_not_be_said():
    assert str(parse_fault("delay:rank=1,factor=10")) == "delay:rank=1,factor=10"
    assert str(parse_fault("duplicate:rank=1")) == "duplicate:rank=1"
    assert str(parse_fault("drop-put:rank=0,iteration=3")) == "drop-put:rank=0,iteration=3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown kind ''"),
        ("explode:rank=1", "unknown kind 'explode'; use one of kill, duplicate, drop-put, delay, cut"),
        ("kill:rank=1,iteration=1,when=now", "unknown key 'when'; use attempt, iteration, phase, rank"),
        ("duplicate:rank=1,iteration=2", "unknown key 'iteration'; use rank"),
        ("kill", "missing iteration, rank"),
        ("kill:rank=1", "missing iteration"),
        ("delay:rank=1", "missing factor"),
        ("kill:rank=1,iteration=1,phase=lunch", "unknown phase 'lunch'; use one of load, compute"),
        ("kill:rank=one,iteration=1", "expected numbers"),
        ("kill:rank=,iteration=1", "expected numbers"),
        ("kill:rank=1.5,iteration=1", "expected numbers"),
        ("delay:rank=1,factor=slow", "expected numbers"),
        ("kill:rank=-1,iteration=1", "rank = -1 is below 0"),
        ("drop-put:rank=1,iteration=-1", "iteration = -1 is below 0"),
        ("delay:rank=1,factor=0.5", "factor = 0.5 is not at least 1; use 10"),
        ("delay:rank=1,factor=nan", "factor = nan is not at least 1"),
        ("cut:rank=1,to=1,iteration=0,seconds=1", "always connected to itself; name two ranks"),
        ("cut:rank=1,to=0,iteration=0,seconds=inf", "seconds = inf is not a duration"),
        ("cut:rank=1,to=0,iteration=0,seconds=-1", "seconds = -1 is not a duration"),
        ("cut:rank=1,to=0,iteration=0,seconds=1,silent=2", "silent = 2; use 0 or 1"),
        ("delay:rank=1,factor=inf", "factor = inf is not at least 1"),
    ],
)
def test_mistakes_name_the_fault_and_the_remedy(text, says):
    with pytest.raises(JobError) as caught:
        parse_fault(text)
    assert f"fault {text!r}" in str(caught.value)
    assert says in str(caught.value)
