"""The emulated wide-area network: what passes, in which order, how much of it, and when nothing does."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from ephemeron.testing import wan_namespaces
from ephemeron.testing.wan import EmulatedWan, WanLink
from ephemeron.testing.wan_namespaces import RegionNamespaces


class Echo:
    """Sends back what it receives."""

    def __enter__(self) -> Echo:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.listening.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                sock.sendall(data)


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    out = b""
    while len(out) < nbytes:
        part = sock.recv(nbytes - len(out))
        assert part
        out += part
    return out


@pytest.mark.parametrize(
    "link", [WanLink(), WanLink(bandwidth_mbit_s=50, latency_s=0.01, jitter_s=0.02), WanLink(loss=0.2, retransmission_s=0.01)]
)
def test_bytes_arrive_in_order_whatever_the_link(link: WanLink) -> None:
    sent = bytes(range(256)) * 2000
    with Echo() as echo, EmulatedWan(link) as wan:
        port = wan.route("east", "west", echo.address)
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sender = threading.Thread(target=sock.sendall, args=(sent,))
            sender.start()
            assert exactly(sock, len(sent)) == sent
            sender.join()
        assert wan.carried["east", "west"] == wan.carried["west", "east"] == len(sent)


def test_latency_and_bandwidth_are_lower_bounds_in_each_direction() -> None:
    with Echo() as echo, EmulatedWan(WanLink(latency_s=0.05)) as wan:
        wan.link("east", "west", WanLink(bandwidth_mbit_s=8, latency_s=0.1))
        port = wan.route("east", "west", echo.address)
        with socket.create_connection(("127.0.0.1", port)) as sock:
            began = time.monotonic()
            sock.sendall(b"x")
            exactly(sock, 1)
            assert time.monotonic() - began >= 0.15
            began = time.monotonic()
            sock.sendall(bytes(200_000))
            exactly(sock, 200_000)
            assert time.monotonic() - began >= 0.35


def test_nothing_passes_in_a_blackout_and_connections_go_on_after_it() -> None:
    with Echo() as echo, EmulatedWan() as wan:
        port = wan.route("east", "west", echo.address)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(b"before")
            assert exactly(sock, 6) == b"before"
            with wan.blackout("west"):
                sock.sendall(b"within")
                sock.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    sock.recv(6)
            sock.settimeout(10)
            assert exactly(sock, 6) == b"within"
            wan.reset("east")
            with pytest.raises(ConnectionError):
                exactly(sock, 1)


@pytest.mark.slow
@pytest.mark.skipif(bool(wan_namespaces.unavailable()), reason=wan_namespaces.unavailable() or "it is available")
def test_namespaces_limit_and_count_what_regions_exchange() -> None:
    server = (
        "import socket\n"
        "s = socket.create_server(('', 7070)); print('ready', flush=True); c, _ = s.accept(); n = 0\n"
        "while data := c.recv(65536): n += len(data)\n"
        "print(n, flush=True)"
    )
    client = (
        "import socket, sys\n"
        "c = socket.create_connection((sys.argv[1], int(sys.argv[2]))); c.sendall(bytes(500_000)); c.shutdown(1); c.recv(1)"
    )
    with RegionNamespaces({"east": 100.0, "west": 20.0}, default=WanLink(latency_s=0.01)) as regions:
        serving = subprocess.Popen([*regions["west"].command, sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        port = regions.wan.route("east", "west", (regions["west"].address, 7070), host=regions["east"].gateway)
        began = time.monotonic()
        subprocess.run([*regions["east"].command, sys.executable, "-c", client, regions["east"].gateway, str(port)], check=True, timeout=60)
        assert serving.stdout.readline() == "500000\n"
        assert time.monotonic() - began >= 0.1
        serving.wait(10)
        for counted in (regions["east"].bytes_sent, regions["west"].bytes_received):
            assert 500_000 < counted < 600_000
