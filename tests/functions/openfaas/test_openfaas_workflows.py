"""Workflows: documents that are refused, steps in the order of the graph, and all of it at the local gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openfaas_world import PASSWORD, client, settings_of

from ephemeron.cli.main import main
from ephemeron.errors import GatewayError, JobError
from ephemeron.functions.openfaas.gateway import FunctionSpec
from ephemeron.functions.openfaas.workflow import WorkflowStep, execute, parse_workflow
from ephemeron.functions.openfaas.workflow_gateway import WorkflowGateway
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from running import until

DIAMOND: dict[str, Any] = {
    "name": "training",
    "steps": [
        {"name": "schedule", "function": "words"},
        {"name": "near", "function": "words", "after": ["schedule"]},
        {"name": "far", "function": "words", "after": ["schedule"]},
        {"name": "join", "function": "words", "after": ["near", "far"]},
    ],
}
STEP = """
import http.server, json, os, urllib.parse

class Step(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b"ok")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if b"fail" in body:
            self.answer(503, b"this function fails")
        else:
            self.answer(200, json.dumps({"got": body.decode()}).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = urllib.parse.urlsplit(os.environ["http_upstream_url"]).port
http.server.ThreadingHTTPServer(("127.0.0.1", port), Step).serve_forever()
"""


def steps(*rows: tuple[str, tuple[str, ...]]) -> dict[str, Any]:
    return {"name": "w", "steps": [{"name": n, "function": "f", "after": list(after)} for n, after in rows]}


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({"name": "w", "steps": []}, "workflow w has no steps"),
        ([1], "is list; give an object with name and steps"),
        ({"name": "W", "steps": [{"name": "a", "function": "f"}]}, "small letters"),
        ({"name": "w", "steps": [{"name": "a"}]}, "missing key function"),
        ({"name": "w", "steps": [{"name": "a", "function": "f", "afer": []}]}, "unknown key afer; did you mean after"),
        (steps(("a", ()), ("a", ())), "two steps have the name 'a'"),
        (steps(("a", ("b",))), "step a comes after 'b', which is no step; steps are a"),
        (steps(("a", ("a",))), "wait for each other: a after a"),
        (steps(("s", ()), ("a", ("s", "c")), ("b", ("a",)), ("c", ("b",))), "a after c after b after a"),
    ],
)
def test_a_wrong_document_is_one_line(document: Any, match: str) -> None:
    with pytest.raises(JobError, match=match) as refused:
        parse_workflow(document)
    assert "\n" not in str(refused.value)


def test_a_document_is_read_as_it_was_written() -> None:
    workflow = parse_workflow(DIAMOND)
    assert parse_workflow(json.loads(json.dumps(workflow.to_json()))) == workflow
    assert workflow.last == ("join",)


def test_steps_are_called_in_order_and_those_that_can_at_the_same_time() -> None:
    log: list[str] = []
    both = asyncio.Barrier(2)

    async def call(step: WorkflowStep, body: bytes) -> tuple[int, bytes]:
        log.append(step.name)
        if step.name in ("near", "far"):
            async with asyncio.timeout(5):
                await both.wait()  # neither answers before both are called
        return 200, f"<{step.name} {body.decode()}>".encode()

    run = asyncio.run(execute(parse_workflow(DIAMOND), b"go", call))
    assert log[0] == "schedule"
    assert log[-1] == "join"
    assert run.answers["near"] == b"<near <schedule go>>"
    assert json.loads(run.answer.decode().removeprefix("<join ").removesuffix(">")) == {
        "near": "<near <schedule go>>",
        "far": "<far <schedule go>>",
    }


def test_a_step_may_have_a_request_of_its_own_and_a_workflow_several_ends() -> None:
    document = steps(("a", ()), ("b", ()))
    document["steps"][1]["request"] = {"entry": "geo-scheduling"}

    async def call(step: WorkflowStep, body: bytes) -> tuple[int, bytes]:
        return 200, body

    run = asyncio.run(execute(parse_workflow(document), b'{"x": 1}', call))
    assert json.loads(run.answer) == {"a": {"x": 1}, "b": {"entry": "geo-scheduling"}}


def test_a_step_that_fails_ends_the_workflow() -> None:
    called: list[str] = []

    async def call(step: WorkflowStep, body: bytes) -> tuple[int, bytes]:
        called.append(step.name)
        return (500, b"no memory") if step.name == "near" else (200, b"")

    with pytest.raises(GatewayError, match="step near: no memory") as failed:
        asyncio.run(execute(parse_workflow(DIAMOND), b"", call))
    assert failed.value.status == 500
    assert sorted(called) == ["far", "near", "schedule"], "what can run beside it does, what comes after does not"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenFaasGateway]:
    image = tmp_path_factory.mktemp("image")
    (image / "step.py").write_text(STEP)
    (image / "Dockerfile").write_text('FROM scratch\nENV fprocess="python3 /home/app/step.py"\n')
    with OpenFaasGateway(password=PASSWORD) as found:
        found.add_image("words", image)
        api = client(settings_of(found, function="words"))
        api.deploy(FunctionSpec(service="words", image="words", memory_mb=128, cpus=0.5))
        api.scale(2)
        until(lambda: api.invoke(b"are you there").status == 200)
        yield found


@pytest.fixture
def workflows(gateway: OpenFaasGateway) -> Iterator[WorkflowGateway]:
    found = WorkflowGateway(client(settings_of(gateway, function="words")))
    yield found
    for each in found.deployed():
        found.delete(each.name)


@pytest.mark.slow
def test_a_workflow_is_deployed_called_updated_and_deleted(workflows: WorkflowGateway) -> None:
    assert workflows.known()
    assert workflows.deploy(parse_workflow(DIAMOND)) == "created"
    reply = workflows.invoke("training", b"go")
    assert reply.status == 200
    got = json.loads(json.loads(reply.body)["got"])
    assert sorted(got) == ["far", "near"]
    assert json.loads(got["near"]["got"]) == {"got": "go"}
    one = workflows.invoke_step("training", "far", b"alone")
    assert json.loads(one.body) == {"got": "alone"}
    assert workflows.invoke_step("training", "unknown", b"").status == 404
    shorter = {**DIAMOND, "steps": DIAMOND["steps"][:1]}
    assert workflows.deploy(parse_workflow(shorter)) == "updated"
    assert json.loads(workflows.invoke("training", b"go").body) == {"got": "go"}
    workflows.delete("training")
    assert workflows.invoke("training", b"go").status == 404


@pytest.mark.slow
def test_the_gateway_says_which_step_failed_and_what_it_refuses(workflows: WorkflowGateway, gateway: OpenFaasGateway) -> None:
    workflows.deploy(parse_workflow(DIAMOND))
    reply = workflows.invoke("training", b"fail")
    assert (reply.status, reply.text()) == (503, "step schedule: this function fails")
    other = {"name": "other", "steps": [{"name": "a", "function": "missing"}]}
    with pytest.raises(JobError, match="step a calls function 'missing', which is not deployed; deploy the function first"):
        workflows.deploy(parse_workflow(other))
    api = client(settings_of(gateway, function="words"))
    with pytest.raises(GatewayError, match="missing") as refused:
        api.system("POST", "/system/workflows", other)
    assert refused.value.status == 400
    with pytest.raises(GatewayError, match="wait for each other"):
        api.system("POST", "/system/workflows", steps(("a", ("a",))))


@pytest.mark.slow
def test_a_workflow_runs_where_the_gateway_knows_none(workflows: WorkflowGateway) -> None:
    run = asyncio.run(workflows.run_here(parse_workflow(DIAMOND), b"go"))
    assert json.loads(run.answers["schedule"]) == {"got": "go"}
    assert sorted(json.loads(json.loads(run.answer)["got"])) == ["far", "near"]
    with pytest.raises(GatewayError, match="step schedule"):
        asyncio.run(workflows.run_here(parse_workflow(DIAMOND), b"fail"))


@pytest.mark.slow
def test_workflows_on_the_command_line(
    workflows: WorkflowGateway, gateway: OpenFaasGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPHEMERON_OPENFAAS_PASSWORD", PASSWORD)
    monkeypatch.setenv("OPENFAAS_URL", gateway.url)
    document = tmp_path / "training.json"
    document.write_text(json.dumps(DIAMOND))

    def said(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["cloud", "workflow", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output

    assert said("validate", document).splitlines()[0] == "workflow training: 4 steps"
    assert "join: words after near, far" in said("validate", document).splitlines()[-1]
    assert said("deploy", document) == "workflow training created\n"
    assert said("deploy", document) == "workflow training updated\n"
    for what in ("training", document):
        assert sorted(json.loads(json.loads(said("invoke", what, "--request", "go"))["got"])) == ["far", "near"]
    assert json.loads(said("invoke", "training", "--step", "far", "--request", "alone")) == {"got": "alone"}
    assert "step schedule: this function fails" in said("invoke", "training", "--request", "fail", code=1)
    document.write_text(json.dumps(steps(("a", ("b",)))))
    refused = said("validate", document, code=2)
    assert f"{document}: step a comes after 'b', which is no step" in refused
    assert "cannot be read" in said("invoke", tmp_path / "no.json", code=2)
