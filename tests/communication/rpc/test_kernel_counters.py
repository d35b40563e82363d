"""Counters of TCP connections: what was sent and received, also through a socket whose bytes travel over another one."""

from __future__ import annotations

import socket

import pytest

from ephemeron.communication.rpc.frame_socket import carry, kernel_bytes


def test_bytes_of_a_connection_are_counted_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            if kernel_bytes(one) is None:
                pytest.skip("no counters of TCP connections: Linux 4.19 and later have them")
            one.sendall(b"x" * 1000)
            assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
            assert kernel_bytes(one) == (1000, 0)
            assert kernel_bytes(other) == (0, 1000)
            plain, theirs = socket.socketpair()
            with plain, theirs:
                assert kernel_bytes(plain) is None
                carry(plain, one)
                assert kernel_bytes(plain) == (1000, 0)
        assert kernel_bytes(other) is None
