"""A process in place of a device while links are measured: `python -m ephemeron.partition.costs.peer_process`.

Reads the token from the first line of its standard input, prints host and port, and ends when its standard input ends, so it never
outlives the process that started it.
"""

from __future__ import annotations

import asyncio
import sys

from ephemeron.communication.rpc import Server
from ephemeron.partition.costs.peer import LinkPeer


async def _main() -> None:
    token = sys.stdin.readline().strip()
    server = Server(LinkPeer(token).handle, token=token)
    host, port = await server.listen_tcp()
    sys.stdout.write(f"{host} {port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(_main())
