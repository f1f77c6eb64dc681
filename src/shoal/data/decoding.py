"""Tokens to text where they come in parts: what is decoded apart need not be what is decoded as one.

A character of several bytes may lie across the seam, a SentencePiece tokenizer drops the blank before what it takes for
the beginning of a text, and some join words by rules. So a part is decoded with what stands before it, and that is
taken away again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer


def continued(tokenizer: Tokenizer, before: Sequence[int], new: Sequence[int]) -> str:
    """The text that `new` adds after `before`: put behind the text of `before`, it makes the text of both."""
    whole, known = tokenizer.decode([*before, *new]), tokenizer.decode(before)
    same = next((i for i, (a, b) in enumerate(zip(whole, known, strict=False)) if a != b), min(len(whole), len(known)))
    return whole[same:]
