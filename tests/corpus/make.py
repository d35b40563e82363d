"""Makes run folders of every kind, as the code that is checked out writes them, and packs them for `tests/corpus/runs.tar.xz`.

python tests/corpus/make.py OUT                       all of them: about ten minutes
python tests/corpus/make.py OUT --only 'local-*'      some; what OUT has of the others stays
python tests/corpus/make.py OUT --pack runs.tar.xz    packs what OUT has

Each recipe has a home folder of its own below OUT. Simulated runs are the same in each run of this program; those on this machine have other times.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PATHS = [str(TESTS / part) for part in ("data/service", "tuning", "sparse/job", "training/code", "training", "functions/aws", "")]
"""Of helpers of the tests, which recipes import."""
LIMIT_S = 300.0
PROGRAM = str(Path(sys.executable).with_name("ephemeron"))
Recipe = Callable[[Path], None]
RECIPES: dict[str, Recipe] = {}
"""By label: each is given a folder for what is not in the home folder."""


def recipe(label: str) -> Callable[[Recipe], Recipe]:
    def put(made: Recipe) -> Recipe:
        RECIPES[label] = made
        return made

    return put


def homes() -> Path:
    return Path(os.environ["EPHEMERON_HOME"])


def wait_for(what: Callable[[], Any], process: subprocess.Popen[Any] | None = None) -> Any:
    """What something returns once it is true."""
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise TimeoutError(f"{what} did not become true; the process: {process and process.poll()}")
        time.sleep(0.02)
    return found


def ephemeron(*arguments: str, check: bool = True, **how: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([PROGRAM, *arguments], text=True, capture_output=True, timeout=LIMIT_S, check=False, **how)
    if check and done.returncode:
        raise RuntimeError(f"{arguments}: {done.returncode}: {done.stdout[-800:]}{done.stderr[-2000:]}")
    return done


def client(code: str, *arguments: str, **how: Any) -> subprocess.Popen[str]:
    """A client in a process of its own, which can be interrupted and killed."""
    paths = f"import sys; sys.path[:0] = {PATHS!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", paths + code, *arguments], text=True, start_new_session=True, stdout=subprocess.DEVNULL, **how
    )


def reports(count: int) -> Callable[[], bool]:
    """Whether functions of the newest run of this home have reported so often."""

    def seen() -> bool:
        found = sorted(homes().glob("runs/*/events.jsonl"), key=lambda p: p.stat().st_mtime)
        return bool(found) and found[-1].read_text().count('"kind":"progress"') >= count

    return seen


def kill_everything(process: subprocess.Popen[Any] | None = None) -> None:
    """Kills a client, and then all processes that belong to this home: daemon, functions."""
    import psutil

    if process is not None:
        process.kill()
        process.wait()
    mark, quiet = str(homes()), 0
    while quiet < 3:
        found = [p for p in psutil.process_iter() if p.pid != os.getpid() and _belongs(p, mark)]
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.kill()
        quiet = 0 if found else quiet + 1
        time.sleep(0.1)


def _belongs(process: Any, mark: str) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        if mark in " ".join(process.cmdline()) or process.cwd().startswith(mark):
            return True
        variables = process.environ()
        return any(variables.get(name, "").startswith(mark) for name in ("HOME", "TMPDIR", "EPHEMERON_HOME"))
    return False


# Simulated training.


def job(**overrides: Any) -> Any:
    from training_runs import make_job

    return make_job(**{"name": "corpus", **overrides})


def trained(job: Any, *, faults: tuple[str, ...] = (), prices: Any = None, **values: Any) -> Any:
    from ephemeron.training.driver import configure, train
    from ephemeron.training.job import parse_fault

    configuration = configure(job, **{"platform": "simulated", **values})
    return train(job, configuration, faults=[parse_fault(f) for f in faults], check=False, prices_file=prices)


def simulated(
    label: str, *, job_fields: dict[str, Any] | None = None, faults: tuple[str, ...] = (), make: Any = None, **values: Any
) -> None:
    """A recipe of one simulated run. `make`: fields that need imports."""

    def run(folder: Path) -> None:
        fields = {**(job_fields or {})}
        more = dict(values)
        for name, value in (make() if make else {}).items():
            (more if name not in JOB_FIELDS else fields)[name] = value
        result = trained(job(**fields), faults=faults, **{"workers": 3, "batch_size": 24, "checkpoint_every": 5, **more})
        print(f"  {result.summary.status} {result.summary.iterations} {result.causes}")

    RECIPES[label] = run


JOB_FIELDS = {"limits", "early_stopping", "keep_best", "optimizer", "model", "scheduler", "simulation", "epochs", "name", "evaluate_every"}


def limits(**values: float) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        from ephemeron.training.job import JobLimits

        return {"limits": JobLimits(**values)}

    return made


def target(field: str, name: str, **options: Any) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        from ephemeron.training.job import Target

        return {field: Target(target=name, options=options)}

    return made


def schedule(*entries: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        from ephemeron.training.job.generation import ScheduledResize

        return {"resize": {"schedule": tuple(ScheduledResize(**entry) for entry in entries)}}

    return made


def best() -> dict[str, Any]:
    from ephemeron.training.job.spec import EarlyStopping, KeepBest

    return {"early_stopping": EarlyStopping(monitor="accuracy", mode="max", patience=1, min_delta=0.2), "keep_best": KeepBest()}


simulated("bsp")
simulated("all-reduce", pattern="all-reduce")
simulated("scatter-reduce", pattern="scatter-reduce")
simulated("pipelined", pattern="pipelined")
simulated("parameter-server", pattern="parameter-server", channel="parameter_server")
simulated("standalone", pattern="standalone", workers=1)
simulated("hap", sync="hap")
simulated("ssp", sync="ssp:1")
simulated("asp", sync="asp")
simulated("hsp", sync="hsp")
simulated("local-steps", exchange={"local_steps": 4})
simulated(
    "outer-optimiser",
    exchange={"local_steps": 4, "outer_optimizer": {"target": "SGD", "options": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}},
)
simulated("parameters", exchange={"quantity": "parameters"})
simulated("direct", channel="direct")
simulated("direct-machines", channel="direct", workers=4, exchange={"ranks_per_machine": 2}, batch_size=18)
simulated("direct-faults", channel="direct", faults=("kill:rank=1,iteration=7,phase=upload", "cut:rank=0,to=2,iteration=11,seconds=3"))
simulated("stages", stages={"count": 2}, workers=2, batch_size=48)
simulated("stages-replicas", stages={"count": 2, "replicas": 2, "micro_batches": 4, "schedule": "gpipe"}, workers=4)
simulated("int8", exchange={"compression": "int8"})
simulated("bf16", exchange={"compression": "bf16"})
simulated("sparse-compression", exchange={"compression": "sparse"})
simulated("two-batches", aggregators=1, batch_size=30, nonaggregator_batch_size=20)
simulated(
    "elastic", job_fields={"epochs": 3}, make=schedule({"from_epoch": 1, "workers": 5}, {"from_epoch": 2, "workers": 2, "memory_mb": 3008})
)
simulated("elastic-policy", job_fields={"epochs": 3}, workers=2, batch_size=16, resize={"policy": "tiny_policies:Growing"})
simulated(
    "elastic-faults",
    job_fields={"epochs": 3},
    make=schedule({"from_epoch": 1, "workers": 4, "aggregators": 1}),
    faults=("kill:rank=2,iteration=20,phase=download", "kill:rank=0,iteration=24,phase=compute"),
)
simulated("budget", job_fields={"epochs": 50}, make=limits(budget_usd=0.0006))
simulated("time-limit", job_fields={"epochs": 50}, make=limits(time_limit_s=12.0))
simulated("adapt", job_fields={"epochs": 6}, resize={"adapt": True}, workers=2, batch_size=16, make=limits(deadline_s=165.0))
simulated("not-finite", make=target("model", "tiny:nan_after", passes=9))
simulated("too-many-losses", max_replacements=1, faults=tuple(f"kill:rank=1,iteration=6,phase=compute,attempt={n}" for n in range(4)))
simulated("replaced", job_fields={"epochs": 2}, faults=("kill:rank=1,iteration=8,phase=upload", "kill:rank=0,iteration=23,phase=aggregate"))
simulated(
    "hap-faults", sync="hap", faults=("kill:rank=1,iteration=5,phase=compute", "delay:rank=2,factor=3", "drop-put:rank=0,iteration=3")
)
simulated("hand-offs", job_fields={"epochs": 3}, function_timeout_s=12.0)
simulated("keep-best", job_fields={"epochs": 6}, make=best)


@recipe("script")
def script(folder: Path) -> None:
    arguments = ["--workers", "2", "--platform", "simulated", "--", "--epochs", "2"]
    ephemeron("train", str(ROOT / "examples/script/train.py"), *arguments)


def small_profile(folder: Path) -> Path:
    """A profile by hand, as `ephemeron profile` writes it."""
    place = folder / "profile.json"
    shutil.copy(ROOT / "examples/superresolution/profile.json", place)
    return place


def tiny_file(folder: Path, **changes: Any) -> Path:
    """A job file of `tiny:mlp`."""
    from ephemeron.config.toml import toml_text

    document = {
        "name": "corpus",
        "model": "tiny:mlp",
        "code": [str(TESTS / "training/code")],
        "epochs": 2,
        "optimizer": {"target": "SGD", "options": {"lr": 0.1, "momentum": 0.9}},
        "simulation": {"compute": {"a": 50.0, "b": 4.0, "m": 0.0}},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(toml_text(document))
    return path


@recipe("planned")
def planned(folder: Path) -> None:
    """A job without numbers of functions: it is profiled and planned first."""
    ephemeron("train", str(tiny_file(folder)), "--platform", "simulated")


@recipe("learned")
def learned(folder: Path) -> None:
    """A policy is learned first, and kept below `policies`."""
    job = tiny_file(
        folder,
        epochs=4,
        limits={"budget_usd": 0.05},
        early_stopping={"monitor": "loss", "mode": "min", "threshold": 1.0},
        run={"workers": 2, "batch_size": 60, "memory_mb": 1769},
    )
    ephemeron("train", str(job), "--platform", "simulated", "--schedule", "learned")


@recipe("flow")
def flow(folder: Path) -> None:
    """Samples from a data flow over a catalogued dataset."""
    from test_flow_jobs import flow_job, publish

    folder.mkdir(parents=True, exist_ok=True)
    publish(folder / "store")
    publish(folder / "store", seed=1, samples=40, variant="val")
    result = trained(flow_job(folder / "store"), workers=2, batch_size=16)
    print(f"  {result.summary.status}")


# Regions: groups of functions.


def grouped(label: str, *, faults: tuple[str, ...] = (), late: int = 0, make: Any = None, epochs: int = 3, **values: Any) -> None:
    def run(folder: Path) -> None:
        from training_runs import WORLD, combined

        from ephemeron.training.job import RunRegion

        near, far = (
            {"name": "near", "workers": 2, "batch_size": 24, "share": 2},
            {"name": "far", "workers": 1, "batch_size": 12, "share": 1},
        )
        groups = (RunRegion(**near), RunRegion(**far, memory_mb=1024))
        world = WORLD
        if late:
            groups = tuple(RunRegion(name=n, workers=w, batch_size=12 // w) for n, w in (("near", 1), ("mid", 1), ("far", 2)))
            world = dataclasses.replace(WORLD, compute=dataclasses.replace(WORLD.compute, a=200.0))
        fields = {"epochs": epochs, "simulation": world, **(make() if make else {})}
        with _late("far", late):
            result = trained(
                job(**fields),
                faults=faults,
                **combined({"regions": {"region": groups, "exchange_every": 5}, "checkpoint_every": 4}, values),
            )
        print(f"  {result.summary.status} {result.summary.iterations} {result.causes}")

    RECIPES[label] = run


@contextlib.contextmanager
def _late(region: str, times: int) -> Iterator[None]:
    """Inside, a region cannot be started at first."""
    if not times:
        yield
        return
    from ephemeron.errors import PlatformError
    from ephemeron.regions.driver import late_regions
    from ephemeron.training.driver import lifecycle

    simulate, retry = lifecycle.simulate, late_regions.RETRY_S
    left = [times]

    async def start(prepared: Any, *args: Any, **options: Any) -> Any:
        if prepared.spec.run_id.rpartition("-")[2] == region and left[0]:
            left[0] -= 1
            raise PlatformError("no answer")
        return await simulate(prepared, *args, **options)

    lifecycle.simulate, late_regions.RETRY_S = start, (0.5, 1.0)  # type: ignore[assignment]
    try:
        yield
    finally:
        lifecycle.simulate, late_regions.RETRY_S = simulate, retry


grouped("regions")
grouped("regions-diloco", epochs=2, regions={"sync": "diloco:fragments=3,delay=2", "compression": "int4"})
grouped("regions-asgd", epochs=2, regions={"sync": "asgd-ga:staleness=2", "compression": "topk:0.2"})
grouped("regions-faults", faults=("kill:rank=2,iteration=9,phase=wait", "kill:rank=1,iteration=14,phase=compute"))
grouped("regions-late", late=2, regions={"exchange_every": 4})
grouped("regions-auto", epochs=2, regions={"sync": "auto", "compression": "int8"})
grouped("regions-budget", make=limits(budget_usd=0.0008), epochs=60)


@recipe("regions-resized")
def regions_resized(folder: Path) -> None:
    """From a file of regions; one slows down, and the other one gives functions back."""
    from training_runs import WORLD

    from ephemeron.functions.world import RegionSlowdown
    from ephemeron.training.job import RunRegion

    groups = (
        RunRegion(name="steady", workers=2, batch_size=12, memory_mb=1769),
        RunRegion(name="grows", workers=2, most_workers=6, batch_size=12, memory_mb=1769),
    )
    slowdown = RegionSlowdown(region="grows", start_s=25.0, seconds=60.0, factor=2.6)
    world = dataclasses.replace(WORLD, compute=dataclasses.replace(WORLD.compute, a=100.0, b=0.0), region_slowdowns=(slowdown,))
    result = trained(job(epochs=5, simulation=world), regions={"region": groups, "exchange_every": 5, "sync": "sma", "replan_every_s": 2.0})
    print(f"  {result.summary.status}", (result.folder.path / "events.jsonl").read_text().count("region_resized"))


# On this machine.

LOCAL = {"platform": "local", "workers": 2, "batch_size": 36, "memory_mb": 704, "checkpoint_every": 4}
TRAIN = """
import json, os
from ephemeron.training.driver import configure, train
from ephemeron.training.job import parse_fault, Target
from training_runs import make_job
how = json.loads(sys.argv[1])
job = make_job(name="corpus", **{k: Target(**v) if k == "model" else v for k, v in how.get("job", {}).items()})
if how.get("groups"):
    from ephemeron.training.job import RunRegion
    how["run"]["regions"]["region"] = tuple(RunRegion(**g) for g in how["groups"])
train(job, configure(job, **how["run"]), faults=[parse_fault(f) for f in how.get("faults", [])], check=False)
"""
SLOW = ["delay:rank=0,factor=1,seconds=0.2"]


def local_client(*, faults: list[str] | None = None, groups: Any = None, job: Any = None, **values: Any) -> subprocess.Popen[str]:
    run = {"platform": "local", "regions": {"exchange_every": 4}, "checkpoint_every": 4} if groups else {**LOCAL, **values}
    how = {"run": {**run, **values}, "faults": faults or [], "groups": groups, "job": job or {}}
    return client(TRAIN, json.dumps(how))


def locally(label: str, **how: Any) -> None:
    """A recipe of one local run that ends by itself."""

    def run(folder: Path) -> None:
        process = local_client(**how)
        print(f"  {process.wait(LIMIT_S)}")
        kill_everything()

    RECIPES[label] = run


locally("local")
locally("local-direct", channel="direct")
locally("local-replaced", faults=["kill:rank=1,iteration=6,phase=compute"])
locally("local-failed", job={"model": {"target": "tiny:failing"}}, max_replacements=2)


def interrupted(label: str, then: str, *, at: int = 9, **how: Any) -> None:
    """A recipe of a local run to which something happens in the middle.

    Args:
        then: `stop` (Ctrl-C), `stop-resume`, `kill` (client and functions), `kill-resume`, `client-attach`, `stop-now`, or `resize`.
    """

    def run(folder: Path) -> None:
        process = local_client(**{"faults": SLOW, **how})
        wait_for(reports(at), process)
        action = then.partition("-")[0]
        if then == "resize":
            ephemeron("resize", "last", "--workers", "3")
            process.wait(LIMIT_S)
        elif then == "stop-now":
            ephemeron("stop", "last", "--now")
            process.wait(LIMIT_S)
        elif action == "stop":
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)
        elif action == "client":
            process.kill()
            process.wait()
            ephemeron("attach", "last")
        else:
            kill_everything(process)
        if then.endswith("-resume"):
            print(f"  {ephemeron('resume', 'last').returncode}")
        kill_everything()

    RECIPES[label] = run


interrupted("local-stopped", "stop")
interrupted("local-resumed", "stop-resume")
interrupted("local-killed", "kill")
interrupted("local-killed-resumed", "kill-resume")
interrupted("local-attached", "client-attach")
interrupted("local-stopped-now", "stop-now")
interrupted("local-resized", "resize", job={"epochs": 3})
PAIR = [{"name": "near", "workers": 1, "batch_size": 24, "share": 2}, {"name": "far", "workers": 1, "batch_size": 12, "share": 1}]
locally("local-regions", groups=PAIR, memory_mb=704)
interrupted("local-regions-stopped", "stop", groups=PAIR, memory_mb=704)
interrupted("local-regions-resumed", "stop-resume", groups=PAIR, memory_mb=704)
interrupted("local-regions-killed", "kill", groups=PAIR, memory_mb=704)
interrupted("local-regions-killed-resumed", "kill-resume", groups=PAIR, memory_mb=704)


@recipe("local-script")
def local_script(folder: Path) -> None:
    """Functions that print."""
    arguments = ["--workers", "2", "--memory-mb", "704", "--", "--epochs", "2"]
    ephemeron("train", str(ROOT / "examples/script/train.py"), *arguments)
    kill_everything()


@recipe("local-script-by-value")
def by_value(folder: Path) -> None:
    """A model of a program without a file: its code is kept below `programs`."""
    code = """
import torch, ephemeron
from ephemeron.training.driver import train

class Digits(ephemeron.Task):
    def model(self):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x), y)
    def train_data(self):
        return self.data(0)
    def test_data(self):
        return self.data(1)
    def data(self, part):
        generator = torch.Generator().manual_seed(part)
        return torch.utils.data.TensorDataset(torch.rand(96, 64, generator=generator), torch.arange(96) % 10)
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)

train(Digits, workers=2, platform="local", batch_size=24, epochs=2, memory_mb=704)
"""
    done = subprocess.run([sys.executable, "-"], input=code, text=True, capture_output=True, timeout=LIMIT_S, check=False)
    print(f"  {done.returncode} {done.stderr[-600:]}")
    kill_everything()


@recipe("session")
def session(folder: Path) -> None:
    """Two runs of a session, whose client is killed when the second has begun to train: the session's folder and its daemon's files stay."""
    code = """
import asyncio
from ephemeron.training.driver import Session, configure
from ephemeron.training.job import parse_fault
from training_runs import make_job
LOCAL = dict(platform="local", workers=2, batch_size=36, memory_mb=704, checkpoint_every=4)
async def main():
    async with Session(max_functions=4) as session:
        job = make_job(name="corpus")
        await session.train(job, configure(job, **LOCAL))
        await session.train(job, configure(job, **LOCAL), faults=[parse_fault("delay:rank=0,factor=1,seconds=0.3")])
asyncio.run(main())
"""
    process = client(code)

    def second() -> bool:
        found = sorted(homes().glob("runs/*/events.jsonl"), key=lambda p: p.stat().st_mtime)
        return len(found) == 2 and found[-1].read_text().count('"kind":"progress"') >= 9

    wait_for(second, process)
    kill_everything(process)


@recipe("session-simulated")
def session_simulated(folder: Path) -> None:
    import asyncio

    from ephemeron.training.driver import Session, configure

    async def main() -> None:
        async with Session(max_functions=3) as session:
            each = [job(name=f"corpus-{n}", seed=n) for n in range(2)]
            await asyncio.gather(
                *(session.train(j, configure(j, platform="simulated", workers=2, aggregators=1, batch_size=24)) for j in each)
            )

    asyncio.run(main())


# On a cloud, which the emulator is.

CLOUD = """
import json
from ephemeron.functions.aws.settings import AwsSettings
from ephemeron.training.driver import configure, train
from ephemeron.training.job import parse_fault
from training_runs import make_job
how, settings = json.loads(sys.argv[1])
job = make_job(name="corpus")
faults = [parse_fault("delay:rank=0,factor=1,seconds=0.2")]
train(job, configure(job, **how), cloud=AwsSettings(**settings), faults=faults, check=False)
"""


def aws(label: str, then: str = "") -> None:
    """A recipe of a run on Lambda.

    Args:
        then: `kill` the client when functions train, whose end nobody sees; `kill-attach`: another client sees it; `stop`.
    """

    def run(folder: Path) -> None:
        from aws_world import deployed, keys

        from ephemeron.config.typed import plain
        from ephemeron.testing.lambda_service import LambdaService

        preload = "torch,ephemeron.training.worker.loop,ephemeron.training.worker.trainers.torch_trainer"
        with keys(), LambdaService(concurrency=6) as service:
            settings = {k: v for k, v in plain(deployed(service, memory_mb=704, timeout_s=300, preload=preload)).items() if v is not None}
            channel = (homes() / "store").as_uri()
            how = {"platform": "aws", "workers": 2, "batch_size": 36, "memory_mb": 704, "checkpoint_every": 4, "channel": channel}
            process = client(CLOUD, json.dumps([how, settings]))
            if then:
                wait_for(reports(9), process)
            if then == "stop":
                process.send_signal(signal.SIGINT)
            elif then:
                process.kill()
            print(f"  {process.wait(LIMIT_S)}")
            if then == "kill":
                wait_for(lambda: list(homes().glob("store/*/result")))
            if then.endswith("attach"):
                ephemeron("attach", "last")
        kill_everything()

    RECIPES[label] = run


aws("aws")
aws("aws-killed", "kill")
aws("aws-attached", "kill-attach")
aws("aws-stopped", "stop")


# Sparse jobs.

SPARSE = "from ephemeron.training.driver import api; api.train(sys.argv[1])"


def sparse(label: str, then: str = "", *, reports_seen: int = 20, **changes: Any) -> None:
    def run(folder: Path) -> None:
        from sparse_jobs import sparse_job

        path = sparse_job(folder, name="corpus.toml", **changes)
        process = client(SPARSE, str(path))
        if then:
            wait_for(reports(reports_seen), process)
        if then.startswith("stop"):
            ephemeron("stop", "last")
        if then.startswith("kill"):
            kill_everything(process)
        print(f"  {process.wait(LIMIT_S)}")
        if then.endswith("resume"):
            ephemeron("resume", "last")
        kill_everything()

    RECIPES[label] = run


sparse("sparse", rows=600, run={"workers": 2, "batch_size": 60, "memory_mb": 1024})
sparse("sparse-budget", epochs=4000, limits={"budget_usd": 2e-4})
sparse("sparse-stopped", "stop", epochs=40)
sparse("sparse-resumed", "stop-resume", epochs=12)
sparse("sparse-killed", "kill", epochs=40)
sparse("sparse-killed-resumed", "kill-resume", epochs=12)


# Studies.

STUDY = """
import os, signal
from ephemeron.tuning import Study
ended, number = 0, getattr(signal, sys.argv[2])
def on_trial(trial):
    global ended
    ended += trial.state in ("finished", "pruned", "failed")
    if ended == 2:
        os.kill(os.getpid(), number)
Study.open(sys.argv[1]).run(on_trial=on_trial)
"""


def study(label: str, then: str = "", *, job: dict[str, Any] | None = None, resume: bool = False, **values: Any) -> None:
    def run(folder: Path) -> None:
        from tuning_worlds import write_study

        path = write_study(folder, job={"name": "corpus", **(job or {})}, **{"name": label, **values})
        if then:
            process = client(STUDY, str(path), then)
            print(f"  {process.wait(LIMIT_S)}")
        else:
            print(f"  {ephemeron('tune', str(path), '--json', check=False).stdout[-300:]}")
        if resume:
            print(f"  {ephemeron('tune', str(path), '--resume', '--json').stdout[-300:]}")
        kill_everything()

    RECIPES[label] = run


GRID: dict[str, Any] = {"sampler": "grid", "space": {"optimizer.options.lr": [0.1, 1e-6], "seed": [0, 1]}, "concurrency": 2}
study("study", **GRID, pruner={"name": "asha", "min_evaluations": 1}, seed=1)
study("study-budget", job={"epochs": 400}, concurrency=2, budget_usd=0.002)
study("study-failing", job={"model": "tiny:nan_after"}, sampler="grid", space={"model.options.passes": [9, 10_000]})
study("study-stopped", "SIGINT", trials=4, concurrency=2)
study("study-killed", "SIGKILL", trials=4, concurrency=1)
study("study-resumed", "SIGINT", resume=True, trials=4, concurrency=1, pruner="asha")
study("study-killed-resumed", "SIGKILL", resume=True, trials=4, concurrency=1, pruner="asha")


def local_study(label: str, *, resume: bool) -> None:
    """A recipe of a study of local runs that is interrupted when functions train: their checkpoints stay."""

    def run(folder: Path) -> None:
        from tuning_worlds import write_study

        run = {"platform": "local", "workers": 1, "batch_size": 240, "memory_mb": 704, "checkpoint_every": 2}
        grid: dict[str, Any] = {"sampler": "grid", "space": {"optimizer.options.lr": [0.1, 0.01]}, "concurrency": 1}
        path = write_study(folder, job={"name": "corpus", "epochs": 200 if not resume else 20, "run": run}, name=label, **grid)
        process = subprocess.Popen([PROGRAM, "tune", str(path)], start_new_session=True, stderr=subprocess.DEVNULL)
        wait_for(reports(5), process)
        process.send_signal(signal.SIGINT)
        print(f"  {process.wait(LIMIT_S)}")
        if resume:
            ephemeron("tune", str(path), "--resume")
        kill_everything()

    RECIPES[label] = run


local_study("study-local-stopped", resume=False)
local_study("study-local-resumed", resume=True)


@recipe("study-sparse")
def study_sparse(folder: Path) -> None:
    from sparse_jobs import sparse_job

    from ephemeron.config.toml import toml_text

    run = {"workers": 1, "batch_size": 10, "memory_mb": 1024}
    sparse_job(folder, rows=600, name="corpus.toml", epochs=6, sparse={"model": "logistic", "optimizer": "adagrad"}, run=run)
    document = {"job": "corpus.toml", "name": "study-sparse", "metric": "loss", "sampler": "grid", "concurrency": 1, "predict": False}
    space = {"sparse.optimizer.options.learning_rate": [0.3, 1e-6]}
    (folder / "study.toml").write_text(toml_text({**document, "space": space, "pruner": {"name": "asha", "min_evaluations": 1}}))
    print(f"  {ephemeron('tune', str(folder / 'study.toml'), '--json').stdout[-300:]}")
    kill_everything()


# Executors.

MAPPED = """
import time

def twice(x):
    print("twice", x)
    return 2 * x

def no_two(x):
    if x == 2:
        raise ValueError("there is no two")
    return x

def slow(x):
    time.sleep(0.3)
    return x
"""
POOL = """
import os, signal, time
import ephemeron
sys.path.insert(0, sys.argv[1])
import mapped_items
pool = ephemeron.FunctionExecutor(max_workers=2, idle_timeout_s=1.0, retries=0, **({"platform": "simulated"} if sys.argv[2] == "simulated" else {}))
futures = [pool.submit(getattr(mapped_items, sys.argv[3]), n) for n in range(int(sys.argv[4]))]
for future in futures[: int(sys.argv[5])]:
    try:
        future.result()
    except Exception as e:
        print(e, file=sys.stderr)
print(pool.bill(), file=sys.stderr)
time.sleep(float(sys.argv[6]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def executor(label: str, *arguments: str) -> None:
    """A recipe of an executor whose client is killed: one that ends well leaves nothing."""

    def run(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mapped_items.py").write_text(MAPPED)
        process = client(POOL, str(folder), *arguments)
        print(f"  {process.wait(LIMIT_S)}")
        kill_everything()

    RECIPES[label] = run


executor("map-killed", "local", "twice", "4", "4", "0")
executor("map-failed-killed", "local", "no_two", "4", "4", "0")
executor("map-killed-halfway", "local", "slow", "40", "3", "0")
executor("map-idle-killed", "local", "twice", "4", "4", "6")
executor("map-simulated-killed", "simulated", "twice", "4", "4", "0")


@recipe("map-ended")
def map_ended(folder: Path) -> None:
    """Commands that end, well and with failed tasks: what they leave is nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mapped_items.py").write_text(MAPPED)
    (folder / "items.jsonl").write_text("1\n2\n3\n")
    for name in ("twice", "no_two"):
        ephemeron(
            "map", f"mapped_items:{name}", "--items", "items.jsonl", "--out", "o.jsonl", "--max-workers", "1", check=False, cwd=folder
        )
    print(f"  {[str(p.relative_to(homes())) for p in homes().rglob('*')]}")


def held(*arguments: str, **how: Any) -> subprocess.Popen[str]:
    """A command that waits at the first result of its functions, to be killed."""
    from gates import holding_results

    return subprocess.Popen(holding_results(*arguments), text=True, stdout=subprocess.DEVNULL, start_new_session=True, **how)


@recipe("prepare-killed")
def prepare_killed(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "in.csv").write_text("click,age\n" + "".join(f"{n % 2},{n % 7}\n" for n in range(400)))
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'source = "{folder}/in.csv"\nout = "{folder}/out"\npartition_mb = 0.001\n[label]\ncolumn = "click"\n[run]\nmax_workers = 1\n'
    )
    process = held("prepare", str(recipe))
    wait_for(lambda: any('"ended"' in p.read_text() or '"invoked"' in p.read_text() for p in homes().glob("tasks/*/events.jsonl")), process)
    wait_for(lambda: [p for p in (folder / "out").rglob("*.arrow") if p.is_file()], process)
    kill_everything(process)


@recipe("linalg-killed")
def linalg_killed(folder: Path) -> None:
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    a = rng.normal(size=(240, 240))
    np.save(folder / "a.npy", a @ a.T + 240 * np.eye(240))
    channel = (homes() / "matrices").as_uri()
    files = [str(folder / "a.npy"), "--out", str(folder / "l.npy")]
    process = held("linalg", "cholesky", *files, "--tile", "40", "--max-workers", "1", "--channel", channel)
    wait_for(lambda: list(homes().rglob("cholesky-*-L/*")), process)
    kill_everything(process)


@recipe("linalg-ended")
def linalg_ended(folder: Path) -> None:
    """A matrix with a name stays; a command that ends leaves nothing."""
    import numpy as np

    from ephemeron.linalg import BigMatrix

    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "a.npy", 4 * np.eye(16))
    ephemeron("linalg", "cholesky", str(folder / "a.npy"), "--out", str(folder / "l.npy"), "--tile", "8", "--max-workers", "1")
    BigMatrix.from_numpy(np.arange(64.0).reshape(8, 8), name="kept", tile=4)
    kill_everything()


# Others.


def _service(folder: Path, *, gently: bool) -> None:
    process = subprocess.Popen(
        [PROGRAM, "serve", "data", "--port", "0", "--json"], text=True, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    code = """
import os
from pathlib import Path
from ephemeron.data.service import RemoteReader
from service_worlds import epochs_of, mixed
read = mixed(12).prepare_read(RemoteReader(folder=Path(os.environ["EPHEMERON_HOME"]) / "data-service"))
epochs_of(read, 2)
"""
    print(f"  {client(code).wait(LIMIT_S)} {ephemeron('data', 'status', '--json').stdout}")
    if gently:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    kill_everything(process)


@recipe("data-service")
def data_service(folder: Path) -> None:
    _service(folder, gently=True)


@recipe("data-service-killed")
def data_service_killed(folder: Path) -> None:
    _service(folder, gently=False)


@recipe("profiled")
def profiled(folder: Path) -> None:
    ephemeron("profile", str(tiny_file(folder)), "--out", str(folder / "profile.json"), "--confidence", "0.5")
    kill_everything()


@recipe("profile-killed")
def profile_killed(folder: Path) -> None:
    path = tiny_file(folder)
    process = subprocess.Popen([PROGRAM, "profile", str(path), "--out", str(folder / "p.json")], start_new_session=True)
    wait_for(lambda: list(homes().glob("profiling/*/*")), process)
    time.sleep(2.0)
    kill_everything(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--pack", type=Path, help="write the archive, make nothing")
    options = parser.parse_args()
    out = options.out.absolute()
    sys.path[:0] = PATHS
    os.environ |= {"EPHEMERON_REPORT_PICTURE": "0", "OMP_NUM_THREADS": "1"}
    if options.pack:
        from corpus_archive import pack

        pack(out, options.pack)
        return
    failed = []
    for label, make in RECIPES.items():
        if not any(fnmatch.fnmatch(label, pattern) for pattern in options.only):
            continue
        home, work = out / "homes" / label, out / "work" / label
        for place in (home, work):
            shutil.rmtree(place, ignore_errors=True)
        home.mkdir(parents=True)
        os.environ["EPHEMERON_HOME"] = str(home)
        began = time.monotonic()
        print(label, flush=True)
        try:
            make(work)
        except Exception:  # noqa: BLE001 - the others are made all the same
            traceback.print_exc()
            failed.append(label)
            kill_everything()
        print(f"  {time.monotonic() - began:.1f} s; {sorted(p.name for p in home.iterdir())}", flush=True)
    print("failed:", *failed)


if __name__ == "__main__":
    main()
