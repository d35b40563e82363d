"""Members meet through the rendezvous service: by connecting to each other at once, or relayed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rendezvous_world import RUN_TOKEN, SERVICE_TOKEN, TIMEOUT_S, Inbox, Member, members, service

from ephemeron.communication.direct import punching, rendezvous
from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.rendezvous import Rendezvous, ServiceAddress
from ephemeron.communication.direct.rendezvous_protocol import (
    Go,
    Invite,
    Invited,
    MessageSocket,
    Redeem,
    Refused,
    Register,
    Registered,
    group_of,
)
from ephemeron.communication.direct.rendezvous_service import Pace, ServiceLimits
from ephemeron.errors import JobError, TokenRefused

BOTH = ("punched", "relay")


def endpoint(member: Member) -> Endpoint:
    assert member.address is not None
    return Endpoint(rank=0, attempt=0, machine="here", addresses={member.transport.name: member.address})


async def echo(ours: Inbox, theirs: Inbox, nbytes: int = 3_000_000) -> None:
    body = os.urandom(nbytes)
    ours.send(1, body)
    assert await theirs.receive() == (1, body)
    theirs.send(2, body[::-1])
    assert await ours.receive() == (2, body[::-1])


async def control(address: ServiceAddress, *, name: str = "member", run_token: str = RUN_TOKEN) -> MessageSocket:
    """A registered connection to the service, without a `Rendezvous`."""
    channel = await proved(address)
    await channel.send(Register(group=group_of(run_token), name=name))
    assert isinstance(await channel.receive(), Registered)
    return channel


async def proved(address: ServiceAddress, token: str = SERVICE_TOKEN) -> MessageSocket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
    channel = MessageSocket(sock)
    await channel.prove(token, client=True)
    return channel


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 - state of a service that has no events for it
            await asyncio.sleep(0.005)


async def is_closed(sock: socket.socket) -> bool:
    """Whether the service ends the connection; what it says before does not matter."""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass
        except ConnectionError:
            pass
    return True


@pytest.mark.parametrize("purpose", BOTH)
def test_two_members_connect_and_exchange_messages(purpose: str) -> None:
    async def main() -> None:
        async with service() as (serving, address), members(address, purpose, purpose) as (one, two):
            assert one.transport.reaches(endpoint(one), endpoint(two))
            ours, theirs = await one.connect(two)
            assert (ours.connection.transport, ours.connection.dialled) == (purpose, True)
            assert (theirs.connection.transport, theirs.connection.dialled) == (purpose, False)
            await echo(ours, theirs)
            assert serving.statistics().meetings == 1
            assert (serving.statistics().relayed_bytes > 6_000_000) == (purpose == "relay")
            ours.connection.close()
            async with asyncio.timeout(TIMEOUT_S):
                await theirs.closed.wait()
            await echo(*await two.connect(one), 10)

    asyncio.run(main())


def test_many_pairs_of_one_run_meet_at_once() -> None:
    async def main() -> None:
        async with service() as (_, address), members(address, *["punched"] * 6) as all_members:
            pairs = [(a, b) for i, a in enumerate(all_members) for b in all_members[:i]]
            await asyncio.gather(*(a.dial(b) for a, b in pairs))
            async with asyncio.timeout(TIMEOUT_S):
                for _, b in pairs:
                    await b.accepted.get()

    asyncio.run(main())


def test_the_end_that_begins_later_refuses_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tried, bound = asyncio.Event(), punching._bound
        calls = 0

        def counted(family: socket.AddressFamily, port: int) -> socket.socket:
            nonlocal calls
            calls += 1
            if calls == 5:
                tried.set()
            return bound(family, port)

        held = [bound(socket.AF_INET, 0) for _ in range(2)]
        ports = [sock.getsockname()[1] for sock in held]
        monkeypatch.setattr(punching, "_bound", counted)
        early = asyncio.create_task(punching.punch(socket.AF_INET, ports[0], ("127.0.0.1", ports[1])))
        async with asyncio.timeout(TIMEOUT_S):
            await tried.wait()  # refused several times
            late = await punching.punch(socket.AF_INET, ports[1], ("127.0.0.1", ports[0]))
            first = await early
        assert first.getpeername() == late.getsockname()
        first.send(b"x")
        assert await asyncio.get_running_loop().sock_recv(late, 1) == b"x"
        for sock in (first, late, *held):
            sock.close()

    asyncio.run(main())


def test_a_stranger_that_connects_to_the_port_is_not_taken_for_the_other_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        held = punching._bound(socket.AF_INET, 0)
        port = held.getsockname()[1]
        unanswered = socket.create_server(("127.0.0.2", 0))  # an address that is not the stranger's
        theirs = unanswered.getsockname()
        unanswered.close()
        meeting = asyncio.create_task(punching.punch(socket.AF_INET, port, theirs))
        stranger = socket.socket()
        stranger.setblocking(False)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await loop.sock_connect(stranger, ("127.0.0.1", port))
                    break
                except ConnectionError:
                    await asyncio.sleep(0)
        assert await is_closed(stranger)
        assert not meeting.done()
        meeting.cancel()
        await asyncio.gather(meeting, return_exceptions=True)
        held.close()

    asyncio.run(main())


@pytest.mark.parametrize("purpose", BOTH)
def test_runs_of_one_service_do_not_see_each_other(purpose: str) -> None:
    async def main() -> None:
        tokens = [RUN_TOKEN, "another run's token"]
        async with service() as (serving, address), members(address, purpose, purpose, run_tokens=tokens) as (one, two):
            assert serving.statistics().runs == 2
            with pytest.raises(LinkFailed, match="no such member"):
                await one.dial(two)

    asyncio.run(main())


@pytest.mark.parametrize("purpose", BOTH)
def test_members_prove_the_run_s_token_to_each_other_whatever_the_service_does(purpose: str) -> None:
    async def main() -> None:
        async with service() as (serving, address), members(address, purpose) as (one,):
            # A service that brings a stranger into the run: it knows the group, but not the run's token.
            group = next(iter(serving._groups))
            stranger = await proved(address)
            await stranger.send(Register(group=group, name="stranger"))
            await stranger.receive()
            dialling = asyncio.create_task(one.transport.dial(f"stranger@{address}", RUN_TOKEN, timeout_s=TIMEOUT_S))
            invited = await stranger.receive()
            assert isinstance(invited, Invited)
            meeting = type(one.transport)(Rendezvous(address, token=SERVICE_TOKEN))
            met = asyncio.create_task(meeting._met(invited.ticket, "not the run's", dialled=False, timeout_s=TIMEOUT_S))
            with pytest.raises(LinkFailed, match="token"):
                await dialling
            with pytest.raises(LinkFailed, match="token"):
                await met
            stranger.close()

    asyncio.run(main())


def test_a_member_without_the_service_s_token_is_refused() -> None:
    async def main() -> None:
        async with service() as (serving, address):
            async with members(address, "punched", service_token="wrong") as (one,):
                assert serving.statistics().members == 0
                assert not one.transport.reaches(endpoint(one), endpoint(one))
                with pytest.raises(LinkFailed, match="not connected"):
                    await one.transport.dial(one.address, RUN_TOKEN, timeout_s=TIMEOUT_S)
            with pytest.raises(TokenRefused):
                await proved(address, "wrong")

    asyncio.run(main())


def test_punched_connections_outlive_the_service_which_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RETRY_S", (0.01, 0.01))

    async def main() -> None:
        async with service() as (serving, address), members(address, "punched", "punched", "relay", "relay") as four:
            one, two, three, four_ = four
            direct, relayed = await one.connect(two), await three.connect(four_)
            await serving.close()
            async with asyncio.timeout(TIMEOUT_S):
                for end in relayed:
                    await end.closed.wait()
                await until(lambda: not one.transport._rendezvous.connected)
            with pytest.raises(LinkFailed, match="not connected"):
                await one.dial(two)
            await echo(*direct)
            async with service(port=address.port), asyncio.timeout(TIMEOUT_S):
                await until(lambda: one.transport._rendezvous.connected and two.transport._rendezvous.connected)
                await echo(*await one.connect(two))

    asyncio.run(main())


def test_a_lost_service_fails_an_invitation_at_once() -> None:
    async def main() -> None:
        answered = asyncio.Event()

        async def silent(sock: socket.socket) -> None:
            channel = MessageSocket(sock)
            await channel.prove(SERVICE_TOKEN, client=False)
            await channel.receive()
            await channel.send(Registered(host="127.0.0.1", port=1))
            await channel.receive()  # the invitation
            answered.set()
            channel.close()

        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        address = ServiceAddress(*listening.getsockname())
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            sock, _ = await loop.sock_accept(listening)
            await silent(sock)

        serving = asyncio.create_task(serve())
        async with members(address, "punched") as (one,):
            with pytest.raises(LinkFailed, match="lost"):
                await one.transport.dial(f"other@{address}", RUN_TOKEN, timeout_s=TIMEOUT_S)
            assert answered.is_set()
            await serving
        listening.close()

    asyncio.run(main())


Attack = Callable[[ServiceAddress], Coroutine[Any, Any, socket.socket]]


async def garbage(address: ServiceAddress) -> socket.socket:
    sock = socket.create_connection((address.host, address.port))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, os.urandom(5000))
    return sock


async def silence(address: ServiceAddress) -> socket.socket:
    sock = socket.create_connection((address.host, address.port))
    sock.setblocking(False)
    return sock


async def oversized(address: ServiceAddress) -> socket.socket:
    channel = await proved(address)
    await asyncio.get_running_loop().sock_sendall(channel.sock, b"\xff\xff" + bytes(70_000))
    return channel.sock


async def no_message(address: ServiceAddress) -> socket.socket:
    channel = await proved(address)
    await asyncio.get_running_loop().sock_sendall(channel.sock, b"\x00\x02{}")
    return channel.sock


async def nested(address: ServiceAddress) -> socket.socket:
    channel = await control(address)
    text = b"[" * 1000
    await asyncio.get_running_loop().sock_sendall(channel.sock, len(text).to_bytes(2, "big") + text)
    return channel.sock


async def wrong_type(address: ServiceAddress) -> socket.socket:
    channel = await control(address)
    text = b'{"Invite": {"number": "x", "name": "../..", "purpose": "other"}}'
    await asyncio.get_running_loop().sock_sendall(channel.sock, len(text).to_bytes(2, "big") + text)
    return channel.sock


async def out_of_order(address: ServiceAddress) -> socket.socket:
    channel = await control(address)
    await channel.send(Redeem(ticket="0" * 32))
    return channel.sock


async def invented_ticket(address: ServiceAddress) -> socket.socket:
    channel = await proved(address)
    await channel.send(Redeem(ticket="0" * 32))
    return channel.sock


async def idle(address: ServiceAddress) -> socket.socket:
    return (await control(address)).sock


ATTACKS: list[Attack] = [garbage, silence, oversized, no_message, nested, wrong_type, out_of_order, invented_ticket, idle]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_what_comes_in_ends_its_own_connection_only(attack: Attack, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        limits = {silence: ServiceLimits(proof_s=2.0), idle: ServiceLimits(idle_s=0.5)}.get(attack, ServiceLimits())
        async with service(limits=limits) as (serving, address):
            sock = await attack(address)
            assert await is_closed(sock)
            sock.close()
            if attack is idle:
                return await until(lambda: serving.statistics().members == 0)
            async with members(address, "relay", "punched", "punched") as (_, two, three):
                await echo(*await two.connect(three), 100)
            assert serving._unproved.count == 0

    asyncio.run(main())
    assert not [r for r in caplog.records if r.name == "asyncio"]


def test_strangers_that_never_prove_the_token_do_not_pile_up() -> None:
    async def main() -> None:
        async with service(limits=ServiceLimits(unproved=3)) as (serving, address):
            waiting = [await silence(address) for _ in range(3)]
            await until(lambda: serving._unproved.count == 3)
            member = await control(address)  # the oldest stranger goes for it
            assert await is_closed(waiting[0])
            assert serving._unproved.count == 2
            for sock in waiting:
                sock.close()
            await until(lambda: not serving._unproved.count)
            member.close()

    asyncio.run(main())


def test_runs_members_and_tickets_are_limited() -> None:
    async def main() -> None:
        async with service(limits=ServiceLimits(runs=1, members=2, tickets=2)) as (serving, address):
            first, second = await control(address, name="a"), await control(address, name="b")
            for name, token, why in (("c", RUN_TOKEN, "2 members"), ("a", "another run's", "1 runs")):
                channel = await proved(address)
                await channel.send(Register(group=group_of(token), name=name))
                answer = await channel.receive()
                assert isinstance(answer, Refused)
                assert why in answer.why
                channel.close()
            await first.send(Invite(number=1, name="b", purpose="relay", timeout_s=5))
            assert isinstance(await first.receive(), Invited)
            assert isinstance(await second.receive(), Invited)
            await first.send(Invite(number=2, name="b", purpose="relay", timeout_s=5))
            answer = await first.receive()
            assert isinstance(answer, Refused)
            assert "2 tickets" in answer.why
            first.close()
            second.close()
            await until(lambda: not (serving.statistics().runs))

    asyncio.run(main())


def test_tickets_are_redeemed_once_and_expire() -> None:
    async def main() -> None:
        async with service() as (serving, address):
            first, second = await control(address, name="a"), await control(address, name="b")
            await first.send(Invite(number=7, name="b", purpose="punched", timeout_s=5))
            ours, theirs = await first.receive(), await second.receive()
            assert isinstance(ours, Invited)
            assert isinstance(theirs, Invited)
            assert (ours.number, theirs.number, ours.name, theirs.name) == (7, 0, "b", "a")
            one = await proved(address)
            await one.send(Redeem(ticket=ours.ticket))
            again = await proved(address)
            await until(lambda: ours.ticket not in serving._tickets)
            await again.send(Redeem(ticket=ours.ticket))
            assert await is_closed(again.sock)
            serving.limits = ServiceLimits(ticket_s=0.3)  # from here on
            two = await proved(address)
            await two.send(Redeem(ticket=theirs.ticket))
            here, there = await one.receive(), await two.receive()
            assert isinstance(here, Go)
            assert isinstance(there, Go)
            assert (here.host, here.port) == two.sock.getsockname()
            assert (there.host, there.port) == one.sock.getsockname()
            assert await is_closed(one.sock)  # the time for the meeting is over
            await first.send(Invite(number=8, name="b", purpose="punched", timeout_s=5))
            late = await first.receive()
            assert isinstance(late, Invited)
            await until(lambda: late.ticket not in serving._tickets)
            for channel in (first, second, one, two, again):
                channel.close()

    asyncio.run(main())


def test_a_member_s_invitations_are_paced() -> None:
    pace = Pace(rate=20.0, burst=2, now=100.0)
    assert [pace.take(100.0) for _ in range(4)] == pytest.approx([0.0, 0.0, 0.05, 0.1])
    assert pace.take(101.0) == 0.0
    assert pace.take(101.0) == 0.0
    assert pace.take(101.0) == pytest.approx(0.05)

    async def main() -> None:
        async with service(limits=ServiceLimits(burst=1, invitations_s=1000.0)) as (_, address):
            channel = await control(address)
            for number in range(1, 8):
                await channel.send(Invite(number=number, name="absent", purpose="relay", timeout_s=5))
            for number in range(1, 8):
                answer = await channel.receive()
                assert isinstance(answer, Refused)
                assert answer.number == number
            channel.close()

    asyncio.run(main())


def test_a_member_that_registers_again_replaces_itself() -> None:
    async def main() -> None:
        async with service() as (serving, address):
            first = await control(address, name="a")
            second = await control(address, name="a")
            assert await is_closed(first.sock)
            assert serving.statistics().members == 1
            await second.send(Invite(number=1, name="a", purpose="relay", timeout_s=5))
            assert isinstance(await second.receive(), Refused)
            second.close()

    asyncio.run(main())


def test_relayed_bytes_are_limited() -> None:
    async def main() -> None:
        limits = ServiceLimits(relayed_bytes=100_000)
        async with service(limits=limits) as (_, address), members(address, "relay", "relay") as (one, two):
            ours, theirs = await one.connect(two)
            ours.send(1, bytes(1_000_000))
            async with asyncio.timeout(TIMEOUT_S):
                await ours.closed.wait()
                await theirs.closed.wait()
            with pytest.raises(LinkFailed, match="relayed already"):
                await one.dial(two)

    asyncio.run(main())


def test_idle_relayed_connections_end() -> None:
    async def main() -> None:
        limits = ServiceLimits(idle_s=0.5)
        async with service(limits=limits) as (serving, address), members(address, "relay", "relay") as (one, two):
            ours, _ = await one.connect(two)
            async with asyncio.timeout(TIMEOUT_S):
                await ours.closed.wait()
            await until(lambda: serving.statistics().relayed_pairs == 0)

    asyncio.run(main())


@pytest.mark.parametrize("purpose", BOTH)
def test_the_service_over_tls(purpose: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tls_world = pytest.importorskip("tls_world", reason="no maker of certificates; pip install cryptography")
    from ephemeron.communication.direct.tls_socket import server_context

    authority = tls_world.Authority(tmp_path)
    certificate = authority.certificate("127.0.0.1")
    context = server_context(certificate.chain, certificate.key)
    monkeypatch.delenv("EPHEMERON_CHANNEL_CA", raising=False)

    async def trusted() -> None:
        async with service(tls=context) as (_, address), members(address, purpose, purpose) as (one, two):
            assert str(address).startswith("tls://")
            await echo(*await one.connect(two))

    async def untrusted() -> None:
        async with service(tls=context) as (serving, address), members(address, purpose) as (one,):
            assert not one.transport._rendezvous.connected
            assert serving.statistics().members == 0

    asyncio.run(untrusted())
    monkeypatch.setenv("EPHEMERON_CHANNEL_CA", authority.pem)
    asyncio.run(trusted())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:7071", ServiceAddress("host", 7071)),
        ("tls://host.example:1", ServiceAddress("host.example", 1, True)),
        ("[::1]:80", ServiceAddress("::1", 80)),
    ],
)
def test_addresses(text: str, address: ServiceAddress) -> None:
    assert ServiceAddress.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:70000", "http://host:80", ":80"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(JobError, match="EPHEMERON_RENDEZVOUS"):
        ServiceAddress.parse(text)
