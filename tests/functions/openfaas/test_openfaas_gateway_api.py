"""The gateway's documented API, by our client: on the local gateway always, on a real one where the environment names it.

EPHEMERON_OPENFAAS_URL, EPHEMERON_OPENFAAS_USER, EPHEMERON_OPENFAAS_PASSWORD, EPHEMERON_OPENFAAS_IMAGE
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openfaas_world import IMAGE, PASSWORD, client, settings_of

from ephemeron.communication.rpc.http import HttpRequest, Response, listen
from ephemeron.errors import GatewayError
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, spec_of, write_recipe
from ephemeron.functions.openfaas.gateway import UNREACHABLE, FunctionSpec, Gateway
from ephemeron.functions.openfaas.platform import Callbacks
from ephemeron.functions.openfaas.settings import INSIDE, Credentials, OpenFaasSettings, credentials
from ephemeron.functions.source_bundle import digest
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from running import until

NAME = "ephemeron-api-test"


class Place:
    """A gateway, and an image of ours that it can run."""

    def __init__(self, settings: OpenFaasSettings, api: Gateway, image: str, inside: str) -> None:
        self.settings, self.api, self.image, self.inside = settings, api, image, inside

    def spec(self, **more: Any) -> FunctionSpec:
        wanted = {
            "image": self.image,
            "memory_mb": 256,
            "lifetime_s": 20.0,
            "replicas": 2,
            "cpus": 1.0,
            "inside": self.inside,
            "digest": digest(),
            "variables": {"EPHEMERON_PRELOAD": ""},
        } | more
        return spec_of(DeploymentSpec(**wanted), self.settings)

    def ready(self, replicas: int = 1) -> None:
        until(lambda: self.api.function().available >= replicas)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenFaasGateway]:
    recipe = tmp_path_factory.mktemp("image")
    write_recipe(recipe)
    with OpenFaasGateway(password=PASSWORD) as gateway:
        gateway.add_image(IMAGE, recipe)
        yield gateway


@pytest.fixture(params=["local", "real"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "local":
        gateway: OpenFaasGateway = request.getfixturevalue("local")
        settings = settings_of(gateway, function=NAME)
        found = Place(settings, client(settings), IMAGE, gateway.url)
    else:
        missing = [n for n in ("EPHEMERON_OPENFAAS_URL", "EPHEMERON_OPENFAAS_IMAGE") if not os.environ.get(n)]
        if missing:
            pytest.skip(f"no real gateway: {' and '.join(missing)} not set")
        settings = OpenFaasSettings(gateway=os.environ["EPHEMERON_OPENFAAS_URL"], function=NAME).located()
        found = Place(settings, Gateway(settings, credentials()), os.environ["EPHEMERON_OPENFAAS_IMAGE"], INSIDE)
    yield found
    remove(found.api)


def remove(api: Gateway) -> None:
    if api.settings.function in [f.name for f in api.functions()]:
        api.delete()


def test_a_function_is_deployed_listed_scaled_and_deleted(place: Place) -> None:
    api = place.api
    assert "provider" in api.info()
    with pytest.raises(GatewayError) as refused:
        api.function()
    assert refused.value.status == 404
    assert api.deploy(place.spec()) == "created"
    place.ready()
    found = api.function()
    assert (found.name, found.image, found.replicas) == (NAME, place.image, 1)
    assert found.annotations["ephemeron.memory-mb"] == "256"
    assert NAME in [f.name for f in api.functions()]
    api.scale(2)
    until(lambda: api.function().replicas == 2)
    place.ready(2)
    assert api.deploy(place.spec(memory_mb=300)) == "updated"
    until(lambda: api.function().annotations["ephemeron.memory-mb"] == "300")
    api.delete()
    until(lambda: NAME not in [f.name for f in api.functions()])


def test_a_call_is_answered_and_an_asynchronous_one_accepted(place: Place) -> None:
    place.api.deploy(place.spec())
    place.ready()
    about = place.api.invoke(b"", path="/about", method="GET")
    assert about.status == 200
    assert json.loads(about.body)["memory_mb"] == 256
    assert about.call_id
    none_of_ours = place.api.invoke(b"{}")
    assert none_of_ours.status == 400
    assert "not a call of ephemeron" in none_of_ours.text()
    assert float(none_of_ours.headers["x-duration-seconds"]) >= 0
    first, second = (place.api.invoke_async(b"{}") for _ in range(2))
    assert first != second
    assert len(first) == len("ee7fcaeb-82b7-4834-b677-45005c5f0b1b")


def test_what_is_refused_has_the_status_that_is_documented(place: Place) -> None:
    wrong = Gateway(place.settings, Credentials("admin", "wrong"))
    with pytest.raises(GatewayError, match="invalid credentials") as refused:
        wrong.functions()
    assert refused.value.status == 401
    with pytest.raises(GatewayError) as refused:
        place.api.scale(1)
    assert refused.value.status == 404
    with pytest.raises(GatewayError) as refused:
        place.api.delete()
    assert refused.value.status == 404
    assert place.api.invoke(b"{}").status == 404


def test_nobody_answers() -> None:
    api = Gateway(OpenFaasSettings(gateway="http://127.0.0.1:9").located())
    with pytest.raises(GatewayError, match="does not answer: Connection refused") as refused:
        api.info()
    assert refused.value.status == UNREACHABLE


# -- what only a gateway shows that can be told to misbehave -------------------------------------------------

ECHO = """
import asyncio, json, os, sys, time
from urllib.parse import urlsplit
from ephemeron.communication.rpc.http import listen, Response

async def answer(request):
    if request.path == "/ready":
        return Response()
    said = json.loads(request.body or b"{}")
    print("serving", said, flush=True)
    await asyncio.sleep(said.get("seconds", 0))
    while "until" in said and not os.path.exists(said["until"]):
        await asyncio.sleep(0.01)
    if said.get("die"):
        os._exit(3)
    seen = {"headers": dict(request.headers), "path": request.path, "query": request.query,
            "secrets": os.listdir(os.environ["EPHEMERON_SECRETS_FOLDER"])}
    return Response(status=said.get("status", 200), headers={"X-Mine": "yes"}, body=json.dumps(seen).encode())

async def main():
    await listen(answer, port=urlsplit(os.environ["http_upstream_url"]).port)
    await asyncio.Event().wait()

asyncio.run(main())
"""
DOCKERFILE = """FROM scratch
ENV PYTHONPATH=/home/app fprocess="python3 -P /home/app/echo.py" mode=http
ENV ready_path=/ready max_inflight=1
"""


@pytest.fixture(scope="module")
def echo(local: OpenFaasGateway, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("echo")
    write_recipe(folder)  # for the package, which it imports
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "echo.py").write_text(ECHO)
    local.add_image("echo:1", folder)
    return folder


@pytest.fixture
def api(local: OpenFaasGateway, echo: Path) -> Iterator[Gateway]:
    api = client(settings_of(local, function="echo"))
    yield api
    remove(api)


def deploy_echo(api: Gateway, *, replicas: int = 1, annotations: dict[str, str] | None = None, **variables: str) -> None:
    spec = FunctionSpec(service="echo", image="echo:1", memory_mb=128, cpus=1.0, variables=variables, annotations=annotations or {})
    api.deploy(spec)
    api.scale(replicas)
    until(lambda: api.function().available >= replicas)


def body(**said: Any) -> bytes:
    return json.dumps(said).encode()


def test_path_query_and_headers_are_passed_on(api: Gateway) -> None:
    deploy_echo(api)
    reply = api.invoke(body(), path="/deep/er?a=1&b=2", headers={"X-Other": "o"})
    seen = json.loads(reply.body)
    assert (seen["path"], seen["query"], seen["headers"]["x-other"]) == ("/deep/er", "a=1&b=2", "o")
    assert seen["headers"]["x-call-id"] == reply.call_id
    assert reply.headers["x-mine"] == "yes"
    assert api.function().image == "echo:1"


def test_a_second_request_at_once_is_429_and_the_queue_tries_again_where_it_is_told_to(
    api: Gateway, local: OpenFaasGateway, tmp_path: Path
) -> None:
    retry = {
        "com.openfaas.retry.attempts": "20",
        "com.openfaas.retry.codes": "429",
        "com.openfaas.retry.min_wait": "100ms",
        "com.openfaas.retry.max_wait": "200ms",
    }
    for notes, expected in (({}, [200, 429]), (retry, [200, 200])):
        deploy_echo(api, annotations=notes)
        gate = tmp_path / str(len(notes))
        calls = [api.invoke_async(body(until=str(gate))) for _ in range(2)]
        if not notes:
            until(lambda calls=calls: [call for call, _ in local.queue.delivered if call in calls])  # what is refused
        gate.touch()
        statuses = until(lambda calls=calls: over(local, calls))
        assert sorted(statuses) == expected


def over(local: OpenFaasGateway, calls: list[str]) -> list[int]:
    """Last statuses, once all are there."""
    found = [status for call, status in local.queue.delivered if call in calls]
    return found if len(found) == len(calls) else []


def test_exec_timeout_answers_504_and_write_timeout_cuts_the_connection(api: Gateway) -> None:
    deploy_echo(api, exec_timeout="2s", write_timeout="20s", max_inflight="0")
    late = api.invoke(body(seconds=60))
    assert late.status == 504
    assert late.headers["x-openfaas-internal"] == "of-watchdog"
    assert api.invoke(body()).status == 200, "of-watchdog leaves the process as it is"
    assert api.invoke(body(seconds=60), headers={"X-Timeout": "50ms"}).status == 504, "a shorter one by header"
    deploy_echo(api, exec_timeout="20s", write_timeout="200ms", max_inflight="0")
    assert api.invoke(body(seconds=60)).status == 502


def test_a_replica_whose_process_ends_is_started_again(api: Gateway, local: OpenFaasGateway) -> None:
    deploy_echo(api)

    def ready() -> list[int]:
        return [r.pid for r in local.replicas() if r.function == "echo" and r.ready]

    (first,) = ready()
    assert api.invoke(body(die=True)).status == 502
    (second,) = until(lambda: [pid for pid in ready() if pid != first])
    assert api.invoke(body()).status == 200
    os.kill(second, signal.SIGKILL)
    until(lambda: [pid for pid in ready() if pid != second])
    assert api.invoke(body()).status == 200


def test_from_no_replicas_a_call_starts_one(api: Gateway) -> None:
    deploy_echo(api)
    api.scale(0)
    until(lambda: api.function().available == 0)
    assert api.invoke(body()).status == 200
    assert api.function().replicas == 1


def test_secrets_are_files_and_missing_ones_are_refused(api: Gateway) -> None:
    spec = FunctionSpec(service="echo", image="echo:1", memory_mb=128, cpus=1.0, secrets=("ephemeron-channel-password",))
    with pytest.raises(GatewayError, match="unable to find secret: ephemeron-channel-password") as refused:
        api.deploy(spec)
    assert refused.value.status == 400
    api.set_secret("ephemeron-channel-password", "one")
    api.set_secret("ephemeron-channel-password", "two")
    api.deploy(spec)
    until(lambda: api.function().available == 1)
    assert json.loads(api.invoke(body()).body)["secrets"] == ["ephemeron-channel-password"]
    api.delete_secret("ephemeron-channel-password")
    with pytest.raises(GatewayError):
        api.delete_secret("ephemeron-channel-password")


def test_what_the_queue_cannot_hold_is_refused(api: Gateway) -> None:
    deploy_echo(api)
    assert api.invoke_async(b'"' + b"x" * 700_000 + b'"')
    with pytest.raises(GatewayError, match="maximum payload exceeded") as refused:
        api.invoke_async(b'"' + b"x" * 800_000 + b'"')  # base64 makes it 1.07 MB
    assert refused.value.status == 500


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"service": "No Name"}, "invalid"),
        ({"image": ""}, "image is required"),
        ({"limits": {"memory": "much"}}, "quantities"),
        ({"envVars": {"a": 1}}, "envVars"),
        ({"labels": {"com.openfaas.scale.min": "few"}}, "scale.min"),
    ],
)
def test_a_deployment_that_makes_no_sense_is_400(local: OpenFaasGateway, changed: dict[str, Any], said: str) -> None:
    api = client(settings_of(local, function="bad"))
    pair = base64.b64encode(f"admin:{PASSWORD}".encode()).decode()
    value = {"service": "bad", "image": "echo:1", **changed}
    reply = api.request("POST", "/system/functions", json.dumps(value).encode(), {"Authorization": f"Basic {pair}"})
    assert reply.status == 400
    assert said in reply.text()


def test_a_call_back_has_the_documented_headers_and_the_answer(api: Gateway) -> None:
    deploy_echo(api)

    async def main() -> None:
        heard: asyncio.Queue[HttpRequest] = asyncio.Queue()

        async def answer(request: HttpRequest) -> Response:
            heard.put_nowait(request)
            return Response()

        listener = await listen(answer)
        url = f"http://127.0.0.1:{listener.port}/told/here"
        call = await asyncio.to_thread(api.invoke_async, body(seconds=0.05, status=418), callback=url)
        request = await asyncio.wait_for(heard.get(), 30)
        assert (request.method, request.path) == ("POST", "/told/here")
        assert request.headers["x-call-id"] == call
        assert request.headers["x-function-status"] == "418"
        assert request.headers["x-function-name"] == "echo"
        assert float(request.headers["x-duration-seconds"]) >= 0.05
        assert request.headers["x-mine"] == "yes", "the function's own headers come along"
        assert json.loads(request.body)["headers"]["x-call-id"] == call
        await listener.close()

    asyncio.run(main())


def test_the_death_of_a_replica_comes_as_a_call_back(api: Gateway, local: OpenFaasGateway) -> None:
    deploy_echo(api)

    async def main() -> None:
        callbacks = Callbacks(settings_of(local))
        await callbacks.open()
        call = await asyncio.to_thread(api.invoke_async, body(seconds=0.05, die=True), callback=callbacks.url)
        told = await until_heard(callbacks)
        assert [(type(t), t.request) for t in told] == [(LogReport, call), (Death, call)]
        assert told[0].billed_s >= 0.05
        assert "502" in told[1].text
        stranger = callbacks.url.rpartition("/")[0] + "/wrong"
        lost = await asyncio.to_thread(api.invoke_async, body(die=True), callback=stranger)
        assert min(await asyncio.to_thread(until, lambda: over(local, [lost]))) >= 500
        assert await callbacks.poll() == []
        await callbacks.close()

    asyncio.run(main())


async def until_heard(callbacks: Callbacks) -> list[Any]:
    for _ in range(9000):
        if told := await callbacks.poll():
            return told
        await asyncio.sleep(0.02)
    raise AssertionError("no call-back came")
