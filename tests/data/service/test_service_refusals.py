"""What goes wrong is said once, at once, and to the one whom it concerns."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_worlds import Numbered, World, drawn, epochs_of, local, mixed, plain

from ephemeron.data.flow import Flow
from ephemeron.data.service import RemoteReader, ServiceSettings
from ephemeron.data.service.messages import FlowRequest
from ephemeron.data.service.protocol import DELETE_FLOW
from ephemeron.data.service.settings import TOKEN_VARIABLE, ServiceTimeouts
from ephemeron.errors import JobError, LoadersLost, SampleFailed, ServiceRefused, ServiceUnreachable
from ephemeron.testing._emulation.service import free_port


def picky(sample: tuple[Any, int]) -> tuple[Any, int]:
    if sample[1] in (5, 11):
        raise ValueError(f"there is no {sample[1]}")
    return sample


class Flaky:
    """Raises until it was tried so often, in whatever process."""

    def __init__(self, folder: Path, fails: int) -> None:
        self.folder, self.fails = folder, fails

    def __call__(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        if sample[1] == 3 and len(os.listdir(self.folder)) < self.fails:
            (self.folder / os.urandom(8).hex()).touch()
            raise OSError("not now")
        return sample


def deadly(sample: tuple[Any, int]) -> tuple[Any, int]:
    if sample[1] == 4:
        os._exit(3)
    return sample


def test_another_token(one_shard: World) -> None:
    with pytest.raises(ServiceRefused, match=rf"refuses this token; .*{TOKEN_VARIABLE}"):
        mixed().prepare_read(RemoteReader(one_shard.address(), token="wrong"))


def test_the_right_token_by_argument_and_by_variable(one_shard: World, monkeypatch: pytest.MonkeyPatch) -> None:
    address, token = one_shard.address(), one_shard.service.token
    here = epochs_of(local(mixed()))
    assert epochs_of(mixed().prepare_read(RemoteReader(address, token=token))) == here
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert epochs_of(mixed().prepare_read(RemoteReader(address))) == here


@pytest.fixture
def deaf() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def stranger() -> Iterator[str]:
    """Speaks, but not as we do."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            while True:
                try:
                    other, _ = sock.accept()
                except OSError:
                    return
                with other:
                    other.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 20)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{sock.getsockname()[1]}"
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_nobody_there(deaf: str, stranger: str) -> None:
    for address in (f"127.0.0.1:{free_port()}", deaf, stranger):
        with pytest.raises(ServiceUnreachable, match=f"no data service answers at {address}"):
            mixed().prepare_read(RemoteReader(address, token="t", timeout_s=0.3))


def test_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(JobError, match=rf"127.0.0.1:9 wants a token; give token=… or set {TOKEN_VARIABLE}"):
        RemoteReader("127.0.0.1:9")
    for address in ("nowhere", "host:", ":7", "host:port"):
        with pytest.raises(JobError, match="write HOST:PORT"):
            RemoteReader(address, token="t")
    with pytest.raises(JobError, match="ephemeron serve data"):
        RemoteReader("127.0.0.1:9", token="t", loaders=3)
    with pytest.raises(JobError, match="timeout_s = 0"):
        RemoteReader(timeout_s=0, folder=tmp_path)
    with pytest.raises(JobError, match="has no dataset"):
        Flow("a/b").prepare_read(RemoteReader(folder=tmp_path))
    for wrong in ({"shards": 0}, {"loaders": 0}, {"cache_mb": -1}, {"idle_s": 0}, {"buffer_mb": 0}):
        with pytest.raises(JobError, match=f"{next(iter(wrong))} = "):
            ServiceSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="loader_lease_s = -1"):
        ServiceTimeouts(loader_lease_s=-1)


def test_what_cannot_be_sent_starts_nothing(own_world: Callable[..., World]) -> None:
    world, lock = own_world(), threading.Lock()
    flow = Flow("test/locked").dataset(Numbered(3)).map("lock", lambda sample: (lock, sample)[1])
    with pytest.raises(JobError, match=r"flow test/locked cannot be sent to loaders: TypeError.*lock"):
        world.read(flow)
    assert world.processes() == []


@pytest.mark.slow
def test_a_step_that_raises(one_shard: World) -> None:
    flow = Flow("test/picky").dataset(Numbered(16)).map("pick", picky).map_data("noise", drawn)
    read = one_shard.read(flow)
    with pytest.raises(SampleFailed, match="there is no 5") as info:
        epochs_of(read, shuffle=False)
    problem = info.value
    assert (problem.flow, problem.dataset, problem.index, problem.step) == ("test/picky@1", "Numbered", 5, "pick")
    with pytest.raises(SampleFailed, match="there is no 11"):
        read.to_mapped()[11]
    for each in (read, local(flow)):
        with each.to_shuffled(3, plain, seed=1, on_error="skip") as shuffled:
            got = [list(shuffled), list(shuffled)]
            assert shuffled.counters.skipped == 4
        if each is read:
            there = got
    assert there == got


@pytest.mark.slow
@pytest.mark.parametrize("retries", [1, 3])
def test_tried_again(one_shard: World, tmp_path: Path, retries: int) -> None:
    name = f"test/flaky-{retries}"
    flow = Flow(name).dataset(Numbered(8)).map("flaky", Flaky(tmp_path, 3))
    with one_shard.read(flow).to_shuffled(4, plain, on_error=f"retry:{retries}", shuffle=False) as shuffled:
        if retries == 3:
            assert [i for batch in shuffled for i, _ in batch] == list(range(8))
            assert 1 <= shuffled.counters.retried <= 3
        else:
            with pytest.raises(SampleFailed, match="not now"):
                list(shuffled)
            assert shuffled.counters.retried == 1


@pytest.mark.slow
def test_a_step_that_kills_its_loader(one_shard: World) -> None:
    """The sample is given up, the others are delivered, and nobody says that there are no loaders."""
    flow = Flow("test/deadly").dataset(Numbered(12)).map("kill", deadly)
    with one_shard.read(flow).to_shuffled(3, plain, on_error="skip", shuffle=False) as shuffled:
        assert [i for batch in shuffled for i, _ in batch] == [i for i in range(12) if i != 4]
        assert shuffled.counters.skipped == 1
    with pytest.raises(SampleFailed, match="was lost while it loaded this and nothing else") as info:
        epochs_of(one_shard.read(flow), shuffle=False)
    assert (info.value.flow, info.value.dataset, info.value.index) == ("test/deadly@1", "Numbered", 4)


@pytest.mark.slow
def test_loaders_that_cannot_start(one_shard: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here_for_a_while.py").write_text("def step(sample):\n    return sample\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here_for_a_while  # type: ignore[import-not-found]

    flow = Flow("test/absent").dataset(Numbered(4)).map("step", only_here_for_a_while.step)
    read = one_shard.read(flow)
    (tmp_path / "only_here_for_a_while.py").unlink()
    with pytest.raises(LoadersLost, match=r"in a row ended without a sample: ModuleNotFoundError.*only_here"):
        epochs_of(read)
    (tmp_path / "only_here_for_a_while.py").write_text("def step(sample):\n    return sample\n")
    assert len(epochs_of(read)[0]) == 1, "once it is mended, the same service does it"
    sys.modules.pop("only_here_for_a_while")


@pytest.mark.slow
def test_another_definition_of_a_version(one_shard: World) -> None:
    def of(step: Any, samples: int = 4, version: int = 2) -> Flow:
        return Flow("test/defined", version).dataset(Numbered(samples)).map("step", step)

    here = epochs_of(local(of(str)), collate_fn=list)
    assert epochs_of(one_shard.read(of(str)), collate_fn=list) == here
    for wrong in (of(repr), of(str, samples=5)):
        with pytest.raises(JobError, match=r"registered with other steps or samples.*raise the version"):
            one_shard.read(wrong)
    with pytest.raises(JobError, match="version 1 is older than version 2"):
        one_shard.read(of(str, version=1))
    newer = of(repr, samples=5, version=3)
    assert epochs_of(one_shard.read(newer), collate_fn=list) == epochs_of(local(newer), collate_fn=list)


def test_a_flow_in_use_is_not_deleted(one_shard: World) -> None:
    with one_shard.read(mixed()).to_shuffled(4, plain) as shuffled:
        iterator = iter(shuffled)
        next(iterator)
        with pytest.raises(JobError, match=r"test/mixed is (ready|accessed) and cannot be deleted"):
            one_shard.service.call(DELETE_FLOW, FlowRequest(flow="test/mixed"))
    with pytest.raises(JobError, match="no flow 'test/unheard-of'"):
        one_shard.service.call(DELETE_FLOW, FlowRequest(flow="test/unheard-of"))


def test_a_router_that_cannot_start_says_why(own_world: Callable[..., World]) -> None:
    """Not that some call failed, but what the process said as it ended."""
    world = own_world()
    (world.folder / "flows").mkdir(parents=True)
    (world.folder / "flows" / "test--mixed").write_text("a file where a folder should be")
    reader = world.reader(timeout_s=3.0)
    with pytest.raises(ServiceUnreachable, match=r"the router cannot be started: .*File exists"):
        epochs_of(mixed().prepare_read(reader))
