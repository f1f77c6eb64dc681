"""A child of this warm process, where `import torch` is already paid for. Nothing of it outlives a killed pytest.

    pid = fork(lambda: work(3), tmp_path / "out.txt")     # leaves with the code that work returns

The caller waits for it (`os.waitpid`) and ends it. Several ranks of one group: tests/ranks.py.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1


def fork(run: Callable[[], int], out: Path | None = None) -> int:
    """Its pid. What it prints is appended to `out`, if given, and so are the stacks of its threads upon SIGUSR1."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be tied to
            os._exit(1)
        if out is not None:
            _print_to(out)
        code = run()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: pytest's own exit handlers belong to the parent.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_to(out: Path) -> None:
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stderr = sys.stdout = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # pytest has put its own there
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
