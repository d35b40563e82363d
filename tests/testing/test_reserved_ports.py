"""Ports that are kept for servers that begin later."""

from __future__ import annotations

import socket
import sys

import pytest

from ephemeron.testing._emulation.service import ReservedPort


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_a_reserved_port_is_its_servers_alone_before_between_and_after_them() -> None:
    reserved = ReservedPort()
    address = ("127.0.0.1", reserved.number)
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.create_server(address), socket.create_connection(address) as connected:
            assert connected.getpeername() == address
    reserved.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection to the server has just ended
        other.bind(address)
