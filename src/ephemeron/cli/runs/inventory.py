"""Everything that there is of ephemeron on this machine and in a store, with sizes and owners, and what of it may go.

What may go belongs to nobody that lives and is no result: folders of executors, sessions and profiles whose processes have ended, code of programs that
no run names, environments of functions that none uses, matrices without a name or an owner, staging files of puts that never ended. Runs, studies, measurements, matrices with names and datasets stay.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import SupportsSizes
from ephemeron.communication.object_frame import MAGIC
from ephemeron.config.paths import ENVIRONMENTS, bytes_below, datasets_store, home, present, statuses
from ephemeron.errors import EphemeronError
from ephemeron.functions.environments.local_environment import is_used, remove_environment, used_at
from ephemeron.functions.local import is_hosted
from ephemeron.runs import cleanup, folders
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.lock import LOCK_FILE, is_driven
from ephemeron.runs.status import may_be_running, status_of

_YOUNG_S = 3600.0
"""What has changed within this time may belong to a process that has not begun its work."""
_RUN = re.compile(r"([a-z0-9-]+-\d{4}-\d{6}-[0-9a-f]{4})[./]")
_STAGED = re.compile(r".+#\d+")
_KEPT = {"profiles": "measurements", "platforms": "measurements", "policies": "learned policies", "matrix-owners": "owners of matrices"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that takes place."""

    kind: str
    name: str
    place: str
    """Folder, or address of a store."""
    nbytes: int
    """0 where a store does not tell."""
    objects: int = 0
    """In a store."""
    owner: str
    """Who uses it; `nobody`; or `not known here`, of what other machines may use."""
    kept: str = ""
    """Why it stays; empty: `runs clean --all` removes it."""


def inventory(stores: Iterable[str] = (), *, runs: bool = True) -> list[Item]:
    """What there is in the home folder, in the channels of its runs and executors, and in these stores.

    Args:
        stores: addresses.
        runs: list runs, too, for which each of their channels is asked.

    Raises:
        ChannelError, JobError: one of the stores does not answer, or is none.
    """
    root = home()
    found = [
        *(_runs() if runs else ()),
        *_scratch(root / "tasks", "executor"),  # of earlier releases, as `profiling`
        *_scratch(root / "profiling", "profile run"),
        *_scratch(root / "sessions", "session"),
        *_programs(root / "programs"),
        *_environments(root / ENVIRONMENTS),
    ]
    listed = {folder.path.resolve() for folder in folders.all_runs()}
    found += [
        Item(kind="study", name=p.name, place=str(p), nbytes=bytes_below(p), owner="you", kept="results")
        for p in _folders(root / "studies")
        if p.resolve() not in listed
    ]
    found += _matrices(None)
    seen = {"runs", "tasks", "sessions", "profiling", "programs", "studies", "matrices", ENVIRONMENTS}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.name not in seen and str(path.absolute()) != datasets_store():
            found.append(_whole(path, _KEPT.get(path.name, "")))
    if Path(datasets_store()).is_dir():
        found.append(_whole(Path(datasets_store()), "your datasets"))
    for store in stores:
        found += _in_store(store)
    return found


def remove(items: Collection[Item]) -> list[str]:
    """Removes those that nothing keeps; returns what could not be removed, a line each."""
    problems = []
    for item in items:
        path = Path(item.place)
        if item.kept or item.kind == "matrix":
            continue
        try:
            if item.kind == "staging":
                for each in _staged(item.place, item.name):
                    each.unlink(missing_ok=True)
            elif item.kind == "environment":
                if not remove_environment(path):
                    problems.append(f"environment {item.name}: it is in use")
            elif path.is_dir() and (busy := _busy(path)):
                problems.append(f"{item.kind} {item.name}: {busy}")
            elif path.is_dir():
                shutil.rmtree(path)
        except OSError as e:
            problems.append(f"{item.kind} {item.name}: {e.strerror}")
    for store in {item.place for item in items if item.kind == "matrix" and not item.kept}:
        from ephemeron.linalg.execution.remains import abandoned_matrices, remove_matrices

        try:
            remove_matrices(abandoned_matrices(store))
        except EphemeronError as e:
            problems.append(f"matrices in {store}: {e}")
    return problems


def _runs() -> Iterator[Item]:
    for one in cleanup.left_by(folders.all_runs(), force=True):
        where = f", {len(one.keys)} objects in {one.address}" if one.keys else ""
        yield Item(
            kind="run",
            name=one.folder.run_id,
            place=str(one.folder.path),
            nbytes=one.folder_bytes + one.nbytes,
            objects=len(one.keys),
            owner=_owner(one.folder) if may_be_running(one.status) else f"nobody, it is {one.status}",
            kept=f"results{where}{f'; {one.problem}' if one.problem else ''}",
        )


def _owner(folder: RunFolder) -> str:
    """What keeps a run going: a service, a simulation or a study is its process."""
    header = read_header(folder)
    of_process = header is not None and (header.kind in ("service", "study") or (header.platform == "simulated" and not header.detached))
    return "its process" if of_process else "its functions"


def _scratch(folder: Path, kind: str) -> Iterator[Item]:
    for path in _folders(folder):
        busy = _busy(path)
        yield Item(kind=kind, name=path.name, place=str(path), nbytes=bytes_below(path), owner=busy or "nobody", kept=busy)


def _programs(folder: Path) -> Iterator[Item]:
    """Code that was sent by value. A run that is resumed reads it again."""
    found = {f"run {f.run_id}": f.path for f in folders.all_runs()}
    found |= {f"study {p.name}": p for p in _folders(home() / "studies")}
    texts = {
        user: "".join(p.read_text(errors="replace") for kind in ("*.json", "*.toml") for p in path.glob(kind))
        for user, path in found.items()
    }
    for path in _folders(folder):
        user = next((user for user, text in texts.items() if path.name in text), "")
        yield Item(
            kind="program", name=path.name, place=str(path), nbytes=bytes_below(path), owner=user or "nobody", kept=user or _busy(path)
        )


def _environments(folder: Path) -> Iterator[Item]:
    """Packages of functions of this machine: they are installed again when they are needed."""
    for path in _folders(folder):
        busy = "it is in use" if is_used(path) else "it was used within the hour" if time.time() - used_at(path) < _YOUNG_S else ""
        yield Item(kind="environment", name=path.name, place=str(path), nbytes=bytes_below(path), owner=busy or "nobody", kept=busy)


def _matrices(store: str | None) -> Iterator[Item]:
    from ephemeron.linalg.execution.remains import abandoned_matrices, home_store, stored_matrices

    address = store or home_store()
    found = stored_matrices(address)
    going = {each.name for each in abandoned_matrices(address)} if found else set()
    for each in found:
        owner = f"process {each.owner}" if each.is_owned and each.owner else "nobody" if each.name in going else "you"
        kept = "" if each.name in going else each.kind if not each.is_owned else "it is in use"
        yield Item(kind="matrix", name=each.name, place=address, nbytes=each.nbytes, objects=each.objects, owner=owner, kept=kept)


def _in_store(address: str) -> Iterator[Item]:
    async def sizes() -> dict[str, int]:
        async with open_channel(address) as channel:
            return await channel.sizes("") if isinstance(channel, SupportsSizes) else dict.fromkeys(await channel.list(""), 0)

    below: dict[tuple[str, str], list[int]] = defaultdict(list)
    runs = {folder.run_id: folder for folder in folders.all_runs()}
    for key, nbytes in asyncio.run(sizes()).items():
        of = _RUN.match(key)
        name = of[1] if of else key.partition("/")[0].removesuffix(".calls")
        below["run" if of or name in runs else "objects", name].append(nbytes)
    matrices = {item.name: item for item in _matrices(address)}
    for (kind, name), found in sorted(below.items()):
        if kind == "objects" and name in matrices:
            yield matrices[name]
            continue
        status = status_of(runs[name]) if name in runs else ""
        yield Item(
            kind=kind,
            name=name,
            place=address,
            nbytes=sum(found),
            objects=len(found),
            owner=(_owner(runs[name]) if may_be_running(status) else "nobody") if status else "not known here",
            kept="runs clean RUN removes them" if status else "other machines may use it",
        )
    if old := _staged(address, ""):
        yield Item(
            kind="staging",
            name="*#N",
            place=address,
            nbytes=sum(status.st_size for _, status in present(old)),
            objects=len(old),
            owner="nobody",
        )


def _staged(address: str, name: str) -> list[Path]:
    """Files that puts of ours into a folder have begun and not ended. Others may have such names, too: they begin otherwise."""
    if not address.startswith("file:"):
        return []
    files = Path(unquote(urlparse(address).path)).rglob("*#*")
    old = (p for p, status in present(files) if _STAGED.fullmatch(p.name) and time.time() - status.st_mtime > _YOUNG_S)
    return [p for p in old if p.is_file() and _begins_as_ours(p)]


def _begins_as_ours(path: Path) -> bool:
    """Whether a file is empty, or begins as our objects do, signed or not."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) in (b"", MAGIC)
    except OSError:
        return False


def _whole(path: Path, why: str) -> Item:
    owner = "you"
    if path.name == "data-service":
        from ephemeron.data.service.daemon import ManagedProcess

        lives = ManagedProcess("coordinator", path, "").alive
        owner, why = ("its processes", "it runs") if lives else ("you", "settings and cache of a data service")
    return Item(kind=path.name, name="", place=str(path), nbytes=bytes_below(path), owner=owner, kept=why or "not known")


def _busy(path: Path) -> str:
    if is_driven(RunFolder(path)):
        return "its client runs"
    if is_hosted(path) or is_hosted(path / "calibration"):
        return "its functions run"
    if (path / LOCK_FILE).exists():
        return ""
    changed = max((status.st_mtime for _, status in statuses(path)), default=0.0)
    return "it is new, or in use" if time.time() - changed < _YOUNG_S else ""


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
