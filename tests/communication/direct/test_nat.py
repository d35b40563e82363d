"""Members of a run in network namespaces behind translators: which transport connects them, and what stays when the service ends."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest

from ephemeron.testing.nat_network import Host, NatNetwork, unavailable

WHY_NOT = unavailable()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.slow]
TIMEOUT_S = 120
SERVICE = "198.51.100.1"
NBYTES = 2_000_000
Behaviour = Literal["endpoint-independent", "symmetric"]


class Process:
    """A process on a host, with the lines that it prints."""

    def __init__(self, host: Host, command: list[str], variables: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            [*host.command, sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._seen: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def event(self, **wanted: object) -> dict[str, Any]:
        """The next event with these values, which is then not found again."""
        return self._next(lambda event: wanted.items() <= event.items())

    def named(self, name: str) -> Any:
        """Value of the next event that has one of this name."""
        return self._next(lambda event: name in event)[name]

    def _next(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            for event in self._seen:
                if fits(event):
                    self._seen.remove(event)
                    return event
            event = self._lines.get(timeout=TIMEOUT_S)
            assert event is not None, f"the process has ended after {self._seen}"
            self._seen.append(event)

    def tell(self, **command: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command) + "\n")
        self.popen.stdin.flush()

    def ask(self, **command: object) -> dict[str, Any]:
        """The event that answers a command."""
        self.tell(**command)
        return self.event(**command)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


class Internet:
    """A service with a public address, and members behind translators."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.network = stack.enter_context(NatNetwork())
        self.server = self.network.host(SERVICE)
        self.variables = {"EPHEMERON_RENDEZVOUS": f"{SERVICE}:7071", "EPHEMERON_RENDEZVOUS_TOKEN": "the service's"}
        self.service = self.serve()

    def serve(self) -> Process:
        words = ["serve", "rendezvous", "--listen", f"{SERVICE}:7071", "--allow-remote", "--json"]
        started = self._start(self.server, ["-c", "from ephemeron.cli.main import main; main()", *words])
        assert started.named("address") == f"{SERVICE}:7071"
        return started

    def member(self, host: Host, rank: int, ranks: int = 2) -> Process:
        script = str(Path(__file__).with_name("nat_member.py"))
        member = self._start(host, [script, f"file://{self.folder}", str(rank), str(ranks)])
        member.event(joined=rank)
        return member

    def _start(self, host: Host, command: list[str]) -> Process:
        process = Process(host, command, self.variables)
        self.stack.callback(process.kill)
        return process


@pytest.fixture
def internet(tmp_path: Path) -> Iterator[Internet]:
    with ExitStack() as stack:
        yield Internet(stack, tmp_path)


def exchange(one: Process, two: Process, ranks: tuple[int, int] = (0, 1)) -> None:
    """Two members send to each other."""
    for sender, receiver, rank, target in ((one, two, *ranks), (two, one, *reversed(ranks))):
        sender.tell(send=target, nbytes=NBYTES)
        assert sender.named("sent") is True
        receiver.event(received=rank, digest=hashlib.sha256(bytes([rank]) * NBYTES).hexdigest())


@pytest.mark.parametrize("refusing", [False, True], ids=["dropping", "refusing"])
@pytest.mark.parametrize(
    ("mappings", "transport"),
    [
        (("endpoint-independent", "endpoint-independent"), "punched"),
        (("endpoint-independent", None), "punched"),
        (("symmetric", "symmetric"), "relay"),
        (("symmetric", "endpoint-independent"), "relay"),
    ],
    ids=["both-cone", "one-public", "both-symmetric", "one-symmetric"],
)
def test_how_two_members_are_connected(internet: Internet, mappings: tuple[Behaviour | None, ...], transport: str, refusing: bool) -> None:
    hosts = [
        internet.network.host(f"203.0.113.{7 + i}")
        if mapping is None
        else internet.network.host("10.0.0.2", behind=internet.network.nat(f"203.0.113.{7 + i}", mapping, refusing=refusing))
        for i, mapping in enumerate(mappings)
    ]
    one = internet.member(hosts[0], 0)
    two = internet.member(hosts[1], 1)
    two.event(connected=0, transport=transport)
    one.event(connected=1, transport=transport)
    exchange(one, two)


def test_a_relayed_pair_is_punched_once_its_translators_allow_that(internet: Internet) -> None:
    nats = [internet.network.nat(f"203.0.113.{7 + i}", "symmetric") for i in range(2)]
    members = [internet.member(internet.network.host("10.0.0.2", behind=nat), i) for i, nat in enumerate(nats)]
    members[1].event(connected=0, transport="relay")
    members[0].event(connected=1, transport="relay")
    for nat in nats:
        nat.mapping = "endpoint-independent"
    end = time.monotonic() + 2 * TIMEOUT_S
    for rank, member in enumerate(members):
        while member.ask(transport_of=1 - rank)["transport"] != "punched":
            assert time.monotonic() < end, "the pair is still relayed"
            exchange(*members)
            time.sleep(0.2)
    done = internet.network.carried["203.0.113.7", "203.0.113.8"]
    exchange(*members)
    assert internet.network.carried["203.0.113.7", "203.0.113.8"] > done + NBYTES


def test_two_members_behind_one_translator(internet: Internet) -> None:
    nat = internet.network.nat("203.0.113.7")
    one = internet.member(internet.network.host("10.0.0.2", behind=nat), 0)
    two = internet.member(internet.network.host("10.0.0.3", behind=nat), 1)
    two.event(connected=0, transport="punched")
    one.event(connected=1, transport="punched")
    exchange(one, two)


def test_punched_connections_outlive_the_service_and_others_wait_for_it(internet: Internet) -> None:
    def host(number: int) -> Host:
        nat = internet.network.nat(f"203.0.113.{number}")
        return internet.network.host("10.0.0.2", behind=nat)

    one, two = internet.member(host(7), 0, 3), internet.member(host(8), 1, 3)
    two.event(connected=0, transport="punched")
    one.event(connected=1, transport="punched")
    internet.service.kill()
    exchange(one, two)
    three = internet.member(host(9), 2, 3)
    three.tell(send=0, nbytes=1)
    assert three.named("sent") is False  # the caller uses the store
    exchange(one, two)
    internet.serve()
    three.event(connected=0, transport="punched")
    three.event(connected=1, transport="punched")
    exchange(three, one, (2, 0))
