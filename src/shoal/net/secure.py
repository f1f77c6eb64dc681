"""A TCP connection between two proven keys: who is there is signed, what is said is encrypted.

Modelled on SIGMA-I (Krawczyk 2003) with TLS 1.3's parts (RFC 8446): ephemeral X25519, each side signs the transcript
with its ed25519 key under a label of its role, the dialer shows itself only after the other has been proven, and all
keys are derived (HKDF-SHA256) from the secret and the hash of everything said so far. So a recorded handshake cannot
be replayed (the other's ephemeral key is new), none can be spliced into another, and a stolen long-term key does not
open old traffic. Why neither TLS nor Noise as they are: docs/decisions/037.

Records are AES-256-GCM with the record's number as nonce, which is not sent: one that is dropped, repeated, moved or
changed cannot be opened, and ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.net.api import PeerId, Refused
from shoal.net.frames import BadFrame, Data
from shoal.net.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from shoal.net.pipe import MOST_GREETING, Broken, Counts, Greeting, read_greeting

HELLO = b"shoal swarm 1\n\0\0"
TAG_BYTES = 16
REKEY = 1 << 20  # records under one key: at most 2^33 blocks of AES, far below what GCM allows
_LENGTH = 4
_SHORT = 2
_PROVEN = KEY_BYTES + SIGNATURE_BYTES + TAG_BYTES

Welcome = Callable[[PeerId, Greeting], "Greeting | str"]  # the greeting in return, or why not


class Cipher:
    """One direction: keys that follow each other, and the number of the next record."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._count = secret, 0
        self._key = AESGCM(secret)

    def seal(self, data: Data, about: bytes) -> bytes:
        number = self._number()  # first: it may bring a new key
        return self._key.encrypt(number, data, about)

    def open(self, data: Data, about: bytes) -> bytes:
        number = self._number()
        try:
            return self._key.decrypt(number, data, about)
        except InvalidTag as e:
            raise Broken("a record that was changed, repeated, moved, or is not from the peer") from e

    def _number(self) -> bytes:
        if self._count == REKEY:
            self._secret, self._count = _derive(self._secret, b"", b"next", 1)[0], 0
            self._key = AESGCM(self._secret)
        self._count += 1
        return self._count.to_bytes(12, "big")


@dataclass(frozen=True)
class Proven:
    peer: PeerId
    greeting: Greeting
    sends: Cipher
    receives: Cipher


async def dial(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, me: Identity, peer: PeerId, greeting: Greeting
) -> Proven:
    """The side that knows whom it wants. `Refused` is the other's no, `Broken` anything that is not as it should be."""
    own = X25519PrivateKey.generate()
    said = HELLO + own.public_key().public_bytes_raw()
    writer.write(said)
    theirs = await _exactly(reader, KEY_BYTES)
    secret, said = _shared(own, theirs), said + theirs
    mine, its = _handshake_keys(secret, said)
    proven = await _exactly(reader, _PROVEN)
    opened = its.open(proven, b"")
    key, signature = opened[:KEY_BYTES], opened[KEY_BYTES:]
    if not verify(key.hex(), b"shoal swarm responder" + _hash(said + key), signature):
        raise Broken("what answers there has no valid signature")
    if key.hex() != peer:
        raise Broken(f"another peer ({key.hex()[:10]}) is at this address")
    said += proven
    text, own_key = greeting.encode(), bytes.fromhex(me.id)
    signature = me.sign(b"shoal swarm initiator" + _hash(said + own_key + text))
    sealed = mine.seal(own_key + signature + text, _hash(said))
    writer.write(len(sealed).to_bytes(_SHORT, "big") + sealed)
    said += sealed
    answer = await _short(reader, MOST_GREETING)
    verdict = its.open(answer, _hash(said))
    if verdict[:1] != b"\1":
        raise Refused(verdict[1:].decode(errors="replace")[:200] or "no reason given")
    mine, its = _traffic_keys(secret, said + answer)
    return Proven(peer, read_greeting(verdict[1:]), mine, its)


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, me: Identity, welcome: Welcome
) -> Proven | None:
    """The side that listens. None: proven, but not welcome (`welcome` knows, and has told why)."""
    if await _exactly(reader, len(HELLO)) != HELLO:  # before any arithmetic is spent on a stranger
        raise Broken("a stranger that does not speak this protocol")
    own, theirs = X25519PrivateKey.generate(), await _exactly(reader, KEY_BYTES)
    public, own_key = own.public_key().public_bytes_raw(), bytes.fromhex(me.id)
    secret, said = _shared(own, theirs), HELLO + theirs + public
    its, mine = _handshake_keys(secret, said)
    proven = mine.seal(own_key + me.sign(b"shoal swarm responder" + _hash(said + own_key)), b"")
    writer.write(public + proven)
    said += proven
    sealed = await _short(reader, MOST_GREETING)
    opened = its.open(sealed, _hash(said))
    key, signature = opened[:KEY_BYTES], opened[KEY_BYTES : KEY_BYTES + SIGNATURE_BYTES]
    text = opened[KEY_BYTES + SIGNATURE_BYTES :]
    if not verify(key.hex(), b"shoal swarm initiator" + _hash(said + key + text), signature):
        raise Broken("a greeting without a valid signature")
    said += sealed
    greeting = read_greeting(text)
    verdict = welcome(key.hex(), greeting)
    text = b"\0" + verdict.encode() if isinstance(verdict, str) else b"\1" + verdict.encode()
    sealed = mine.seal(text, _hash(said))
    writer.write(len(sealed).to_bytes(_SHORT, "big") + sealed)
    if isinstance(verdict, str):
        await writer.drain()
        return None
    its, mine = _traffic_keys(secret, said + sealed)
    return Proven(key.hex(), greeting, mine, its)


@dataclass
class SecurePipe:
    """Frames over a proven connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sends: Cipher
    receives: Cipher
    most_frame: int
    seen: str
    read_counts: Callable[[], Counts] = field(default=Counts)

    async def send(self, parts: list[Data]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        length = (len(data) + TAG_BYTES).to_bytes(_LENGTH, "big")
        try:
            self.writer.write(length + self.sends.seal(data, length))
            await self.writer.drain()
        except OSError as e:
            raise Broken(f"the connection broke ({e})") from e

    async def receive(self) -> Data:
        length = await _exactly(self.reader, _LENGTH)
        size = int.from_bytes(length, "big")
        if not TAG_BYTES < size <= self.most_frame + TAG_BYTES:
            raise BadFrame(f"a frame of {size} bytes, where at most {self.most_frame} are allowed")
        sealed = await _exactly(self.reader, size)
        try:
            return self.receives.open(sealed, length)
        except Broken as e:
            raise BadFrame(str(e)) from e

    def counts(self) -> Counts:
        return self.read_counts()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the latter: the loop is closed already
            self.writer.close()


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except (OSError, EOFError) as e:
        raise Broken("the connection was closed" if isinstance(e, EOFError) else f"the connection broke ({e})") from e


async def _short(reader: asyncio.StreamReader, most: int) -> bytes:
    size = int.from_bytes(await _exactly(reader, _SHORT), "big")
    if not TAG_BYTES < size <= most + _PROVEN:
        raise Broken("a greeting of a wrong length")
    return await _exactly(reader, size)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _shared(own: X25519PrivateKey, theirs: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as e:  # a key of low order, that would make the secret one that everybody knows
        raise Broken("a key that is none") from e


def _derive(secret: bytes, salt: bytes, use: bytes, count: int) -> list[bytes]:
    keys = HKDF(SHA256(), 32 * count, salt, b"shoal swarm " + use).derive(secret)
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


def _handshake_keys(secret: bytes, said: bytes) -> tuple[Cipher, Cipher]:
    dialer, listener = _derive(secret, _hash(said), b"handshake", 2)
    return Cipher(dialer), Cipher(listener)


def _traffic_keys(secret: bytes, said: bytes) -> tuple[Cipher, Cipher]:
    dialer, listener = _derive(secret, _hash(said), b"traffic", 2)
    return Cipher(dialer), Cipher(listener)
