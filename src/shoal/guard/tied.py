"""Ties a process to its parent, then becomes the real program: `python tied.py PARENT_PID COMMAND…`.

When the supervisor is killed with -9 nobody is left to end its workers, so the kernel does it (PR_SET_PDEATHSIG,
which survives exec). It runs as a program of its own instead of subprocess's preexec_fn because code between fork and
exec may deadlock when the parent has threads; it costs 20 ms. It imports nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":  # elsewhere the worker notices when its rendezvous or its peers go away
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above; the signal will never come
            sys.exit(75)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(f"shoal: cannot start {command[0]}: {e.strerror}.", file=sys.stderr)
        sys.exit(78)


if __name__ == "__main__":
    main()
