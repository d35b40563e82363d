"""Who is whom: attempts are claimed before they are launched and started once, by create-only puts.

`claim/RANK/N` belongs to whoever may launch attempt N of a rank: its predecessor (a relay), the client, or a peer
that has waited too long. `start/RANK/N` belongs to the invocation that is attempt N: a platform that delivers a
call twice finds the second one stepping aside. An attempt that sees the next one claimed, and has not done so
itself, is superseded. Whatever it still sends is harmless: under BSP and HAP it is the same bytes.
"""

from __future__ import annotations

from ephemeron.channels.base import Channel
from ephemeron.channels.keys import Keys
from ephemeron.errors import KeyExists


async def take(channel: Channel, key: str, owner: str) -> bool:
    """Whether the key was free and is ours now."""
    try:
        await channel.put(key, [owner.encode()], create=True)
    except KeyExists:
        return False
    return True


async def latest_attempt(channel: Channel, keys: Keys, rank: int) -> int:
    """Highest attempt claimed for a rank. Lists: for the cold path."""
    claims = await channel.list(keys.claims(rank))
    return max((int(key.rpartition("/")[2]) for key in claims), default=0)
