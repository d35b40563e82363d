"""Becomes the real runtime client `awslambdaric` once its limits are set: `python bootstrap.py PARENT HANDLER`.

A file that is run by its path and imports nothing of ours: what a function may import is its deployed code. Waits
for one byte on standard input, so that everything that is imported counts as memory of the function; and dies with
the service.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Waits to be let go, then runs the client for good."""
    parent, handler = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or not os.read(0, 1):
        os._exit(1)
    sys.path.insert(0, os.environ["LAMBDA_TASK_ROOT"])
    sys.argv = ["awslambdaric", handler]
    runpy.run_module("awslambdaric", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
