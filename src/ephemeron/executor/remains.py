"""What killed clients have left: folders of their executors, and objects in their channels. The next executor removes it.

`find_remains` is the inventory, with sizes and owners; `remove_remains` removes what nobody uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.sizes import SupportsSizes
from ephemeron.config.paths import bytes_below
from ephemeron.errors import EphemeronError
from ephemeron.functions.local import is_hosted

_log = logging.getLogger(__name__)

CLAIM = "client.json"
"""Address of the channel; locked by the kernel while the client lives, and removed when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRemains:
    """What there is of one executor."""

    run: str
    """Its name: its objects' keys begin with it and a dot."""
    folder: Path
    address: str
    """Of its channel."""
    objects: int
    """In its channel, unless that is in its folder."""
    object_bytes: int
    """0 where the store does not tell sizes."""
    folder_bytes: int
    running: str = ""
    """Who uses it; empty: nobody, so it is removed."""
    problem: str = ""
    """Why its channel cannot be read: then it is kept."""

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.object_bytes + self.folder_bytes


@contextmanager
def claimed(folder: Path, address: str) -> Iterator[None]:
    """Marks the folder of an executor as used by this process."""
    path = folder / CLAIM
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"address": address}, file)
        file.flush()
        yield
        path.unlink(missing_ok=True)


async def find_remains(folders: Path) -> list[ExecutorRemains]:
    """Executors whose clients have not ended well, or run.

    Args:
        folders: of all executors: `tasks` in the home folder.
    """
    found = []
    for path in sorted(folders.glob(f"*/{CLAIM}")):
        with contextlib.suppress(OSError, ValueError, KeyError), path.open() as file:
            found.append(await _found(path.parent, str(json.load(file)["address"]), _user(path.parent, file.fileno())))
    return found


async def remove_remains(folders: Path) -> list[ExecutorRemains]:
    """Removes what clients that were killed have left, unless their functions are still running; returns what was removed.

    Args:
        folders: see `find_remains`.
    """
    gone = []
    for path in sorted(folders.glob(f"*/{CLAIM}")):
        with contextlib.suppress(OSError, ValueError, KeyError, EphemeronError), path.open() as file:
            if _user(path.parent, file.fileno(), keep=True):
                continue
            each = await _found(path.parent, str(json.load(file)["address"]), "")
            if each.problem:
                continue
            if not _is_inside(each.address, each.folder):
                async with open_channel(each.address) as channel:
                    await channel.delete(await channel.list(f"{each.run}."))
                    channel.discard_staged(f"{each.run}.")
            shutil.rmtree(each.folder, ignore_errors=True)
            _log.info("deleted %d objects of executor %s, whose client was killed", each.objects, each.run)
            gone.append(each)
    return gone


def _user(folder: Path, claim: int, *, keep: bool = False) -> str:
    """Who uses an executor. Takes the lock of its claim, and keeps it if wanted: then nobody else removes the same."""
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return "its client runs"
    if not keep:
        fcntl.flock(claim, fcntl.LOCK_UN)
    return "its functions run" if is_hosted(folder) else ""


async def _found(folder: Path, address: str, user: str) -> ExecutorRemains:
    sizes: dict[str, int] = {}
    problem = ""
    if not _is_inside(address, folder):
        try:
            async with open_channel(address) as channel:
                listed = f"{folder.name}."
                sizes = await channel.sizes(listed) if isinstance(channel, SupportsSizes) else dict.fromkeys(await channel.list(listed), 0)
        except EphemeronError as e:
            problem = str(e)
    return ExecutorRemains(
        run=folder.name,
        folder=folder,
        address=address,
        objects=len(sizes),
        object_bytes=sum(sizes.values()),
        folder_bytes=bytes_below(folder),
        running=user,
        problem=problem,
    )


def _is_inside(address: str, folder: Path) -> bool:
    """Whether the objects are removed with the executor's folder."""
    return address == "memory" or address.startswith(f"{folder.resolve().as_uri()}/")
