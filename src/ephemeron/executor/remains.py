"""What killed clients have left: folders of their executors, and objects in their channels. The next executor removes it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ephemeron.communication.channels import open_channel
from ephemeron.errors import EphemeronError
from ephemeron.functions.local import is_hosted

_log = logging.getLogger(__name__)

_CLAIM = "client.json"
"""Address of the channel; locked by the kernel while the client lives, and removed when it ends."""


@contextmanager
def claimed(folder: Path, address: str) -> Iterator[None]:
    """Marks the folder of an executor as used by this process."""
    path = folder / _CLAIM
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"address": address}, file)
        file.flush()
        yield
        path.unlink(missing_ok=True)


async def remove_remains(folders: Path) -> None:
    """Removes what clients that were killed have left, unless their functions are still running.

    Args:
        folders: of all executors.
    """
    for path in list(folders.glob(f"*/{_CLAIM}")):
        with contextlib.suppress(OSError, ValueError, EphemeronError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its client lives
            if is_hosted(path.parent):
                continue
            address = str(json.load(file)["address"])
            run = path.parent.name
            if not address.startswith("file:") and address != "memory":
                async with open_channel(address) as channel:
                    keys = await channel.list(f"{run}.")
                    await channel.delete(keys)
                    _log.info("deleted %d objects of executor %s, whose client was killed", len(keys), run)
            shutil.rmtree(path.parent, ignore_errors=True)
