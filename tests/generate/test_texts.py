"""Text that is told token by token is the text of all tokens at once."""

from __future__ import annotations

from random import Random

import pytest

from shoal.data.decoding import continued
from shoal.generate.texts import Decoded
from tests.generate.folders import KINDS
from tests.generate.test_grammar import tokenizer_of

LETTERS = {"metaspace": 'abé日本 "{x'}


@pytest.mark.parametrize("kind", ["byte", *KINDS])
def test_told_in_parts_it_is_the_same_text(kind: str) -> None:
    """Letters of several bytes, after prompts that end within a row of them: SentencePiece decodes a row of bytes as a
    whole or not at all."""
    rng, tokenizer = Random(1), tokenizer_of(kind)
    letters = LETTERS.get(kind, 'abé日本😀ü "{x')
    for _ in range(60):
        prompt, new = (tokenizer.encode("".join(rng.choices(letters, k=rng.randint(0, 20)))) for _ in range(2))
        decoded = Decoded(tokenizer, prompt)
        assert "".join(map(decoded.add, new)) + decoded.rest() == continued(tokenizer, prompt, new)
