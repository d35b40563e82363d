"""Becomes an emulated function's process once its limits are set: `python bootstrap.py PARENT COMMAND…`.

A file that is run by its path and imports nothing of this package: a function imports its deployed code. Waits for one
byte on standard input, so that all imports count as memory of the function; and dies with the service.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Waits for the byte, then becomes the command."""
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or not os.read(0, 1):
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the service may block signals, which functions need
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
