"""`python -m shoal…` without most of its start: a child that has torch already becomes it, instead of executing it.

A real start takes 3 s of CPU time, nearly all of it for imports of others' packages, and a drill has ten. While
`subprocess.Popen` is `Warm`, a command of Shoal's own is forked from the process that starts it, and so are those that
it starts itself, and a module of the tests': with real pids, parents, sessions, signals, pipes and exit codes, with its
own environment and command line, also in /proc, and with Shoal imported anew (0.4 s). Only what others' packages read
from the environment when they are imported is not read again. Where this is not possible (with a GPU, or under a kernel
that does not let processes name themselves) they are executed. Asked for by the fixture `warm_starts`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import logging
import mmap
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal.guard.workers import TIED

PR_SET_MM, PR_SET_MM_MAP, PR_SET_MM_MAP_SIZE = 35, 14, 15
Executed = subprocess.Popen
_shown: list[mmap.mmap] = []  # what /proc reads


def possible() -> bool:
    """Whether a process may say what its command line is, and may fork others that compute."""
    size = ctypes.c_uint32()
    return (
        sys.platform == "linux"
        and _prctl(PR_SET_MM_MAP_SIZE, ctypes.byref(size), 0) == 0
        and size.value == ctypes.sizeof(_Map)
        and not os.path.exists("/dev/nvidiactl")
    )


class Warm(Executed[Any]):
    def __init__(self, args: Any, **options: Any) -> None:
        if isinstance(args, list | tuple) and _ours(words := [os.fsdecode(word) for word in args]):
            env, keep, first = options.get("env"), options.get("pass_fds", ()), options.get("preexec_fn")
            options["preexec_fn"] = lambda: _begin(words, env, keep, first)
        super().__init__(args, **options)


def _ours(words: Sequence[str]) -> bool:
    match words:
        case [sys.executable, "-m", module, *_]:
            return module.split(".")[0] in ("shoal", "tests")
        case [sys.executable, "-I", "-S", script, _, *command]:
            return script == str(TIED) and _ours(command)
    return False


def _begin(
    words: Sequence[str], env: Mapping[str, str] | None, keep: Sequence[int], first: Callable[[], object] | None
) -> NoReturn:
    """In the forked child, where it would execute the program: streams, folder and session are what they should be."""
    try:
        if first is not None:
            first()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        _as_new(keep)
        os.execvp = _instead  # type: ignore[assignment]  # tied.py's last act
        _run(words)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


def _instead(_program: str, words: Sequence[str]) -> NoReturn:
    _run(words)


def _run(words: Sequence[str]) -> NoReturn:
    _show(words)
    if words[1] == "-m":
        sys.argv = list(words[2:])
        code = _code_of(lambda: runpy.run_module(words[2], run_name="__main__", alter_sys=True))
    else:
        sys.argv = list(words[3:])
        code = _code_of(lambda: runpy.run_path(words[3], run_name="__main__"))
    code = _code_of(atexit._run_exitfuncs) or code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter says it
    os._exit(code)


def _code_of(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _as_new(keep: Sequence[int]) -> None:
    """Nothing is left of what the process that forked was doing."""
    gc.enable()  # off between fork and exec
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        # In its place, not closed: whoever held it may close it yet, and must not close another.
        if fd > 2 and fd != nothing and fd not in keep:
            os.dup2(nothing, fd, inheritable=False)
    signal.set_wakeup_fd(-1)
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with contextlib.suppress(RuntimeError):  # those of `enable`
            faulthandler.unregister(number)
    atexit._clear()
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=at_once)
    sys.stderr.reconfigure(line_buffering=True, write_through=at_once)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = _warn
    for name in [name for name in sys.modules if name.split(".")[0] == "shoal"]:
        del sys.modules[name]  # it reads its environment anew, and nothing in it is patched
    sys.path.insert(0, os.getcwd())


def _warn(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _show(words: Sequence[str]) -> None:
    """In /proc: others look there for what this process is."""
    fields = [0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]  # the third of proc(5) at 2
    map_ = _Map(*(int(fields[n - 1]) for n in (26, 27, 45, 46, 47)), brk=_brk(), start_stack=int(fields[27]), exe_fd=-1)
    map_.arg_start, map_.arg_end = _kept(words)
    map_.env_start, map_.env_end = _kept([f"{name}={value}" for name, value in os.environ.items()])
    if _prctl(PR_SET_MM_MAP, ctypes.byref(map_), ctypes.sizeof(map_)):
        raise OSError(ctypes.get_errno(), "prctl")


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of prctl(2)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    )


def _prctl(option: int, *arguments: Any) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_MM, option, *arguments, 0, 0))


def _brk() -> int:
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    return int(sbrk(0))


def _kept(words: Sequence[str]) -> tuple[int, int]:
    """Where they begin in memory, and where they end."""
    data = b"".join(os.fsencode(word) + b"\0" for word in words) or b"\0"
    room = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no other is shown
    room[:] = data
    _shown.append(room)
    at = ctypes.addressof(ctypes.c_char.from_buffer(room))
    return at, at + len(data)
