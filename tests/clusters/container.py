"""A container without Docker: `python container.py SPEC.json` runs one command in namespaces and a root of its own.

The root is the machine's, seen through an overlay: what the container writes there is its own and gone with it, and
mount points can be made that the machine does not have. Process ids, mounts and shared memory are its own too; the
network and the host name are those of its pod, which `--sandbox` holds. The command is process 1, as it is in a real
container: a signal that it does not handle does nothing; unless the pod shares its processes, then another is, which
also reaps orphans. Whoever started this dies: so does the container.
Needs root. Standard library only: it starts in 50 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
RDONLY, NOSUID, REMOUNT, BIND, REC, PRIVATE = 0x1, 0x2, 0x20, 0x1000, 0x4000, 0x40000
PDEATHSIG, NO_NEW_PRIVS = 1, 38
CANNOT_START = 128  # what Kubernetes reports for it
DEFAULT_SHM = 64 << 20  # what container runtimes give without being asked
_libc = ctypes.CDLL(None, use_errno=True)


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _call(_libc.unshare(flags), "unshare")


def join(namespace: str) -> None:
    with open(namespace) as handle:
        _call(_libc.setns(handle.fileno(), 0), f"setns {namespace}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    encoded = [text.encode() for text in (source, target, kind, data)]
    _call(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def die_with_parent() -> None:
    _libc.prctl(PDEATHSIG, signal.SIGKILL)


def sandbox(host_name: str) -> None:
    """Holds the network and the host name of a pod."""
    die_with_parent()
    unshare(NEWNET | NEWUTS)
    socket.sethostname(host_name)
    print("ready", flush=True)
    signal.pause()


def run(spec: dict[str, Any]) -> int:
    die_with_parent()
    for namespace in spec["join"]:
        join(namespace)
    unshare(NEWNS | NEWPID | NEWIPC)
    child = os.fork()
    if child == 0:
        try:
            _become(spec)
        except OSError as e:
            print(f"cannot start {spec['argv'][0]}: {e}", flush=True)
        os._exit(CANNOT_START)
    return _stand_before(child)


def _stand_before(child: int) -> int:
    """Passes signals on to it, reaps whoever else ends, leaves when it does; its exit code as a shell shows it."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _become(spec: dict[str, Any]) -> None:
    mount("none", "/", flags=PRIVATE | REC)
    root = spec["root"]
    for folder in (root, spec["upper"], spec["work"]):
        os.makedirs(folder, exist_ok=True)
    mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={spec['upper']},workdir={spec['work']}")
    for folder in spec["passable"]:  # as an image would have it: installed where anybody may look
        os.chmod(f"{root}{folder}", 0o755)
    mount("/dev", f"{root}/dev", flags=BIND | REC)
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", data=f"size={DEFAULT_SHM}")
    mount("proc", f"{root}/proc", "proc")
    read_only = RDONLY if spec["read_only"] else 0
    mount("tmpfs", f"{root}/tmp", "tmpfs", read_only, "size=256m,mode=1777")
    for each in spec["mounts"]:
        _mount(root, each)
    for folder in spec["installed"]:
        _show(root, folder)
    if read_only:
        mount("", root, flags=REMOUNT | BIND | RDONLY)
    os.chroot(root)
    os.chdir(spec["cwd"])
    os.setgroups(spec["groups"])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])
    die_with_parent()  # again: changing the user has undone it
    if spec["no_new_privileges"]:
        _libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if spec["shares_processes"] and (child := os.fork()):
        os._exit(_stand_before(child))
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


def _show(root: str, folder: str) -> None:
    """A checkout under /tmp, say, which a mount lies over; in an image it would be elsewhere."""
    if os.path.isdir(root + folder):
        return
    with contextlib.suppress(OSError):  # nothing can be put there, so nobody needs it
        os.makedirs(root + folder)
        mount(folder, root + folder, flags=BIND | REC)
        mount("", root + folder, flags=REMOUNT | BIND | RDONLY)


def _mount(root: str, each: dict[str, Any]) -> None:
    target = root + each["at"]
    if each["memory"]:
        os.makedirs(target, exist_ok=True)
        mount("tmpfs", target, "tmpfs", data=f"mode=1777{',size=' + str(each['bytes']) if each['bytes'] else ''}")
        return
    if os.path.isdir(each["source"]):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    mount(each["source"], target, flags=BIND | REC)
    if each["read_only"]:
        mount("", target, flags=REMOUNT | BIND | RDONLY)


if __name__ == "__main__":
    if sys.argv[1] == "--sandbox":
        sandbox(sys.argv[2])
    else:
        sys.exit(run(json.loads(Path(sys.argv[1]).read_text())))
