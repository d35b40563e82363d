"""The same promises on real processes: channels, clients and servers that die, quotas. Deaths of functions: `test_matrix`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from training_runs import make_job

from ephemeron.cli.main import main
from ephemeron.errors import ChannelError, UserError
from ephemeron.events import Ended, Invoked, Progress
from ephemeron.runs.verbs import attach, resume
from ephemeron.testing.training_world import PEER_TIMEOUT_S
from ephemeron.training.driver import configure, train
from ephemeron.training.job import DataSpec, Target, parse_fault

JOB = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1)
HOW = {"platform": "local", "workers": 3, "aggregators": 2, "batch_size": 24, "memory_mb": 704, "checkpoint_every": 4}


def go(job=JOB, faults=(), **how):
    events = []
    c = configure(job, **{**HOW, **how})
    faults = [parse_fault(f) for f in faults]
    result = train(job, c, faults=faults, on_event=events.append, check=False, peer_timeout_s=PEER_TIMEOUT_S)
    return result, events


def of(events, kind):
    return [e for e in events if isinstance(e, kind)]


def no_function_left(runs: Path | None = None) -> bool:
    """Of any run in that folder; None: of this home."""
    scratch = str((runs or Path(os.environ["EPHEMERON_HOME"]) / "runs").resolve())
    left = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ours = "ephemeron.functions.function_main" in (process.info["cmdline"] or [])
            if ours and process.environ().get("HOME", "").startswith(scratch):
                left.append(process)
    return not left


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("EPHEMERON_REPORT_PICTURE")
        result, events = go()
    return result, events


def test_a_run(undisturbed):
    result, events = undisturbed
    s = result.summary
    assert s.status == "finished"
    assert s.iterations == 20
    assert len(of(events, Progress)) == 60
    assert {p.name for p in result.folder.path.iterdir()} >= {
        "report.html",
        "report.png",
        "weights.safetensors",
        "result.json",
        "events.jsonl",
    }
    left = [p.name for p in (result.folder.path / "objects").rglob("*") if p.is_file()]
    assert sorted(left) == ["result", "spec"]
    assert s.billed.gb_seconds == pytest.approx(sum(e.billed_s for e in of(events, Ended)) * 704 / 1024, rel=1e-6)
    assert no_function_left(result.folder.path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["redis", "s3"])
def test_other_channels_give_the_same_weights(channel, undisturbed, home, request):
    address = request.getfixturevalue("s3") if channel == "s3" else request.getfixturevalue("valkey_server").address
    result, events = go(channel=address)
    assert result.summary.status == "finished"
    assert result.summary.weights_sha256 == undisturbed[0].summary.weights_sha256
    if channel == "redis":  # the cache waits by itself, 10 s at a time; rank 0 looks for a stop in each iteration
        assert result.summary.traffic.polls <= 20 + 3 * max(event.t for event in events) / 10


PACE = "delay:rank=0,factor=1,seconds=0.3"
"""So that what happens in the middle of a run comes before its end."""
CLIENT = """
import sys
sys.path.insert(0, {tests!r})
from test_local_runs import JOB, HOW
from ephemeron.training.job import parse_fault
from ephemeron.training.driver import configure, train
train(JOB, configure(JOB, **HOW), faults=[parse_fault({pace!r})], peer_timeout_s={patience})
"""


def start_client(home: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A client of its own, once its run has trained a little."""
    code = CLIENT.format(tests=str(Path(__file__).parent), pace=PACE, patience=PEER_TIMEOUT_S)
    client = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "EPHEMERON_HOME": str(home)}, start_new_session=True)
    deadline = time.monotonic() + 180
    while True:
        assert client.poll() is None
        assert time.monotonic() < deadline
        found = list(home.glob("runs/*/events.jsonl"))
        if found and found[0].read_text().count('"kind":"progress"') >= 9:
            return client, found[0].parent
        time.sleep(0.05)


@pytest.mark.slow
def test_the_run_goes_on_without_its_client(undisturbed, home):
    client, folder = start_client(home)
    client.kill()
    client.wait()
    result = attach(folder.name)
    assert result.summary.status == "finished"
    assert result.summary.weights_sha256 == undisturbed[0].summary.weights_sha256
    assert result.summary.invocations == 3


@pytest.mark.slow
def test_a_run_is_interrupted_again_and_again_and_ends_as_one_that_was_not(undisturbed, home):
    """Ctrl-C, another terminal that resumes and is killed, a third that attaches; then what is to be seen of it all."""
    from running import until  # the client's process imports this module, and has no such path

    client, folder = start_client(home)
    client.send_signal(signal.SIGINT)
    client.wait(180)
    stopped = json.loads((folder / "result.json").read_text())
    assert stopped["status"] == "stopped"
    assert 0 < stopped["iterations"] < 20
    assert no_function_left()
    said = CliRunner().invoke(main, ["runs", "--json"])
    assert json.loads(said.output)["status"] == "stopped"

    def progress() -> int:
        return (folder / "events.jsonl").read_text().count('"kind":"progress"')

    before = progress()
    command = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "resume", folder.name]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as resumer:
        until(lambda: progress() > before or resumer.poll() is not None)
        resumer.kill()
    result = attach(folder.name)
    assert result.summary.status == "finished"
    assert result.summary.weights_sha256 == undisturbed[0].summary.weights_sha256
    with pytest.raises(UserError, match="has finished"):
        resume(folder.name)
    for verb in ("report", "logs", "attach"):
        done = CliRunner().invoke(main, [verb, folder.name])
        assert done.exit_code == 0, done.output
    assert json.loads(CliRunner().invoke(main, ["runs", "--json"]).output)["metrics"]["accuracy"] == result.summary.metrics["accuracy"]


@pytest.mark.slow
def test_out_of_memory_is_named(home):
    job = make_job(model=Target(target="tiny:heavy", options={"megabytes": 700}))
    result, _ = go(job)
    assert result.summary.status == "failed"
    assert "out of memory" in result.causes[0]
    assert "704 MB" in result.causes[0]
    assert no_function_left()


@pytest.mark.slow
def test_user_code_that_raises_is_named(home):
    result, events = go(make_job(model=Target(target="tiny:failing")))
    assert result.summary.status == "failed"
    assert "ValueError: no luck today" in result.causes[0]
    assert len(of(events, Invoked)) == 3  # not tried again: it would raise again


def test_a_wrong_bucket_is_refused_before_anything_starts(home, s3_server, monkeypatch):
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ChannelError, match="no-such-bucket"):
        go(channel="s3://no-such-bucket/runs")
    assert not list(home.glob("runs/*"))


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_with_a_clear_error(home, own_valkey):
    server = own_valkey()
    seen = []

    def kill_later(event):
        if isinstance(event, Progress) and event.iteration == 3 and not seen:
            seen.append(event)
            server.kill()

    job = make_job()
    c = configure(job, **HOW, channel=server.address, channel_retry_s=3.0)
    result = train(job, c, faults=[parse_fault(PACE)], on_event=kill_later, check=False)
    assert result.summary.status == "failed"
    assert "ChannelUnreachable" in result.causes[0]
    assert "given up after" in result.causes[0]
    assert no_function_left()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_is_named(home, tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(ChannelError, match="no space left"):
            go(channel=disk.as_uri())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_no_secret_is_written_or_shown(home):
    with pytest.raises(ChannelError) as caught:
        go(channel="redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in str(caught.value)
