"""No process of a compile outlives the one that started it, however that one ends.

A pool's worker waits for work on a pipe whose other end its siblings hold too, so it does not notice that the process
which would send some has been killed. The kernel does.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. On Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
