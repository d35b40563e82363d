"""Python processes that begin with their imports made: a fork server for each process of a lane, as the product has for functions.

The lanes start thousands of Python processes (clients, scripts, daemons, fork servers, services, shards), and most of them import
PyTorch, which takes 1.5 CPU seconds. Here `subprocess.Popen` has a process forked that has made the imports, wherever it would start
this interpreter in a way that a forked process can stand for, if `--warm-starts` asks for it; anything else, and everything under the
mark `cold_start`, starts as ever. What is forked behaves like a fresh process: it is the caller's child, with the descriptors, environment, folder, command line
(in /proc, too), session and exit code that it would have; random states are drawn anew.

A process that was forked here has a fork server from its birth, so its own children begin warm, too. To become its caller's child, a
process is forked twice while the caller is a subreaper (prctl(2)), as functions are (`ephemeron.functions.forking`). Where it becomes
another program (exec), as functions of emulated platforms do under their limits, that program goes on in it, if it could be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import mmap
import multiprocessing.util
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ephemeron.functions.forking import fork_away
from ephemeron.functions.process_reset import renew_randomness

PRELOAD = ("torch", "numpy.random", "click", "psutil")
OWN = (
    "training.worker.loop",
    "training.worker.trainers.torch_trainer",
    "communication.channels.object_store",
    "functions.daemon_process",
    "functions.function_main",
    "cli.main",
    "executor.executor",
)
"""Modules of `ephemeron`; `affected` takes whole names for dependencies of all tests."""
DETACHES = "ephemeron.functions.daemon_process"
"""Its process forks once and ends: the one that goes on gets a fork server, too."""
COLD = (("-m", "pip"), ("-m", "venv"))
"""Commands that are never forked."""
FUNCTION = ("-m", "ephemeron.functions.function_main")
SUPERVISORS = ("ephemeron.functions.aws_microvm.handler", "ephemeron.functions.openfaas.handler", "localhost-runner-v2.py")
"""Of clouds' functions, which they start warm. Others without a fork server are charged for the imports they make themselves."""
SLOW = ("ephemeron", "torch")
"""In code that takes long to import."""
ALIKE = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "MALLOC_", "GLIBC_", "TORCH", "LC_ALL", "LANG", "EPHEMERON_PRELOAD")
"""Environment variables that take effect while a process starts, or imports: where they differ, it starts as ever."""
SAME = {
    "LANG": lambda value: value.upper().endswith("UTF-8"),
    "EPHEMERON_PRELOAD": lambda value: value.startswith("torch,"),
    "MKL_NUM_THREADS": lambda value: value == "1",
    "KMP_DUPLICATE_LIB_OK": lambda value: value == "True",
    "KMP_INIT_AT_FORK": lambda value: value == "FALSE",
}
"""Values that are as good as none: Python's encoding is UTF-8 anyway, functions import PyTorch anyway, the tests have one thread (OMP_NUM_THREADS), and scikit-learn
sets those of KMP when it is imported."""
MOST_BYTES = 150_000
"""Of a request: a longer one is no packet."""
NAME = "fork server of tests"
HIGH = 700
"""Descriptors of fork servers are at least this."""
_SET_SUBREAPER, _GET_SUBREAPER, _SET_MM, _MAP = 36, 37, 35, 14
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """A process that is wanted."""

    kind: str
    """`module`, `code` or `file`."""
    target: str
    arguments: list[str]
    command: list[str]
    env: dict[str, str]
    cwd: str
    caller: int
    """Its parent, once the process in between has ended."""
    descriptors: list[int]
    """Their numbers in the process; the first three are 0, 1 and 2."""
    leads_session: bool
    safe_path: bool
    unbuffered: bool


class ForkServer:
    """The caller's side of its fork server."""

    def __init__(self, control: socket.socket, pid: int = 0) -> None:
        self._control, self._pid = control, pid
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def is_own(self) -> bool:
        """A process that was forked otherwise has a copy of this object, but no fork server."""
        return self._owner == os.getpid()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int | None:
        """The process id of a new child; None: there is none."""
        message = json.dumps(asdict(request)).encode()
        if len(message) > MOST_BYTES:
            return None
        with self._lock:
            was_subreaper = _is_subreaper()
            before = set() if was_subreaper else _children()
            if not was_subreaper:
                _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
            pid = 0
            try:
                socket.send_fds(self._control, [message], list(descriptors))
                pid = int(self._control.recv(32) or 0)
            except OSError:
                pass
            if not was_subreaper:
                _libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)
                for orphan in _children() - before - {pid}:  # lost its parent just now
                    threading.Thread(target=_reap, args=(orphan,), daemon=True).start()
            return pid or None

    def close(self) -> None:
        self._control.close()

    def end(self) -> None:
        """Ends the server, which is this process's child."""
        self.close()
        os.waitpid(self._pid, 0)


forked = 0
"""Processes that were forked for this one."""
_enabled = False
_server: ForkServer | None = None
_served: Request | None = None
"""What this process was forked for."""
_cold = 1
"""Above 0: processes start as ever."""
_environment: Mapping[str, str] = dict(os.environ)
"""In which the imports were made."""
_kept: list[object] = []


def enable() -> None:
    """From here on, this process's Python processes begin warm. Does nothing where the system cannot."""
    global _cold, _enabled
    _cold, _enabled = 0, sys.platform == "linux"


def is_available() -> bool:
    """Whether processes begin warm here."""
    return not _cold and _ready() is not None


def own_servers() -> set[int]:
    """Processes of this process's fork servers."""
    return {process.pid for process in _kept if isinstance(process, subprocess.Popen)}


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Inside, this process's Python processes begin warm."""
    global _cold, _enabled
    before, _cold = _cold, 0
    _enabled = _enabled or (_server is None and sys.platform == "linux")
    try:
        yield
    finally:
        _cold = before


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Inside, all processes start as ever, with their own imports."""
    global _cold
    _cold += 1
    try:
        yield
    finally:
        _cold -= 1


def main(control: int) -> NoReturn:
    """The first fork server of all."""
    global _cold
    _cold = 0
    sys.path.pop(0)
    for name in (*PRELOAD, *(f".{own}" for own in OWN)):
        importlib.import_module(name, "ephemeron")
    gc.collect()
    gc.freeze()
    try:
        _rename([f"{NAME}, with imports"], os.environ)
    except OSError:
        os._exit(0)  # so all processes start as ever
    _serve(socket.socket(fileno=control))


# -- the side of the caller -------------------------------------------------------------------------------------


_starting = threading.Lock()


def _ready() -> ForkServer | None:
    """The fork server of this process, the first of all if it is enabled."""
    global _enabled
    with _starting:
        if _enabled and _server is None:
            _enabled = False
            _start()
    return _server if _server is not None and _server.is_own else None


def _start() -> None:
    global _environment
    _environment = dict(os.environ)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import {__name__}; {__name__}.main({theirs.fileno()})"
        command = [sys.executable, "-c", code]  # without -P: IPython asks for `sys.flags.safe_path`
        _kept.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
    _take(ours)


def _take(control: socket.socket, pid: int = 0) -> None:
    global _server
    high = socket.socket(fileno=fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH))
    control.close()
    _server = ForkServer(high, pid)


_execute_child: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute_child)
_NEEDED = {
    "args",
    "executable",
    "preexec_fn",
    "close_fds",
    "pass_fds",
    "cwd",
    "env",
    "shell",
    "p2cread",
    "p2cwrite",
    "c2pread",
    "c2pwrite",
    "errread",
    "errwrite",
    "gid",
    "gids",
    "uid",
    "umask",
    "start_new_session",
}


@functools.wraps(_execute_child)
def _executed(self: subprocess.Popen[Any], *positional: Any, **named: Any) -> None:
    given = _parameters.bind(self, *positional, **named).arguments
    pid = None if _cold else _forked(given)
    if pid is None:
        return _execute_child(self, *positional, **named)
    global forked
    forked += 1
    self.pid = pid
    self._child_created = True  # type: ignore[attr-defined]
    self._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # type: ignore[attr-defined]


subprocess.Popen._execute_child = _executed  # type: ignore[attr-defined]


class _Becomes(BaseException):
    """This process goes on as another program."""


_execvp = os.execvp


def _became(file: str, arguments: Sequence[str]) -> NoReturn:
    """`os.execvp` of a process that was forked here."""
    command = [os.fsdecode(argument) for argument in arguments]
    if threading.active_count() == 1 and file == command[0] and _parsed(command) is not None and _is_alike(os.environ):
        raise _Becomes(command)
    _execvp(file, arguments)


def _forked(given: dict[str, Any]) -> int | None:
    """The process id of a warm process; None: this one starts as ever."""
    plain = (
        given["executable"] is given["preexec_fn"] is given["gid"] is given["gids"] is given["uid"] is None
        and given["close_fds"]
        and not given["shell"]
        and given["umask"] == -1
        and given.get("process_group", -1) in (-1, None)
    )
    if not plain or isinstance(given["args"], (str, bytes, os.PathLike)):
        return None
    command = [os.fsdecode(argument) for argument in given["args"]]
    env = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if given["env"] is None else given["env"]).items()}
    parsed = _parsed(command)
    if parsed is None or (server := _ready()) is None or not _is_alike(env):
        return None
    standard = [number if given[name] == -1 else given[name] for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
    passed = [fd for fd in given["pass_fds"] if fd > 2]
    try:
        folder = os.getcwd() if given["cwd"] is None else os.fsdecode(given["cwd"])
    except OSError:
        return None  # it is gone
    if parsed["kind"] == "code" and not parsed["safe_path"] and os.path.isdir(os.path.join(folder, "ephemeron")):
        return None  # it looks at a copy of the package
    request = Request(
        **parsed,
        command=command,
        env=env,
        cwd=folder,
        caller=os.getpid(),
        descriptors=[0, 1, 2, *passed],
        leads_session=bool(given["start_new_session"]),
    )
    return server.fork(request, [*standard, *passed])


def _parsed(command: list[str]) -> dict[str, Any] | None:
    """Kind, target, arguments and flags of a Python command; None: it cannot be forked."""
    if _is_script(command[0]):
        return {"kind": "file", "target": command[0], "arguments": command[1:], "safe_path": False, "unbuffered": False}
    if command[0] != sys.executable:
        return None
    flags, rest = [], command[1:]
    while rest and rest[0] in ("-P", "-u"):
        flags.append(rest.pop(0))
    kind = {"-m": "module", "-c": "code"}.get(rest[0] if rest else "", "file")
    start = tuple(rest[:2])
    if not rest or start in COLD or (start == FUNCTION and rest[-1] != "forks" and not _is_supervisor()):
        return None
    if kind != "file":
        rest.pop(0)
    elif not rest[0].endswith(".py"):
        return None
    if kind == "code" and ("sys.modules" in rest[0] or not any(word in rest[0] for word in SLOW)):
        return None  # it looks at what it has imported, or has begun sooner than a process of PyTorch's size is forked
    return {"kind": kind, "target": rest[0], "arguments": rest[1:], "safe_path": "-P" in flags, "unbuffered": "-u" in flags}


def _is_supervisor() -> bool:
    return _served is not None and _served.target.endswith(SUPERVISORS)


@functools.cache
def _is_script(path: str) -> bool:
    """A command that was installed for this interpreter."""
    if Path(path).parent != Path(sys.executable).parent or path == sys.executable:
        return False
    try:
        with open(path, "rb") as file:
            return file.readline().strip() == f"#!{sys.executable}".encode()
    except OSError:
        return False


def _is_alike(env: Mapping[str, str]) -> bool:
    def of(variables: Mapping[str, str]) -> dict[str, str]:
        own = ("PYTHONPATH", "PYTHONUNBUFFERED")
        found = {k: v for k, v in variables.items() if k.startswith(ALIKE) and k not in own}
        return {k: v for k, v in found.items() if k not in SAME or not SAME[k](v)}

    return of(env) == of(_environment)


def _is_subreaper() -> bool:
    found = ctypes.c_int()
    _libc.prctl(_GET_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def _children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


# -- the fork server, and what it forks -------------------------------------------------------------------------


def _serve(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its caller
    while True:
        try:
            message, descriptors, *_ = socket.recv_fds(control, MOST_BYTES, 250)
        except OSError:
            message = b""
        if not message:
            os._exit(0)
        request = Request(**json.loads(message))
        try:
            pid = fork_away(leads_session=request.leads_session)
        except OSError:
            pid = -1
        if pid == 0:
            control.close()
            try:
                _run(request, descriptors)
            finally:  # an error, which must not go on in the frames in which this server began
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        for fd in descriptors:
            os.close(fd)
        with contextlib.suppress(OSError):
            control.send(str(max(0, pid)).encode())


def _begin_server() -> None:
    """The fork server of this process, which has one thread yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        return _take(ours, pid)
    control = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    # Files that are open here are closed below their objects, which would close other files of these numbers in their end.
    gc.freeze()
    _kept.append((sys.stdin, sys.stdout, sys.stderr, sys.modules["__main__"]))
    _close_but({control})
    _rename([f"{NAME} for process {os.getppid()}"], {})
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _serve(socket.socket(fileno=control))


def _after_fork() -> None:
    global _server, _served
    if _server is None or _server.is_own:
        return
    _server.close()
    _server = None
    detaches = _served is not None and (_served.kind, _served.target) == ("module", DETACHES)
    if not _is_supervisor():
        _served = None
    if detaches:
        _begin_server()


def _after_multiprocessing(_: object) -> None:
    """A supervisor may start its function in a child: Lithops does."""
    if _server is None and _is_supervisor():
        _begin_server()


os.register_at_fork(after_in_child=_after_fork)
multiprocessing.util.register_after_fork(Request, _after_multiprocessing)


def _close_but(kept: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _run(request: Request, descriptors: list[int]) -> NoReturn:
    """Becomes the process that is wanted, to its end."""
    global _served
    _served = request
    os.execvp = _became
    end = time.monotonic() + 60
    while os.getppid() != request.caller and time.monotonic() < end:
        time.sleep(0.0005)
    placed = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in descriptors]
    _close_but(set(placed))
    for fd, number in zip(placed, request.descriptors, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.env)
    while True:
        try:
            code = _go_on(request)
        except _Becomes as e:
            (command,) = e.args
            request = replace(request, **_parsed(command), command=command, env=dict(os.environ), cwd=os.getcwd())
            _served = request
            assert _server is not None
            _server.end()  # it is not in the control groups that this process has entered since
        else:
            _end(code)


def _go_on(request: Request) -> int | None:
    """Runs the program to its end; its exit code, or None if it was interrupted.

    Raises:
        _Becomes: another one is to go on instead.
    """
    _rename(request.command, request.env)
    code = 1
    try:
        _begin_server()
        _set_up(request)
    except OSError as e:  # no such folder, above all
        os.write(2, f"{e}\n".encode())
        os._exit(1)
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    try:
        if request.kind == "module":
            runpy._run_module_as_main(request.target)  # type: ignore[attr-defined]
        elif request.kind == "code":
            exec(compile(request.target, "<string>", "exec"), main_module.__dict__)
        else:
            main_module.__dict__.update(__file__=request.target, __cached__=None)
            with open(request.target, "rb") as file:
                compiled = compile(file.read(), request.target, "exec")
            exec(compiled, main_module.__dict__)
        return 0
    except _Becomes:
        raise
    except SystemExit as e:
        code = _exit_code(e.code)
    except BaseException as e:  # noqa: BLE001 - a program's errors end its process
        trace = e.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(e), e.with_traceback(trace), trace)
        if isinstance(e, KeyboardInterrupt):
            return None
    return code


def _set_up(request: Request) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.cwd)
    time.tzset()
    tempfile.tempdir = None
    renew_randomness()
    argv0 = {"module": "-m", "code": "-c"}.get(request.kind, request.target)
    sys.argv, sys.orig_argv = [argv0, *request.arguments], list(request.command)
    first = {"module": os.getcwd(), "code": ""}.get(request.kind) if not request.safe_path else None
    if request.kind == "file":
        first = str(Path(request.target).resolve().parent)
    added = [entry for entry in request.env.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in sys.path]
    sys.path[:0] = [*([] if first is None else [first]), *added]
    importlib.invalidate_caches()
    if any(Path(entry, "sitecustomize.py").exists() for entry in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    through = request.unbuffered or bool(request.env.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")  # type: ignore[misc]
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw: Any = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if through else io.BufferedWriter(raw),
            "utf-8",
            errors,
            write_through=through,
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _rename(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Command line and environment in /proc.

    Raises:
        OSError: this kernel does not let us.
    """
    lines = [f"{k}={v}" for k, v in env.items()]
    parts = [b"".join(os.fsencode(part) + b"\0" for part in each) for each in (command, lines)]
    memory = mmap.mmap(-1, sum(map(len, parts)) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"".join(parts))
    _kept.append(memory)
    begins = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, ends = begins + len(parts[0]), begins + len(parts[0]) + len(parts[1])
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code, data = stat[23:25], stat[42:44]  # of fields 26, 27 and 45, 46; then begin of the heap and of the stack
    heap, stack = stat[44], stat[25]
    _libc.sbrk.restype = ctypes.c_void_p
    places = [*code, *data, heap, _libc.sbrk(0), stack, begins, middle, middle, ends]
    layout = struct.pack("11QQIi", *map(int, places), 0, 0, -1)  # as prctl_mm_map of <linux/prctl.h>; the rest stays
    if _libc.prctl(_SET_MM, ctypes.c_ulong(_MAP), layout, ctypes.c_ulong(len(layout)), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "this kernel does not change command lines")


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(code: int | None) -> NoReturn:
    """As the interpreter ends; None: as a program does that was interrupted."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.modules["__main__"].__dict__.clear()  # files that it has left open are written
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if code is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code or 0)
