"""The local Lambda service: the real runtime client on one side, boto3 on the other."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.functions.cgroups import detect
from ephemeron.testing.lambda_service.logs import matches

boto3 = pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from botocore.config import Config  # noqa: E402
from botocore.exceptions import ClientError  # noqa: E402

from ephemeron.testing.lambda_service import LambdaService  # noqa: E402
from running import until  # noqa: E402

CODE = """
import json, os, time
calls = 0

def handle(event, context):
    global calls
    calls += 1
    do = event.get("do", "echo")
    if "mark" in event:
        with open(event["mark"], "a") as file:
            file.write(context.aws_request_id + "\\n")
    if do == "raise":
        raise ValueError("seven is not a colour")
    if do == "exit":
        os._exit(3)
    if do == "sleep":
        time.sleep(event["s"])
    if do == "wait":
        while not os.path.exists(event["for"]):
            time.sleep(0.01)
    if do == "allocate":
        held = bytearray(os.urandom(1 << 20) * event["mb"])
    if do == "big":
        return "x" * event["nbytes"]
    if do == "invoke itself" and event["left"]:
        import boto3
        boto3.client("lambda").invoke(FunctionName=context.function_name, InvocationType="Event",
                                      Payload=json.dumps({**event, "left": event["left"] - 1}))
    print("did", do)
    return {"calls": calls, "pid": os.getpid(), "request": context.aws_request_id, "said": event.get("say"),
            "memory": context.memory_limit_in_mb, "left_ms": context.get_remaining_time_in_millis(),
            "variables": {name: os.environ.get(name) for name in ("MINE", "AWS_REGION", "OF_ALL")}}
"""

ROLE = "arn:aws:iam::123456789012:role/tests"
NO_RETRIES = Config(retries={"total_max_attempts": 1})


def zipped(**files: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.py", text)
    return out.getvalue()


@pytest.fixture(scope="module")
def service() -> Iterator[LambdaService]:
    with LambdaService(concurrency=3, environment={"OF_ALL": "yes"}, retry_after_s=(0.01, 0.01), queue_pause_s=0.02) as service:
        yield service


def client_of(service: LambdaService, *, key: str = "test", region: str = "us-east-1", what: str = "lambda") -> Any:
    return boto3.client(
        what, endpoint_url=service.url, region_name=region, aws_access_key_id=key, aws_secret_access_key="x", config=NO_RETRIES
    )


@pytest.fixture
def client(service: LambdaService) -> Any:
    return client_of(service)


@pytest.fixture
def function(client: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"f-{abs(hash(request.node.name)) % 10**8}"
    create(client, name)
    yield name
    client.delete_function(FunctionName=name)


def create(client: Any, name: str, code: str = CODE, **more: Any) -> None:
    values = {"MemorySize": 256, "Timeout": 20, "Handler": "code.handle", "Runtime": "python3.12", **more}
    client.create_function(FunctionName=name, Role=ROLE, Code={"ZipFile": zipped(code=code)}, **values)


def call(client: Any, name: str, **event: Any) -> tuple[Any, str]:
    answer = client.invoke(FunctionName=name, Payload=json.dumps(event))
    return json.loads(answer["Payload"].read()), answer.get("FunctionError", "")


def send(client: Any, name: str, **event: Any) -> str:
    answer = client.invoke(FunctionName=name, InvocationType="Event", Payload=json.dumps(event))
    assert answer["StatusCode"] == 202
    return str(answer["ResponseMetadata"]["RequestId"])


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def log_of(service: LambdaService, name: str, pattern: str = "") -> list[str]:
    logs = client_of(service, what="logs")
    found = logs.filter_log_events(logGroupName=f"/aws/lambda/{name}", filterPattern=pattern)
    return [event["message"] for event in found["events"]]


def test_a_call_runs_in_the_real_runtime_and_the_next_one_is_warm(service: LambdaService, client: Any, function: str):
    first, error = call(client, function, say={"deep": [1, None, "é"]})
    assert error == ""
    assert first["said"] == {"deep": [1, None, "é"]}
    assert (first["memory"], first["variables"]["AWS_REGION"], first["variables"]["OF_ALL"]) == ("256", "us-east-1", "yes")
    assert 0 < first["left_ms"] <= 20_000
    second, _ = call(client, function)
    assert (second["calls"], second["pid"]) == (2, first["pid"])
    assert second["request"] != first["request"]


def test_between_calls_an_environment_is_frozen(client: Any, function: str):
    first, _ = call(client, function)
    until(lambda: psutil.Process(first["pid"]).status() == psutil.STATUS_STOPPED)
    second, _ = call(client, function)
    assert second["pid"] == first["pid"]


def test_what_a_function_raises_is_said_and_logged(service: LambdaService, client: Any, function: str):
    value, error = call(client, function, do="raise")
    assert error == "Unhandled"
    assert (value["errorType"], value["errorMessage"]) == ("ValueError", "seven is not a colour")
    assert any("seven is not a colour" in line for line in log_of(service, function))
    assert "Status: error\tError Type: ValueError" in log_of(service, function, "REPORT")[-1]


def test_a_process_that_exits_is_an_error_and_is_replaced(service: LambdaService, client: Any, function: str):
    value, error = call(client, function, do="exit")
    assert error == "Unhandled"
    assert value["errorType"] == "Runtime.ExitError"
    assert "exit status 3" in value["errorMessage"]
    assert call(client, function)[0]["calls"] == 1


def test_a_killed_environment_is_noticed(service: LambdaService, client: Any, function: str, tmp_path: Path):
    request = send(client, function, do="wait", **{"for": str(tmp_path / "never"), "mark": str(tmp_path / "mark")})
    until(lambda: lines_of(tmp_path / "mark"))
    (running,) = [e for e in service.environments() if e.request_id == request]
    client.put_function_event_invoke_config(FunctionName=function, MaximumRetryAttempts=0)
    os.kill(running.pid, signal.SIGKILL)
    until(lambda: log_of(service, function, f'"{request}" "signal: killed"'))
    until(lambda: log_of(service, function, f'"REPORT RequestId: {request}"'))


def test_at_its_time_limit_a_function_is_killed(service: LambdaService, client: Any):
    create(client, "slow", Timeout=1)
    value, error = call(client, "slow", do="sleep", s=1000)
    assert error == "Unhandled"
    assert value["errorType"] == "Sandbox.Timedout"
    assert "Task timed out after 1.00 seconds" in value["errorMessage"]
    assert len(log_of(service, "slow", '"Task timed out after 1.00 seconds"')) == 1
    (report,) = log_of(service, "slow", '"REPORT RequestId"')
    assert "Status: timeout" in report
    assert int(report.split("Billed Duration: ")[1].split(" ms")[0]) >= 1000
    client.delete_function(FunctionName="slow")


@pytest.mark.parametrize(
    "enforce", [pytest.param(True, marks=pytest.mark.skipif(detect().kind == "none", reason="no writable control groups here")), False]
)
def test_beyond_its_memory_a_function_is_killed(enforce: bool):
    with LambdaService(enforce=enforce) as service:
        client = client_of(service)
        create(client, "hungry", MemorySize=128)
        assert call(client, "hungry", do="allocate", mb=40)[1] == ""
        value, error = call(client, "hungry", do="allocate", mb=300)
        assert error == "Unhandled"
        assert "signal: killed" in value["errorMessage"]
        assert "Max Memory Used: 128 MB" in log_of(service, "hungry", "REPORT")[-1]


def test_a_handler_that_cannot_be_imported_fails_the_call(service: LambdaService, client: Any):
    create(client, "broken", code="import nowhere_at_all")
    value, error = call(client, "broken")
    assert error == "Unhandled"
    assert "nowhere_at_all" in value["errorMessage"]
    client.delete_function(FunctionName="broken")


def test_changes_of_a_function_reach_the_next_call(client: Any, function: str):
    before, _ = call(client, function)
    client.update_function_configuration(FunctionName=function, MemorySize=384, Environment={"Variables": {"MINE": "1"}})
    client.get_waiter("function_updated_v2").wait(FunctionName=function)
    after, _ = call(client, function)
    assert (after["memory"], after["variables"]["MINE"]) == ("384", "1")
    assert after["pid"] != before["pid"]
    client.update_function_code(FunctionName=function, ZipFile=zipped(code="def handle(event, context): return 'new'"))
    assert call(client, function) == ("new", "")
    until(lambda: not psutil.pid_exists(before["pid"]))


def test_payloads_beyond_the_limits_are_refused(client: Any, function: str):
    assert call(client, function, say="x" * 5_900_000)[1] == ""
    for kind, size in (("RequestResponse", 6 * 2**20 + 1), ("Event", 2**20 + 1)):
        with pytest.raises(ClientError) as caught:
            client.invoke(FunctionName=function, InvocationType=kind, Payload=json.dumps("x" * size))
        assert caught.value.response["Error"]["Code"] == "RequestTooLargeException"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 413
    value, error = call(client, function, do="big", nbytes=6 * 2**20 + 1)
    assert (error, value["errorType"]) == ("Unhandled", "Function.ResponseSizeTooLarge")


def test_at_once_as_many_as_the_quota_allows(service: LambdaService, client: Any, function: str, tmp_path: Path):
    go = tmp_path / "go"
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(call, client_of(service), function, do="wait", **{"for": str(go)}) for _ in range(3)]
        until(lambda: len([e for e in service.environments() if e.request_id]) == 3)
        with pytest.raises(ClientError) as caught:
            call(client, function)
        assert caught.value.response["Error"]["Code"] == "TooManyRequestsException"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 429
        queued = tmp_path / "queued"
        send(client, function, mark=str(queued))  # is accepted, and runs as soon as there is room
        go.touch()
        pids = {future.result()[0]["pid"] for future in waiting}
    assert len(pids) == 3, "one process for each at once"
    until(lambda: len(lines_of(queued)) == 1)


def test_reserved_concurrency_holds_for_one_function(client: Any, function: str):
    client.put_function_concurrency(FunctionName=function, ReservedConcurrentExecutions=0)
    with pytest.raises(ClientError, match="TooManyRequests"):
        call(client, function)
    settings = client.get_account_settings()["AccountLimit"]
    assert (settings["ConcurrentExecutions"], settings["UnreservedConcurrentExecutions"]) == (3, 3)
    client.delete_function_concurrency(FunctionName=function)
    assert call(client, function)[1] == ""


@pytest.mark.parametrize("retries", [None, 0, 1])
def test_a_failed_asynchronous_call_is_tried_again(client: Any, function: str, tmp_path: Path, retries: int | None):
    if retries is not None:
        client.put_function_event_invoke_config(FunctionName=function, MaximumRetryAttempts=retries)
    request = send(client, function, do="raise", mark=str(tmp_path / "mark"))
    wanted = 1 + (2 if retries is None else retries)
    until(lambda: len(lines_of(tmp_path / "mark")) == wanted)
    assert call(client, function)[1] == ""  # by now another one would have been begun
    assert lines_of(tmp_path / "mark") == [request] * wanted


def test_on_demand_a_call_is_delivered_twice(service: LambdaService, client: Any, function: str, tmp_path: Path):
    service.deliver_twice(1)
    once, twice = tmp_path / "once", tmp_path / "twice"
    request = send(client, function, mark=str(twice))
    send(client, function, mark=str(once))
    until(lambda: len(lines_of(twice)) == 2 and lines_of(once))
    assert set(lines_of(twice)) == {request}


def test_on_demand_requests_are_throttled(service: LambdaService, client: Any, function: str):
    service.throttle(2)
    for _ in range(2):
        with pytest.raises(ClientError, match="TooManyRequests"):
            call(client, function)
    assert call(client, function)[1] == ""


@pytest.mark.slow
def test_a_chain_of_functions_is_ended_unless_recursion_is_allowed(service: LambdaService, client: Any, function: str, tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    send(client, function, do="invoke itself", left=17, mark=str(first))
    until(lambda: service.invoker.dropped)
    assert "recursive loop" in service.invoker.dropped.pop()
    assert len(lines_of(first)) == 16
    client.put_function_recursion_config(FunctionName=function, RecursiveLoop="Allow")
    send(client, function, do="invoke itself", left=17, mark=str(second))
    until(lambda: len(lines_of(second)) == 18)


def test_who_may_not_is_told_why(service: LambdaService, function: str):
    service.guard.expired, service.guard.unknown = {"OLD"}, {"WRONG"}
    service.guard.denied = {"WEAK": {"lambda:InvokeFunction"}}
    try:
        for key, region, code in (
            ("OLD", "us-east-1", "ExpiredTokenException"),
            ("WRONG", "us-east-1", "UnrecognizedClientException"),
            ("test", "eu-west-1", "InvalidSignatureException"),
            ("WEAK", "us-east-1", "AccessDeniedException"),
        ):
            with pytest.raises(ClientError) as caught:
                call(client_of(service, key=key, region=region), function)
            assert caught.value.response["Error"]["Code"] == code
        assert client_of(service, key="WEAK").get_function(FunctionName=function)["Configuration"]["State"] == "Active"
    finally:
        service.guard.__init__()


def test_what_does_not_exist_or_does_not_fit(client: Any):
    for wrong, code in (
        (lambda: call(client, "nothing"), "ResourceNotFoundException"),
        (lambda: client.get_function_event_invoke_config(FunctionName="nothing"), "ResourceNotFoundException"),
        (lambda: create(client, "tiny", MemorySize=99_999), "InvalidParameterValueException"),
        (lambda: create(client, "long", Timeout=901), "InvalidParameterValueException"),
        (lambda: client.create_function(FunctionName="z", Role=ROLE, Code={"ZipFile": b"no zip"}), "InvalidParameterValueException"),
        (lambda: client.create_alias(FunctionName="z", Name="a", FunctionVersion="1"), "UnknownOperationException"),
    ):
        with pytest.raises(ClientError) as caught:
            wrong()
        assert caught.value.response["Error"]["Code"] == code


def test_images_are_kept_but_not_run(client: Any):
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine:1"
    client.create_function(FunctionName="image", Role=ROLE, PackageType="Image", Code={"ImageUri": image})
    assert client.get_function(FunctionName="image")["Code"]["ImageUri"] == image
    value, error = call(client, "image")
    assert error == "Unhandled"
    assert "no images" in value["errorMessage"]
    client.delete_function(FunctionName="image")


def test_nothing_is_left_when_the_service_ends(tmp_path: Path):
    with LambdaService() as service:
        client = client_of(service)
        create(client, "left")
        idle, _ = call(client, "left")
        request = send(client, "left", do="sleep", s=1000, mark=str(tmp_path / "mark"))
        until(lambda: lines_of(tmp_path / "mark"))
        pids = [e.pid for e in service.environments()]
        assert idle["pid"] in pids
        assert [e.request_id for e in service.environments()] == [request], "the warm one was taken"
        folder = service._folder
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not folder.exists()


@given(st.text(min_size=1).filter(lambda t: '"' not in t and "\\" not in t), st.text())
def test_a_quoted_phrase_matches_where_it_occurs(phrase: str, message: str):
    assert matches(f'"{phrase}"', message) == (phrase in message)
    assert matches(f'?"{phrase}" ?"{phrase}x"', message) == (phrase in message)
    assert matches(f'"{phrase}"', message + phrase)
