"""Both ends of the echo that `rpc` measures, each a process of its own: ours, gRPC's, and a loop in C.

    python -m benchmarks.rpc_peers server WAY SOCKET MEMORY             prints its port, and serves
    python -m benchmarks.rpc_peers client WAY TRANSPORT PAYLOAD WHERE MEMORY

For each line of its input that is a number, a client prints the seconds of that many echoes. Ways: `views` and
`copies` (blocking interface), `asyncio`, `grpc`. Memory: `plain`, or `kept` for a process that has called `keep_freed`.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import SEED
from ephemeron.communication.rpc import BlockingClient, BlockingServer, Client, Options, Receive, Server, keep_freed

OBJECTS, NBYTES = 5, 500_000
_TOKEN = "a benchmark on loopback"
_KEPT_BYTES = 64 << 20
_GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
ECHO_C = r"""
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static void full(int s, char *at, size_t n, int out) {
    while (n) {
        ssize_t k = out ? send(s, at, n, MSG_NOSIGNAL) : recv(s, at, n, MSG_WAITALL);
        if (k <= 0) exit(0);
        at += k; n -= (size_t)k;
    }
}

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

/* server N PATH: prints its port; echoes whole messages of N bytes, one connection after the other.
   client N PATH|PORT: for each line of input that is a number, prints the seconds of that many echoes. */
int main(int argc, char **argv) {
    size_t n = strtoul(argv[2], 0, 10);
    char *data = malloc(n), line[64];
    memset(data, 7, n);
    int unix_socket = argv[3][0] == '/', one = 1;
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    if (unix_socket) strncpy(un.sun_path, argv[3], sizeof un.sun_path - 1);
    int s = socket(unix_socket ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    struct sockaddr *address = unix_socket ? (struct sockaddr *)&un : (struct sockaddr *)&in;
    socklen_t length = unix_socket ? sizeof un : sizeof in;
    if (argv[1][0] == 's') {
        if (bind(s, address, length) || listen(s, 8) || (!unix_socket && getsockname(s, address, &length))) return 1;
        printf("%d\n", unix_socket ? 0 : ntohs(in.sin_port)); fflush(stdout);
        int c = accept(s, 0, 0);
        setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        for (;;) { full(c, data, n, 0); full(c, data, n, 1); }
    }
    in.sin_port = htons(unix_socket ? 0 : atoi(argv[3]));
    if (connect(s, address, length)) return 1;
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (fgets(line, sizeof line, stdin)) {
        for (int i = atoi(line); i > 0; i--) {
            double begun = now();
            full(s, data, n, 1); full(s, data, n, 0);
            printf("%.9f ", now() - begun);
        }
        printf("\n"); fflush(stdout);
    }
    return 0;
}
"""


def build_echo(folder: Path) -> Path:
    """Compiles the loop in C.

    Raises:
        OSError, subprocess.CalledProcessError: no compiler, or it fails.
    """
    source, program = folder / "echo.c", folder / "echo"
    source.write_text(ECHO_C)
    subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True, capture_output=True)
    return program


def serve(way: str, path: str) -> None:
    """Listens, prints the port, and serves until its input ends."""
    if way == "asyncio":
        asyncio.run(_serve_asyncio(path))
    elif way == "grpc":
        _serve_grpc()
    else:
        with BlockingServer(
            lambda method, params, buffers: (params, buffers),
            objects=lambda method, value: value,
            token=_TOKEN,
            options=Options(receive=Receive(way)),
        ) as server:
            _, port = server.listen_tcp()
            server.listen_unix(path)
            _announce(port)


async def _serve_asyncio(path: str) -> None:
    async def plain(method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        return params, buffers

    async def objects(method: str, value: Any) -> Any:
        return value

    server = Server(plain, objects=objects, token=_TOKEN)
    _, port = await server.listen_tcp()
    await server.listen_unix(path)
    await asyncio.get_running_loop().run_in_executor(None, _announce, port)


def _serve_grpc() -> None:
    import grpc

    echo = grpc.unary_unary_rpc_method_handler(
        lambda request, context: request,
        request_deserializer=pickle.loads,
        response_serializer=lambda value: pickle.dumps(value, protocol=5),
    )
    server = grpc.server(futures.ThreadPoolExecutor(4), options=_GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _announce(port)


def _announce(port: int) -> None:
    print(port, flush=True)
    sys.stdin.read()


def call(way: str, transport: str, payload: str, where: str) -> None:
    """Connects, checks one echo, and then times as many as its input asks for."""
    blobs = [np.random.default_rng(SEED).bytes(NBYTES) for _ in range(OBJECTS)]
    value = blobs if payload == "bytes" else [np.frombuffer(blob, np.float32).copy() for blob in blobs]
    if way == "asyncio":
        asyncio.run(_call_asyncio(value, transport, where))
    elif way == "grpc":
        _call_grpc(value, where)
    else:
        client = _dial(BlockingClient, transport, where)
        assert client.transport == transport
        _time(lambda: client.call_object("echo", value, receive=Receive(way)), value, Receive(way))


def _dial(kind: Any, transport: str, where: str) -> Any:
    if transport == "tcp":
        return kind.connect_tcp("127.0.0.1", int(where), token=_TOKEN)
    return (kind.connect_unix if transport == "unix" else kind.connect_shared)(where, token=_TOKEN)


async def _call_asyncio(value: list[Any], transport: str, where: str) -> None:
    client = await _dial(Client, transport, where)

    async def echo() -> list[Any]:
        return await client.call_object("echo", value, receive=Receive.VIEWS)

    _check(await echo(), value, Receive.VIEWS)
    for line in sys.stdin:
        print(*[await _seconds_later(echo) for _ in range(int(line))], flush=True)


def _call_grpc(value: list[Any], where: str) -> None:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{where}", options=_GRPC_OPTIONS) as channel:
        echo = channel.unary_unary(
            "/Echo/echo", request_serializer=lambda value: pickle.dumps(value, protocol=5), response_deserializer=pickle.loads
        )
        _time(lambda: echo(value), value, Receive.COPIES)


def _time(echo: Callable[[], list[Any]], value: list[Any], receive: Receive) -> None:
    _check(echo(), value, receive)
    for line in sys.stdin:
        print(*[_seconds(echo) for _ in range(int(line))], flush=True)


def _seconds(echo: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    echo()
    return time.perf_counter() - begun


async def _seconds_later(echo: Callable[[], Awaitable[Any]]) -> float:
    begun = time.perf_counter()
    await echo()
    return time.perf_counter() - begun


def _check(back: list[Any], sent: list[Any], receive: Receive) -> None:
    kind = memoryview if receive is Receive.VIEWS and isinstance(sent[0], bytes) else type(sent[0])
    assert all(type(a) is kind and bytes(a) == bytes(b) for a, b in zip(back, sent, strict=True))


if __name__ == "__main__":
    role, *words, memory = sys.argv[1:]
    if memory == "kept":
        keep_freed(_KEPT_BYTES)
    (serve if role == "server" else call)(*words)
