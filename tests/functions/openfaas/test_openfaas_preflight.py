"""What is refused before anything runs, each in one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openfaas_world import IMAGE, PASSWORD, client, settings_of

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible, UserError
from ephemeron.functions.openfaas import preflight
from ephemeron.functions.openfaas.gateway import FunctionSpec
from ephemeron.functions.openfaas.settings import PASSWORD_ENV, USER_ENV, OpenFaasSettings, credentials
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from ephemeron.training.driver import configure, train
from ephemeron.training.job import DataSpec, Job, Simulation, Target
from running import until

CODE = Path(__file__).parents[2] / "training" / "code"
JOB = Job(name="faas", model=Target(target="tiny:mlp"), data=DataSpec(), epochs=1, code=(CODE,), simulation=Simulation())


@pytest.fixture(scope="module")
def gateway() -> Iterator[OpenFaasGateway]:
    with OpenFaasGateway(password=PASSWORD) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)
    for name in (USER_ENV, "OPENFAAS_URL", "EPHEMERON_CHANNEL_PASSWORD", "EPHEMERON_CHANNEL_USER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def deploy(gateway: OpenFaasGateway, tmp_path: Path) -> Iterator[Any]:
    """`ephemeron cloud deploy openfaas`, as people run it; removed afterwards."""

    def run(*more: str) -> Any:
        arguments = [
            "cloud",
            "deploy",
            "openfaas",
            "--openfaas-gateway",
            gateway.url,
            "--inside",
            gateway.url,
            "--out",
            str(tmp_path / "out"),
            "--channel",
            (tmp_path / "objects").as_uri(),
            "--memory-mb",
            "256",
            "--cpus",
            "1",
            *more,
        ]
        return CliRunner().invoke(main, arguments)

    yield run
    api = client(settings_of(gateway))
    for function in api.functions():
        client(settings_of(gateway, function=function.name)).delete()


def go(gateway: OpenFaasGateway, tmp_path: Path, *, settings: OpenFaasSettings | None = None, **how: Any) -> Any:
    channel = how.pop("channel", (tmp_path / "objects").as_uri())
    how = {"platform": "openfaas", "workers": 1, "aggregators": 1, "batch_size": 64, "channel": channel, **how}
    return train(JOB, configure(JOB, **how), cloud=settings or settings_of(gateway))


def test_a_wrong_password(gateway: OpenFaasGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_ENV, "guessed")
    with pytest.raises(JobError, match="refuses this user or password; set EPHEMERON_OPENFAAS_PASSWORD") as refused:
        go(gateway, tmp_path)
    assert "guessed" not in str(refused.value)
    monkeypatch.delenv(PASSWORD_ENV)
    with pytest.raises(JobError, match="refuses this user or password"):
        go(gateway, tmp_path)
    assert not (tmp_path / "home").exists(), "nothing was begun"


def test_no_such_function_and_no_such_gateway(gateway: OpenFaasGateway, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"function 'ephemeron' at .* is not deployed; run: ephemeron cloud deploy openfaas"):
        go(gateway, tmp_path)
    nowhere = OpenFaasSettings(gateway="http://127.0.0.1:9")
    with pytest.raises(JobError, match="does not answer: Connection refused; check --openfaas-gateway"):
        go(gateway, tmp_path, settings=nowhere)


def test_what_answers_there_is_no_gateway(gateway: OpenFaasGateway, tmp_path: Path) -> None:
    elsewhere = OpenFaasSettings(gateway=f"{gateway.url}/function/none")
    with pytest.raises(JobError, match="is not deployed"):
        go(gateway, tmp_path, settings=elsewhere)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gateway": "gateway:8080"}, "is no URL"),
        ({"gateway": "http://admin:secret@host:8080"}, "credentials do not belong in --openfaas-gateway"),
        ({"gateway": "http://host:8080?x=1"}, "more than a path"),
        ({"gateway": "http://host:eighty"}, "is no URL"),
        ({"callback": "http://here"}, "has no port"),
    ],
)
def test_addresses_that_make_no_sense(more: dict[str, str], said: str) -> None:
    with pytest.raises(JobError, match=said):
        OpenFaasSettings(**more).located()


def test_a_password_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("from a file\n")
    monkeypatch.setenv(PASSWORD_ENV, f"@{tmp_path / 'password'}")
    found = credentials()
    assert found is not None
    assert (found.user, found.password) == ("admin", "from a file")
    assert "from a file" not in repr(found)
    monkeypatch.setenv(PASSWORD_ENV, "@/no/such/file")
    with pytest.raises(JobError, match="cannot be read: /no/such/file"):
        credentials()


def test_a_function_of_somebody_else(gateway: OpenFaasGateway, tmp_path: Path, deploy: Any) -> None:
    client(settings_of(gateway)).deploy(FunctionSpec(service="ephemeron", image="figlet:1", memory_mb=128, cpus=0.1))
    with pytest.raises(JobError, match=r"\(image figlet:1\) was not deployed by ephemeron"):
        go(gateway, tmp_path)


def test_an_image_that_cannot_be_pulled(gateway: OpenFaasGateway, tmp_path: Path, deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.make_ready, "__kwdefaults__", {**preflight.make_ready.__kwdefaults__, "limit_s": 0.5})
    assert deploy("--image", "registry.example/misspelt:1").exit_code == 0
    with pytest.raises(JobError, match=r"no replica .* is its image right\? \(registry.example/misspelt:1\)"):
        go(gateway, tmp_path)
    assert not list((tmp_path / "home").glob("runs/*")), "nothing was begun"


OTHER = """
import asyncio, os
from urllib.parse import urlsplit
from ephemeron.communication.rpc.http import listen, Response

async def answer(request):
    return Response(body=b"I draw letters")

async def main():
    await listen(answer, port=urlsplit(os.environ["http_upstream_url"]).port)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_an_image_that_holds_something_else(gateway: OpenFaasGateway, tmp_path: Path, deploy: Any) -> None:
    assert deploy("--image", "figlet:1", "--replicas", "2").exit_code == 0
    recipe = tmp_path / "out"
    (recipe / "other.py").write_text(OTHER)
    text = (recipe / "Dockerfile").read_text().replace("-m ephemeron.functions.openfaas.handler", "/home/app/other.py")
    (recipe / "Dockerfile").write_text(text)
    gateway.add_image("figlet:1", recipe)
    client(settings_of(gateway)).scale(2)
    with pytest.raises(JobError, match=r"image figlet:1 .* does not hold ephemeron's handler: it answers 200: I draw letters"):
        go(gateway, tmp_path)


def test_what_does_not_fit_the_function(gateway: OpenFaasGateway, tmp_path: Path, deploy: Any) -> None:
    done = deploy("--image", IMAGE, "--replicas", "3", "--function-timeout-s", "60")
    assert done.exit_code == 0, done.output
    assert "256 MB, 1 CPUs, calls of up to 60 s, up to 3 replicas" in done.output
    for how, said in (
        ({"memory_mb": 512}, "has 256 MB, the run wants 512 MB; run: ephemeron cloud deploy openfaas --memory-mb 256,512"),
        ({"function_timeout_s": 90.0}, "ends after 60 s, the run wants 90 s"),
        ({"channel": "folder"}, "'folder' has no address"),
        ({"channel": "redis://:secret@127.0.0.1:6379"}, "functions do not get credentials from an address"),
    ):
        with pytest.raises(JobError, match=said):
            go(gateway, tmp_path, **how)
    with pytest.raises(PlanInfeasible, match="4 workers are wanted, function 'ephemeron' may have 3 replicas") as refused:
        go(gateway, tmp_path, workers=4)
    assert refused.value.binding == "concurrency"
    api = client(settings_of(gateway))
    api.deploy(
        FunctionSpec(
            service="ephemeron",
            image=IMAGE,
            memory_mb=256,
            cpus=1.0,
            annotations={**api.function().annotations, "ephemeron.code": "of another day"},
        )
    )
    with pytest.raises(JobError, match="runs code of another day, this is"):
        go(gateway, tmp_path)


def test_a_channel_of_this_machine_is_no_use_elsewhere() -> None:
    far = OpenFaasSettings(gateway="https://openfaas.example.org").located()
    for channel in ("file:///tmp/x", "redis://127.0.0.1:6379", "redis://localhost:6379"):
        with pytest.raises(JobError, match="is on this machine"):
            preflight.check_channel(channel, far, {})
    preflight.check_channel("s3://bucket/prefix", far, {})


def test_flags_of_another_platform(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('name = "x"\nmodel = "m:m"\n[data]\nsource = "digits"\n[run]\nworkers = 1\n')
    done = CliRunner().invoke(main, ["train", str(job), "--openfaas-gateway", "http://127.0.0.1:9"])
    assert done.exit_code != 0
    assert "platform local takes no --openfaas-gateway" in (done.output + str(done.exception))


def test_deploy_writes_first_and_sends_only_with_an_image(gateway: OpenFaasGateway, tmp_path: Path, deploy: Any) -> None:
    done = deploy()
    assert done.exit_code == 0, done.output
    assert "nothing was sent to" in done.output
    assert client(settings_of(gateway)).functions() == []
    recipe = tmp_path / "out"
    assert (recipe / "ephemeron" / "functions" / "openfaas" / "handler.py").exists()
    assert not (recipe / "ephemeron" / "testing").exists()
    values = (recipe / "openfaas-values.yaml").read_text()
    assert "upstreamTimeout: 935s" in values, "longer than of-watchdog's exec_timeout of 930 s"
    text = (recipe / "Dockerfile").read_text()
    assert "of-watchdog" in text
    assert "max_inflight=1" in text


def test_the_printed_command_deploys_what_was_reviewed(tmp_path: Path, deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hush")
    done = deploy("--memory-mb", "512", "--replicas", "7", "--cpus", "0.5", "--s3-keys", "--tag", "team=x")
    assert done.exit_code == 0, done.output
    next_command = done.output.splitlines()[-1]
    for given in (
        "--memory-mb 512",
        "--replicas 7",
        "--cpus 0.5",
        "--s3-keys",
        "--tag team=x",
        f"--out {tmp_path / 'out'}",
        "--image REGISTRY",
    ):
        assert given in next_command
    assert "hush" not in done.output


def test_secrets_are_deployed_as_secrets_and_removed_with_the_function(
    gateway: OpenFaasGateway, tmp_path: Path, deploy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "of the cache")
    done = deploy("--image", IMAGE)
    assert done.exit_code == 0, done.output
    assert "of the cache" not in done.output
    api = client(settings_of(gateway))
    shown = api.request("GET", "/system/functions", b"", basic()).body.decode()
    assert '"ephemeron-channel-password"' in shown
    assert "of the cache" not in shown
    removed = CliRunner().invoke(main, ["cloud", "remove", "openfaas", "--openfaas-gateway", gateway.url, "--yes"])
    assert removed.exit_code == 0, removed.output
    assert "deleted function ephemeron\ndeleted secret ephemeron-channel-password\n" in removed.output
    until(lambda: api.functions() == [])
    again = CliRunner().invoke(main, ["cloud", "remove", "openfaas", "--openfaas-gateway", gateway.url, "--yes"])
    assert "there is no function ephemeron" in again.output
    nobody = CliRunner().invoke(main, ["cloud", "remove", "openfaas", "--openfaas-gateway", "http://127.0.0.1:9", "--yes"])
    assert (nobody.exit_code, nobody.stdout) == (2, "")
    assert "http://127.0.0.1:9 does not answer: Connection refused" in nobody.stderr


def basic() -> dict[str, str]:
    import base64

    return {"Authorization": "Basic " + base64.b64encode(f"admin:{PASSWORD}".encode()).decode()}


def test_deploying_with_the_wrong_password_or_nonsense(gateway: OpenFaasGateway, deploy: Any, monkeypatch: Any) -> None:
    for more, said in (
        (("--memory-mb", "64"), "memory of 64 MB is outside"),
        (("--replicas", "0"), "0 replicas are outside"),
        (("--function-timeout-s", "0.2"), "a lifetime of 0.2 s is outside"),
        (("--inside", "nowhere"), "is no URL"),
        (("--channel", "redis://:secret@cache:6379"), "credentials do not belong in --channel"),
    ):
        with pytest.raises(UserError, match=said):
            raise_from(deploy("--image", IMAGE, *more))
    monkeypatch.setenv(PASSWORD_ENV, "guessed")
    with pytest.raises(UserError, match="refuses this user or password"):
        raise_from(deploy("--image", IMAGE))


def raise_from(done: Any) -> None:
    """What a command raised, whether it printed it or not."""
    if isinstance(done.exception, UserError):
        raise done.exception
    raise UserError(done.output)
