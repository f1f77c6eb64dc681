"""Changes bytes the way that disks, networks and hostile writers do: flips, cuts, splices, edges for lengths."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_MOST = 1 << 16  # bytes that a change adds


def damaged(rng: Random, data: bytes, most: int = 3, head: int = 0) -> bytes:
    """With one to `most` changes. `head`: half of them are within so many first bytes, where the lengths stand."""
    held = bytearray(data)
    _damage(rng, held, head)
    while most > 1 and rng.random() < 0.3:
        _damage(rng, held, head)
        most -= 1
    return bytes(held)


def spliced(rng: Random, samples: Sequence[bytes]) -> bytes:
    """The beginning of one and the end of another."""
    a, b = rng.choice(samples), rng.choice(samples)
    return a[: rng.randrange(len(a) + 1)] + b[rng.randrange(len(b) + 1) :]


def _damage(rng: Random, held: bytearray, head: int) -> None:
    if not held:
        held += rng.randbytes(rng.randrange(1, 40))
        return
    most = min(head, len(held)) if head and rng.random() < 0.5 else len(held)
    at = rng.randrange(most)
    how = rng.randrange(10)
    if how < 3:
        held[at] ^= 1 << rng.randrange(8)
    elif how == 3:
        held[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B, 0x0A, 0x2D, rng.randrange(256)))
    elif how == 4:
        del held[at:]
    elif how == 5:
        del held[at : at + rng.choice((1, 2, 4, 8, rng.randrange(1, 64)))]
    elif how == 6:
        held[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
    elif how == 7:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice(_NUMBERS) & ((1 << 8 * width) - 1)
        held[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
    elif how == 8:
        part = held[at : at + rng.randrange(1, 64)]
        held[at:at] = part * rng.choice((1, 2, min(1000, _MOST // max(1, len(part)))))
    else:
        end = min(len(held), at + rng.randrange(1, 64))
        held[at:end] = bytes((rng.choice((0, 255, 0x20)),)) * (end - at)
