"""A small internet of network namespaces behind address translators (NAT), in one process; needs root and Linux.

    with NatNetwork() as network:
        server = network.host("198.51.100.1")                                   # a public address
        member = network.host("10.0.0.2", behind=network.nat("203.0.113.1"))    # like a Lambda function without a VPC
        subprocess.run([*member.command, "curl", "http://198.51.100.1"])

Every host is a network namespace whose only device, apart from loopback, is a TUN device; this process receives what the
kernels of all hosts send, translates addresses, and passes it on. So the TCP is the kernel's, and the translators behave as
they are told (RFC 4787), whatever tools a machine has:

    mapping      "endpoint-independent": one public port for a local port, whatever it connects to ("cone")
                 "symmetric": another public port for every destination
    filtering    only what answers a connection from inside is let in (address- and port-dependent)
    refusing     whether other packets are answered by a reset, as by some translators, or dropped

TCP and UDP over IPv4. Translations do not expire, and nothing is delayed or lost. About 20 microseconds for a packet.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import select
import shutil
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 16_000
_TCP, _UDP = 6, 17
_FLAGS = {"fin": 1, "syn": 2, "rst": 4, "ack": 16}
_names = count(1)

Address = tuple[bytes, int]
"""IPv4 address and port."""


def unavailable() -> str:
    """Why this machine cannot have such a network; empty: it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    if shutil.which("ip") is None:
        return "there is no command ip; apt-get install iproute2"
    probe = f"ephemeron-probe-{os.getpid()}"
    ran = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        ran = subprocess.run(["ip", "netns", "del", probe], capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else f"no network namespace can be made: {ran.stderr.strip()}"


class _Flow(NamedTuple):
    protocol: int
    source: Address
    target: Address


@dataclass
class Nat:
    """A translator. Made by `NatNetwork.nat`. `mapping` may be changed: that of present flows stays."""

    public: str
    mapping: Literal["endpoint-independent", "symmetric"] = "endpoint-independent"
    refusing: bool = False
    refused: int = 0
    """Packets from outside that were not let in."""
    _ports: dict[tuple[int, Address, Address | None], int] = field(default_factory=dict)
    _mapped: dict[tuple[int, int], tuple[Address, set[Address]]] = field(default_factory=dict)
    """By protocol and public port: the inner address, and the outer ones that it has sent to."""

    def outward(self, flow: _Flow) -> Address:
        """Public address of a flow from inside."""
        flow_key: tuple[int, Address, Address | None] = (flow.protocol, flow.source, flow.target)
        symmetric = self.mapping == "symmetric" or flow_key in self._ports
        key = flow_key if symmetric else (flow.protocol, flow.source, None)
        port = self._ports.get(key)
        if port is None:
            port = self._ports[key] = 20_000 + len(self._ports) * 7 % 40_000
            self._mapped[flow.protocol, port] = (flow.source, set())
        self._mapped[flow.protocol, port][1].add(flow.target)
        return ipaddress.IPv4Address(self.public).packed, port

    def inward(self, flow: _Flow) -> Address | None:
        """Inner address of a flow from outside; None: it is not let in."""
        inner, sent_to = self._mapped.get((flow.protocol, flow.target[1]), (None, set()))
        if inner is None or flow.source not in sent_to:
            self.refused += 1
            return None
        return inner


@dataclass(frozen=True)
class Host:
    """A network namespace. Made by `NatNetwork.host`."""

    address: str
    namespace: str
    """Empty: that of this process."""
    nat: Nat | None

    @property
    def command(self) -> list[str]:
        """Prefix of a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


class NatNetwork:
    """See the module. A context manager; ends all processes on its hosts when the context is left."""

    def __init__(self) -> None:
        self.nats: list[Nat] = []
        self.carried: Counter[tuple[str, str]] = Counter()
        """Bytes of packets from one public address that were delivered to another one."""
        self._hosts: dict[int, Host] = {}
        """By the handle of their device."""
        self._at: dict[bytes, tuple[int, Host]] = {}
        """Public hosts, by address."""
        self._inside: dict[tuple[int, bytes], int] = {}
        """Handles of hosts behind a translator, by the translator's identity and the inner address."""
        self._by_public: dict[bytes, Nat] = {}
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, name="nat-network", daemon=True)

    def nat(
        self, public: str, mapping: Literal["endpoint-independent", "symmetric"] = "endpoint-independent", *, refusing: bool = False
    ) -> Nat:
        """A translator with a public address."""
        nat = Nat(public, mapping, refusing)
        self._by_public[ipaddress.IPv4Address(public).packed] = nat
        self.nats.append(nat)
        return nat

    def host(self, address: str, *, behind: Nat | None = None) -> Host:
        """A host in a namespace of its own, with an address of the internet or of the network behind a translator."""
        namespace = f"ephemeron-{os.getpid()}-{next(_names)}"
        _ip("netns", "add", namespace)
        host = Host(address, namespace, behind)
        self._attach(host, ("default",))
        return host

    def here(self, address: str, *, reaches: Sequence[str]) -> Host:
        """This process's own namespace as a host.

        Args:
            address: of the internet.
            reaches: networks that are reached through it, such as `203.0.113.0/24`.
        """
        host = Host(address, "", None)
        self._attach(host, reaches)
        return host

    def __enter__(self) -> NatNetwork:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.write(self._woken, b"x")
        self._thread.join()
        for handle, host in self._hosts.items():
            os.close(handle)  # the device ends with it
            if host.namespace:
                found = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False)
                for pid in found.stdout.split():
                    subprocess.run(["kill", "-KILL", pid], capture_output=True, check=False)
                subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        os.close(self._wake)
        os.close(self._woken)

    def _attach(self, host: Host, routes: Sequence[str]) -> None:
        device = f"eph{os.getpid() % 100_000}n{next(_names)}"
        handle = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        inside = ["-n", host.namespace] if host.namespace else []
        if host.namespace:
            _ip("link", "set", device, "netns", host.namespace)
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "address", "add", f"{host.address}/32", "dev", device)
        _ip(*inside, "link", "set", device, "mtu", str(_MTU), "up")
        for route in routes:
            _ip(*inside, "route", "add", route, "dev", device, "src", host.address)
        packed = ipaddress.IPv4Address(host.address).packed
        if host.nat is None:
            self._at[packed] = (handle, host)
        else:
            self._inside[id(host.nat), packed] = handle
        self._hosts[handle] = host
        os.write(self._woken, b".")

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake, *self._hosts], [], [])
            for handle in ready:
                if handle == self._wake:
                    if b"x" in os.read(self._wake, 64):
                        return
                    continue
                for _ in range(64):
                    try:
                        packet = bytearray(os.read(handle, _MTU + 64))
                    except BlockingIOError:
                        break
                    self._pass_on(packet, self._hosts[handle])

    def _pass_on(self, packet: bytearray, sender: Host) -> None:
        if packet[0] >> 4 != 4 or packet[9] not in (_TCP, _UDP):
            return
        flow = _flow(packet)
        if sender.nat is not None:
            public = sender.nat.outward(flow)
            _rewrite(packet, flow, source=public)
            flow = flow._replace(source=public)
        nat = self._by_public.get(flow.target[0])
        if nat is None:
            handle, _ = self._at.get(flow.target[0], (-1, None))
        else:
            inner = nat.inward(flow)
            if inner is None:
                if nat.refusing and flow.protocol == _TCP and not packet[_start(packet) + 13] & _FLAGS["rst"]:
                    self._answer_with_reset(packet, flow)
                return
            _rewrite(packet, flow, target=inner)
            handle = self._inside.get((id(nat), inner[0]), -1)
        if handle >= 0:
            self.carried[_text(flow.source[0]), _text(flow.target[0])] += len(packet)
        _write(handle, packet)

    def _answer_with_reset(self, packet: bytearray, flow: _Flow) -> None:
        start = _start(packet)
        (number,) = struct.unpack_from("!I", packet, start + 4)
        tcp = struct.pack(
            "!HHIIBBHHH", flow.target[1], flow.source[1], 0, (number + 1) & 0xFFFFFFFF, 5 << 4, _FLAGS["rst"] | _FLAGS["ack"], 0, 0, 0
        )
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0, 64, _TCP, 0, flow.target[0], flow.source[0])
        pseudo = flow.target[0] + flow.source[0] + struct.pack("!BBH", 0, _TCP, len(tcp))
        reset = bytearray(ip + tcp)
        struct.pack_into("!H", reset, 10, _sum(ip))
        struct.pack_into("!H", reset, 36, _sum(pseudo + tcp))
        nat = self._by_public.get(flow.source[0])
        if nat is not None:
            inner = nat._mapped[_TCP, flow.source[1]][0]
            _rewrite(reset, _flow(reset), target=inner)
            _write(self._inside.get((id(nat), inner[0]), -1), reset)
        else:
            _write(self._at.get(flow.source[0], (-1, None))[0], reset)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _write(handle: int, packet: bytearray) -> None:
    if handle >= 0:
        try:
            os.write(handle, packet)
        except OSError:
            pass  # the device is down, or its queue is full: TCP sends it again


def _text(address: bytes) -> str:
    return ".".join(map(str, address))


def _start(packet: bytearray) -> int:
    return int(packet[0] & 15) * 4


def _flow(packet: bytearray) -> _Flow:
    source, target = struct.unpack_from("!HH", packet, _start(packet))
    return _Flow(packet[9], (bytes(packet[12:16]), source), (bytes(packet[16:20]), target))


def _rewrite(packet: bytearray, flow: _Flow, *, source: Address | None = None, target: Address | None = None) -> None:
    """Replaces an address; both checksums are updated by the difference (RFC 1624)."""
    start = _start(packet)
    checksum_at = start + (16 if flow.protocol == _TCP else 6)
    for new, old, address_at, port_at in ((source, flow.source, 12, start), (target, flow.target, 16, start + 2)):
        if new is None:
            continue
        address, port = _words(old[0]) - _words(new[0]), old[1] - new[1]
        packet[address_at : address_at + 4] = new[0]
        struct.pack_into("!H", packet, port_at, new[1])
        _adjust(packet, 10, address)
        if flow.protocol == _TCP or packet[checksum_at : checksum_at + 2] != b"\0\0":
            _adjust(packet, checksum_at, address + port)


def _words(address: bytes) -> int:
    high, low = struct.unpack("!HH", address)
    return int(high + low)


def _adjust(packet: bytearray, at: int, difference: int) -> None:
    (old,) = struct.unpack_from("!H", packet, at)
    struct.pack_into("!H", packet, at, (old + difference) % 0xFFFF or 0xFFFF)


def _sum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
