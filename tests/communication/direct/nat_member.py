"""A member of a run as a process of its own: commands on standard input, events on standard output, one JSON object a line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.direct import Head, Mesh, kernel_transports
from ephemeron.communication.direct.message import Kind
from ephemeron.communication.direct.punching import rendezvous_transports
from ephemeron.communication.keys import Keys


def tell(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def main(folder: str, rank: int, ranks: int) -> None:
    mesh = await Mesh.join(
        store=open_channel(folder),
        rank=rank,
        attempt=0,
        ranks=ranks,
        keys=Keys("run"),
        token="the run's token",
        transports=[*kernel_transports(), *rendezvous_transports()],
    )
    mesh.on_connect.append(lambda peer, _: tell(connected=peer, transport=mesh.transport_of(peer)))

    def received(sender: int, head: Head, body: memoryview) -> None:
        tell(received=sender, digest=hashlib.sha256(body).hexdigest())

    mesh.handle(Kind.CONTRIBUTION, received)
    tell(joined=rank)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        if "transport_of" in command:
            tell(transport_of=command["transport_of"], transport=mesh.transport_of(command["transport_of"]))
            continue
        body = bytes([rank]) * command["nbytes"]
        tell(sent=mesh.send(command["send"], Kind.CONTRIBUTION, buffers=[body]))
    await mesh.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
