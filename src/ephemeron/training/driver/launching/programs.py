"""Jobs from what users hand to `train`: a job file, a task by name, or a task of this program.

A task that a module defines travels as its module's folder. A task of a notebook or a script (`__main__`), or one that has
been constructed already, travels as an object written by cloudpickle, in a folder of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ephemeron.config.imported_sources import folder_of, folders_in
from ephemeron.config.paths import home
from ephemeron.config.typed import build, near, plain
from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError, MissingExtra
from ephemeron.runs.kinds import program_makers
from ephemeron.training.job import Configuration, Job, load_job
from ephemeron.training.job.former_names import refuse_former_names
from ephemeron.training.job.job_file import parse_job
from ephemeron.training.job.run_options import merged, nested
from ephemeron.training.task.task import Task, task_of
from ephemeron.user_code import guarded, line_of

_JOB_OPTIONS = frozenset(f.name for f in dataclasses.fields(Job)) - {"model", "task", "script", "sparse", "run"}
_RUN_OPTIONS = frozenset(f.name for f in dataclasses.fields(Configuration))
_NAME = r"[A-Za-z_][\w.]*"
_LIGHTNING = re.compile(rf"lightning:({_NAME}:{_NAME})(?:,({_NAME}:{_NAME}))?")
_TARGET = re.compile(rf"{_NAME}(:{_NAME})+|{_LIGHTNING.pattern}")
_OF_LIGHTNING, _OF_LIGHTNING_NAME = program_makers("lightning")


def job_of(program: object, options: Mapping[str, object] | None = None) -> Job:
    """The job of a program.

    Args:
        program: a `Job`; the path of a job file, or of a script; `module:Class` of a task; a subclass of `Task`, or an instance;
            `lightning:module:Class` of a LightningModule, with `,module:DataModule` if it has one; the module itself.
        options: fields of the job and of the configuration that override those of the program, and `arguments` of a script.

    Raises:
        JobError: none of these, or an option is unknown or has a wrong value.
        MissingExtra: the task is defined in this program, and cloudpickle is not installed.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    arguments = given.pop("arguments", ())
    if "callbacks" in given:
        program = _with_callbacks(program, given.pop("callbacks"))
    refuse_former_names({name: value for name, value in given.items() if name not in _JOB_OPTIONS}, where="options: ")
    for name in given:
        if name not in _JOB_OPTIONS | _RUN_OPTIONS:
            known = sorted(_JOB_OPTIONS | _RUN_OPTIONS)
            raise JobError(f"unknown option {name!r}", remedy=near(name, known, what="options", quoted=True))
    if isinstance(program, Job):
        job = program
    elif isinstance(program, (str, os.PathLike)) and Path(program).suffix == ".py":
        job = _of_script(Path(program), arguments)
    elif isinstance(program, (str, os.PathLike)) and not _is_target(str(program)):
        job = load_job(Path(program))
    else:
        job = _of_task(program)
    if arguments and job.script is None:
        raise JobError(f"{job.name} takes no arguments", remedy="give arguments to a script only")
    if "epochs" in given and job.script is not None:
        raise JobError("epochs is not an option of a script", remedy=f"say it in {job.script.file}, or by its arguments")
    return _overridden(job, given)


def _with_callbacks(program: object, callbacks: object) -> object:
    if isinstance(program, (str, os.PathLike, Task)) or not _is_lightning(program):
        raise JobError(
            "callbacks are of a LightningModule, and the program is none",
            remedy="give the module itself; a Task has on_step_end, evaluation_end and on_end",
        )
    return resolve(_OF_LIGHTNING, ())(program, callbacks=callbacks)


def _of_script(path: Path, arguments: object) -> Job:
    if not path.is_file():
        raise JobError(f"there is no script {path}")
    raw = {"name": path.stem, "code": ["."], "script": {"file": path.name, "arguments": arguments}}
    return parse_job(raw, folder=path.resolve().parent, where=path.name)


def _is_target(text: str) -> bool:
    return _TARGET.fullmatch(text) is not None and not Path(text).exists()


def _overridden(job: Job, given: Mapping[str, object]) -> Job:
    fields = {name: value for name, value in given.items() if name in _JOB_OPTIONS}
    for name in ("code_include", "code_exclude"):  # beside those of the program
        if name in fields:
            fields[name] = (*getattr(job, name), *cast(Sequence[str], fields[name]))
    run = {name: value for name, value in given.items() if name in _RUN_OPTIONS}
    build(Configuration, run, where="options")
    made = dataclasses.replace(job, **fields) if fields else job  # type: ignore[arg-type]
    return dataclasses.replace(made, run=nested(merged(made.run, run))) if run else made


def _of_task(program: object) -> Job:
    options: dict[str, object] = {}
    include: list[str] = []
    more: list[Path] = []
    named = _LIGHTNING.fullmatch(program) if isinstance(program, str) else None
    if not isinstance(program, (str, Task)) and _is_lightning(program):
        if isinstance(program, type) and _is_importable(program):
            named = _LIGHTNING.fullmatch(f"lightning:{program.__module__}:{program.__qualname__}")
        else:
            program = resolve(_OF_LIGHTNING, ())(program)
    cls = program if isinstance(program, type) else type(program)
    name = getattr(program, "program_name", cls.__name__) if isinstance(program, Task) else cls.__name__
    found: object
    if named is not None:
        here = Path.cwd()
        options = {"module": named[1], **({"data": named[2]} if named[2] else {})}
        made = resolve(named[1], [here])
        target, folder = _OF_LIGHTNING_NAME, folder_of(inspect.getmodule(made), here)
        name = named[1].rpartition(":")[2]
        found = resolve(target, [folder])(**options)
    elif isinstance(program, str):
        here = Path.cwd()
        found = resolve(program, [here])
        target, folder = program, folder_of(inspect.getmodule(found), here)
        module, _, name = program.rpartition(":")
        if not isinstance(found, type):  # a function that makes it, often called `task`: the file says more
            name = module.rpartition(".")[2]
    elif not issubclass(cls, Task):
        raise JobError(f"job is a {name}", remedy="give a Job, a Task, module:Class, or the path of a job file")
    elif program is cls and _is_importable(cls):
        found, target = program, f"{cls.__module__}:{cls.__qualname__}"
        folder = folder_of(sys.modules.get(cls.__module__), Path.cwd())
    else:
        found, include = program, [_OBJECT]
        target, folder, *more = _written(program)
    if callable(found) and not isinstance(found, (type, Task)):
        found = task_of(found, target)
    settings = getattr(found, "settings", {})
    task = {"target": target, "options": options} if options else target
    raw = {"name": name, "code": [str(folder), *map(str, more)], "code_include": include, **plain_settings(settings), "task": task}
    return parse_job(raw, folder=folder, where=f"settings of {name}" if settings else name)


def _is_lightning(program: object) -> bool:
    """Whether a program is a LightningModule, or a class of them, without importing Lightning."""
    cls = program if isinstance(program, type) else type(program)
    return any(c.__name__ == "LightningModule" and c.__module__.split(".")[0] in ("lightning", "pytorch_lightning") for c in cls.__mro__)


def plain_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Keys of a job file that a task brings along; dataclasses among them as tables."""
    return {
        key: plain(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value for key, value in settings.items()
    }


def _is_importable(cls: type) -> bool:
    return cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__


_OBJECT = "task.pkl"
_MODULE = """\
from pathlib import Path

import cloudpickle

task = cloudpickle.loads((Path(__file__).parent / "task.pkl").read_bytes())
"""


def _written(task: object) -> tuple[str, Path, *tuple[Path, ...]]:
    """Writes a task of this program into a folder of its own; returns its target there, the folder, and those of its modules."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise MissingExtra("cloudpickle", "notebook") from None
    try:
        with guarded():
            data = cloudpickle.dumps(task)
    except Exception as e:
        raise JobError(
            f"task {type(task).__name__} cannot be sent to functions: {line_of(e)}",
            remedy="open files and connections inside its hooks, or put the class into a module",
        ) from e
    digest = hashlib.sha256(data).hexdigest()[:16]
    folder = home() / "programs" / digest
    if not folder.exists():
        part = folder.with_name(f"{digest}.{secrets.token_hex(6)}.part")
        part.mkdir(parents=True)
        (part / _OBJECT).write_bytes(data)
        (part / f"ephemeron_program_{digest}.py").write_text(_MODULE)
        try:
            part.rename(folder)  # as a whole: another run of the same task may read it from then on
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(part)
    return f"ephemeron_program_{digest}:task", folder, *folders_in(data)
