"""Statements that anybody can check: a JSON object, who says it, and a signature.

What a statement is about is part of what is signed, so that one kind can never be passed off as another, and the bytes
that are signed are the canonical form of the object, so that spelling does not matter.
"""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from typing import Any

from shoal.net.api import PeerId
from shoal.net.identity import SIGNATURE_BYTES, Identity, canonical, is_peer, verify

_DOMAIN = b"shoal swarm 1\n"
Object = dict[str, Any]


class Forged(ValueError):
    """A statement that is not what it says it is; the message is the reason."""


def sign(kind: str, body: Object, key: Identity) -> str:
    return encode64(key.sign(_signed_bytes(kind, body)))


def check(kind: str, body: Object, by: object, signature: object) -> None:
    """Raises `Forged` unless `by` has signed exactly this."""
    try:
        given, data = decode64(signature), _signed_bytes(kind, body)
    except (ValueError, TypeError, RecursionError):
        raise Forged(f"a {kind} whose signature is no signature") from None
    if not (isinstance(by, str) and is_peer(by)) or len(given) != SIGNATURE_BYTES or not _holds(by, data, given):
        raise Forged(f"a {kind} that its author has not signed")


def encode64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode64(text: object) -> bytes:
    """ValueError for what is no base64."""
    if not isinstance(text, str):
        raise ValueError("no text")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("no base64") from None


def _signed_bytes(kind: str, body: Object) -> bytes:
    return _DOMAIN + kind.encode() + b"\n" + canonical(body)


@lru_cache(maxsize=1024)  # the same ticket comes with every record of those whom it has let in
def _holds(by: PeerId, data: bytes, signature: bytes) -> bool:
    return verify(by, data, signature)
