"""Statements that anybody can check: a JSON object, who says it, and an ed25519 signature.

What a statement is about is part of what is signed, so that one kind can never be passed off as another, and the bytes
that are signed are the canonical form of the object, so that spelling does not matter.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import SetupError, needs_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SEED_BYTES, ID_DIGITS, SIGNATURE_BYTES = 32, 64, 64
_DOMAIN = b"shoal swarm 1\n"
Object = dict[str, Any]


class Forged(ValueError):
    """A statement that is not what it says it is; the message is the reason."""


class Signer(Protocol):
    """Whoever holds a secret key."""

    @property
    def id(self) -> str: ...

    def sign(self, data: bytes) -> bytes: ...


@dataclass(frozen=True)
class Key:
    """A secret key. Its id, the public one, is 64 hexadecimal digits."""

    seed: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Key:
        return cls(os.urandom(SEED_BYTES))

    @property
    def id(self) -> str:
        return _public(self.seed)

    def sign(self, data: bytes) -> bytes:
        return _private(self.seed).sign(data)

    def save(self, file: Path) -> None:
        """Readable by its owner alone, from the first moment on; an existing key is never overwritten."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(self.seed.hex() + "\n")

    @classmethod
    def load(cls, file: Path) -> Key:
        try:
            seed = bytes.fromhex(file.read_text().strip())
        except FileNotFoundError:
            raise SetupError(f"there is no key in {file}; join the swarm again with an invitation.") from None
        except ValueError:
            seed = b""
        if len(seed) != SEED_BYTES:
            raise SetupError(f"{file} holds no secret key of 64 hexadecimal digits; delete it and join again.")
        return cls(seed)


def canonical(value: Any) -> bytes:
    """One spelling for each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sign(kind: str, body: Object, key: Signer) -> str:
    return base64.urlsafe_b64encode(key.sign(_signed_bytes(kind, body))).decode().rstrip("=")


def check(kind: str, body: Object, by: str, signature: object) -> None:
    """Raises `Forged` unless `by` has signed exactly this."""
    try:
        given = decode64(signature)
        data = _signed_bytes(kind, body)
    except (ValueError, RecursionError):
        raise Forged(f"a {kind} whose signature is no signature") from None
    if not is_id(by) or len(given) != SIGNATURE_BYTES or not _holds(by, given, data):
        raise Forged(f"a {kind} that its author has not signed")


def is_id(value: object) -> bool:
    return isinstance(value, str) and len(value) == ID_DIGITS and all(c in "0123456789abcdef" for c in value)


def decode64(text: object) -> bytes:
    """ValueError for what is no base64."""
    if not isinstance(text, str):
        raise ValueError("no text")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("no base64") from None


def encode64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _signed_bytes(kind: str, body: Object) -> bytes:
    return _DOMAIN + kind.encode() + b"\n" + canonical(body)


@lru_cache(maxsize=8)
def _private(seed: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise needs_extra("cryptography", "swarm", "a swarm") from None
    return Ed25519PrivateKey.from_private_bytes(seed)


@lru_cache(maxsize=64)
def _public(seed: bytes) -> str:
    return _private(seed).public_key().public_bytes_raw().hex()


@lru_cache(maxsize=4096)  # the same ticket comes with every record of those whom it has let in
def _holds(by: str, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(by)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
