"""TLS in front of a real cache and a real object store: verified always, and every failure in one line that helps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("cryptography", reason="no maker of certificates; pip install cryptography")

from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.tls import CA_ENV, authority
from ephemeron.errors import ChannelUnreachable, JobError
from ephemeron.testing.channel_contract import ChannelConnectionContract
from tls_world import DAY, Authority, in_front_of

if TYPE_CHECKING:
    from servers import ServerProcess


class Cache:
    """A real Valkey server with a password, and TLS in front of it."""

    def __init__(self, authority: Authority, plain: int, password: str) -> None:
        self.authority, self.plain, self.password = authority, plain, password

    def reached(self, *names: str, **life: Any) -> Any:
        """TLS with a certificate for these names, on a port of its own."""
        return in_front_of(self.plain, self.authority.certificate(*names, **life))


@pytest.fixture(scope="module")
def cache(locked_valkey: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    port = urlsplit(locked_valkey.address).port
    assert port is not None
    return Cache(Authority(tmp_path_factory.mktemp("tls")), port, locked_valkey.env["EPHEMERON_CHANNEL_PASSWORD"])


@pytest.fixture(scope="module")
def port(cache: Cache) -> Iterator[int]:
    """With a certificate as it should be."""
    with cache.reached("127.0.0.1", "localhost") as port:
        yield port


@pytest.fixture
def trusted(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As people set it: password and authority in the environment."""
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", cache.password)
    monkeypatch.setenv(CA_ENV, str(cache.authority.file))


def fetch(address: str, key: str = "run/none") -> Any:
    async def main() -> Any:
        async with open_channel(address) as channel:
            return await channel.fetch(key)

    return asyncio.run(main())


def refusal(address: str) -> str:
    """What is said: one line, which names the place."""
    with pytest.raises(ChannelUnreachable) as caught:
        fetch(address)
    said = str(caught.value)
    assert "\n" not in said
    assert address in said
    return said


class TestCacheOverTls(ChannelConnectionContract):
    @pytest.fixture(autouse=True)
    def _server(self, port: int, trusted: None) -> None:
        self.address = f"rediss://127.0.0.1:{port}/1"

    async def open(self) -> Channel:
        return open_channel(self.address)


@pytest.mark.usefixtures("trusted")
def test_the_authority_is_a_file_or_its_text_or_the_system_s(cache: Cache, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"rediss://localhost:{port}/0"
    assert fetch(address) is None
    monkeypatch.setenv(CA_ENV, cache.authority.pem)
    assert fetch(address) is None
    monkeypatch.delenv(CA_ENV)
    monkeypatch.setenv("SSL_CERT_FILE", str(cache.authority.file))
    assert fetch(address) is None


@pytest.mark.usefixtures("trusted")
def test_a_certificate_of_an_unknown_authority_is_refused(cache: Cache, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Authority(tmp_path, "somebody else")
    for wrong in (str(other.file), None):
        if wrong is None:
            monkeypatch.delenv(CA_ENV)
        else:
            monkeypatch.setenv(CA_ENV, wrong)
        said = refusal(f"rediss://127.0.0.1:{port}/0")
        assert "not signed by an authority that is trusted here" in said
        assert f"set {CA_ENV} to the authority's PEM file" in said


@pytest.mark.usefixtures("trusted")
def test_a_certificate_for_another_host_and_one_of_yesterday_are_refused(cache: Cache) -> None:
    with cache.reached("cache.example") as port:
        said = refusal(f"rediss://127.0.0.1:{port}/0")
        assert "its certificate is for another host" in said
        assert "use the host name that the certificate has" in said
    with cache.reached("127.0.0.1", life=(-3 * DAY, -DAY)) as port:
        assert "its certificate has expired; renew it" in refusal(f"rediss://127.0.0.1:{port}/0")
    with cache.reached("127.0.0.1", life=(DAY, 3 * DAY)) as port:
        assert "its certificate is not valid yet" in refusal(f"rediss://127.0.0.1:{port}/0")


@pytest.mark.usefixtures("trusted")
def test_a_wrong_password_and_none(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "wr0ng-one")
    said = refusal(f"rediss://127.0.0.1:{port}/0")
    assert "set EPHEMERON_CHANNEL_PASSWORD to its password" in said
    assert "wr0ng-one" not in said
    monkeypatch.delenv("EPHEMERON_CHANNEL_PASSWORD")
    assert "set EPHEMERON_CHANNEL_PASSWORD to its password" in refusal(f"rediss://127.0.0.1:{port}/0")


@pytest.mark.usefixtures("trusted")
def test_plain_text_to_a_port_for_tls_and_the_other_way_round(cache: Cache, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "if it wants TLS, write rediss://" in refusal(f"redis://127.0.0.1:{port}/0")
    # Valkey waits for the end of a line that never comes.
    monkeypatch.setattr("ephemeron.communication.channels.cache._CONNECT_S", 0.5)
    assert "if the port is not one for TLS, write redis://" in refusal(f"rediss://127.0.0.1:{cache.plain}/0")
    # Others answer, and not with TLS.
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=_answer_in_plain_text, args=(other,), daemon=True)
        answering.start()
        said = refusal(f"rediss://127.0.0.1:{other.getsockname()[1]}/0")
    assert "does not speak TLS; write redis:// for a server without it" in said


def _answer_in_plain_text(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"-ERR unknown command\r\n")
            connection.close()


def test_verifying_cannot_be_switched_off_by_the_address(port: int) -> None:
    with pytest.raises(JobError, match=r"takes no ssl_cert_reqs.*TLS is always verified"):
        open_channel(f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=none")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("/no/such/ca.pem", "names a file that cannot be read: /no/such/ca.pem: No such file"),
        ("KEY", "holds no PEM certificate"),
        ("-----BEGIN CERTIFICATE-----\nnonsense", "holds no PEM certificate"),
    ],
)
def test_an_authority_that_is_none_is_named(value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if value == "KEY":
        value = str(tmp_path / "key.pem")
        Path(value).write_text("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n")
    monkeypatch.setenv(CA_ENV, value)
    with pytest.raises(JobError, match=said) as caught:
        authority()
    assert "\n" not in str(caught.value)


# -- an object store ------------------------------------------------------------------------------------------

S3 = """
import asyncio, json, sys
from ephemeron.communication.channels import open_channel
from ephemeron.errors import ChannelUnreachable, KeyExists

async def main():
    async with open_channel("s3://ephemeron-tests/tls") as channel:
        try:
            await channel.put("a", [b"1"])
            try:
                await channel.put("a", [b"2"], create=True)
            except KeyExists:
                print(json.dumps([bytes(await channel.fetch("a")).decode(), await channel.list("")]))
            await channel.delete(["a"])
        except ChannelUnreachable as e:
            print(json.dumps(str(e)))
asyncio.run(main())
"""


@pytest.mark.slow
def test_an_object_store_over_https_with_an_authority_of_one_s_own(
    s3_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own: who is trusted is read once."""
    own = Authority(tmp_path)
    (plain,) = {int(url.rpartition(":")[2]) for url in [s3_server.env["AWS_ENDPOINT_URL"]]}
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)

    def says(port: int, *, trust: bool) -> Any:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"https://127.0.0.1:{port}")
        if trust:
            monkeypatch.setenv("SSL_CERT_FILE", str(own.file))
        else:
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        done = subprocess.run([sys.executable, "-c", S3], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with in_front_of(plain, own.certificate("127.0.0.1")) as port:
        assert says(port, trust=True) == ["1", ["a"]]
        assert "set SSL_CERT_FILE to the authority's PEM file" in says(port, trust=False)
    with in_front_of(plain, own.certificate("127.0.0.1", life=(-3 * DAY, -DAY))) as port:
        assert "its certificate has expired; renew it" in says(port, trust=True)
    with in_front_of(plain, own.certificate("bucket.example")) as port:
        assert "its certificate is for another host" in says(port, trust=True)
    assert "does not speak TLS" in says(plain, trust=True)


# -- a run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_over_tls_has_the_same_weights_and_the_password_is_nowhere(
    cache: Cache, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    from ephemeron.training.driver import configure, train
    from ephemeron.training.job import DataSpec, Job, Simulation, Target, parse_fault

    code = Path(__file__).parents[2] / "training" / "code"
    job = Job(
        name="tls",
        model=Target(target="tiny:mlp"),
        data=DataSpec(),
        epochs=1,
        code=(code,),
        simulation=Simulation(),
        optimizer=Target(target="SGD", options={"lr": 0.1}),
    )
    how = {"platform": "local", "workers": 2, "aggregators": 1, "batch_size": 144, "memory_mb": 704}
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(CA_ENV, str(cache.authority.file))
    calm = train(job, configure(job, **how))
    seen: dict[str, bytes] = {}
    quoted = cache.password.replace("/", "%2F")
    address = f"rediss://:{quoted}@127.0.0.1:{port}/2"
    look = _copying(seen, address)
    events: list[Any] = []

    def see(event: Any) -> None:
        events.append(event)
        if event.kind in ("invoked", "started", "progress"):
            look()

    slowly = parse_fault("delay:rank=0,factor=1,seconds=1")
    result = train(job, configure(job, **how, channel=address), on_event=see, faults=[slowly])
    assert result.summary.status == "finished", result.causes
    assert result.summary.weights_sha256 == calm.summary.weights_sha256
    look()
    assert {key.split("/")[1] for key in seen} >= {"spec", "code", "data", "start"}, "looked while it ran"
    written = [path.read_bytes() for path in result.folder.path.rglob("*") if path.is_file()]
    assert len(written) > 4
    everything = b"\0".join([*written, *seen.values(), *(key.encode() for key in seen), repr(events).encode()])
    for secret in (cache.password, quoted):
        assert secret.encode() not in everything
    assert f"rediss://127.0.0.1:{port}/2".encode() in everything, "the address itself is there"


def _copying(seen: dict[str, bytes], address: str) -> Callable[[], None]:
    """Copies all objects that are in the channel at this moment."""

    async def copy() -> None:
        async with open_channel(address) as channel:
            for key in await channel.list(""):
                if key not in seen and (data := await channel.fetch(key)) is not None:
                    seen[key] = bytes(data)

    def look() -> None:
        # In a thread: the caller's own loop is the run's.
        thread = threading.Thread(target=lambda: asyncio.run(copy()))
        thread.start()
        thread.join()

    return look
