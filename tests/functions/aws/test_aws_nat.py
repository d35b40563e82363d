"""Direct runs on AWS Lambda without a VPC, as the local service has it: every function is in a network namespace of its own, behind
an address translator (NAT) of its own, and reaches the Runtime API, the store and the rendezvous service, while nothing reaches it.

Without root, functions are on loopback and accept no connection from each other but what the rendezvous service brings about.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")
pytest.importorskip("redis", reason="no cache client; pip install 'ephemeron[cache]'")

from aws_world import deployed, keys

from ephemeron.events import Ended, Event, FaultFired, Invoked, Loaded, Progress
from ephemeron.testing import TrainingWorld
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.testing.nat_network import NatNetwork, unavailable
from ephemeron.testing.training_world import of
from servers import start_valkey, stop
from tiny_job import JOB

pytestmark = pytest.mark.slow

Mapping = Literal["endpoint-independent", "symmetric"]
MEMORY_MB = 704
HERE, SERVICE, FUNCTIONS, INSIDE = "198.51.100.9", "198.51.100.1", "203.0.113.", "169.254.76.1"
"""This process, the rendezvous service, the functions' public addresses, and the address that each has inside, as on Lambda."""
SERVE = "from ephemeron.cli.main import main; main()"


def port_can_be_shared() -> str:
    """Why two sockets cannot have one port, which punching on loopback needs; empty: they can."""
    with socket.socket() as one, socket.socket() as two:
        try:
            for sock in (one, two):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(("127.0.0.1", one.getsockname()[1]))
        except (OSError, AttributeError) as e:
            return str(e)
    return ""


WHY_NO_NAMESPACES = unavailable()
WHY_NOTHING = port_can_be_shared() if WHY_NO_NAMESPACES else ""


@dataclass(kw_only=True)
class Internet:
    """What functions are connected to."""

    mapping: Mapping
    stack: ExitStack
    host: str = "127.0.0.1"
    """Of services that functions reach."""
    network: NatNetwork | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Of every function."""
    rendezvous: subprocess.Popen[str] | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def launcher(self) -> Sequence[str]:
        """Beginning of the command of a function: the namespace of a new host behind a new translator."""
        if self.network is None:
            return ()
        nat = self.network.nat(f"{FUNCTIONS}{next(self._numbers)}", self.mapping)
        return self.network.host(INSIDE, behind=nat).command

    def serve(self) -> None:
        """Starts the rendezvous service."""
        prefix, host = ([], self.host) if self.network is None else (self.network.host(SERVICE).command, SERVICE)
        token = "the service's token"
        self.rendezvous = subprocess.Popen(
            [*prefix, sys.executable, "-c", SERVE, "serve", "rendezvous", "--listen", f"{host}:0", "--allow-remote", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "EPHEMERON_RENDEZVOUS_TOKEN": token},
        )
        self.stack.callback(self.end, signal.SIGKILL)
        assert self.rendezvous.stdout is not None
        address = json.loads(self.rendezvous.stdout.readline())["address"]
        self.variables |= {"EPHEMERON_RENDEZVOUS": address, "EPHEMERON_RENDEZVOUS_TOKEN": token}

    def end(self, number: signal.Signals = signal.SIGTERM) -> dict[str, Any]:
        """Ends the rendezvous service, and returns what it says of itself; nothing if it was killed."""
        assert self.rendezvous is not None
        self.rendezvous.send_signal(number)
        said, _ = self.rendezvous.communicate(timeout=30)
        return json.loads(said) if said else {}

    @property
    def between_functions(self) -> int:
        """Bytes that have gone from function to function."""
        assert self.network is not None
        return sum(n for way, n in self.network.carried.items() if all(a.startswith(FUNCTIONS) for a in way))


@dataclass(kw_only=True)
class World(TrainingWorld):
    """One service whose functions are behind translators."""

    internet: Internet
    service: LambdaService

    def kill(self, rank: int) -> bool:
        """SIGKILL from outside for whatever runs this rank now. Whether there was anything."""
        for environment in self.service.environments():
            if environment.request_id and json.loads(environment.payload).get("rank") == rank:
                os.kill(environment.pid, signal.SIGKILL)
                return True
        return False


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of local functions over a folder, where nothing happens."""
    local = TrainingWorld(platform="local", job=JOB, memory_mb=MEMORY_MB, folder=tmp_path_factory.mktemp("local"))
    sha256 = local.undisturbed[0].summary.weights_sha256
    assert sha256 is not None
    return sha256


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping], World]]:
    if WHY_NOTHING:
        pytest.skip(f"{WHY_NO_NAMESPACES}; {WHY_NOTHING}")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:

        def make(mapping: Mapping) -> World:
            internet = Internet(mapping=mapping, stack=stack)
            if WHY_NO_NAMESPACES:
                internet.variables["EPHEMERON_DIRECT_TRANSPORTS"] = "relay" if mapping == "symmetric" else "punched"
            else:
                internet.network = stack.enter_context(NatNetwork())
                internet.host = internet.network.here(HERE, reaches=[f"{FUNCTIONS}0/24", f"{SERVICE}/32"]).address
                internet.variables["EPHEMERON_DIRECT_HOST"] = "auto"
            internet.serve()
            stack.enter_context(keys())
            addresses = dict.fromkeys(("127.0.0.1", internet.host))
            valkey = start_valkey(tmp_path, "--bind", *addresses, "--protected-mode", "no")
            stack.callback(stop, valkey.process)
            service = LambdaService(concurrency=10, environment=internet.variables, host=internet.host, launcher=internet.launcher)
            stack.enter_context(service)
            settings = deployed(
                service,
                memory_mb=MEMORY_MB,
                timeout_s=600,
                preload="torch,ephemeron.training.worker.loop,ephemeron.training.worker.trainers.torch_trainer",
            )
            store = valkey.address.replace("127.0.0.1", internet.host)
            return World(
                platform="aws",
                job=JOB,
                memory_mb=MEMORY_MB,
                settings=settings,
                service=service,
                internet=internet,
                channels={"direct": f"direct+{store}"},
                folder=tmp_path,
            )

        yield make


def at(iteration: int, act: Callable[[], object]) -> tuple[Callable[[Event], None], list[object]]:
    """A watcher that acts once, when rank 0 has done an iteration; and what the act has returned."""
    done: list[object] = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration >= iteration and not done:
            done.append(act())

    return watch, done


SLOWLY = "delay:rank=1,factor=1,seconds=0.2"
"""So that what happens from outside in the middle of a run comes before its end."""


def resumed(events: list[Any]) -> list[tuple[int, int]]:
    """Rank and iteration of every later attempt, in order."""
    return [(e.rank, e.iteration) for e in of(events, Loaded) if e.attempt]


def test_deaths_and_hand_offs_behind_translators_that_are_punched(make_world: Callable[[Mapping], World], weights: str) -> None:
    world = make_world("endpoint-independent")
    watch, killed = at(2, lambda: world.kill(2))
    faults = (SLOWLY, "kill:rank=0,iteration=30,phase=upload")
    result, events = world.go(on_event=watch, faults=faults, aggregators=0)
    assert result.summary.weights_sha256 == weights, result.causes
    assert killed == [True]
    assert "kill:rank=0,iteration=30,phase=upload" in [e.fault for e in of(events, FaultFired)]
    assert {0, 2} <= {e.rank for e in of(events, Ended) if e.status == "lost"}
    assert {rank for rank, _ in resumed(events)} >= {0, 2}
    assert all(iteration > 0 for _, iteration in resumed(events)), "state of a live function"
    sent = result.summary.traffic.direct_bytes_sent

    how = world.past_lifetimes(events)
    faults = (*how.pop("faults"), "kill:rank=2,iteration=0,phase=load,attempt=1")
    result, events = world.go(faults=faults, aggregators=0, **how)
    assert result.summary.weights_sha256 == weights, result.causes
    assert "kill:rank=2,iteration=0,phase=load,attempt=1" in [e.fault for e in of(events, FaultFired)]
    assert {e.rank for e in of(events, Invoked) if e.reason == "relay"} == set(range(3))
    assert {rank for rank, _ in resumed(events)} == set(range(3))
    sent += result.summary.traffic.direct_bytes_sent
    done = world.internet.end()
    assert done["meetings"] >= 3
    assert done["relayed_bytes"] == 0
    if world.internet.network is not None:
        assert world.internet.between_functions > sent


def test_deaths_behind_symmetric_translators_with_and_without_the_relay(make_world: Callable[[Mapping], World], weights: str) -> None:
    world = make_world("symmetric")
    watch, killed = at(2, lambda: world.kill(2))
    watch_too, served = at(25, world.internet.end)

    def both(event: Event) -> None:
        watch(event)
        watch_too(event)

    faults = (SLOWLY, "kill:rank=0,iteration=35,phase=upload")
    result, events = world.go(on_event=both, faults=faults, aggregators=0)
    assert result.summary.weights_sha256 == weights, result.causes
    assert killed == [True]
    assert "kill:rank=0,iteration=35,phase=upload" in [e.fault for e in of(events, FaultFired)]
    assert {rank for rank, _ in resumed(events)} >= {0, 2}
    [done] = served
    assert isinstance(done, dict)
    assert done["relayed_bytes"] > 0
    sent = result.summary.traffic.direct_bytes_sent
    assert 0 < sent < 2 * done["relayed_bytes"], "what came later went through the store"
    if world.internet.network is not None:
        assert world.internet.between_functions < done["relayed_bytes"] / 2


def test_a_rendezvous_service_that_is_killed_leaves_connections_and_the_store(make_world: Callable[[Mapping], World], weights: str) -> None:
    world = make_world("endpoint-independent")
    watch, killed = at(2, lambda: (world.internet.end(signal.SIGKILL), world.kill(2)))
    result, events = world.go(on_event=watch, faults=(SLOWLY,), aggregators=0)
    assert result.summary.weights_sha256 == weights, result.causes
    assert killed == [({}, True)]
    assert 2 in {rank for rank, _ in resumed(events)}
    if world.internet.network is not None:
        assert world.internet.between_functions > 0
