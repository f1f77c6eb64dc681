"""Who a peer is: an ed25519 key pair. The public key is its name, and signs what it says.

The same key proves a peer in every way it is reached: iroh's identities are ed25519 keys too.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.errors import SetupError, needs_extra
from shoal.net.api import PeerId

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as e:
    raise needs_extra("cryptography", "swarm", "A swarm") from e

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_FORM = "shoal-key-1 "  # then the secret key, 64 hexadecimal digits


@dataclass(frozen=True)
class Identity:
    secret: bytes

    def __repr__(self) -> str:
        return f"Identity({self.id})"  # the secret must not get into a log

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    @cached_property
    def id(self) -> PeerId:
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def sign_json(self, value: Any) -> str:
        """In hexadecimal digits, of the canonical form."""
        return self.sign(canonical(value)).hex()

    @classmethod
    def new(cls) -> Identity:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, file: Path) -> Identity:
        try:
            text, mode = file.read_text(), file.stat().st_mode
        except (OSError, UnicodeDecodeError) as e:
            raise SetupError(f"The key {file} cannot be read ({e}).") from e
        if mode & 0o077 and os.name != "nt":
            raise SetupError(f"The key {file} can be read by others: run `chmod 600 {file}`, or make a new one.")
        try:
            secret = bytes.fromhex(text.removeprefix(_FORM).strip()) if text.startswith(_FORM) else b""
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise SetupError(f"{file} is no key of a peer, or is damaged; nobody can repair it, so join again.")
        return cls(secret)

    @classmethod
    def at(cls, file: Path) -> Identity:
        """The key in the file; a new one where there is none.

        It appears whole or not at all, and of two processes that make it at once both use the one that came first.
        """
        if file.exists():
            return cls.load(file)
        made = cls.new()
        part = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
                f.write(f"{_FORM}{made.secret.hex()}\n")
                f.flush()
                os.fsync(f.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(part, file)
            _sync(file.parent)
        except OSError as e:
            raise SetupError(f"The key {file} cannot be written ({e}).") from e
        finally:
            part.unlink(missing_ok=True)
        return cls.load(file)


def _sync(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def canonical(value: Any) -> bytes:
    """The one way to write a JSON value, so that signatures and hashes of it are the same everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def is_peer(name: object) -> bool:
    return isinstance(name, str) and len(name) == 2 * KEY_BYTES and set(name) <= set("0123456789abcdef")


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer)).verify(signature, data)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def verify_json(peer: PeerId, value: Any, signature: str) -> bool:
    try:
        return verify(peer, canonical(value), bytes.fromhex(signature))
    except (ValueError, TypeError, RecursionError):
        return False
