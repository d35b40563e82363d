"""Training on AWS Lambda as the local service has it: the same weights whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import KEYS, deployed

from checking import left, refusal, texts
from detached_map import check_detached_map
from ephemeron.cli.main import main
from ephemeron.errors import JobError, UserError
from ephemeron.events import Ended, Event, Invoked, Note, Progress
from ephemeron.functions.aws.settings import client
from ephemeron.runs import detached, folders, verbs
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.header import open_header
from ephemeron.runs.verbs import attach, resume
from ephemeron.testing import TrainingMatrix, TrainingWorld
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.testing.training_world import PEER_TIMEOUT_S, driver_function, of
from ephemeron.training.driver import configure
from ephemeron.training.driver.api import launch
from ephemeron.training.job import Job, Target, parse_fault
from ephemeron.tuning.folder import StudyFolder
from ephemeron.tuning.study import Study
from running import until
from sparse_data import prepared as prepared_rows
from tiny_job import CODE, JOB, SHORT

pytestmark = pytest.mark.slow

MEMORY_MB = 704


@dataclass(kw_only=True)
class World(TrainingWorld):
    """One service, one function, the cache and the object store that it reaches."""

    service: LambdaService

    def kill(self, rank: int) -> bool:
        """SIGKILL from outside for whatever runs this rank now. Whether there was anything."""
        for environment in self.service.environments():
            if environment.request_id and json.loads(environment.payload).get("rank") == rank:
                os.kill(environment.pid, signal.SIGKILL)
                return True
        return False


@pytest.fixture(scope="module")
def world(valkey_server: Any, s3_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}.items():
            patch.setenv(name, value)
        s3 = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
        with LambdaService(concurrency=10, environment={**s3, "EPHEMERON_SPARSE_TOKEN": TOKEN}) as service:
            settings = deployed(
                service,
                memory_mb=MEMORY_MB,
                timeout_s=600,
                preload="torch,ephemeron.training.worker.loop,ephemeron.training.worker.trainers.torch_trainer",
            )
            yield World(
                platform="aws",
                job=JOB,
                memory_mb=MEMORY_MB,
                settings=settings,
                service=service,
                channels={"cache": valkey_server.address, "objects": s3_server.address},
                folder=tmp_path_factory.mktemp("runs"),
            )


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class TestAwsTraining(TrainingMatrix):
    """On Valkey; what goes through S3 is below."""


def test_what_a_run_leaves(world: World) -> None:
    result, _ = world.undisturbed
    assert not [e for e in world.service.environments() if e.request_id], "nothing runs on"
    calls = [json.loads(line) for line in (result.folder.path / "calls.jsonl").read_text().splitlines()]
    assert {r["billed_by"] for r in calls if r["record"] == "final"} == {"report"}
    text = (result.folder.path / "run.json").read_text() + (result.folder.path / "calls.jsonl").read_text()
    assert "SECRET" not in text.upper()


def test_through_an_object_store_and_with_every_call_delivered_twice(world: World) -> None:
    world.service.deliver_twice(3)
    result, events = world.go(channel="objects")
    world.check_same(result)
    twice = {e.invocation for e in of(events, Invoked) if e.reason == "duplicate"}
    assert 1 <= len(twice) <= 3, "the last one may begin when everything is over"
    # Which of the two is called the first is up to the store; one of them steps aside.
    assert [e.outcome for e in of(events, Ended)].count("duplicate") == len(twice)
    assert [e.outcome for e in of(events, Ended)].count("finished") == 3
    run = result.summary.run_id
    assert left(world.channels["objects"], run) == [f"{run}.calls/cancel", f"{run}/result", f"{run}/spec"]


def test_an_environment_is_killed_from_outside(world: World) -> None:
    killed = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration >= 2 and not killed:
            killed.append(world.kill(0))

    result, events = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    world.check_same(result)
    assert killed == [True]
    lost = [e for e in of(events, Ended) if e.status == "lost"]
    assert [e.rank for e in lost] == [0]
    assert "signal: killed" in lost[0].error
    assert lost[0].billed_s > 0, "Lambda bills what it kills"
    assert [e.reason for e in of(events, Invoked)].count("replacement") == 1


def test_a_throttled_launch_is_tried_again(world: World) -> None:
    world.service.throttle(5)
    result, _ = world.go(job=SHORT, workers=1, aggregators=1, batch_size=720)
    assert result.summary.status == "finished"
    assert world.service.invoker.faults.throttle == 0


FAILING = """
import os
import torch

class Model(torch.nn.Linear):
    def forward(self, x):
        if "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
            print("about to fail", flush=True)
            raise ValueError("seven is not a colour")
        return super().forward(x.flatten(1))

def build():
    return Model(64, 10)
"""


def test_what_the_code_raises_fails_the_run_and_its_log_is_kept(world: World, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "failing.py").write_text(FAILING)
    job = Job(name="bad", model=Target(target="failing:build"), data=JOB.data, epochs=1, code=(tmp_path / "code",))
    result, events = world.go(job=job, workers=2, aggregators=1, batch_size=48)
    assert result.summary.status == "failed"
    assert "ValueError: seven is not a colour" in result.causes[0]
    failed = next(e for e in of(events, Ended) if e.status == "error")
    kept = (result.folder.path / "logs" / f"{failed.invocation}.txt").read_text()
    assert kept.startswith("START RequestId: ")
    assert "about to fail" in kept
    assert {e.status for e in of(events, Ended)} <= {"error", "cancelled"}


CLIENT = """
import json, sys
how, settings, tests = json.loads(sys.argv[1])
sys.path.insert(0, tests)
from running import until
from tiny_job import JOB
from ephemeron.functions.aws.settings import AwsSettings
from ephemeron.training.driver import configure, train
train(JOB, configure(JOB, **how), on_event=lambda e: print(e.kind, flush=True), cloud=AwsSettings(**settings))
"""


def test_the_client_is_killed_and_another_one_brings_the_run_home(world: World) -> None:
    told = [world.configured(), dataclasses.asdict(world.settings), str(Path(__file__).parents[2])]
    program = [sys.executable, "-c", CLIENT, json.dumps(told)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line.strip() == "progress":
                client.kill()
                break
    (folder,) = folders.all_runs()
    result = attach(folder.run_id)
    world.check_same(result)
    assert result.summary.invocations == 3


def test_a_run_is_stopped_and_resumed(world: World) -> None:
    asked = threading.Event()
    stopper = threading.Thread(target=lambda: asked.wait() and verbs.stop("last"), daemon=True)
    stopper.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    stopped, _ = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    stopper.join()
    assert stopped.summary.status == "stopped"
    with pytest.raises(UserError, match="is not running"):
        verbs.stop("last")
    events: list[Any] = []
    result = resume("last", on_event=events.append)
    world.check_same(result)
    assert [e.reason for e in of(events, Invoked)].count("resume") == 3
    assert not [e.text for e in of(events, Note) if e.level == "error"]


# -- the check ------------------------------------------------------------------------------------------------


def test_the_check_finds_all_well_and_leaves_nothing(world: World) -> None:
    asked = ("aws", "--aws-endpoint", world.service.url, "--aws-region", "us-east-1", "--channel", str(world.channels["objects"]))
    before = len(world.service.environments())
    said = texts(*asked, "--no-call")
    assert "function" not in said
    assert len(world.service.environments()) == before, "nothing was invoked"
    assert "quota: 10 functions at once" in said["platform"]
    assert "1 function of 704 MB can run at once" in said["platform"]
    said = texts(*asked)
    assert "one of 704 MB began" in said["function"]
    assert "at list prices" in said["function"]
    assert left(str(world.channels["objects"])) == []


def test_what_the_check_finds_wrong_is_one_line_with_a_remedy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*more: str, channel: str = str(world.channels["cache"]), where: str = world.service.url) -> str:
        common = ("aws", "--aws-endpoint", where, "--channel", channel, "--no-call")
        return refusal(*common, *more)

    guard = world.service.guard
    try:
        assert "did you mean eu-central-1?" in asks("--aws-region", "eu-centrall-1")
        assert "region eu-west-1 is not the one that answers" in asks("--aws-region", "eu-west-1")
        guard.expired = {"test"}
        assert "the AWS credentials have expired; get new ones, for example with: aws sso login" in asks()
        guard.expired, guard.denied = set(), {"test": {"lambda:InvokeFunction"}}
        assert "may not lambda:InvokeFunction for function 'ephemeron'" in asks()
        assert "attach client-policy.json" in asks()
    finally:
        guard.expired, guard.denied = set(), {}
    assert "function 'other' in us-east-1 does not exist; run: ephemeron cloud deploy aws" in asks("--aws-function", "other")
    assert "16 workers are wanted, the quota of concurrent functions in us-east-1 is 10" in asks("--workers", "16")
    elsewhere = asks(channel="file:///tmp/objects", where="https://lambda.us-east-1.amazonaws.com")
    assert "is on this machine, where AWS Lambda cannot reach it; use s3://" in elsewhere
    assert "channel: redis://127.0.0.1:9/0: cannot connect" in asks(channel="redis://127.0.0.1:9/0")
    secret = asks(channel="redis://:hush@127.0.0.1:9/0")
    assert "functions do not get credentials from an address" in secret
    assert "hush" not in secret
    with monkeypatch.context() as patch:
        patch.setattr("ephemeron.functions.aws.provider.digest", lambda: "0123456789abcdef")
        assert "this is 0123456789abcdef; run `ephemeron cloud deploy aws` again" in asks()
    api_of = client(world.settings, "lambda")
    api_of.put_function_concurrency(FunctionName="ephemeron", ReservedConcurrentExecutions=0)
    try:
        assert "the quota of concurrent functions in us-east-1 is 0" in asks()
    finally:
        api_of.delete_function_concurrency(FunctionName="ephemeron")


def test_the_check_says_what_a_function_could_not_do(world: World, locked_valkey: Any) -> None:
    """Here the channel is reached, and there it is not: the function has no password."""
    password = locked_valkey.env["EPHEMERON_CHANNEL_PASSWORD"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_CHANNEL_PASSWORD", password)
        patch.setattr("ephemeron.training.driver.launching.diagnostics.ANSWER_S", 8.0)
        said = refusal("aws", "--aws-endpoint", world.service.url, "--channel", locked_valkey.address)
    assert said.startswith("function: a function was called and ")
    assert "aws logs tail /aws/lambda/ephemeron" in said
    assert password not in said


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which no driver function may need."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", detached.BEAT_S)
    return place


def where(world: World) -> list[str]:
    """Options of a command whose functions are in this world."""
    return ["--platform", "aws", "--aws-region", "us-east-1", "--aws-endpoint", world.service.url, "--channel", world.channels["objects"]]


def detach(*arguments: str) -> str:
    """Name of a run that functions drive when this returns."""
    said = CliRunner().invoke(main, [*arguments, "--detach", "--json"])
    assert said.exit_code == 0, said.output
    return str(json.loads(said.output.splitlines()[-1])["run_id"])


def kill_driver(run: str) -> None:
    """SIGKILL for the function that drives a run."""
    function = driver_function(run)
    assert function is not None
    function.kill()


def check_driven_there(folder: RunFolder) -> None:
    """Whether functions have driven a run to its end, after one of them was killed."""
    events = list(events_of(RunFolder(folder.path / detached.FOLDER)))
    outcomes = [e.outcome for e in of(events, Ended) if e.status == "ok"]
    assert "finished" in outcomes
    assert "failed" not in outcomes
    assert "replacement" in {e.reason for e in of(events, Invoked)}


def test_a_factorisation_is_driven_there_though_its_driver_is_killed(world: World, place: Path) -> None:
    a = np.random.default_rng(0).standard_normal((240, 240))
    a = a @ a.T + 240 * np.eye(240)
    np.save(place / "A.npy", a)
    run = detach("linalg", "cholesky", "A.npy", "--out", "L.npy", "--tile", "40", "--max-workers", "2", *where(world))
    (place / "A.npy").unlink()
    kill_driver(run)
    result = attach(run)
    assert result.summary.status == "finished"
    check_driven_there(result.folder)
    lower = np.load(place / "L.npy")
    np.testing.assert_array_equal(lower, np.tril(lower))
    np.testing.assert_allclose(lower @ lower.T, a, rtol=1e-10)
    assert not [key for key in left(world.channels["objects"], run) if key.startswith(f"{run}.tiles")], "its tiles are deleted"


def test_predictions_are_those_of_a_client_though_their_driver_is_killed(world: World, place: Path) -> None:
    trained = world.undisturbed[0].folder.path
    inputs = np.random.default_rng(0).standard_normal((400, 8, 8)).astype(np.float32)
    np.savez(place / "inputs.npz", x=inputs)
    command = ["predict", "model", "--data", "inputs.npz", "--batch-size", "40", "--max-workers", "2"]
    shutil.copytree(trained, place / "model")
    here = CliRunner().invoke(main, [*command, "--out", "here.npz"])
    assert here.exit_code == 0, here.output
    run = detach(*command, "--out", "there.npz", *where(world))
    shutil.rmtree(place / "model")
    (place / "inputs.npz").unlink()
    kill_driver(run)
    result = attach(run)
    assert result.summary.status == "finished"
    check_driven_there(result.folder)
    with np.load(place / "here.npz") as wanted, np.load(place / "there.npz") as found:
        np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5, atol=1e-6)


TOKEN = "a token of these tests"


def test_a_sparse_job_with_a_store_is_driven_there_though_its_driver_is_killed(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"{world.channels['objects']}/sparse"
    prepared_rows(f"{data}/train", rows=3000)
    prepared_rows(f"{data}/test", rows=600, partitions=1, seed=1)
    monkeypatch.setenv("EPHEMERON_SPARSE_TOKEN", TOKEN)
    serve = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "serve", "sparse", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        try:
            (place / "job.toml").write_text(
                'epochs = 4\n[sparse]\nmodel = "logistic"\n'
                f"store = {json.loads(store.stdout.readline())['addresses']}\n"
                'optimizer = { target = "adagrad", options = { learning_rate = 0.1 } }\n'
                f'[data]\nsource = "prepared"\noptions = {{ train = "{data}/train", test = "{data}/test" }}\n'
                "[run]\nworkers = 2\nbatch_size = 20\n"
            )
            run = detach("train", "job.toml", *where(world))
            kill_driver(run)
            result = attach(run)
        finally:
            store.terminate()
    assert result.summary.status == "finished", result.causes
    assert result.summary.metrics["accuracy"] > 0.6
    check_driven_there(result.folder)


STUDY = """
job = "job.toml"
name = "rates"
metric = "accuracy"
mode = "max"
sampler = "grid"
pruner = "none"
predict = false
concurrency = 2
[space]
optimizer.options.lr = [0.05, 0.1, 0.2]
"""
STUDY_JOB = """
name = "tiny"
model = {{ target = "tiny:mlp", options = {{ dropout = 0.2 }} }}
optimizer = {{ target = "SGD", options = {{ lr = 0.1, momentum = 0.9 }} }}
epochs = 3
[run]
platform = "aws"
channel = "{channel}"
workers = 1
batch_size = 144
memory_mb = {memory_mb}
"""


SLOW = """

def slow(**options):
    import time
    model = mlp(**options)
    model.register_forward_hook(lambda *_: time.sleep(0.2))
    return model
"""


@pytest.fixture
def study(world: World, place: Path) -> Path:
    """A study of three trials, two of which run at once, and the folder of its job's code."""
    (place / "study").mkdir()
    (place / "study" / "tiny.py").write_text((CODE / "tiny.py").read_text())
    (place / "study" / "study.toml").write_text(STUDY)
    (place / "study" / "job.toml").write_text(STUDY_JOB.format(channel=world.channels["objects"], memory_mb=MEMORY_MB))
    return place / "study" / "study.toml"


def tune(world: World, study: Path) -> list[str]:
    return ["tune", str(study), "--aws-region", "us-east-1", "--aws-endpoint", world.service.url]


def is_training(world: World) -> bool:
    """Whether a function of the first trial runs."""
    return any(e.request_id and b"rates-0-" in e.payload for e in world.service.environments())


def values(study: str) -> dict[str, float | None]:
    """The value of each trial, by its parameters."""
    return {json.dumps(dict(t.parameters)): t.value for t in StudyFolder(folders.find(study).path).status().trials}


def test_a_study_is_driven_there_though_its_driver_is_killed(
    world: World, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(tmp_path / "here"))
        here = CliRunner().invoke(main, tune(world, study))
        assert here.exit_code == 0, here.output
        wanted = values("rates")
    run = detach(*tune(world, study))
    moved = study.parent.rename(study.parent.with_name("moved"))
    with pytest.raises(JobError, match="functions on aws drive study rates"):
        Study.open(moved / "study.toml").run(resume=True)
    until(lambda: is_training(world))  # its next driver attaches to the trial
    kill_driver(run)
    seen: list[Event] = []
    result = attach(run, on_event=seen.append)
    assert result.summary.status == "finished"
    check_driven_there(result.folder)
    assert values(run) == wanted
    assert len(wanted) == 3
    listed = CliRunner().invoke(main, ["runs", "--json"])
    rows = [row for row in map(json.loads, listed.output.splitlines()) if row["parent"] == run]
    assert [row["status"] for row in rows if row["status"] != "stopped"] == ["finished"] * 3, "a trial may have been begun anew"
    trials = [RunFolder(folder.path.resolve()) for _, folder in result.folder.trials]
    assert len(trials) == 3
    study_key = result.folder.signing_key()
    for trial in trials:
        assert attach(trial.run_id).summary.weights_sha256
        assert trial.weights.exists()
        assert trial.signing_key() == study_key.derived(trial.run_id)
        assert trial.signing_key() != study_key
    stored = left(world.channels["objects"], f"{run}-driver")
    assert not [key for key in stored if "signing.key" in key]


def test_a_study_that_is_driven_there_is_stopped_and_resumed_by_a_client(world: World, study: Path) -> None:
    job, code = study.with_name("job.toml"), study.with_name("tiny.py")
    job.write_text(job.read_text().replace("tiny:mlp", "tiny:slow").replace("epochs = 3", "epochs = 12"))
    code.write_text(code.read_text() + SLOW)
    run = detach(*tune(world, study))
    until(lambda: is_training(world))
    stopper = threading.Thread(target=lambda: verbs.stop(run, wait=False), daemon=True)
    stopper.start()
    stopped = attach(run, check=False)
    stopper.join()
    assert stopped.summary.status == "stopped"
    states = [t.state for t in StudyFolder(stopped.folder.path).status().trials]
    assert "running" in states
    result = resume(run)
    assert result.summary.status == "finished"
    assert result.summary.trials == {"finished": 3}
    assert open_header(result.folder).detached == ""


def test_a_map_is_driven_there_without_a_client_though_its_driver_is_killed(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_detached_map(where(world), place, monkeypatch)


def test_predictions_of_groups_are_driven_there(world: World, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="groups are given as frames")
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", detached.BEAT_S)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    (place / "means_there.py").write_text(
        "def fit(group):\n    return float(group['y'].mean())\n\n\ndef mean(model, group):\n    return [model] * len(group)\n"
    )
    (place / "sales.csv").write_text("store,y\n" + "".join(f"{'abc'[n % 3]},{n}\n" for n in range(30)))
    models = f"{world.channels['objects']}/models"
    fitted = CliRunner().invoke(
        main, ["fit-groups", "sales.csv", "--by", "store", "--fit", "means_there:fit", "--out", models, "--max-workers", "1", *where(world)]
    )
    assert fitted.exit_code == 0, fitted.output
    command = [
        "predict-groups",
        models,
        "--data",
        "sales.csv",
        "--out",
        "out.csv",
        "--predict",
        "means_there:mean",
        "--max-workers",
        "1",
        *where(world),
    ]
    run = detach(*command, "--results", f"{world.channels['objects']}/predicted")
    for name in ("means_there.py", "sales.csv"):
        (place / name).unlink()
    assert attach(run).summary.status == "finished"
    found = [line.split(",") for line in (place / "out.csv").read_text().splitlines()[1:]]
    assert [float(value) for _, _, value in found] == [float(13.5 + n % 3) for n in range(30)]
    refused = CliRunner().invoke(main, ["predict-groups", "models", *command[2:], "--detach"])
    assert refused.exit_code == 2
    assert "models is on this machine, and functions drive the run; fit the groups to s3://bucket/prefix" in refused.stderr


def test_a_run_that_is_driven_there_is_stopped_and_taken_back_by_a_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", detached.BEAT_S)
    c = configure(world.job, **world.configured())
    slow = [parse_fault("delay:rank=1,factor=1,seconds=0.8")]
    run = launch(world.job, c, faults=slow, cloud=world.settings, peer_timeout_s=PEER_TIMEOUT_S)
    asked = threading.Event()
    stopper = threading.Thread(target=lambda: asked.wait() and verbs.stop(run, wait=False), daemon=True)
    stopper.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    stopped = attach(run, on_event=watch, check=False)
    stopper.join()
    assert stopped.summary.status == "stopped", "the client that watches returns with it"
    with pytest.raises(UserError, match="is not running"):
        verbs.stop(run)
    result = resume(run)
    world.check_same(result)
    assert open_header(result.folder).detached == "", "a client has driven it since"
    own = RunFolder(result.folder.path / detached.FOLDER)
    assert [e.status for e in events_of(own) if isinstance(e, Ended)].count("ok") >= 2
    driving = detached.driving_cost(result.folder, open_header(result.folder))
    assert driving is not None
    assert driving.requests > 20
