"""How processes of a run talk over TCP: both prove that they know the run's token, then JSON messages and raw bytes.

The token never travels. Each side sends a random number and the other answers with an HMAC of both. It keeps strangers
and stray programs out; it does not encrypt, as the traffic of the training itself is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from typing import Any

from shoal.values import BadValue, read_object

TOKEN_BYTES = 32
GREETING_S = 5.0  # for a stranger to become a friend
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH_BYTES = 4
MOST_PORT = (1 << 16) - 1


class Broken(ConnectionError):
    """The other side does not keep to the protocol, or is not who it should be."""


def admit(sock: socket.socket, token: bytes, hello: bytes) -> None:
    """The server's side; `Broken` for whoever does not know the token, who has learnt nothing then."""
    until = time.monotonic() + GREETING_S
    mine = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(hello + mine)
    said = receive(sock, _NONCE_BYTES + _MAC_BYTES, until)
    theirs, proof = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"asks", mine, theirs)):
        raise Broken("it does not know the token of this run")
    sock.sendall(_proof(token, b"keeps", mine, theirs))


def greet(sock: socket.socket, token: bytes, hello: bytes, within_s: float | None = None) -> None:
    """The other side. `hello` is the name and the version of what is to be talked."""
    until = time.monotonic() + (GREETING_S if within_s is None else within_s)
    said = receive(sock, len(hello) + _NONCE_BYTES, until)
    if not said.startswith(hello):
        raise Broken(f"what answers there is no {hello.split(maxsplit=2)[1].decode()} of this version")
    theirs, mine = said[len(hello) :], secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(mine + _proof(token, b"asks", theirs, mine))
    if not hmac.compare_digest(receive(sock, _MAC_BYTES, until), _proof(token, b"keeps", theirs, mine)):
        raise Broken("it does not know the token of this run")


def _proof(token: bytes, role: bytes, servers: bytes, askers: bytes) -> bytes:
    """The role is in it, so that nobody can be made to answer his own question."""
    return hmac.digest(token, role + servers + askers, "sha256")


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """ValueError for what is infinite or NaN: who reads it would refuse it."""
    text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    sock.sendall(len(text).to_bytes(_LENGTH_BYTES, "big") + text)


def receive_message(sock: socket.socket, most_bytes: int) -> dict[str, Any]:
    length = int.from_bytes(receive(sock, _LENGTH_BYTES), "big")
    if length > most_bytes:
        raise Broken(f"a message of {length} bytes, where at most {most_bytes} are allowed")
    try:
        return read_object(receive(sock, length), most_bytes=most_bytes)
    except BadValue as e:
        raise Broken(f"a message that is none: {e}") from None


def receive(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    data = bytearray(count)
    receive_into(sock, memoryview(data), until)
    return bytes(data)


def receive_into(sock: socket.socket, into: memoryview, until: float | None = None) -> None:
    """Each wait is bounded by the socket's timeout, all of them together by `until` (monotonic)."""
    done = 0
    while done < into.nbytes:
        if until is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
        n = sock.recv_into(into[done:])
        if not n:
            raise Broken("the connection was closed")
        done += n


def address_of(text: str) -> tuple[str, int]:
    """Of host:port. ValueError for what is none."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= MOST_PORT):
        raise ValueError(f"{text[:80]!r} is no host:port")
    return host.strip("[]"), int(port)


def text_of(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
