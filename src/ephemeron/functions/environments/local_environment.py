"""Virtual environments for functions of this machine: one for what a file of requirements names, made once and used again.

    HOME/environments/DIGEST/
        pyvenv.cfg, bin/, lib/      as `python -m venv` makes them; what the client's Python has installed is seen behind it (`_CLIENT`)
        requirements.txt            what was installed
        complete                    written last: without it the folder is a remain of an install that was killed

The digest is that of the requirements, of Python, and of the names and versions of what the client has installed: pip installs what is missing there, or is
there in a version that does not fit, and nothing else. uv is used where the client has no pip; it installs everything anew, from its cache.
A lock of the kernel is held during an install, so a second client waits, and nothing is left to break when the first one is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ephemeron.config import own_processes
from ephemeron.config.paths import ENVIRONMENTS, home
from ephemeron.errors import JobError
from ephemeron.functions.entries import PRELOADS
from ephemeron.functions.environments.requirement_files import Requirements
from ephemeron.functions.source_bundle import REQUIREMENTS
from ephemeron.units import human_count

_COMPLETE, _LOCK, _CLIENT = "complete", ".lock", "_client.pth"
_REQUIREMENTS, _OWN = "requirements.txt", "ephemeron.txt"
MOST_S = 1800.0
"""Longest install, and longest wait for that of another client."""
_LOOK_S = 0.1


def interpreter(requirements: Requirements, on_note: Callable[[str], None] = lambda text: None) -> str:
    """The Python of the environment that has what is required, which is made if there is none.

    Args:
        requirements: read.
        on_note: told what takes time.

    Raises:
        JobError: it cannot be installed; with the decisive line of what has refused it. Nothing is left of it.
    """
    folder = home() / ENVIRONMENTS / _digest_of(requirements)
    if not (folder / _COMPLETE).exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder, on_note):
                if not (folder / _COMPLETE).exists():
                    _make(folder, requirements, on_note)
        except OSError as e:
            raise JobError(
                f"requirements {requirements.place} cannot be installed below {folder.parent}: {e.strerror or e}",
                remedy="set EPHEMERON_HOME to a folder that you can write to, with room for them",
            ) from None
    with suppress(OSError):  # of another user: when it was used last is not kept
        os.utime(folder / _COMPLETE)
    return str(folder / "bin" / "python")


def import_folder(python: str) -> str:
    """Folder of an environment from which modules are imported.

    Args:
        python: of the environment; see `interpreter`.
    """
    root = Path(python).parents[1]
    return sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)})


def seen_here(python: str) -> None:
    """Has this process find the modules of an environment, behind all that it finds without it: functions are looked at here before they are sent."""
    place = import_folder(python)
    if place not in sys.path:
        sys.path.append(place)
        importlib.invalidate_caches()


@contextmanager
def in_use(python: str) -> Iterator[None]:
    """Inside, an environment stays when others are deleted.

    Args:
        python: of it; empty: there is none.
    """
    with ExitStack() as stack:
        if python:
            with suppress(OSError):  # a home of another user, who alone deletes there
                fcntl.flock(stack.enter_context(Path(python).parents[1].with_suffix(_LOCK).open()), fcntl.LOCK_SH)
        yield


def is_used(folder: Path) -> bool:
    """Whether a process has functions in an environment, or installs it.

    Args:
        folder: of it.
    """
    with _unused(folder) as found:
        return not found


def used_at(folder: Path) -> float:
    """When a process has begun to use an environment last, Unix time; 0: it is the remain of an install."""
    with suppress(OSError):
        return (folder / _COMPLETE).stat().st_mtime
    return 0.0


def remove_environment(folder: Path) -> bool:
    """Deletes an environment; returns whether that was done: not if a process uses it.

    Raises:
        OSError: it cannot be deleted.
    """
    with _unused(folder) as found:
        if found:
            (folder / _COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        return found


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether no other process uses an environment; inside, none begins to."""
    try:
        file = folder.with_suffix(_LOCK).open("a")
    except OSError:
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _digest_of(requirements: Requirements) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (requirements.state(), sys.version, sysconfig.get_platform(), sys.prefix, *sorted(_installed())):
        digest.update(part.encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()


def _site_folders() -> list[Path]:
    """Folders of what the client has installed."""
    own = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [path for path in dict.fromkeys(map(Path, own)) if path.is_dir()]


def _installed() -> Iterator[str]:
    for folder in _site_folders():
        yield str(folder)
        yield from (path.name for path in folder.iterdir() if path.name.endswith((".dist-info", ".egg-info")))


@contextmanager
def _locked(folder: Path, on_note: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of an environment. The kernel releases it when this process ends, however that is."""
    began, is_told = time.monotonic(), False
    with folder.with_suffix(_LOCK).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > MOST_S:
                    raise JobError(
                        f"another process has installed the same requirements for {MOST_S / 60:g} minutes, and goes on"
                    ) from None
                if not is_told:
                    is_told = True
                    on_note("another process installs the same requirements: this one waits for it")
                time.sleep(_LOOK_S)
        yield


def _make(folder: Path, requirements: Requirements, on_note: Callable[[str], None]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    installer = _installer(folder)
    on_note(f"installing {human_count(len(requirements.lines), 'requirement')} of {requirements.place}, once")
    try:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], requirements)
        lines = [f"import site; site.addsitedir({str(each)!r})\n" for each in _site_folders()]
        Path(import_folder(str(folder / "bin" / "python")), _CLIENT).write_text("".join(lines))
        for name, text in {**requirements.files(), _OWN: "\n".join((*REQUIREMENTS, ""))}.items():
            (folder / name).touch(mode=0o600)  # addresses of indexes may have passwords
            (folder / name).write_text(text)
        _run([*installer, "-r", str(folder / _REQUIREMENTS), "-c", str(folder / _OWN)], requirements)
        python = str(folder / "bin" / "python")
        needed = (own_processes.module_of("function"), "numpy.random", *PRELOADS["task-executor"])
        _run([python, "-P", "-c", f"import {', '.join(needed)}"], requirements, "do not go with ephemeron")
        (folder / _COMPLETE).touch()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _installer(folder: Path) -> list[str]:
    python = str(folder / "bin" / "python")
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", "--no-input"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", python]
    raise JobError("neither pip nor uv is installed, which install requirements", remedy="run: python -m ensurepip")


def _run(command: list[str], requirements: Requirements, refused: str = "cannot be installed") -> None:
    """Runs one command, which ends with this process.

    Raises:
        JobError: it has failed, or takes too long.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        preexec_fn=own_processes.ends_with_parent,
    )
    try:
        said, _ = process.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        raise JobError(f"requirements {requirements.place} are not installed after {MOST_S / 60:g} minutes") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise JobError(f"requirements {requirements.place} {refused}: {_decisive(said) or f'exit code {process.returncode}'}")


def _decisive(said: str) -> str:
    """The line that says why an install has failed."""
    lines = [line.strip() for line in said.split("\n") if line.strip()]
    text = " ".join(lines)
    if (found := re.search(r"(?:╰─▶|cause:) (.*)", text)) is not None:  # uv
        return found[1]
    errors = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("error:") and "ResolutionImpossible" not in line]
    because = [line for line in lines if line.startswith("The user requested")]
    if errors and because and "conflict" in errors[-1]:
        return f"{errors[-1].rstrip('.')}: {', '.join(line.removeprefix('The user requested ') for line in because)}"
    return errors[-1] if errors else lines[-1] if lines else ""
