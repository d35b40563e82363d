"""The archive of run folders: what `make.py` has made, under fixed names, without anything of the machine that made it.

It holds home folders: `home` has everything, another one what there can be one of in a home only. Text is kept, with the home folder as `@HOME@`; other
files are as long as they were and hold zeros: no document needs weights, objects or code, but their sizes are listed.
"""

from __future__ import annotations

import getpass
import io
import json
import lzma
import os
import platform
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ARCHIVE = HERE / "runs.tar.xz"
HOME = "@HOME@"
HOME_LENGTH = 240
"""Characters of the path of a home that was unpacked, whatever is above it: sizes of folders depend on it."""
EPOCH_S = 1_767_225_600
"""Beginning of the times in the archive: folders are a minute apart, in the order of their names."""
ENTRIES = ("runs", "studies", "tasks", "sessions", "profiling")
"""Folders of a home whose folders are named after their recipe."""
DROPPED = frozenset({"scratch", "signing.key", "study.db", "study.db-journal", "__pycache__"})
_SECRET = re.compile(r'("(?:token|key|secret)": ?")([^"]+)(")')
_TIME = re.compile(r"(?<![\d.])1[78]\d{8}(?:\.\d+)?(?![\d.])")
_LONG_FLOAT = re.compile(r"(?<![\w.\-+])-?\d+\.\d{6,}(?![\w.\-+])")
"""Times and losses to a hundred thousandth: what is behind it is most of what does not compress."""
_DATE = re.compile(r"20\d\d-\d\d-\d\d([ T])\d\d:\d\d:\d\d(?:[.,]\d+)?")


def pack(made: Path, archive: Path) -> None:
    """Writes the archive of what `make.py` has made in a folder."""
    root = str(Path(__file__).resolve().parents[2])
    names: dict[str, str] = {}
    entries: list[tuple[str, Path, str]] = []
    """Path in the archive, file, and its label."""
    taken: set[str] = set()
    labels = sorted(p.name for p in (made / "homes").iterdir())
    for label in labels:
        for top in sorted((made / "homes" / label).iterdir()):
            for number, each in enumerate(_by_age(top) if top.name in ENTRIES else [top]):
                name = label + (f"-{number + 1}" if number else "") if top.name in ENTRIES else ""
                if top.name == "runs" and (made / "homes" / label / "studies").is_dir():
                    name = f"{label}-trial-{number}"
                where = f"home/{top.name}/{name}" if name else f"home/{top.name}"
                if top.name == "data-service" and where in taken:
                    where = f"{label}/{top.name}"
                taken.add(where)
                if name and each.name != name:
                    names[each.name] = name
                entries.append((where, each, label))
    replaced = [(str(made / "homes" / label), HOME) for label in sorted(labels, key=len, reverse=True)]
    replaced += [(str(made / "work"), "/work"), (root, "/repository"), (os.path.realpath(sys.base_prefix), "/python")]
    replaced += [(str(made), "/made"), (os.environ.get("TMPDIR", "/tmp"), "/tmp"), (f'"{platform.node()}"', '"machine"')]
    if (home := str(Path.home())) != "/":
        replaced.append((home, "/user"))
    replaced += sorted(names.items(), key=lambda pair: len(pair[0]), reverse=True)

    def rewrite(text: str) -> str:
        for old, new in replaced:
            text = text.replace(old, new)
        return text

    out, seen = io.BytesIO(), dict[str, Path]()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, (where, folder, _) in enumerate(sorted(entries, key=lambda entry: entry[0])):
            at = EPOCH_S + 60 * number
            for path, kind in _below(folder):
                name = rewrite(f"{where}/{path.relative_to(folder).as_posix()}".removesuffix("/."))
                if name in seen:
                    continue
                seen[name] = path
                info = tarfile.TarInfo(name)
                info.mtime = at
                if kind == "link":
                    info.type, info.linkname = tarfile.SYMTYPE, rewrite(os.readlink(path))
                    tar.addfile(info)
                elif kind == "folder":
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(info)
                else:
                    data = _framed(path, folder, name, rewrite) or _contents(path, rewrite, at)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    data = lzma.compress(out.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    archive.write_bytes(data)
    print(f"{archive}: {len(seen)} files, {len(out.getvalue())} bytes, {len(data)} compressed")
    text = out.getvalue()
    for word in {root, str(made), f'"{platform.node()}"', getpass.getuser() + "/", "wt/corpus", "/eph/"}:
        if word.encode() in text:
            at = text.index(word.encode())
            print(f"still there: {word!r}: {text[max(0, at - 100) : at + 100]!r}")


def _by_age(folder: Path) -> list[Path]:
    def begun(path: Path) -> tuple[float, str]:
        try:
            return float(json.loads((path / "run.json").read_text())["wall_time"]), path.name
        except (OSError, ValueError, KeyError):
            return path.stat().st_ctime, path.name

    return sorted((p for p in folder.iterdir() if p.is_dir()), key=begun)


def _below(folder: Path) -> Iterator[tuple[Path, str]]:
    if folder.is_dir() and not folder.is_symlink():
        yield folder, "folder"
        for path in sorted(folder.iterdir()):
            if path.name in DROPPED or path.is_socket():
                continue
            if path.is_symlink():
                yield path, "link"
            elif path.is_dir():
                yield from _below(path)
            else:
                yield path, "file"
    else:
        yield folder, "file"


def _framed(path: Path, folder: Path, name: str, rewrite: Callable[[str], str]) -> bytes:
    """Text in an object of a matrix, in a frame for its new name: who runs a program is read of it. Its paths are not put back when it is unpacked."""
    from ephemeron.communication.object_frame import FRAME_BYTES, opened, sealed
    from ephemeron.errors import CorruptMessage

    data = path.read_bytes()
    if folder.name != "matrices" or not data.startswith(b"EPHM"):
        return b""
    try:
        text = bytes(opened(memoryview(data), key=path.relative_to(folder).as_posix())).decode()
    except (UnicodeDecodeError, CorruptMessage):  # tiles, and objects of an executor
        return b""
    if "\0" in text:
        return b""
    text = _TIME.sub(f"{EPOCH_S}.0", rewrite(text).replace(HOME, "/elsewhere"))
    return b"".join(
        bytes(part) for part in sealed([text.encode()], key=name.partition("/matrices/")[2], token=data[FRAME_BYTES // 2 :][:16])
    )


def _contents(path: Path, rewrite: Callable[[str], str], at: int) -> bytes:
    data = path.read_bytes()
    if {"objects", "policies"} & {*path.parts} or path.name in ("report.html", "token") or path.suffix in (".svg", ".zip"):
        return bytes(len(data))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return bytes(len(data))
    if "\0" in text:
        return bytes(len(data))
    text = rewrite(text)
    if path.name == "events.jsonl":
        text = _LONG_FLOAT.sub(lambda found: repr(round(float(found[0]), 5)), text)
    text = _SECRET.sub(lambda found: found[1] + "0" * len(found[2]) + found[3], text)
    text = _TIME.sub(f"{at}.0", text)
    return _DATE.sub(r"2026-01-01\g<1>00:00:00", text).encode()


def unpack(place: Path, archive: Path = ARCHIVE) -> dict[str, Path]:
    """Unpacks the archive below a folder; returns the home folders by name. Their paths have the same length wherever they are."""
    homes: dict[str, Path] = {}

    def home_of(name: str) -> Path:
        if name not in homes:
            left = HOME_LENGTH - len(str(place)) - 2
            assert left > 2, f"{place} is too long a path"
            above = place / f"{name}-".ljust(left // 2, "x")
            homes[name] = above / "h".ljust(HOME_LENGTH - len(str(above)) - 1, "x")
            assert len(str(homes[name])) == HOME_LENGTH
        return homes[name]

    folders = []
    with lzma.open(archive) as file, tarfile.open(fileobj=file) as tar:
        for info in tar:
            name, _, rest = info.name.partition("/")
            home = home_of(name)
            path = home / rest
            path.parent.mkdir(parents=True, exist_ok=True)
            if info.issym():
                path.symlink_to(info.linkname.replace(HOME, str(home)))
                continue
            if info.isdir():
                path.mkdir(parents=True, exist_ok=True)
                folders.append((path, info.mtime))
                continue
            read = tar.extractfile(info)
            assert read is not None
            data = read.read()
            path.write_bytes(data.replace(HOME.encode(), str(home).encode()) if HOME.encode() in data else data)
            os.utime(path, (info.mtime, info.mtime))
    for path, at in reversed(folders):
        os.utime(path, (at, at))
    return homes
