"""Flags go before the job's own table."""

import pytest

import ephemeron
from ephemeron.errors import JobError
from ephemeron.training.job import ExchangeOptions
from ephemeron.training.job.precedence import give_way

SHIPPED = {"workers": 4, "aggregators": 2, "batch_size": 16}


def check(values):
    """No more aggregators than workers, no more than five of both, and no negative ones."""
    if min(values.values()) < 0:
        raise JobError("negative")
    if values.get("aggregators", 1) > values.get("workers", 4):
        raise JobError("more aggregators than workers")


def test_without_contradiction_nothing_gives_way():
    assert give_way(SHIPPED, {"workers": 8}, check) == ({**SHIPPED, "workers": 8}, [])


def test_the_fewest_values_give_way():
    assert give_way(SHIPPED, {"workers": 1}, check) == ({"workers": 1, "batch_size": 16}, ["aggregators"])


def test_wrong_flags_and_wrong_tables_are_refused():
    with pytest.raises(JobError, match="negative"):
        give_way(SHIPPED, {"workers": -1}, check)
    with pytest.raises(JobError, match="more aggregators"):
        give_way({"workers": 1, "aggregators": 2}, {"batch_size": 3}, check)
    with pytest.raises(JobError, match="more aggregators"):
        give_way({}, {"workers": 1, "aggregators": 2}, check)


def job(**run):
    return ephemeron.Job(name="j", model=ephemeron.Target(target="m:b"), data=ephemeron.DataSpec(source="digits"), run=run, epochs=1)


@pytest.mark.parametrize(
    ("run", "flags", "gone", "kept"),
    [
        (SHIPPED, {"workers": 1}, "aggregators = 2", {"aggregators": 1, "batch_size": 16}),
        (SHIPPED, {"pattern": "scatter-reduce"}, "aggregators = 2", {"aggregators": 4, "workers": 4}),
        (SHIPPED, {"pattern": "all-reduce"}, "aggregators = 2", {"aggregators": 1}),
        ({"sync": "hap", "workers": 3}, {"pattern": "parameter-server"}, "sync = hap", {"sync": "bsp", "workers": 3}),
        ({"channel": "s3://b/p"}, {"platform": "simulated"}, "channel = s3://b/p", {"channel": "memory"}),
        (
            {"exchange": {"compression": "int8"}},
            {"exchange": {"quantity": "parameters"}},
            "exchange.compression = int8",
            {"exchange": ExchangeOptions(quantity="parameters")},
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_a_flag_unsets_what_contradicts_it_and_says_so(run, flags, gone, kept):
    notes = []
    configuration = ephemeron.configure(job(**run), on_note=notes.append, **flags)
    assert {name: getattr(configuration, name) for name in kept} == kept
    (note,) = notes
    assert note.endswith(gone)


def test_in_python_it_is_a_warning():
    with pytest.warns(UserWarning, match="aggregators = 2"):
        ephemeron.configure(job(**SHIPPED), workers=1)
