"""The deployed code under Amazon's own emulator of Lambda, and under the local service: the same answers, the same records."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import deployed, keys
from kit_entry import ENTRIES

from ephemeron.communication.channels import open_channel
from ephemeron.communication.signing import SigningKey
from ephemeron.functions.async_invoke.records import EVERYTHING, InvokeRequest, RecordKeys, calls_prefix, cancellation, decode, record_of
from ephemeron.functions.aws.deploy.package import build_zip
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.base import Call
from ephemeron.testing._emulation.service import free_port
from ephemeron.testing.lambda_service import LambdaService
from servers import answers_on, wait_until

pytestmark = pytest.mark.slow

RUN = "run"
NAMES = RecordKeys(calls_prefix(RUN))
HANDLER = "ephemeron.functions.aws.handler.handle"
TIMEOUT_S = 30
ACCIDENTS = frozenset({"at", "mark", "request", "stream", "took_s", "peak_mb", "traffic"})
"""Fields of records that differ from one invocation to the next."""


class Lambda(Protocol):
    """Somewhere the function runs."""

    def invoke(self, event: bytes) -> Any:
        """The answer to one synchronous invocation."""
        ...


class Service:
    """Ours."""

    def __init__(self, settings: AwsSettings) -> None:
        self._name, self._client = settings.function, client(settings, "lambda")

    def invoke(self, event: bytes) -> Any:
        return json.loads(self._client.invoke(FunctionName=self._name, Payload=event)["Payload"].read())


class Emulator:
    """Amazon's: one environment, whose runtime is started by the first invocation, and again when it has ended."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/2015-03-31/functions/function/invocations"

    def invoke(self, event: bytes) -> Any:
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url, data=event), timeout=120) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            return json.loads(e.read())


def emulator_binary(folder: Path) -> Path:
    """The one that comes with Amazon's command line for serverless applications, which is not started itself."""
    found = importlib.util.find_spec("samcli")
    machine = {"x86_64": "x86_64", "aarch64": "arm64"}.get(platform.machine())
    if found is None or found.origin is None:
        pytest.skip("no emulator of Lambda; pip install --no-deps aws-sam-cli")
    if sys.platform != "linux" or machine is None:
        pytest.skip(f"Amazon has no emulator of Lambda for {sys.platform} on {platform.machine()}")
    own = folder / "emulator"
    shutil.copy(Path(found.origin).parent / "local" / "rapid" / f"aws-lambda-rie-{machine}", own)
    own.chmod(0o700)
    return own


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lambda]:
    folder = tmp_path_factory.mktemp("emulator")
    binary, port, code, log = emulator_binary(folder), free_port(), folder / "code", folder / "log"
    with zipfile.ZipFile(io.BytesIO(build_zip())) as archive:
        archive.extractall(code)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(code), str(Path(__file__).parent)]),
        "LAMBDA_TASK_ROOT": str(code),
        "AWS_REGION": "us-east-1",
        "AWS_LAMBDA_FUNCTION_NAME": "emulated",
        "AWS_LAMBDA_FUNCTION_TIMEOUT": str(TIMEOUT_S),
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "256",
        "EPHEMERON_ENTRIES": ENTRIES,
    }
    own = ["--runtime-interface-emulator-address", f"127.0.0.1:{port}", "--runtime-api-address", f"127.0.0.1:{free_port()}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(binary), *own, sys.executable, "-P", "-m", "awslambdaric", HANDLER],
            env=environment,
            cwd=code,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers_on(port), process, "Amazon's emulator")
        yield Emulator(port)
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # which ends its runtime, too
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def service(shared_service: LambdaService) -> Iterator[Lambda]:
    with keys():
        settings = deployed(shared_service, entries=ENTRIES, folder=Path(__file__).parent, timeout_s=TIMEOUT_S, function="emulated")
        yield Service(settings)


Start = Callable[..., InvokeRequest]


@pytest.fixture(params=["emulator", "service"])
def peer(request: pytest.FixtureRequest) -> Lambda:
    found: Lambda = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def wanted(tmp_path: Path) -> Start:
    """Makes envelopes of calls that run an entry of the kit, with a folder as their store."""

    def make(entry: str, *, lifetime_s: float = 20.0, **options: Any) -> InvokeRequest:
        address = (tmp_path / "objects").as_uri()
        call = Call(run=RUN, rank=0, attempt=0, memory_mb=256, lifetime_s=lifetime_s, channel=address, entry=entry, request=options)
        return InvokeRequest(
            id="0.0.aa", run=RUN, rank=0, attempt=0, calls=NAMES.calls, channel=address, every_s=0.05, lifetime_s=lifetime_s, call=call
        )

    return make


def told(envelope: InvokeRequest) -> list[dict[str, Any]]:
    """All records that deliveries have left, in order."""

    async def read() -> list[dict[str, Any]]:
        async with open_channel(envelope.channel) as channel:
            keys = [key for key in sorted(await channel.list(NAMES.all)) if NAMES.parse(key)]
            lines = [line for key in keys for line in decode(await channel.fetch(key) or b"")]
            return [json.loads(line) for line in lines if record_of(line) is not None]

    return asyncio.run(read())


def put(envelope: InvokeRequest, key: str, data: bytes) -> None:
    async def write() -> None:
        async with open_channel(envelope.channel) as channel:
            await channel.put(key, [data])

    asyncio.run(write())


def one(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [record] = [r for r in records if r["record"] == kind]
    return record


def test_a_call_that_ends_well(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("echo", say="hello")
    assert peer.invoke(envelope.to_bytes()) == {"id": "0.0.aa", "delivery": 0, "status": "ok"}
    records = told(envelope)
    assert one(records, "outcome")["value"]["said"] == "hello"
    begun = one(records, "begun")
    assert begun["request"], "the request's id, by which its log lines are found"
    assert begun["stream"]


def test_a_call_whose_code_raises(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("fail")
    answer = peer.invoke(envelope.to_bytes())
    assert answer["errorType"] == "RuntimeError"
    assert "seven is" in answer["errorMessage"]
    outcome = one(told(envelope), "outcome")
    assert outcome["status"] == "error"
    assert outcome["error"] == answer["errorMessage"]


def test_a_delivered_call_of_code_that_is_not_deployed_runs_nothing(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("os:abort")
    peer.invoke(envelope.to_bytes())
    outcome = one(told(envelope), "outcome")
    assert outcome["status"] == "error"
    assert outcome["error"].startswith("InvocationRefused: no entry 'os:abort'")


@pytest.mark.parametrize("event", [b"{}", b'{"Records": []}', b'["ephemeron"]', b'{"ephemeron": 1, "run": "x"}'])
def test_somebody_elses_event_is_refused(peer: Lambda, event: bytes) -> None:
    answer = peer.invoke(event)
    assert answer["errorType"] == "CorruptMessage"
    assert "a call of ephemeron" in answer["errorMessage"]


def test_a_second_delivery_goes_by_a_number_of_its_own(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("echo")
    answers = [peer.invoke(envelope.to_bytes()) for _ in range(2)]
    assert [answer["delivery"] for answer in answers] == [0, 1]
    assert [r["delivery"] for r in told(envelope) if r["record"] == "outcome"] == [0, 1]


def test_a_process_that_is_not_fit_ends_itself_and_another_takes_its_place(peer: Lambda, wanted: Start) -> None:
    left = wanted("leave_thread")
    answer = peer.invoke(left.to_bytes())
    assert answer["errorType"] == "Runtime.ExitError"
    [was] = [r["value"] for r in told(left) if r["record"] == "outcome" and r["status"] == "ok"]
    assert peer.invoke(left.to_bytes()).get("errorType") == "Runtime.ExitError", "it leaves a thread each time"
    pids = [r["value"]["pid"] for r in told(left) if r["record"] == "outcome"]
    assert len(set(pids)) == 2
    assert was["pid"] == pids[0]


def test_a_call_ends_by_its_own_lifetime_before_lambda_kills_it(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("forever", lifetime_s=1.0)
    assert peer.invoke(envelope.to_bytes())["errorType"] == "Runtime.ExitError"
    outcome = one(told(envelope), "outcome")
    assert (outcome["status"], outcome["error"]) == ("timed_out", "killed at its lifetime limit of 1 s")


def test_a_cancelled_call_says_so_and_ends(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("forever")
    put(envelope, NAMES.cancel, cancellation([envelope.id]))
    assert peer.invoke(envelope.to_bytes())["errorType"] == "Runtime.ExitError"
    assert one(told(envelope), "outcome")["status"] == "cancelled"


def test_a_call_of_a_run_that_is_over_says_nothing(peer: Lambda, wanted: Start) -> None:
    envelope = wanted("echo")
    put(envelope, NAMES.cancel, cancellation([EVERYTHING]))
    assert peer.invoke(envelope.to_bytes())["errorType"] == "Runtime.ExitError"
    assert told(envelope) == []


def test_a_call_that_lies_in_the_store(peer: Lambda, wanted: Start) -> None:
    whole = wanted("echo", say="x" * 7_000_000)
    assert whole.call is not None
    name, key = NAMES.payload(whole.id), SigningKey.new()
    [signature, call] = key.signed([json.dumps(whole.call.to_payload()).encode()], name=name)
    put(whole, name, bytes(signature) + bytes(call))
    thin = InvokeRequest(
        **{name: getattr(whole, name) for name in InvokeRequest.__slots__ if name not in ("call", "key")}, call=None, key=key.text
    )
    assert peer.invoke(thin.to_bytes())["status"] == "ok"
    assert len(one(told(thin), "outcome")["value"]["said"]) == 7_000_000


def test_both_leave_the_same_records(emulator: Lambda, service: Lambda, wanted: Start, tmp_path: Path) -> None:
    seen = []
    for peer in (emulator, service):
        envelope = wanted("whoami", variables=["AWS_LAMBDA_FUNCTION_NAME", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE"])
        peer.invoke(envelope.to_bytes())
        seen.append([{name: value for name, value in record.items() if name not in ACCIDENTS} for record in told(envelope)])
        shutil.rmtree(tmp_path / "objects")
    for records in seen:
        del records[-1]["value"]["pid"], records[-1]["value"]["cold"]
    assert seen[0] == seen[1]
    assert seen[0][-1]["value"]["env"] == {"AWS_LAMBDA_FUNCTION_NAME": "emulated", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "256"}
