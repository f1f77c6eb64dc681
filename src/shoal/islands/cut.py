"""Cuts an island off from the others, for tests and drills. Does nothing unless SHOAL_FAULT_FILE is set.

SHOAL_FAULT_FILE=PATH     a file that may come and go: {"cut": [2], "until": UNIX TIME}

Until then the processes of these islands hear nothing: the kernel drops what comes in on their connections (a socket
filter, which needs no privilege), acknowledgements too, so soon nothing goes out either. Nothing is closed: a cable was
pulled, no peer has died. The run directory stays within reach, and so do the other ranks of the same island.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from weakref import WeakSet

from shoal.plain_file import read_object
from shoal.values import BadValue, items, real

FILE = "SHOAL_FAULT_FILE"
LOOK_S = 0.05
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)  # classic BPF: return 0 bytes of the packet
_PROGRAM = struct.pack("HL", 1, ctypes.addressof(_DROP))

_sockets: WeakSet[socket.socket] = WeakSet()
_lock = threading.Lock()
_cut = threading.Event()


def may_cut(sock: socket.socket) -> socket.socket:
    """A connection, or a listening socket, between islands."""
    if _file is not None:
        with _lock:
            _sockets.add(sock)
            if _cut.is_set():
                _filter([sock], cut=True)
    return sock


def refuse_if_cut() -> None:
    """Before a connection is made: nobody would answer."""
    if _cut.is_set():
        raise TimeoutError("this island is cut off, by a drill")


def _watch(path: Path, island: int) -> None:
    while True:
        cut = _told(path, island)
        with _lock:
            if cut != _cut.is_set():
                (_cut.set if cut else _cut.clear)()
                _filter(_sockets, cut)
        time.sleep(LOOK_S)


def _told(path: Path, island: int) -> bool:
    with contextlib.suppress(OSError, BadValue):
        said = read_object(path)
        return island in items(said.get("cut"), 1 << 16) and time.time() < real(said.get("until"))
    return False


def _filter(sockets: WeakSet[socket.socket] | list[socket.socket], cut: bool) -> None:
    for sock in list(sockets):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH if cut else _DETACH, _PROGRAM if cut else b"\0\0\0\0")


_file = os.environ.get(FILE) if sys.platform == "linux" else None
if _file is not None:
    threading.Thread(
        target=_watch, args=(Path(_file), int(os.environ.get("SHOAL_ISLAND", "-1"))), name="fleet-cut", daemon=True
    ).start()
