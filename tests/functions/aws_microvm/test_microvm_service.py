"""The local MicroVM service: what AWS documents of its states, hooks, tokens, quotas and limits."""

from __future__ import annotations

import io
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", "1.44", reason="no AWS client that knows MicroVMs; pip install 'ephemeron[aws]'")

from microvm_world import BUILD_ROLE, ROLE, keys, settings_of

from ephemeron.functions.aws_microvm.deploy.image import BASE_IMAGE
from ephemeron.functions.aws_microvm.settings import client
from ephemeron.testing.microvm_service import MicrovmService
from running import until

APPLICATION = """
import http.server, os, pathlib, threading, time

class Hooks(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.rpartition("/")[2]
        with open(os.environ["TRACE"], "a") as file:
            file.write(f"{name} {body.decode()}\\n")
        self.send_response(503 if name == os.environ.get("REFUSED") else 200)
        self.end_headers()
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(time.monotonic()).encode())
    def log_message(self, *text): pass

host, _, port = os.environ["EPHEMERON_HOOKS"].rpartition(":")
http.server.ThreadingHTTPServer((host, int(port)), Hooks).serve_forever()
"""
HOOKS = {
    "port": 9000,
    "microvmHooks": dict.fromkeys(("run", "suspend", "resume", "terminate"), "ENABLED")
    | {f"{name}TimeoutInSeconds": 10 for name in ("run", "suspend", "resume", "terminate")},
    "microvmImageHooks": {"ready": "ENABLED", "readyTimeoutInSeconds": 60},
}


def archive(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return out.getvalue()


GOOD = archive({"Dockerfile": 'FROM base\nCMD ["python3", "app.py"]\n', "app.py": APPLICATION})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "trace").touch()
    return tmp_path / "trace"


@pytest.fixture
def service(trace: Path) -> Iterator[MicrovmService]:
    with keys(), MicrovmService(fetch=lambda uri: GOOD, memory_gb=2.0, environment={"TRACE": str(trace)}) as service:
        yield service


@pytest.fixture
def api(service: MicrovmService) -> Any:
    return client(settings_of(service))


def built(api: Any, **more: Any) -> str:
    made = api.create_microvm_image(
        name="app",
        baseImageArn=BASE_IMAGE.format(region="us-east-1"),
        buildRoleArn=BUILD_ROLE,
        codeArtifact={"uri": "s3://bucket/app.zip"},
        resources=[{"minimumMemoryInMiB": 512}],
        hooks=HOOKS,
        **more,
    )
    arn = str(made["imageArn"])
    until(lambda: api.get_microvm_image(imageIdentifier=arn)["state"] != "CREATING")
    assert api.get_microvm_image(imageIdentifier=arn)["state"] == "CREATED"
    return arn


def started(api: Any, arn: str, **more: Any) -> str:
    id = str(api.run_microvm(imageIdentifier=arn, executionRoleArn=ROLE, **more)["microvmId"])
    until(lambda: state(api, id) != "PENDING")
    return id


def state(api: Any, id: str) -> str:
    return str(api.get_microvm(microvmIdentifier=id)["state"])


def refused(request: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - botocore makes its error classes at run time
        request()
    return str(getattr(caught.value, "response", {}).get("Error", {}).get("Code", caught.value))


def asked(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, ""


def test_a_microvm_goes_through_its_states_and_its_hooks_are_called(api: Any, trace: Path) -> None:
    id = started(api, built(api), runHookPayload="told")
    assert state(api, id) == "RUNNING"
    api.suspend_microvm(microvmIdentifier=id)
    assert state(api, id) == "SUSPENDED"
    api.suspend_microvm(microvmIdentifier=id)
    api.resume_microvm(microvmIdentifier=id)
    assert state(api, id) == "RUNNING"
    api.terminate_microvm(microvmIdentifier=id)
    until(lambda: state(api, id) == "TERMINATED")
    assert refused(lambda: api.resume_microvm(microvmIdentifier=id)) == "ConflictException"
    said = [line.split(" ", 1) for line in trace.read_text().splitlines()]
    names = [name for name, _ in said if name != "ready"]
    assert names == ["run", "suspend", "resume", "terminate"]
    assert any(f'"microvmId": "{id}", "runHookPayload": "told"' in body for name, body in said if name == "run")


def test_the_clock_of_a_guest_stands_still_while_it_is_suspended(api: Any) -> None:
    id = started(api, built(api))
    endpoint = api.get_microvm(microvmIdentifier=id)["endpoint"]
    token = api.create_microvm_auth_token(microvmIdentifier=id, expirationInMinutes=5, allowedPorts=[{"port": 8080}])

    def clock() -> float:
        status, text = asked(f"{endpoint}/", token["authToken"])
        assert status == 200
        return float(text)

    before, here = clock(), time.monotonic()
    api.suspend_microvm(microvmIdentifier=id)
    until(lambda: time.monotonic() > here + 2.0)
    suspended = time.monotonic() - here
    api.resume_microvm(microvmIdentifier=id)
    assert clock() - before < (time.monotonic() - here) - 0.5 * suspended


def test_an_endpoint_wants_a_token_for_its_port(api: Any) -> None:
    arn = built(api)
    id = started(api, arn)
    endpoint = api.get_microvm(microvmIdentifier=id)["endpoint"]
    token = api.create_microvm_auth_token(microvmIdentifier=id, expirationInMinutes=5, allowedPorts=[{"port": 8080}])
    assert asked(f"{endpoint}/", {})[0] == 403
    assert asked(f"{endpoint}/", token["authToken"])[0] == 200
    assert asked(f"{endpoint}/", {**token["authToken"], "X-aws-proxy-port": "9000"})[0] == 403
    too_long = {"microvmIdentifier": id, "expirationInMinutes": 61, "allowedPorts": [{"allPorts": {}}]}
    assert refused(lambda: api.create_microvm_auth_token(**too_long)) == "ValidationException"
    connector = "arn:aws:lambda:us-east-1:aws:network-connector:aws-network-connector:NO_INGRESS"
    closed = started(api, arn, ingressNetworkConnectors=[connector])
    of_closed = api.create_microvm_auth_token(microvmIdentifier=closed, expirationInMinutes=5, allowedPorts=[{"allPorts": {}}])
    assert asked(f"{api.get_microvm(microvmIdentifier=closed)['endpoint']}/", of_closed["authToken"])[0] == 403


def test_a_client_token_starts_one_microvm(service: MicrovmService, api: Any) -> None:
    arn = built(api)
    first = started(api, arn, clientToken="one", runHookPayload="a")
    assert started(api, arn, clientToken="one", runHookPayload="a") == first
    other = {"imageIdentifier": arn, "executionRoleArn": ROLE, "clientToken": "one", "runHookPayload": "b"}
    assert refused(lambda: api.run_microvm(**other)) == "ConflictException"
    assert len(service.microvms()) == 1


def test_it_ends_at_its_maximum_duration_suspended_or_not(service: MicrovmService, api: Any) -> None:
    arn = built(api)
    running, suspended = (started(api, arn, maximumDurationInSeconds=600) for _ in range(2))
    api.suspend_microvm(microvmIdentifier=suspended)
    for id in (running, suspended):
        service.fleet.all[id].started_at -= 600.0  # ten minutes ago
        until(lambda id=id: state(api, id) == "TERMINATED")
        assert "maximum duration" in api.get_microvm(microvmIdentifier=id)["stateReason"]


def test_an_idle_one_is_suspended_and_a_request_resumes_it(service: MicrovmService, api: Any) -> None:
    policy = {"maxIdleDurationSeconds": 60, "suspendedDurationSeconds": 600, "autoResumeEnabled": True}
    id = started(api, built(api), idlePolicy=policy)
    service.fleet.all[id].last_request -= 60.0  # a minute without a request
    until(lambda: state(api, id) == "SUSPENDED")
    token = api.create_microvm_auth_token(microvmIdentifier=id, expirationInMinutes=5, allowedPorts=[{"allPorts": {}}])
    assert asked(f"{api.get_microvm(microvmIdentifier=id)['endpoint']}/", token["authToken"])[0] == 200
    assert state(api, id) == "RUNNING"


def test_quotas_and_throttling(service: MicrovmService, api: Any) -> None:
    arn = built(api)
    for _ in range(4):
        started(api, arn)
    more = {"imageIdentifier": arn, "executionRoleArn": ROLE}
    assert refused(lambda: api.run_microvm(**more)) == "ServiceQuotaExceededException"
    service.throttle(1)
    assert refused(lambda: api.run_microvm(**more)) == "ThrottlingException"
    assert refused(lambda: api.delete_microvm_image(imageIdentifier=arn)) == "ConflictException"


def test_what_the_model_does_not_allow_is_refused(api: Any) -> None:
    arn = built(api)
    run = {"imageIdentifier": arn, "executionRoleArn": ROLE}
    assert refused(lambda: api.run_microvm(**run, runHookPayload="x" * 4097)) == "ValidationException"
    assert refused(lambda: api.run_microvm(**run, maximumDurationInSeconds=28_801)) == "ValidationException"
    assert refused(lambda: api.run_microvm(imageIdentifier=arn, executionRoleArn="arn:aws:iam::1:role/x")) == "ValidationException"
    assert refused(lambda: api.run_microvm(imageIdentifier=f"{arn}x")) == "ResourceNotFoundException"
    assert refused(lambda: api.get_microvm(microvmIdentifier="none")) == "ResourceNotFoundException"


def test_an_image_whose_application_does_not_start_says_why(trace: Path) -> None:
    bad = archive({"Dockerfile": 'FROM base\nCMD ["python3", "-c", "raise SystemExit(3)"]\n'})
    with keys(), MicrovmService(fetch=lambda uri: bad, environment={"TRACE": str(trace)}) as service:
        api = client(settings_of(service))
        with pytest.raises(AssertionError):
            built(api)
        (image,) = api.list_microvm_images(nameFilter="app")["items"]
        assert image["state"] == "CREATE_FAILED"
        version = api.get_microvm_image_version(imageIdentifier=image["imageArn"], imageVersion="1.0")
        assert (version["state"], version["stateReason"]) == ("FAILED", "the command has ended")


def test_a_refused_run_hook_ends_the_microvm(service: MicrovmService, api: Any) -> None:
    id = started(api, built(api, environmentVariables={"REFUSED": "run"}))
    assert state(api, id) == "TERMINATED"
    assert api.get_microvm(microvmIdentifier=id)["stateReason"] == "The run hook answered 503"
