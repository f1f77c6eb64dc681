"""Sockets for peers that can reach each other: BBR where the kernel has it, and what the kernel knows of a path."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from shoal import wire
from shoal.net.api import PeerId, Refused, Way
from shoal.net.frames import MOST_BULK_FRAME, MOST_FRAME, PIECE
from shoal.net.identity import Identity
from shoal.net.pipe import Broken, Counts, Greeting
from shoal.net.secure import Proven, SecurePipe, answer, dial

CONNECT_S = 4.0
GREETING_S = 5.0  # for a stranger to become a friend
MOST_STRANGERS = 128  # at the greeting at a time
_CONGESTION = 13  # TCP_CONGESTION; in `socket` only on Linux
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT
# A connection for bulk may be idle for hours: what forgets it on the way (a NAT) must be noticed, and reminded.
_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
_RETRANSMITTED_AT, _SENT_AT = 100, 156  # in struct tcp_info: tcpi_total_retrans, tcpi_data_segs_out
_SIOCGIFADDR = 0x8915

Welcome = Callable[[PeerId, Greeting, str], "Greeting | str"]  # its key, greeting, ip:port; a greeting, or why not
OnPipe = Callable[[Proven, SecurePipe], None]
OnStranger = Callable[[str, str], None]  # its ip:port, what is wrong


class Listener:
    """Accepts connections and hands over those that have proven themselves and are welcome."""

    def __init__(
        self, me: Identity, welcome: Welcome, on_pipe: OnPipe, on_stranger: OnStranger, congestion: str
    ) -> None:
        self._me, self._welcome, self._on_pipe, self._on_stranger = me, welcome, on_pipe, on_stranger
        self._congestion = congestion
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        # IPv4 alone: for all hosts and port 0, asyncio takes another port for each of the two families.
        at = host or "0.0.0.0"
        self._server = await asyncio.start_server(self._greet, at, port, limit=4 * PIECE, backlog=256)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, sock: socket.socket) -> None:
        """A connection that did not come by listening."""
        await self._greet(*await asyncio.open_connection(sock=sock, limit=4 * PIECE))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, seen = asyncio.current_task(), _seen(writer)
        assert task is not None
        if len(self._tasks) >= MOST_STRANGERS:
            writer.transport.abort()
            return
        self._tasks.add(task)
        proven = None
        try:
            async with asyncio.timeout(GREETING_S):
                tune(writer, self._congestion)
                proven = await answer(reader, writer, self._me, lambda peer, said: self._welcome(peer, said, seen))
        except TimeoutError:
            self._on_stranger(seen, "it did not finish its greeting in time")
        except (Broken, OSError) as e:
            self._on_stranger(seen, str(e))
        except asyncio.CancelledError:
            pass  # closing; the task has nothing else to do, and asyncio's server would log it as an error
        finally:
            self._tasks.discard(task)
            if proven is None:
                writer.close()
        if proven is not None:
            self._on_pipe(proven, _pipe(reader, writer, proven, proven.greeting.bulk))


async def reach(
    me: Identity,
    peer: PeerId,
    at: str | socket.socket,
    greet: Callable[[str], Greeting],
    congestion: str,
) -> tuple[Proven, SecurePipe]:
    """A proven connection to the peer at ip:port or on a socket, or `Broken`, `Refused`. The greeting is told this
    side's address."""
    to: dict[str, Any] = {"sock": at}
    if isinstance(at, str):
        try:
            host, port = wire.address_of(at)
        except ValueError as e:
            raise Broken(f"{at!r} is no address") from e
        to = {"host": host, "port": port}
    writer = None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(**to, limit=4 * PIECE)
            tune(writer, congestion)
            greeting = greet(writer.get_extra_info("sockname")[0])
            proven = await dial(reader, writer, me, peer, greeting)
    except (Broken, Refused):
        _abort(writer)
        raise
    except TimeoutError as e:
        _abort(writer)
        raise Broken("no answer in time") from e
    except OSError as e:
        _abort(writer)
        raise Broken(e.strerror or str(e)) from e
    except BaseException:
        _abort(writer)
        raise
    return proven, _pipe(reader, writer, proven, greeting.bulk)


def way() -> Way:
    return "tcp"


def tune(writer: asyncio.StreamWriter, congestion: str) -> None:
    """BBR keeps its speed on lossy paths where CUBIC does not (10 times at 1% loss, 100 ms); what is not sent yet is
    kept here and not in the kernel, so that pieces of many messages take turns and a slow socket gets fewer."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if congestion and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without it has its own default
            sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, congestion.encode())
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, 2 * PIECE)
    writer.transport.set_write_buffer_limits(high=PIECE)


def congestion_control(wanted: str) -> str:
    """Which one this kernel gives who asks for that one: unprivileged programs may get its default."""
    if sys.platform != "linux":
        return "the system's"
    with socket.socket() as sock:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, wanted.encode())
        return sock.getsockopt(socket.IPPROTO_TCP, _CONGESTION, 16).rstrip(b"\0").decode()


def counts(writer: asyncio.StreamWriter) -> Counts:
    sock = writer.get_extra_info("socket")
    if sys.platform != "linux" or sock is None:
        return Counts()
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return Counts()
    if len(info) < _SENT_AT + 4:
        return Counts()
    return Counts(struct.unpack_from("=I", info, _SENT_AT)[0], struct.unpack_from("=I", info, _RETRANSMITTED_AT)[0])


def own_hosts() -> list[str]:
    """The IPv4 addresses of this machine's interfaces, without loopback (which is left when there is no other)."""
    found: list[str] = []
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    asked = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(asked[20:24]))
    if not found:
        with contextlib.suppress(OSError):
            found = socket.gethostbyname_ex(socket.gethostname())[2]
    return [h for h in found if not h.startswith("127.")] or ["127.0.0.1"]


def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proven: Proven, bulk: bool) -> SecurePipe:
    most = MOST_BULK_FRAME if bulk else MOST_FRAME
    return SecurePipe(reader, writer, proven.sends, proven.receives, most, _seen(writer), lambda: counts(writer))


def _seen(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return wire.text_of(name) if name else ""


def _abort(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.transport.abort()
