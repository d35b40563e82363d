"""Commands whose executor goes on where it was: what another process needs to give the same command again, and how tasks are recognised.

A run of tasks that was started by a command keeps the command in its header. Whoever goes on with the run gives the command again, in
a process whose executor takes the run over: its name, its key, its queue. A task is named by its content, so one that has a result is not run
again, and one that is in the queue is not published again. So a program may end at any time, as long as it submits the same tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ephemeron.communication.channels import open_channel, public_address
from ephemeron.config import own_processes
from ephemeron.config.typed import build, plain
from ephemeron.errors import EphemeronError, JobError
from ephemeron.executor.shipping import Shipment
from ephemeron.functions.registry import CLOUDS
from ephemeron.runs import detached, folders, run_platform
from ephemeron.runs.folder_copies import save_now
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.units import human_bytes

_log = logging.getLogger(__name__)

PROGRAM = "program"
"""In the payload of a header, and folder of the files of a command."""
MAP = "map"
"""In the payload of a header: the table of results of a durable map."""
_RUN_VARIABLE = "EPHEMERON_TASKS_RUN"
_SHIPMENTS = "shipments.json"
_OUTPUTS = "outputs"
"""Folder of what a command writes elsewhere, in that of its files."""
_LEFTOVERS = "leftovers.json"
MOST_KEPT = 256 * 2**20
"""Bytes of the files that are kept with a run, and of those that its command writes: a driver function has room and memory for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command that can be given again."""

    argv: tuple[str, ...]
    """Behind `ephemeron`; `program:NAME` is a file that is kept with the run."""
    folder: str
    """In which it is given."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Files that are kept with the run when it has ended, and where they belong."""


@dataclass(slots=True)
class Launch:
    """A command whose tasks functions are to keep running, until its executor has begun."""

    argv: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    """Name to content: what the command has read, and may be gone later."""
    outputs: dict[str, Path] = field(default_factory=dict)
    """Argument to the file or folder that the command writes."""
    run: RunFolder | None = None
    """Made by its executor."""
    header: RunHeader | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the channel."""

    def keep(self, argument: str, name: str, content: bytes) -> None:
        """Has the command read a file that is kept with the run, in place of the one that an argument names."""
        self.keep_all(argument, name, {name: content})

    def keep_all(self, argument: str, name: str, files: Mapping[str, bytes]) -> None:
        """The same for a folder: its name, and its files by paths that begin with the name."""
        self.files |= files
        self.argv = _with_file(self.argv, argument, f"{PROGRAM}:{name}")

    def begun(self, folder: RunFolder, header: RunHeader, variables: Mapping[str, str], shipped: Mapping[str, Shipment]) -> RunHeader:
        """Stores the program with a run whose tasks are known to be right.

        Args:
            folder, header: of the run.
            variables: of its channel.
            shipped: functions by the name that the command gives them.

        Returns:
            The header with the program.

        Raises:
            JobError: functions cannot drive it. Nothing is stored.
        """
        detached.check(header)
        is_elsewhere = header.platform in CLOUDS
        if is_elsewhere:
            check_size(sum(map(len, self.files.values())), "what this command reads", header.platform)
        place = folder.path / PROGRAM
        place.mkdir()
        for name, content in self.files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        store_shipments(place, shipped)
        argv, outputs = self.argv, {}
        for argument, path in self.outputs.items() if is_elsewhere else ():
            outputs[f"{_OUTPUTS}/{path.name}"] = str(path.absolute())
            argv = _with_file(argv, argument, f"{PROGRAM}:{_OUTPUTS}/{path.name}")
        program = replace(program_here(argv), outputs=outputs)
        self.run, self.variables = folder, variables
        self.header = replace(header, ends_with_client=False, payload={**header.payload, PROGRAM: plain(program)})
        return self.header


def check_size(nbytes: int, what: str, platform: str) -> None:
    """Refuses files that are too large to be kept with a run.

    Args:
        nbytes: of all of them.
        what: they are.
        platform: on which the run is driven.

    Raises:
        JobError: they are.
    """
    if nbytes > MOST_KEPT:
        raise JobError(
            f"{what} has {human_bytes(nbytes)}, and a run that is driven on {platform} keeps at most {human_bytes(MOST_KEPT)}",
            remedy="leave --detach out, or give it in parts",
        )


def program_here(argv: Sequence[str]) -> Program:
    """A command that is given in the present folder, without the secrets of addresses."""
    return Program(argv=tuple(option + public_address(value)[0] for option, value in map(_split, argv)), folder=os.getcwd())


def _split(argument: str) -> tuple[str, str]:
    """`--option=` and its value, or "" and an argument."""
    option, equals, value = argument.partition("=")
    return (option + equals, value) if equals and argument.startswith("--") else ("", argument)


def _with_file(argv: Sequence[str], file: str, name: str) -> tuple[str, ...]:
    """Arguments with another name for a file, which may be the value of an option."""
    found = [(option, name if value and Path(value) == Path(file) else value) for option, value in map(_split, argv)]
    return tuple(option + value for option, value in found)


class Launched(BaseException):
    """The executor of a command that is to be driven by functions has begun: the command ends here."""


_launch: ContextVar[Launch | None] = ContextVar("ephemeron_launch", default=None)


@contextlib.contextmanager
def launching(argv: Sequence[str]) -> Iterator[Launch]:
    """Inside, the first executor that is given tasks stores them with the command instead of running them, and ends the block."""
    launch = Launch(tuple(argv))
    token = _launch.set(launch)
    try:
        yield launch
    except Launched:
        pass
    finally:
        _launch.reset(token)


def present_launch() -> Launch | None:
    """The launch inside which this is called."""
    return _launch.get()


def launch_elsewhere(platform: str) -> Launch | None:
    """The launch inside which this is called, if the command is to be driven on another machine, which has none of its files."""
    return present_launch() if platform in CLOUDS else None


def program_of(header: RunHeader) -> Program | None:
    """The command of a run; None: it was started by a program of the user, which nobody else can repeat."""
    raw = header.payload.get(PROGRAM)
    return None if raw is None else build(Program, raw, where=f"run.json of {header.run_id}: {PROGRAM}")


def taken_over() -> tuple[RunFolder, RunHeader] | None:
    """The run that the first executor of this process goes on with; None: it begins one."""
    run = os.environ.pop(_RUN_VARIABLE, "")
    return opened_again(run) if run else None


def opened_again(run: str) -> tuple[RunFolder, RunHeader]:
    """The folder and header of a run that is gone on with.

    Raises:
        JobError: it has none that can be read.
    """
    folder = RunFolder(folders.runs_folder() / run)
    header = read_header(folder)
    if header is None:
        raise JobError(f"run {run} has no readable run.json")
    return folder, header


def is_going_on() -> bool:
    """Whether the first executor of this process goes on with a run: a command is given again."""
    return _RUN_VARIABLE in os.environ


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableMap:
    """What an executor has to know of a durable map, whose results are kept elsewhere."""

    table: str
    """Address of its results, without credentials."""
    counts: Callable[[], tuple[int, int]]
    """Items that have a result, and all of them: what other clients see."""
    details: Callable[[], Mapping[str, object]] = dict
    """What else they see, as JSON has it."""
    note: Callable[[], str] = str
    """Text for the progress bar."""
    again: str = ""
    """Run whose client was killed, and whose tasks it goes on with; empty: a new run."""
    program: Program | None = None
    """The command, which any client can give again; None: it was started by a program of the user."""

    def payload(self) -> dict[str, Any]:
        """Of the header of its run."""
        return {MAP: {"table": self.table}} | ({} if self.program is None else {PROGRAM: plain(self.program)})


def survives(header: RunHeader) -> bool:
    """Whether another process finds the tasks of a run again."""
    return PROGRAM in header.payload or MAP in header.payload


def shipped(folder: RunFolder) -> dict[str, Shipment]:
    """Functions as they were sent when a command was given first, by the name that the command gives them."""
    place = folder.path / PROGRAM
    try:
        raw: dict[str, Any] = json.loads((place / _SHIPMENTS).read_text())
    except OSError:
        return {}
    return {
        name: Shipment(
            reference=one["reference"], name=one["name"], objects={key: (place / file).read_bytes() for key, file in one["objects"].items()}
        )
        for name, one in raw.items()
    }


def store_shipments(place: Path, made: Mapping[str, Shipment]) -> None:
    """Keeps functions as they are sent, by the name that is given to them. See `shipped`.

    Args:
        place: folder of the files of a command.
        made: functions by name.
    """
    index: dict[str, Any] = {}
    for n, (name, one) in enumerate(made.items()):
        files = {key: f"code-{n}-{m}.bin" for m, key in enumerate(one.objects)}
        for key, file in files.items():
            (place / file).write_bytes(one.objects[key])
        index[name] = {"reference": one.reference, "name": one.name, "objects": files}
    (place / _SHIPMENTS).write_text(json.dumps(index))


@contextlib.contextmanager
def given_again(folder: RunFolder, program: Program) -> Iterator[subprocess.Popen[bytes]]:
    """A process in which the command of a run is given again. It ends with this one."""
    place = folder.path / PROGRAM
    place.mkdir(exist_ok=True)
    cwd = program.folder if Path(program.folder).is_dir() and not program.outputs else str(place)
    argv = [
        option + (str(place / value.partition(":")[2]) if value.startswith(f"{PROGRAM}:") else value)
        for option, value in map(_split, program.argv)
    ]
    if program.outputs:  # of a driver that was killed while the command wrote them
        shutil.rmtree(place / _OUTPUTS, ignore_errors=True)
        (place / _OUTPUTS).mkdir()
    with (place / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [*own_processes.command("command-line"), *argv],
            cwd=cwd,
            env={**os.environ, _RUN_VARIABLE: folder.run_id},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=own_processes.ends_with_parent,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def bring_outputs(folder: RunFolder, program: Program) -> None:
    """Copies what a command has written elsewhere to where it belongs on the machine on which it was given."""
    if run_platform.is_copied(folder.run_id):
        return
    for name, target in program.outputs.items():
        source = folder.path / PROGRAM / name
        if not Path(target).parent.is_dir():
            continue
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copyfile(source, target)


def leave_for_later(folder: Path, store: str, prefixes: Sequence[str]) -> None:
    """Has objects that a command needs no more deleted when its outputs are saved: until then it may have to be given again.

    Args:
        folder: of the run.
        store: address.
        prefixes: of their keys.
    """
    (folder / PROGRAM / _LEFTOVERS).write_text(json.dumps([store, *prefixes]))


async def delete_leftovers(folder: RunFolder) -> None:
    """Deletes these objects. The run has finished."""
    path = folder.path / PROGRAM / _LEFTOVERS
    if not path.exists():
        return
    await save_now()
    store, *prefixes = json.loads(path.read_text())
    try:
        async with open_channel(store) as channel:
            for prefix in prefixes:
                await channel.delete(await channel.list(prefix))
    except EphemeronError as e:
        _log.warning("objects that run %s needs no more are not deleted: %s", folder.run_id, e)
        return
    path.unlink()


def last_words(folder: RunFolder) -> str:
    """What the command has printed last; empty: nothing."""
    with contextlib.suppress(OSError):
        lines = (folder.path / PROGRAM / "output.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def remove_program(folder: RunFolder) -> None:
    """Deletes what only a command that is given again needs."""
    for path in (folder.path / PROGRAM).glob("code-*.bin"):
        path.unlink()
    shutil.rmtree(folder.objects, ignore_errors=True)


class TaskNames:
    """Names of tasks: by their number, or by content in a program, in which another process finds them again."""

    def __init__(self, *, by_content: bool) -> None:
        self.by_content = by_content
        self._count = 0
        self._seen: Counter[str] = Counter()

    def name(self, kind: str, *content: bytes) -> str:
        """A new name.

        Args:
            kind: its first letter.
            content: equal for tasks that do the same.
        """
        if not self.by_content:
            self._count += 1
            return f"{kind}{self._count - 1}"
        digest = hashlib.blake2b(digest_size=10)
        for part in content:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        found = f"{kind}{digest.hexdigest()}"
        self._seen[found] += 1
        return found if self._seen[found] == 1 else f"{found}.{self._seen[found]}"
