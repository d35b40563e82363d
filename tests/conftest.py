"""Real servers on loopback, started once for all tests; what is not installed is skipped, saying so."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import warm_processes
from bytecode import compile_ahead
from forked_workers import fork_workers
from quarantine import entry_of, quarantined
from random_schedules import examples
from servers import ServerProcess, answers_on, free_port, start_parameter_server, start_valkey, stop, wait_until

pytest_plugins = ["measuring"]

# Thousands of processes are started here; without a cache each would compile all it imports once more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("EPHEMERON_REPORT_PICTURE", "0")  # `pictures` is for tests that look at them
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes with two threads each wait for each other, spinning

for kit in ("channel_contract", "communicator_contract", "platform_contract", "task_queue_contract", "training_matrix", "training_world"):
    pytest.register_assert_rewrite(f"ephemeron.testing.{kit}")

# No test asserts a duration. The lanes draw the same examples in each run; `--hypothesis-profile explore` draws others.
settings.register_profile("explore", deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ephemeron", settings.get_profile("explore"), derandomize=True)
settings.load_profile("ephemeron")

TOGETHER = {
    "functions": (
        "cli",
        "executor/test_local",
        "functions/test_",
        "testing",
        "training/test_chaos.py",
        "training/test_cli.py",
        "training/test_flow_jobs.py",
        "training/test_local_runs.py",
        "training/test_matrix.py",
        "training/test_stages.py",
    ),
    "clouds": ("functions/aws", "functions/openfaas"),
    "clusters": ("functions/lithops", "functions/ray"),
    "services": ("data/service",),
}
"""What stays in one process: real functions one after the other, so that they have what they need; what shares a folder of its
library's (Lithops) or costly fixtures."""


TIMES = Path(__file__).parent / "times"
"""What the tests of a lane have cost (`make test-times`)."""


def pytest_addoption(parser: pytest.Parser) -> None:

    parser.addoption("--warm-starts", action="store_true", help="fork Python processes from one that has made the imports")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--warm-starts"):
        warm_processes.enable()


def group_of(nodeid: str) -> str:
    """The group of a test, or its file."""
    where = nodeid.partition("::")[0].removeprefix("tests/")
    return next((name for name, places in TOGETHER.items() if where.startswith(places)), where)


ALL_SLOW = re.compile(r"^pytestmark = .*mark\.slow", re.MULTILINE)


def has_slow_tests(module: Path) -> bool:
    """Slow tests are marked in their module, never only in a class that it inherits from."""
    return "mark.slow" in module.read_text()


def is_collected(module: Path, markers: str) -> bool:
    """Processes of one lane need not import what is in the other one alone."""
    if markers not in ("slow", "not slow") or not module.name.startswith("test_"):
        return True
    return has_slow_tests(module) if markers == "slow" else not ALL_SLOW.search(module.read_text())


READ_THE_FOLDER = ("lithops",)
"""Libraries, and folders of their tests, that read the name of the folder of temporary files when they are imported: each process of a lane has its own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Before the processes of a run begin, all that they collect is compiled and imported, once."""
    root = config.rootpath
    code = [path for folder in ("src", "tests", "benchmarks") for path in (root / folder).rglob("*.py")]
    code = [path for path in code if is_collected(path, config.option.markexpr)]
    if not sys.dont_write_bytecode:
        compile_ahead(config, code)
    chosen = [root / arg.partition("::")[0] for arg in config.args]
    modules = [path for path in code if path.name.startswith("test_") and {path, *path.parents} & {*chosen}]
    modules = [path for path in modules if path.parent.name not in READ_THE_FOLDER]
    fork_workers(config, len(specs), modules)


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    """What a time limit raises inside a callback of an event loop is logged there, and the test goes on: it is raised again and again."""
    found = yield
    if settings.timeout and signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, 60.0)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays for the whole run, so the collector of garbage need not look through it again and again, nor begin as often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 20, 20)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if is_collected(collection_path, config.option.markexpr) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Tests in quarantine have a second try. In a lane, the longest groups begin first: a long one that begins last keeps one process busy alone."""
    unmarked = [str(path) for path in {i.path for i in items if i.get_closest_marker("slow")} if not has_slow_tests(path)]
    if unmarked:
        raise pytest.UsageError(f"slow tests, but no mark.slow in the module: {', '.join(unmarked)}")
    yield  # takes the other lane's tests out
    entries = quarantined()
    for item in items:
        if entry_of(item.nodeid, entries) is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):
        known = recorded_s()
        total: dict[str, float] = defaultdict(float)
        for item in items:
            total[group_of(item.nodeid)] += known.get(item.nodeid, UNKNOWN_S)
        items.sort(key=lambda item: -total[group_of(item.nodeid)])


UNKNOWN_S = 1.0


def recorded_s() -> dict[str, float]:
    """Seconds that each test took when its lane was measured last."""
    found: dict[str, float] = {}
    for path in TIMES.glob("*.json"):
        found |= {name: cost[0] for name, cost in json.loads(path.read_text())["each"].items()}
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with warm_processes.cold() if item.get_closest_marker("cold_start") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 4`, processes take groups and files, whole. (Marks of pytest-xdist 3.8 do nothing with pytest 9.)"""
    if config.getoption("dist") != "loadscope":  # one test many times
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-not-found, import-untyped, unused-ignore]

    class Grouped(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Grouped(config, log)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write the pictures of their reports, as they do by themselves: half a second each."""
    monkeypatch.delenv("EPHEMERON_REPORT_PICTURE")


MOTO = Path(__file__).parents[1] / "benchmarks" / "moto_server.py"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """moto, with an empty bucket; `env` is what AWS clients need to find it."""
    pytest.importorskip("moto.server", reason="no S3 server; pip install 'moto[server,s3]'")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    process = subprocess.Popen([sys.executable, str(MOTO), "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        wait_until(lambda: answers_on(port), process, "moto")
        urllib.request.urlopen(urllib.request.Request(f"{url}/ephemeron-tests", method="PUT"), timeout=30).close()
        env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
        yield ServerProcess("s3://ephemeron-tests/some/prefix", process, env)
    finally:
        stop(process)
        log.close()


@pytest.fixture
def s3(s3_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a bucket, with the environment set for it."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server.address


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real Valkey server, without persistence."""
    pytest.importorskip("redis", reason="no cache client; pip install 'ephemeron[cache]'")
    server = start_valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    stop(server.process)


@pytest.fixture(scope="session")
def locked_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real Valkey server that wants a password, which `env` has."""
    pytest.importorskip("redis", reason="no cache client; pip install 'ephemeron[cache]'")
    password = "pw-of-the-tests/7f3a"
    server = start_valkey(tmp_path_factory.mktemp("locked"), "--requirepass", password)
    server.env["EPHEMERON_CHANNEL_PASSWORD"] = password
    yield server
    stop(server.process)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts further servers, for tests that configure or kill them: `own_valkey("--requirepass", "x")`."""
    pytest.importorskip("redis", reason="no cache client; pip install 'ephemeron[cache]'")
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        started.append(start_valkey(tmp_path, *arguments))
        return started[-1]

    yield start
    for server in started:
        stop(server.process)


@pytest.fixture
def own_parameter_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts further servers, for tests that want several or kill them."""
    started: list[ServerProcess] = []

    def start(token: str = "token of the tests") -> ServerProcess:
        started.append(start_parameter_server(tmp_path, token))
        return started[-1]

    yield start
    for server in started:
        stop(server.process)


@pytest.fixture(scope="session")
def parameter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One parameter server in a process of its own."""
    server = start_parameter_server(tmp_path_factory.mktemp("ps"))
    yield server
    stop(server.process)
    assert server.process.returncode == 0, "SIGTERM is an orderly end"
