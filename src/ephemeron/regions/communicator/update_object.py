"""An update as an object of a store: length of its head, the head as JSON, the payload."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, JobError, KeyExists
from ephemeron.regions.communicator.base import Update

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    fence: int
    fragment: int
    round: int
    samples: int
    norm: float | None


async def put_update(channel: Channel, prefix: str, update: Update) -> None:
    """Stores an update, unless an earlier attempt has."""
    norm = update.norm if math.isfinite(update.norm) else None
    head = _Head(fence=update.fence, fragment=update.fragment, round=update.round, samples=update.samples, norm=norm)
    text = json.dumps(plain(head), separators=(",", ":")).encode()
    key = f"{prefix}/{update.region}/{update.fragment}.{update.round:07d}"
    with contextlib.suppress(KeyExists):
        await channel.put(key, [_LENGTH.pack(len(text)), text, update.payload], create=True)


async def get_update(channel: Channel, key: str, region: str) -> Update | None:
    """The update of a key; None: it was deleted.

    Raises:
        CorruptMessage: it is none.
    """
    data = await channel.fetch(key)
    if data is None:
        return None
    try:
        size = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
        head = build(_Head, json.loads(bytes(data[_LENGTH.size : size])), where=key)
    except (struct.error, ValueError, JobError) as e:
        raise CorruptMessage(f"not an update of a region: {e}", key=key) from None
    return Update(
        region=region,
        fence=head.fence,
        fragment=head.fragment,
        round=head.round,
        samples=head.samples,
        norm=math.inf if head.norm is None else head.norm,
        payload=bytes(data[size:]),
    )
