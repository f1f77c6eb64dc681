"""A node's keeper, `python -m shoal.checkpoint.memory.keeper FOLDER`: serves its memory to others, takes in copies.

A process a node, without torch, started by the node's first worker. It reads the run's token from its standard input,
prints its address, and serves for as long as that input is open and for a while after: whoever is sending a copy when
the workers die can finish. Whoever starts another one over the same folder replaces it: a keeper that is not named in
`keeper.json` any more leaves, as it does when the folder is gone. Nobody has to find and kill it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import wire
from shoal.checkpoint.memory.generations import Here, put
from shoal.checkpoint.memory.intake import Intake, Unfit
from shoal.checkpoint.memory.neighbour import HELLO, REQUEST_BYTES
from shoal.checkpoint.names import Name, rank_file
from shoal.errors import TransientError
from shoal.plain_file import NotPlain, open_plain, read_object
from shoal.values import BadValue

LINGER_S = 600.0
IDLE_S = 120.0  # of a connection that asks nothing
STALL_S = 15.0
MOST_CONNECTIONS, MOST_STRANGERS = 1024, 64
START_S = 60.0  # Python on a busy machine
NICE = 5
_NAMED = "keeper.json"
_TICK_S = 1.0


class Keeper:
    def __init__(self, folder: Path, token: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        self._folder, self._token, self._here = folder, token, Here(folder)
        self._intake = Intake(folder)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.address = wire.text_of(self._listener.getsockname())
        self._id = secrets.token_hex(8)
        put(folder / _NAMED, json.dumps({"id": self._id, "pid": os.getpid(), "address": self.address}).encode())
        self._lock = threading.Lock()
        self._friends = self._strangers = self._busy = 0
        self._seen_at = time.monotonic()

    def run(self, parent: int, linger_s: float) -> None:
        """Until it is replaced, or alone: `parent` is a descriptor that ends when the process which started it does."""
        orphaned = False
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(parent, selectors.EVENT_READ)
            while self._still_named() and not (orphaned and self._idle_s() > linger_s):
                for key, _ in ready.select(_TICK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif not os.read(parent, 4096):
                        ready.unregister(parent)
                        orphaned = True
                        self._seen()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it hung up already, or there are too many open files
            time.sleep(0.01)
            return
        with self._lock:
            full = self._strangers >= MOST_STRANGERS or self._friends >= MOST_CONNECTIONS
            self._strangers += not full
        if full:
            sock.close()
        else:
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its last. Whatever comes over it ends this connection at most."""
        with sock, contextlib.suppress(OSError):
            friend = False
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire.admit(sock, self._token, HELLO)
                friend = True
            finally:
                with self._lock:
                    self._strangers -= 1
                    self._friends += friend
            try:
                while True:
                    sock.settimeout(IDLE_S)
                    message = wire.receive_message(sock, REQUEST_BYTES)
                    sock.settimeout(STALL_S)
                    with self._working():
                        self._answer(sock, message)
            finally:
                with self._lock:
                    self._friends -= 1

    def _answer(self, sock: socket.socket, message: dict[str, Any]) -> None:
        answers: dict[Any, Callable[[socket.socket, dict[str, Any]], None]] = {
            "list": self._list, "part": self._part, "extra": self._extra, "read": self._read, "copy": self._copy,
        }  # fmt: skip
        try:
            answers[message["do"]](sock, message)
        except FileNotFoundError:
            wire.send(sock, {"error": "it is not here", "kind": "missing"})
        except Unfit as e:
            wire.send(sock, {"error": str(e)})
        except (KeyError, TypeError, ValueError) as e:
            raise wire.Broken("a message that cannot be understood") from e

    def _list(self, sock: socket.socket, message: dict[str, Any]) -> None:
        kept = self._here.kept().items()
        table = [(name.step, name.term, sorted(one.ranks.items()), one.extra) for name, one in kept]
        wire.send(sock, {"kept": table})

    def _part(self, sock: socket.socket, message: dict[str, Any]) -> None:
        self._send(sock, self._here.part(_name(message), whole(message["rank"])))

    def _extra(self, sock: socket.socket, message: dict[str, Any]) -> None:
        self._send(sock, self._here.extra(_name(message)))

    def _read(self, sock: socket.socket, message: dict[str, Any]) -> None:
        name, rank = _name(message), whole(message["rank"])
        at, count = whole(message["at"]), whole(message["count"])
        # Names of files are made here, from numbers: nothing that comes over the wire is ever a path.
        with open(open_plain(self._here.path(name, rank_file(rank))), "rb", buffering=0) as file:
            if at + count > os.fstat(file.fileno()).st_size:
                wire.send(sock, {"error": "it is shorter than that", "kind": "short"})
                return
            wire.send(sock, {"bytes": count})
            if count and sock.sendfile(file, at, count) != count:
                raise wire.Broken("the file has become shorter")

    def _copy(self, sock: socket.socket, message: dict[str, Any]) -> None:
        name, rank, world = _name(message), whole(message["rank"]), whole(message["world"])
        sizes = (whole(message["bytes"]), whole(message["part"]), whole(message["extra"]))
        self._intake.take(sock, name, rank, world, *sizes)

    @staticmethod
    def _send(sock: socket.socket, data: bytes) -> None:
        wire.send(sock, {"bytes": len(data)})
        sock.sendall(data)

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
            self._seen()

    def _seen(self) -> None:
        self._seen_at = time.monotonic()

    def _idle_s(self) -> float:
        return 0.0 if self._busy else time.monotonic() - self._seen_at

    def _still_named(self) -> bool:
        try:
            return read_object(self._folder / _NAMED, 1 << 16).get("id") == self._id
        except (FileNotFoundError, NotPlain, BadValue):
            return False


@dataclass(frozen=True)
class Started:
    """A keeper that this process started. It ends a while after this process, or when it is told to."""

    address: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """At the end of a run. It has nothing to save (what it holds is complete or worthless), and may be frozen."""
        self.process.kill()
        self.process.wait()


def start(folder: Path, token: bytes, host: str = "127.0.0.1", linger_s: float = LINGER_S) -> Started:
    """Starts the keeper of a folder; whoever kept it until now leaves. Its last words are in keeper.log beside it."""
    log = folder / "keeper.log"
    options = ["--host", host, "--linger-s", str(linger_s)]
    command = [sys.executable, "-m", "shoal.checkpoint.memory.keeper", str(folder), *options]
    with open(log, "wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, start_new_session=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(token.hex().encode() + b"\n")
        process.stdin.flush()
    with selectors.DefaultSelector() as ready, process.stdout as out:
        ready.register(out, selectors.EVENT_READ)
        address = out.readline().decode().strip() if ready.select(START_S) else ""
    if not address:
        process.kill()
        process.wait()
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise TransientError(f"the keeper of {folder} did not start: {last}")
    return Started(address, process)


def whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError("no whole number")
    return value


def _name(message: dict[str, Any]) -> Name:
    return Name(whole(message["step"]), whole(message["term"]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.checkpoint.memory.keeper", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--linger-s", type=float, default=LINGER_S)
    args = parser.parse_args()
    os.nice(NICE)
    with open(0, "rb", buffering=0, closefd=False) as parent:
        token = bytes.fromhex(parent.readline().decode())
    if len(token) != wire.TOKEN_BYTES:
        parser.error(f"standard input begins with the token of the run, {wire.TOKEN_BYTES} bytes in hex")
    keeper = Keeper(args.folder, token, args.host, args.port)
    print(keeper.address, flush=True)
    keeper.run(0, args.linger_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
