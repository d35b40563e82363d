"""One real process per device: equal training, links with the configured delays, and a common end."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
if "fork" not in multiprocessing.get_all_start_methods():
    pytest.skip("this system cannot fork", allow_module_level=True)

from cutting_worlds import optimizer  # noqa: E402
from training_worlds import batches, furthest, loss, parts_of, traced, train_whole  # noqa: E402

from ephemeron.errors import JobError, StageFailed  # noqa: E402
from ephemeron.partition import Schedule  # noqa: E402
from ephemeron.partition.costs import Throttle  # noqa: E402
from ephemeron.partition.runtime import Pipeline  # noqa: E402

SCHEDULE = Schedule(kind="1f1b", micro_batches=3)
SLOW = Throttle(latency_s=0.004, bandwidth_bytes_s=1e6)
pytestmark = pytest.mark.slow

DEADLINE_S = 180.0


def started(name: str, parts: int = 3, *, cutting: dict[str, Any] | None = None, **options: Any) -> Pipeline:
    settings = {"schedule": SCHEDULE, "optimizer": optimizer, "loss": loss, "where": "processes", **options}
    return Pipeline(parts_of(name, parts, **(cutting or {})), **settings)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not all(map(gone, pids)):
        assert time.monotonic() < end_s, f"still there: {[p for p in pids if not gone(p)]}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def apart() -> Iterator[Pipeline]:
    """GPT-2 with its tied parameter on several devices, one of its links slow."""
    with started("gpt-2", cutting={"ties": "apart"}, links={("d0", "d1"): SLOW}) as pipe:
        yield pipe


def test_processes_train_as_the_unsplit_model_does_and_as_one_process(apart):
    """Shared parameters, dropout, skips, odd batches; and to the last bit as with all devices in one process."""
    e, _ = traced("gpt-2")
    todo = batches("gpt-2", e)
    assert apart.split.shared, "the tied parameter should be on two devices"
    steps = [apart.step(args, kwargs=kwargs, results=True) for args, kwargs in todo]
    expected, losses = train_whole("gpt-2", todo, 3)
    assert furthest(apart.state_dict(), expected) <= 1e-10
    assert [s.loss for s in steps] == pytest.approx(losses, abs=1e-10)
    assert [tuple(r.shape) for r in steps[3].results] == [(2, 6, 20)] * 3
    with Pipeline(parts_of("gpt-2", 3, ties="apart"), schedule=SCHEDULE, optimizer=optimizer, loss=loss) as here:
        same = [here.step(args, kwargs=kwargs).loss for args, kwargs in todo]
        assert same == [s.loss for s in steps]
        assert furthest(here.state_dict(), apart.state_dict()) == 0.0


def test_transfers_are_seen_and_held_back_one_way_only(apart):
    """A throttle holds a link for latency and bytes over bandwidth, and no less; the way back is another link."""
    e, _ = traced("gpt-2")
    step = apart.step(*batches("gpt-2", e)[0][0])
    sent = [s for s in step.spans if s.resource == ("d0", "d1") and s.direction == "forward"]
    assert sorted(s.micro_batch for s in sent) == [0, 1, 2]
    assert all(s.end_s - s.start_s >= SLOW.latency_s for s in sent)
    ordered = sorted(sent, key=lambda s: s.start_s)
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(ordered)), "one message at a time"
    assert {s.resource for s in step.spans if isinstance(s.resource, tuple)} >= {("d0", "d1"), ("d1", "d0")}


def test_state_is_fetched_and_loaded(apart, tmp_path):
    e, _ = traced("gpt-2")
    todo = batches("gpt-2", e, steps=4)
    apart.save(tmp_path)
    first = [apart.step(args, kwargs=kwargs).loss for args, kwargs in todo]
    state = apart.state_dict()
    apart.load(tmp_path)
    assert [apart.step(args, kwargs=kwargs).loss for args, kwargs in todo] == first
    assert furthest(apart.state_dict(), state) == 0.0
    apart.set_options(lr=0.0, weight_decay=0.0, momentum=0.0)
    apart.step(*todo[0][0])
    assert furthest(apart.state_dict(), state) == 0.0
    with pytest.raises(JobError, match="has no option 'rate'"):
        apart.set_options(rate=1)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_statistics_skips_and_recomputation_in_processes(transport):
    e, _ = traced("u-net")
    todo = batches("u-net", e, steps=5)
    schedule = Schedule(kind="gpipe", micro_batches=3, recompute=True)
    with started("u-net", transport=transport, schedule=schedule) as pipe:
        for args, kwargs in todo:
            pipe.step(args, kwargs=kwargs)
        assert furthest(pipe.state_dict(), train_whole("u-net", todo, 3)[0]) <= 1e-10
    assert furthest(pipe.split.state(), train_whole("u-net", todo, 3)[0]) <= 1e-10, "closing brings the stages up to date"


def test_an_exception_names_stage_and_operator_and_ends_all_processes():
    e, _ = traced("gpt-2")
    (args, _), *_ = batches("gpt-2", e)
    with started("gpt-2") as pipe:
        pids = list(pipe.processes.values())
        pipe.step(args)
        with pytest.raises(StageFailed, match=r"forward of micro-batch 0, operator embedding .*iteration 1: IndexError"):
            pipe.step(torch.full_like(args[0], 99))
        wait_until_gone(pids)
        with pytest.raises(JobError, match="this pipeline has ended"):
            pipe.step(args)


def test_a_process_that_dies_in_a_step_is_named():
    """Killed within the second iteration by what runs on the last stage: the others, which only wait, are not blamed."""
    calls = []

    def deadly(result: Any, targets: Any) -> Any:
        calls.append(1)
        if len(calls) > SCHEDULE.micro_batches:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(result, targets)

    e, _ = traced("resnet")
    (args, _), *_ = batches("resnet", e)
    with started("resnet", loss=deadly) as pipe:
        pids, last = list(pipe.processes.values()), pipe.split.stages[-1].spec
        pipe.step(args)
        with pytest.raises(StageFailed, match=rf"stage {last.index} was killed by SIGKILL") as raised:
            pipe.step(args)
        assert raised.value.device == last.device
        assert raised.value.iteration == 1
        wait_until_gone(pids)


def test_a_process_that_died_before_a_step_is_named():
    e, _ = traced("resnet")
    with started("resnet") as pipe:
        victim = pipe.processes["d1"]
        os.kill(victim, signal.SIGKILL)
        wait_until_gone([victim])
        with pytest.raises(StageFailed, match="device d1, iteration 0: the process of stage 1 was killed by SIGKILL"):
            pipe.step(batches("resnet", e)[0][0])


def test_a_forgotten_pipeline_ends_and_a_loss_may_be_no_number():
    e, _ = traced("resnet")
    pipe = started("resnet", loss=lambda result, targets: loss(result, targets) * float("nan"))
    pids = list(pipe.processes.values())
    step = pipe.step(batches("resnet", e)[0][0])
    assert math.isnan(step.loss)
    del pipe
    gc.collect()
    wait_until_gone(pids)


def test_a_step_that_takes_too_long_is_ended():
    def never(result: Any, targets: Any) -> Any:
        signal.pause()

    e, _ = traced("resnet")
    with started("resnet", loss=never, timeout_s=0.5) as pipe:
        pids = list(pipe.processes.values())
        with pytest.raises(StageFailed, match=r"no reply .*within 0\.5 s"):
            pipe.step(batches("resnet", e)[0][0])
        wait_until_gone(pids)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_processes_end_with_their_leader(name):
    """In the middle of a step that would never end: the leader is killed, or interrupted from the keyboard."""
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    traced("resnet")

    def stuck(result: Any, targets: Any) -> Any:
        tell.send("computing")
        signal.pause()

    def lead() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        e, _ = traced("resnet")
        with started("resnet", loss=stuck) as pipe:
            tell.send(list(pipe.processes.values()))
            try:
                pipe.step(batches("resnet", e)[0][0])
            except KeyboardInterrupt:
                tell.send("interrupted")
                raise

    leader = context.Process(target=lead)
    leader.start()
    try:
        assert told.poll(DEADLINE_S)
        pids = told.recv()
        assert len(pids) == 3
        assert told.poll(DEADLINE_S)
        assert told.recv() == "computing"
        assert leader.pid is not None
        os.kill(leader.pid, signal.Signals[name])
        wait_until_gone(pids)
        leader.join(DEADLINE_S)
        assert leader.exitcode is not None
        assert told.poll(0) == (name == "SIGINT")
    finally:
        leader.kill()
        leader.join()
