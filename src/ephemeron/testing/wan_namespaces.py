"""Regions in network namespaces of one machine; needs root, Linux and `ip` and `tc`.

    with RegionNamespaces({"east": 100, "west": 10}) as regions:           # Mbit/s of each region's access, in both directions
        subprocess.run([*regions["east"].command, "python", …])
        port = regions.wan.route("east", "west", (regions["west"].address, 7070), host=regions["east"].gateway)
        regions["west"].bytes_received                                     # by the kernel's counter

Each region has one veth device to a namespace between all regions, limited by `tc tbf` at both ends, whose counters count every byte that enters
or leaves the region, headers and retransmissions included. In the namespace between them only the relay of `wan` joins regions, which adds latency, jitter,
loss and blackouts. Nothing listens outside of these namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import TracebackType

from ephemeron.testing.wan import EmulatedWan, WanLink

_CLONE_NEWNET = 0x40000000
_numbers = count(1)


def unavailable() -> str:
    """Why this machine cannot have such namespaces; empty: it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no command {command}; apt-get install iproute2"
    probe = f"ephemeron-wan-probe-{os.getpid()}"
    ran = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "" if ran.returncode == 0 else f"no network namespace can be made: {ran.stderr.strip()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNamespace:
    """The namespace of one region."""

    name: str
    address: str
    """Of the region."""
    gateway: str
    """At which the relay listens for this region."""
    device: str
    """In the namespace between regions."""
    between: str
    """Name of that namespace."""

    @property
    def command(self) -> list[str]:
        """Before a command that is to run in the region."""
        return ["ip", "netns", "exec", self.name]

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left the region, by the kernel's counter."""
        return self._counted("rx_bytes")

    @property
    def bytes_received(self) -> int:
        """Bytes that have entered the region, by the kernel's counter."""
        return self._counted("tx_bytes")

    def _counted(self, counter: str) -> int:
        path = f"/sys/class/net/{self.device}/statistics/{counter}"
        ran = subprocess.run(["ip", "netns", "exec", self.between, "cat", path], capture_output=True, text=True, check=True)
        return int(ran.stdout)


class RegionNamespaces(Mapping[str, RegionNamespace]):
    """See the module.

    Args:
        bandwidth_mbit_s: by region, of its access in each direction; None: not limited.
        default: see `EmulatedWan`.
        routed: regions reach each other's addresses directly, too, with their bandwidth and without the relay.
    """

    def __init__(self, bandwidth_mbit_s: Mapping[str, float | None], *, default: WanLink | None = None, routed: bool = False) -> None:
        self._routed = routed
        self._rates, self._prefix = dict(bandwidth_mbit_s), f"ephw{os.getpid() % 100_000}-{next(_numbers)}"
        self._regions: dict[str, RegionNamespace] = {}
        self._made: list[str] = []
        self.wan = EmulatedWan(default, enter=self._enter)

    def __getitem__(self, name: str) -> RegionNamespace:
        return self._regions[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def __enter__(self) -> RegionNamespaces:
        try:
            self._add(self._prefix)
            if self._routed:
                _ip("netns", "exec", self._prefix, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, (name, rate) in enumerate(self._rates.items(), start=1):
                self._regions[name] = self._region(number, rate)
        except BaseException:
            self._remove()
            raise
        self.wan.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wan.__exit__(kind, error, trace)
        self._remove()

    def _region(self, number: int, rate: float | None) -> RegionNamespace:
        between, inside = self._prefix, f"{self._prefix}-{number}"
        self._add(inside)
        outer, network = f"w{number}", f"10.{77 + number // 250}.{number % 250}"
        _ip("link", "add", outer, "netns", between, "type", "veth", "peer", "name", "wan0", "netns", inside)
        for namespace, device, address in ((between, outer, f"{network}.1"), (inside, "wan0", f"{network}.2")):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            _ip("-n", namespace, "link", "set", device, "up")
            if rate is not None:
                burst = max(32_000, int(rate * 1e6 / 8 * 0.01))
                _run(
                    "tc",
                    "-n",
                    namespace,
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    f"{rate}mbit",
                    "burst",
                    f"{burst}",
                    "latency",
                    "200ms",
                )
        _ip("-n", inside, "route", "add", "default", "via", f"{network}.1")
        return RegionNamespace(name=inside, address=f"{network}.2", gateway=f"{network}.1", device=outer, between=between)

    def _add(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for namespace in reversed(self._made):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        self._made.clear()

    def _enter(self) -> None:
        with open(f"/var/run/netns/{self._prefix}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "the namespace between regions cannot be entered")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(f"{' '.join(command)}: {ran.stderr.strip()}")
