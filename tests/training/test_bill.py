"""The ledger: every operation and every second once, whoever died in between."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.config.typed import build, plain
from ephemeron.events import (
    PHASES,
    Checkpointed,
    Ended,
    Evaluated,
    Invoked,
    Loaded,
    Progress,
    RunStarted,
    Started,
    StoreRequests,
    Suspended,
    Traffic,
    Woken,
    from_json,
    to_json,
)
from ephemeron.prices import Prices
from ephemeron.runs.cost import Bill, CostMeter, latest_metrics
from ephemeron.training.driver.records import ResultSummary, RunTraffic
from ephemeron.training.driver.result import summarize
from ephemeron.training.job import Configuration, Target
from ephemeron.training.report.cost_series import Spending, spending, with_further
from ephemeron.training.worker.result import FinalState
from ephemeron.training.worker.spec import RunSpec

PRICES = Prices(
    name="test",
    as_of="2025-01-01",
    gb_second_usd=2.0,
    invocation_usd=0.5,
    put_usd=0.1,
    get_usd=0.01,
    list_usd=1.0,
    delete_usd=0.001,
    byte_usd=0.0,
    server_hour_usd=36.0,
)


def run_started(t=0.0, traffic=None, memory_mb=2048):
    return RunStarted(
        t=t,
        run_id="r",
        job="j",
        workers=2,
        aggregators=1,
        memory_mb=memory_mb,
        iterations=4,
        epochs=2,
        samples=8,
        traffic=traffic or Traffic(),
    )


def invoked(invocation, rank=0, attempt=0, t=0.0):
    return Invoked(t=t, rank=rank, attempt=attempt, invocation=invocation)


def started(invocation, rank=0, attempt=0, t=0.0):
    return Started(t=t, rank=rank, attempt=attempt, invocation=invocation, cold=True)


def progress(rank=0, attempt=0, iteration=0, t=1.0, loss=0.0, spans=(), traffic=None):
    return Progress(
        t=t,
        rank=rank,
        attempt=attempt,
        iteration=iteration,
        epoch=0,
        samples=1,
        loss=loss,
        version=0,
        spans=list(spans),
        traffic=traffic or Traffic(),
    )


def ended(invocation, rank=0, attempt=0, t=2.0, status="ok", gb_seconds=0.0, traffic=None):
    return Ended(t=t, rank=rank, attempt=attempt, invocation=invocation, status=status, gb_seconds=gb_seconds, traffic=traffic or Traffic())


def evaluated(rank, epoch, loss_sum, correct, samples):
    return Evaluated(
        t=1.0,
        rank=rank,
        attempt=0,
        epoch=epoch,
        iteration=10 * epoch,
        samples=samples,
        sums={"loss": (loss_sum, samples), "accuracy": (correct, samples)},
    )


def ledger(*events):
    made = CostMeter(PRICES)
    for event in events:
        made.feed(event)
    return made


# -- traffic ----------------------------------------------------------------------------------------------


def test_what_a_function_reports_is_the_total_so_far_and_counts_once():
    got = ledger(
        run_started(traffic=Traffic(puts=10, lists=1)),
        invoked("a"),
        started("a"),
        progress(iteration=0, traffic=Traffic(puts=3, gets=1)),
        progress(iteration=1, traffic=Traffic(puts=6, gets=2, polls=5)),
        ended("a", traffic=Traffic(puts=7, gets=3, polls=5, bytes_up=100)),
    )
    assert got.traffic == Traffic(puts=17, gets=3, polls=5, lists=1, bytes_up=100)


def test_a_killed_function_keeps_what_it_last_reported():
    got = ledger(
        invoked("a"),
        started("a"),
        progress(traffic=Traffic(puts=6, gets=2)),
        ended("a", status="lost"),
        invoked("b", attempt=1),
        started("b", attempt=1),
        ended("b", attempt=1, traffic=Traffic(puts=4)),
    )
    assert got.traffic == Traffic(puts=10, gets=2)


def test_of_readings_with_equal_requests_the_one_with_more_bytes_over_direct_links_counts():
    sent = Traffic(puts=2, direct_bytes_sent=800, direct_bytes_received=700)
    got = ledger(invoked("a"), started("a"), progress(traffic=sent), ended("a", status="lost", traffic=Traffic(puts=2)))
    assert got.traffic == sent


def test_bytes_over_direct_links_cost_what_the_price_list_says_and_are_no_requests():
    moved = Traffic(puts=3, direct_bytes_sent=5_000_000, direct_bytes_received=5_000_000)
    made = CostMeter(dataclasses.replace(PRICES, direct_byte_usd=2e-11))
    for event in (invoked("a"), started("a"), ended("a", gb_seconds=0.0, traffic=moved)):
        made.feed(event)
    assert made.storage_usd(1.0) == pytest.approx(3 * PRICES.put_usd + 5_000_000 * 2e-11)


def test_the_traffic_of_a_result_states_its_requests_and_reads_results_without_them():
    counted = RunTraffic.of(Traffic(puts=1, gets=2, polls=4, deletes=8, lists=16, direct_bytes_sent=32))
    assert plain(counted)["store_requests"] == 31
    assert plain(counted)["direct_bytes_sent"] == 32
    earlier = {"puts": 1, "gets": 2, "polls": 4, "deletes": 8, "lists": 16, "bytes_up": 9, "bytes_down": 9}
    assert build(RunTraffic, earlier, where="traffic") == RunTraffic(**earlier)


def test_a_duplicate_pays_for_what_it_did_itself():
    got = ledger(
        invoked("a"),
        invoked("twin"),
        started("a"),
        progress(traffic=Traffic(puts=6)),
        ended("twin", traffic=Traffic(puts=1)),
        progress(iteration=1, traffic=Traffic(puts=9)),
        ended("a", traffic=Traffic(puts=10)),
    )
    assert got.traffic == Traffic(puts=11)
    assert got.invocations == 2


def test_iterations_that_a_replacement_repeats_are_paid_for_and_done_once():
    got = ledger(
        invoked("a"),
        started("a"),
        *(progress(iteration=i, traffic=Traffic(puts=i + 1)) for i in range(4)),
        ended("a", status="lost"),
        invoked("b", attempt=1),
        started("b", attempt=1),
        *(progress(iteration=i, attempt=1, traffic=Traffic(puts=i - 1)) for i in range(2, 5)),
        ended("b", attempt=1, traffic=Traffic(puts=3)),
    )
    assert got.traffic.puts == 4 + 3
    assert got.done == {0: 5}


def test_a_cache_bills_what_the_run_keeps_in_it():
    """The client's 300 MB, two newest checkpoints of each rank, and two iterations of messages, for half an hour."""
    mb = 1_000_000
    saved = [
        Checkpointed(t=float(i), rank=rank, attempt=0, iteration=i, nbytes=size * mb)
        for rank in (0, 1)
        for i, size in enumerate((50, 40, 40))
    ]
    events = [
        run_started(traffic=Traffic(bytes_up=300 * mb)),
        *(e for i in (0, 1) for e in (invoked(f"i{i}", rank=i), started(f"i{i}", rank=i))),
        *saved,
        *(progress(rank=i, iteration=9, traffic=Traffic(puts=1, bytes_up=(130 + 10 * 5) * mb)) for i in (0, 1)),
    ]
    kept_gb = 0.3 + 2 * 2 * 0.04 + 2 * 2 * 0.005
    got = ledger(*events)
    assert got.kept_bytes == pytest.approx(kept_gb * 1e9)
    billed = CostMeter(dataclasses.replace(PRICES, gb_hour_usd=0.084, least_gb=0.1))
    for event in events:
        billed.feed(event)
    assert billed.storage_usd(1800) - got.storage_usd(1800) == pytest.approx(0.084 * kept_gb / 2)
    assert billed.cost_usd(1800) - got.cost_usd(1800) == pytest.approx(0.084 * kept_gb / 2)


def test_a_cache_bills_its_least_size():
    empty = CostMeter(dataclasses.replace(PRICES, gb_hour_usd=0.084, least_gb=0.1))
    assert empty.storage_usd(3600) == pytest.approx(0.0084)


def test_every_session_of_the_trigger_counts():
    got = ledger(run_started(traffic=Traffic(puts=5)), run_started(t=9, traffic=Traffic(gets=2)))
    assert got.traffic == Traffic(puts=5, gets=2)


def test_requests_of_shards_and_clients_count_once_per_client():
    def told(t, source, **traffic):
        return StoreRequests(t=t, source=source, traffic=Traffic(**traffic))

    events = [told(1, "a", puts=3, polls=2), told(2, "a", puts=7, polls=4), told(9, "b", puts=1, gets=5)]
    got = ledger(run_started(traffic=Traffic(puts=5)), *events)
    assert got.traffic == Traffic(puts=13, polls=4, gets=5)
    spent, _ = spending([], events, PRICES, now=9.0)
    assert spent.requests_usd == pytest.approx(PRICES.storage_usd(Traffic(puts=8, polls=4, gets=5)))
    assert [from_json(to_json(event)) for event in events] == events


counts = st.builds(Traffic, **{f.name: st.integers(0, 100) for f in dataclasses.fields(Traffic)})


@given(st.lists(st.tuples(st.lists(counts, min_size=1, max_size=4), st.booleans()), max_size=5))
@settings(deadline=None)
def test_the_total_is_the_sum_over_invocations_of_the_last_thing_known(functions):
    made, expected = CostMeter(PRICES), Traffic()
    for attempt, (steps, killed) in enumerate(functions):
        made.feed(invoked(f"i{attempt}", attempt=attempt))
        made.feed(started(f"i{attempt}", attempt=attempt))
        so_far = Traffic()
        for iteration, step in enumerate(steps):
            so_far = so_far + step
            made.feed(progress(attempt=attempt, iteration=iteration, traffic=so_far))
        made.feed(ended(f"i{attempt}", attempt=attempt, status="lost") if killed else ended(f"i{attempt}", attempt=attempt, traffic=so_far))
        expected = expected + so_far
    assert made.traffic == expected


# -- seconds and dollars ----------------------------------------------------------------------------------


def test_functions_that_run_are_billed_so_far_and_functions_that_ended_by_their_bill():
    made = ledger(run_started(memory_mb=2048), invoked("a", t=1.0), invoked("b", rank=1, t=2.0))
    assert made.gb_seconds_at(5.0) == pytest.approx(2 * (4 + 3))
    assert made.gb_seconds_at(0.0) == 0
    made.feed(ended("a", t=5.0, gb_seconds=8.25))
    assert made.gb_seconds_at(6.0) == pytest.approx(8.25 + 2 * 4)
    made.feed(ended("b", rank=1, t=6.0, gb_seconds=8.5))
    assert made.gb_seconds_at(1e6) == pytest.approx(16.75)


def test_the_cost_is_functions_and_requests_and_servers():
    made = ledger(
        run_started(traffic=Traffic(puts=1, lists=2)),
        invoked("a"),
        started("a"),
        ended("a", t=10.0, gb_seconds=3.0, traffic=Traffic(puts=4, gets=10, polls=20, deletes=7)),
    )
    storage = 5 * 0.1 + (10 + 20) * 0.01 + 2 * 1.0 + 7 * 0.001
    assert made.storage_usd(10.0) == pytest.approx(storage)
    assert made.cost_usd(10.0) == pytest.approx(3 * 2.0 + 0.5 + storage)
    made.servers = 2
    assert made.storage_usd(10.0) == pytest.approx(storage + 2 * 36 * 10 / 3600)


def test_spans_add_up_by_phase():
    got = ledger(
        Loaded(t=1, rank=0, attempt=0, iteration=0, spans=[("load", 0.0, 0.5)]),
        progress(spans=[("compute", 1.0, 2.0), ("wait", 2.0, 2.25)]),
        progress(rank=1, spans=[("compute", 1.0, 4.0)]),
    )
    assert got.phases_s == {**dict.fromkeys(PHASES, 0.0), "load": 0.5, "compute": 4.0, "wait": 0.25}


# -- metrics and summary ----------------------------------------------------------------------------------


def test_metrics_are_those_of_the_last_epoch_over_all_ranks():
    got = ledger(
        evaluated(0, 1, 100.0, 0, 10),
        evaluated(0, 2, 2.0, 3, 4),
        evaluated(1, 2, 4.0, 4, 4),
        evaluated(1, 2, 6.0, 5, 4),  # its replacement says it again
    )
    assert latest_metrics(got) == {"loss": pytest.approx(1.0), "accuracy": pytest.approx(1.0)}


@pytest.mark.parametrize("events", [[], [evaluated(0, 1, 0.0, 0, 0)]])
def test_no_test_set_no_metrics(events):
    assert latest_metrics(ledger(*events)) == {"loss": None}


SPEC = RunSpec(
    run_id="r",
    model=Target(target="m"),
    loss=Target(target="l"),
    optimizer=Target(target="o"),
    epochs=1,
    seed=0,
    dtype="float32",
    samples=8,
    prices=PRICES,
    configuration=Configuration(workers=3, aggregators=1, memory_mb=2048, batch_size=4, nonaggregator_batch_size=6),
)


def test_a_run_that_has_not_finished_has_done_what_its_slowest_rank_has():
    made = ledger(run_started(), progress(rank=0, iteration=6), progress(rank=1, iteration=4))
    assert summarize(made, SPEC, status="stopped", final=None).iterations == 0, "rank 2 has done nothing"
    made.feed(progress(rank=2, iteration=5))
    got = summarize(made, SPEC, status="stopped", final=None)
    assert (got.iterations, got.status, got.weights_sha256) == (5, "stopped", None)


def test_what_rank_0_knows_at_the_end_counts():
    made = ledger(run_started(), evaluated(0, 1, 2.0, 1, 2))
    metrics = {"loss": 0.25, "accuracy": 0.75}
    final = FinalState(iterations=40, metrics=metrics, weights_sha256="abc")
    got = summarize(made, SPEC, status="finished", final=final)
    assert (got.iterations, got.metrics, got.weights_sha256) == (40, metrics, "abc")


def test_the_parts_of_the_bill_add_up():
    made = ledger(run_started(traffic=Traffic(puts=3)), invoked("a"), ended("a", t=7.0, gb_seconds=2.0))
    got = summarize(made, SPEC, status="finished", final=None)
    assert got.seconds == 7.0
    assert got.billed == Bill(gb_seconds=2.0, requests=1, storage_usd=pytest.approx(0.3))
    assert got.cost_usd == pytest.approx(2.0 * 2.0 + 0.5 + 0.3)
    assert got.prices == "test, 2025-01-01"
    assert build(ResultSummary, json.loads(json.dumps(plain(got))), where="result.json") == got


@pytest.mark.parametrize(("channel", "servers"), [("folder", 0), ("s3://b/p", 0), ("parameter_server", 1), ("ps://h:1", 1)])
def test_a_parameter_server_is_paid_for_as_long_as_the_run_lasts(channel, servers):
    spec = dataclasses.replace(SPEC, configuration=dataclasses.replace(SPEC.configuration, channel=channel))
    made = ledger(run_started(), invoked("a"), ended("a", t=100.0))
    made.servers = spec.servers
    got = summarize(made, spec, status="finished", final=None)
    assert got.billed.storage_usd == pytest.approx(servers * 36.0 * 100 / 3600)


def test_bursts_and_suspensions_are_on_the_bill_and_suspended_time_is_not():
    prices = dataclasses.replace(PRICES, burst_vcpu_second_usd=0.25, suspend_gb_usd=1.0, resume_gb_usd=0.5, suspended_gb_hour_usd=3.6)
    meter = CostMeter(prices)
    for event in (run_started(), invoked("a"), started("a")):
        meter.feed(event)
    assert meter.gb_seconds_at(10.0) == 20.0
    meter.feed(Suspended(t=10.0, functions=1, gb=2.0))
    assert meter.suspended_usd == 2.0, "2 GB are written"
    meter.feed(Woken(t=110.0, functions=1, gb=2.0, seconds=100.0))
    assert meter.suspended_usd == pytest.approx(2.0 + 1.0 + 2.0 * 3.6 * 100 / 3600), "written, read, kept"
    assert meter.gb_seconds_at(115.0) == 30.0, "15 s of 2 GB"
    meter.feed(dataclasses.replace(ended("a", t=115.0, gb_seconds=30.0), burst_vcpu_s=4.0))
    assert meter.cost_usd(115.0) == pytest.approx(30.0 * 2.0 + 0.5 + meter.suspended_usd + 4.0 * 0.25)
    told = [run_started(), ended("a", gb_seconds=30.0), Suspended(t=10.0, functions=1, gb=2.0)]
    told += [Woken(t=110.0, functions=1, gb=2.0, seconds=100.0)]
    shown = with_further(Spending(), told, prices)
    assert shown.suspended_usd == pytest.approx(meter.suspended_usd)
