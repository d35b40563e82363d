"""Training over direct channels: the weights are those of the same run over the store, whatever dies."""

import functools
import re

import pytest
from test_elastic import CHANGES, check_over, elastic
from test_stages import staged
from training_runs import Run, real, synthetic

from ephemeron.errors import JobError
from ephemeron.events import Ended, FaultFired, Invoked
from ephemeron.training.driver.api import configured

DIRECT = {"channel": "direct", "workers": 4, "batch_size": 64, "checkpoint_every": 5}
KINDS = {
    "bsp": {},
    "bsp, K = W": {"aggregators": 4},
    "hap": {"sync": "hap", "nonaggregator_batch_size": 80},
    "scatter-reduce": {"pattern": "scatter-reduce"},
    "pipelined": {"pattern": "pipelined", "aggregators": 4},
    "int8": {"exchange": {"compression": "int8"}},
}


def both(**overrides: object) -> tuple[Run, Run]:
    store = real(**{**DIRECT, "channel": "memory", **overrides})
    return store, real(**{**DIRECT, **overrides})


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_same_run_over_the_store(kind: str) -> None:
    store, direct = both(**KINDS[kind])
    assert direct.sha == store.sha
    assert direct.left == store.left


@pytest.mark.parametrize("sync", ["asp", "ssp:2", "hsp"])
def test_asynchronous_runs_end(sync: str) -> None:
    run = synthetic(**DIRECT, sync=sync)
    assert run.ending.status == "finished"
    assert run.left == {"run/spec", "run/result"}


PHASES = ["load", "compute", "upload", "wait", "aggregate", "download"]


@functools.cache
def undisturbed_over_the_store(sync: str) -> str:
    return synthetic(**{**DIRECT, "sync": sync, "aggregators": 2, "channel": "memory"}, samples=2560).sha


@pytest.mark.parametrize("sync", ["bsp", "hap"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_function_changes_no_weight(sync: str, phase: str, rank: int) -> None:
    how = {**DIRECT, "sync": sync, "aggregators": 2}
    fault = f"kill:rank={rank},iteration={0 if phase == 'load' else 7},phase={phase}"
    run = synthetic(**how, samples=2560, faults=[fault])
    assert run.of(FaultFired) or (rank == 3 and phase in ("wait", "aggregate"))  # it aggregates nothing
    assert run.sha == undisturbed_over_the_store(sync)


def test_hand_offs_change_no_weight() -> None:
    undisturbed = synthetic(**{**DIRECT, "channel": "memory"}, epochs=8)
    run = synthetic(**DIRECT, epochs=8, function_timeout_s=12.0)
    assert run.sha == undisturbed.sha
    assert any(e.reason == "relay" for e in run.events if e.kind == "invoked")


@pytest.mark.parametrize("sync", ["asp", "hsp"])
def test_a_lost_message_is_a_lost_function(sync: str) -> None:
    run = synthetic(**DIRECT, sync=sync, samples=2560, faults=["drop-put:rank=1,iteration=6"])
    assert run.of(FaultFired)
    assert run.ending.status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("sync", ["bsp", "hap", "asp"])
def test_functions_change_over_direct_channels(change: str, sync: str) -> None:
    run = elastic(CHANGES[change], back=True, sync=sync, channel="direct")
    check_over(run)
    if sync != "asp":
        assert run.sha == elastic(CHANGES[change], back=True, sync=sync).sha


@functools.cache
def grown_over_the_store() -> str:
    return elastic(CHANGES["grow"]).sha


@pytest.mark.parametrize("phase", ["load", "compute", "upload", "wait"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_kill_at_a_change_of_functions_changes_no_weight(rank: int, phase: str) -> None:
    faults = [f"kill:rank={rank},iteration={3 if phase != 'load' else 4},phase={phase}"]
    run = elastic(CHANGES["grow"], faults=faults, channel="direct")
    check_over(run)
    assert run.sha == grown_over_the_store()


@pytest.mark.parametrize("how", [{}, {"replicas": 2}, {"micro_batches": 2}], ids=str)
def test_stages_send_activations_directly(how: dict[str, int]) -> None:
    store, direct = staged(**how), staged(**how, channel="direct")
    assert direct.sha == store.sha
    sent = [e.traffic for e in direct.of(Ended)]
    assert all(t.direct_bytes_sent > 0 for t in sent)
    assert sum(t.requests for t in sent) < sum(e.traffic.requests for e in store.of(Ended))


@functools.cache
def undisturbed_stages() -> str:
    return staged(replicas=2).sha


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["compute", "upload", "wait", "download"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_stage_changes_no_weight(rank: int, phase: str) -> None:
    how = {"replicas": 2, "channel": "direct"}
    run = staged([f"kill:rank={rank},iteration=5,phase={phase}"], **how)
    assert run.sha == undisturbed_stages()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"channel": "direct+"}, "names no store"),
        ({"channel": "direct+direct"}, "names no store"),
        ({"channel": "direct", "platform": "aws"}, "--channel direct+s3://bucket/prefix"),
    ],
    ids=str,
)
def test_a_direct_channel_without_a_store_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        configured(options)


@pytest.mark.parametrize("aggregators", [1, 2])
@pytest.mark.parametrize("sync", ["ssp:2", "asp", "hsp"])
def test_ranks_that_run_ahead_hand_off_without_a_replacement(sync: str, aggregators: int) -> None:
    how = {"workers": 4, "aggregators": aggregators, "batch_size": 16, "checkpoint_every": 5, "samples": 160}
    run = synthetic(**how, channel="direct", sync=sync, function_timeout_s=12.0, epochs=10)
    assert run.ending.status == "finished"
    reasons = [e.reason for e in run.of(Invoked)]
    assert reasons.count("relay") >= 4
    assert reasons.count("replacement") == 0
    assert run.left == {"run/spec", "run/result"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_hand_off_without_a_replacement(replicas: int) -> None:
    how = {"replicas": replicas, "function_timeout_s": 25.0}
    store, direct = staged(**how), staged(**how, channel="direct")
    assert direct.sha == store.sha
    reasons = [e.reason for e in direct.of(Invoked)]
    assert reasons.count("relay") >= 2
    assert reasons.count("replacement") == 0
    assert direct.left == store.left
