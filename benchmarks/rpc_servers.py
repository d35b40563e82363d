"""Echo servers to measure against, each a process of its own: ours, gRPC's, and a loop in C.

`python -m benchmarks.rpc_servers KIND SOCKET` prints `PORT` when it listens and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import ROOT
from ephemeron.rpc import BlockingServer, Options, Receive, Server, keep_freed

TOKEN = "a benchmark on loopback"
KEPT_BYTES = 64 << 20
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


@contextmanager
def serving(*command: str) -> Iterator[int]:
    """A server for as long as the block lasts; gives its port."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def python_server(kind: str, path: Path, *, kept: bool) -> tuple[str, ...]:
    """The command of a server in Python."""
    return (sys.executable, "-m", "benchmarks.rpc_servers", kind, str(path), "kept" if kept else "plain")


def build_echo(folder: Path) -> Path:
    """Compiles the loop in C.

    Raises:
        OSError, subprocess.CalledProcessError: no compiler, or it fails.
    """
    source, program = folder / "echo.c", folder / "echo"
    source.write_text(ECHO_C)
    subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True, capture_output=True)
    return program


def _blocking(path: str, receive: Receive) -> None:
    options = Options(receive=receive)
    with BlockingServer(
        lambda method, params, buffers: (params, buffers), objects=lambda _, v: v, token=TOKEN, options=options
    ) as server:
        _, port = server.listen_tcp()
        server.listen_unix(path)
        print(port, flush=True)
        sys.stdin.read()


async def _asyncio(path: str) -> None:
    async def plain(method, params, buffers):
        return params, buffers

    async def objects(method, value):
        return value

    server = Server(plain, objects=objects, token=TOKEN, options=Options(receive=Receive.VIEWS))
    _, port = await server.listen_tcp()
    await server.listen_unix(path)
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _grpc() -> None:
    import grpc

    echo = grpc.unary_unary_rpc_method_handler(
        lambda request, context: request,
        request_deserializer=pickle.loads,
        response_serializer=lambda value: pickle.dumps(value, protocol=5),
    )
    server = grpc.server(futures.ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"echo": echo}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()


GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


if __name__ == "__main__":
    if sys.argv[3] == "kept":
        keep_freed(KEPT_BYTES)
    if sys.argv[1] == "grpc":
        _grpc()
    elif sys.argv[1] == "asyncio":
        asyncio.run(_asyncio(sys.argv[2]))
    else:
        _blocking(sys.argv[2], Receive(sys.argv[1]))
