"""Why tokenizing is fast here: most words of a text were seen before, so their ids are looked up instead of computed.

A byte-level BPE first cuts a text into pieces by a regular expression and then merges within each piece. None of the
expressions in use (GPT-2, Llama 3, Qwen, GPT-4) has a piece that goes on from a non-space into a space, so

    ids("I saw a whale") = ids("I") + ids(" saw") + ids(" a") + ids(" whale")

holds exactly, and the ids of " saw" can be kept. The library encodes what is new; nothing of it is reimplemented. It
spends most of its time on cutting, so this is 3 to 6 times as fast on English (docs/decisions/003-data-prepare.md).
Tokenizers of other kinds are not cut: `splits_before_spaces` knows the ones for which the equation holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal.data.tokenizer_library import flat

# A space after a non-space. Python counts more characters as space than the tokenizers do (\x1c to \x1f), which costs a
# cut and nothing else; U+180E was a space in older Unicode tables, so it counts as one too.
BREAK = re.compile(" (?<=[^\\s\u180e] )")
MAX_WORDS = 1 << 18  # about 40 MB
MAX_WORD_CHARS = 48  # what is longer (addresses, base64, text without spaces) seldom comes again

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (  # also Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS = {GPT2, GPT4, QWEN2}


class WordIds(dict[str, bytes]):
    """Word (without the space before it) → ids of space and word, as raw bytes, so that a text is one join."""

    def __init__(self, encode: Callable[[str], list[int]], dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._encode = encode
        self._dtype = dtype

    def encode(self, text: str) -> Any:
        first, *spaced = BREAK.split(text)
        head = np.array(self._encode(first), self._dtype).tobytes() if first else b""
        return np.frombuffer(head + b"".join(map(self.__getitem__, spaced)), self._dtype)

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._encode(" " + word), self._dtype).tobytes()
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()  # frequent words are back at once; keeping count of uses would cost more than it saves
            self[word] = ids
        return ids


def splits_before_spaces(spec: Mapping[str, Any]) -> bool:
    """Whether the tokenizer that this tokenizer.json describes always cuts between a non-space and a space."""
    steps = flat(spec.get("pre_tokenizer"))
    return (
        spec["model"].get("type") == "BPE"
        # NFC never joins a space to what stands before it. Other normalizers make or move spaces.
        and all(n.get("type") == "NFC" for n in flat(spec.get("normalizer")))
        and all(_known(step) for step in steps)
        and any(_cuts(step) for step in steps)
        and not any(_reaches_over_a_space(token) for token in spec.get("added_tokens") or [])
    )


def _known(step: Mapping[str, Any]) -> bool:
    return step.get("type") in ("ByteLevel", "Digits") or _cuts(step)


def _cuts(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))  # it is GPT2
    keeps_all = (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True))
    return step.get("type") == "Split" and keeps_all and step.get("pattern", {}).get("Regex") in KNOWN_PATTERNS


def _reaches_over_a_space(token: Mapping[str, Any]) -> bool:
    """Added tokens are found before anything is cut; a space inside one, or swallowed after it, must stay with it; and
    one that begins with a space and is to stand by itself must see what stands before it."""
    content = token["content"]
    alone = token.get("single_word") and content[:1].isspace()
    return bool(token.get("rstrip") or alone) or BREAK.search(content) is not None
