"""What each token of a tokenizer adds to a text, in bytes: for those who hold text to a form token by token.

A token may be part of a character only, so text does not do. What is found is compared with what the library decodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.data.tokenizer_library import flat
from shoal.errors import DataError
from shoal.values import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

TRIED = 512  # tokens that are compared with what the library decodes
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
Step = Callable[[str | bytes], str | bytes]


def bytes_of_tokens(library: Library, spec: Mapping[str, Any], where: str) -> list[bytes]:
    """By id. Of special tokens, which are left out of a text, and of ids without a token there are none."""
    steps = _steps(spec, where)
    ids = library.get_vocab(with_added_tokens=True)
    special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    found = [b""] * (max(ids.values(), default=-1) + 1)
    for piece, i in ids.items():
        if i not in special:
            made: str | bytes = piece
            for step in steps:
                made = step(made)
            found[i] = made if isinstance(made, bytes) else made.encode(errors="replace")
    _compare(library, found, where)
    return found


def _steps(spec: Mapping[str, Any], where: str) -> list[Step]:
    """What the decoder does to each token by itself."""
    steps: list[Step] = []
    fused = False  # from there on a step sees the whole text
    for kind in flat(spec.get("decoder")):
        name, pattern = kind.get("type"), kind.get("pattern")
        if name == "ByteLevel":
            steps.append(_by_level)
        elif name == "ByteFallback":
            steps.append(_by_fallback)
        elif name == "Metaspace":
            steps.append(_replaced(str(kind.get("replacement", "▁")), " "))
        elif name == "Replace" and not fused and isinstance(pattern, dict) and "String" in pattern:
            steps.append(_replaced(str(pattern["String"]), str(kind.get("content", ""))))
        elif name == "Fuse":
            fused = True
        elif not (name == "Strip" and fused and not kind.get("stop")):
            raise _cannot(where, f"its decoder has the step {shown(str(name))}, which joins tokens by rules")
    if not steps:
        raise _cannot(where, "its decoder puts blanks between tokens")
    return steps


def _replaced(old: str, new: str) -> Step:
    return lambda made: made if isinstance(made, bytes) else made.replace(old, new)


def _by_fallback(made: str | bytes) -> str | bytes:
    found = None if isinstance(made, bytes) else _BYTE.match(made)
    return bytes([int(found[1], 16)]) if found else made


def _alphabet() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: themselves where they can be seen, else from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_LETTERS = _alphabet()


def _by_level(made: str | bytes) -> str | bytes:
    """A token with another letter in it is text, as the library takes it."""
    if isinstance(made, bytes) or any(letter not in _LETTERS for letter in made):
        return made
    return bytes(_LETTERS[letter] for letter in made)


def _compare(library: Library, found: list[bytes], where: str) -> None:
    """Some of them behind a letter, as in the middle of a text."""
    before = library.encode("a", add_special_tokens=False).ids
    known = library.decode(before, skip_special_tokens=True)
    ids = [i for i, piece in enumerate(found) if piece and _is_text(piece)]
    for i in ids[:: max(1, len(ids) // TRIED)]:
        if library.decode([*before, i], skip_special_tokens=True) != known + found[i].decode():
            raise _cannot(where, f"token {i} is decoded as something else than {shown(found[i].decode())}")


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cannot(where: str, why: str) -> DataError:
    return DataError(
        f"what the tokens of {where} add to a text cannot be told one by one ({why}), so no answer can be held to a "
        "form; leave the form out."
    )
