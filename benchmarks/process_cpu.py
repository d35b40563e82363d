"""CPU-seconds of a benchmark with the functions that it has started: what stays comparable on a machine with other load."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_DAEMON = "ephemeron.functions.daemon_process"


def tree_cpu_s() -> float:
    """User and system seconds so far of this process and its descendants, of daemons of local functions that run on its interpreter and
    their descendants, and of those of them that have ended and were waited for."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    members = {os.getpid()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended meanwhile
                continue
            parents[pid] = int(fields[1])
            used[pid] = sum(map(int, fields[11:15]))
            if words[0] == sys.executable and _DAEMON in words:
                members.add(pid)
    before = 0
    while len(members) > before:
        before = len(members)
        members |= {pid for pid, parent in parents.items() if parent in members}
    return sum(used.get(pid, 0) for pid in members) / _TICKS
