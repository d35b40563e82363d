"""Programs that ephemeron runs in processes of their own, by name: a table, as the entries of functions have one.

They begin with `-P`: a file of the user's working folder, `json.py` say, takes no module's place.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path
from typing import Literal

Program = Literal[
    "function",
    "daemon",
    "parameter-server",
    "sparse-shard",
    "data-service",
    "link-peer",
    "first-steps",
    "script-trial",
    "item-trial",
    "stop-run",
    "driver",
    "command-line",
]
_MODULES: dict[Program, str] = {
    "function": "ephemeron.functions.function_main",
    "daemon": "ephemeron.functions.daemon_process",
    "parameter-server": "ephemeron.communication.channels.parameter_server",
    "sparse-shard": "ephemeron.sparse.store.processes",
    "data-service": "ephemeron.data.service.process",
    "link-peer": "ephemeron.partition.costs.peer_process",
    "first-steps": "ephemeron.training.worker.trainers.first_steps",
    "script-trial": "ephemeron.training.driver.launching.script_process",
    "item-trial": "ephemeron.executor.item_trial",
    "stop-run": "ephemeron.dashboard.stop_process",
    "driver": "ephemeron.runs.driver_process",
    "command-line": "ephemeron.cli.main",
}


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def module_of(program: Program) -> str:
    """The module that runs as `__main__` in such processes."""
    return _MODULES[program]


def ends_with_parent() -> None:
    """In a child that was forked just now: has the kernel kill it when its parent dies, on Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


PYTHON_VARIABLE = "EPHEMERON_FUNCTION_PYTHON"
"""Environment variable of functions of this machine: the interpreter that runs them, where it is not the client's."""


def command(program: Program, *arguments: str, python: str = "") -> list[str]:
    """The command that starts a program.

    Args:
        program: see above.
        arguments: of it.
        python: interpreter; empty: the client's.
    """
    return [python or sys.executable, "-P", "-m", _MODULES[program], *arguments]


def peak_mb() -> float:
    """Largest resident size of this process since `forget_peak`, MiB; where the system keeps none, since it began.

    `getrusage` alone would count what its parent had when it was started.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / (1024 if sys.platform != "darwin" else 1024**2)


def forget_peak() -> None:
    """Begins `peak_mb` anew, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
