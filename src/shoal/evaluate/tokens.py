"""Texts to the tokens that a model is asked about, by lm-eval's rules (`HFLM` of its version 0.4.13).

A context and what follows it are encoded as one, and what stands beyond as many tokens as the context has alone is what
is asked about; blanks at the end of a context belong to what follows. What is too long loses its beginning. A
text as a whole is asked about in windows, each of which sees as much before it as the model can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.data.tokenizer import Tokenizer
from shoal.errors import DataError

Pair = tuple[list[int], list[int]]
"""Tokens, and those that follow them and are asked about."""


@dataclass(frozen=True)
class Encoder:
    tokenizer: Tokenizer
    context: int
    """Tokens that the model sees at most."""
    adds_start: bool
    """Whether a text begins with the start token."""

    @property
    def prefix(self) -> int:
        """What a text without a context comes after."""
        start = self.tokenizer.start_id
        return self.tokenizer.eos_id if start is None else start

    @cached_property
    def _spelled(self) -> str:
        return self.tokenizer.spelled(self.prefix)

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        begins = bool(self._spelled) and text.startswith(self._spelled)
        return [self.prefix, *ids] if self.adds_start and not begins else ids

    def pair(self, context: str, more: str) -> Pair:
        if context == "":
            ids = self.tokenizer.encode(more)
            found = (ids[:1], ids[1:]) if ids[:1] == [self.prefix] else ([self.prefix], ids)
        else:
            kept = context.rstrip()
            more = context[len(kept) :] + more
            # The context's tokens are those of it alone, where those of the whole text go on over the border too.
            before = self.encode(kept)
            found = before, self.encode(kept + more)[len(before) :]
        return self._fitting(*found, more)

    def _fitting(self, context: Sequence[int], more: Sequence[int], text: str) -> Pair:
        if not more:
            raise DataError(f"the answer {text[:40]!r} has no tokens of its own; correct the item.")
        if len(more) > self.context:
            raise DataError(
                f"an answer has {len(more):,} tokens, but the model sees {self.context:,}: use loglikelihood_rolling "
                "for texts of any length."
            )
        room = self.context + 1 - len(more)
        kept = list(context)[max(0, len(context) - room) :]
        return (kept or [self.prefix], list(more))

    def windows(self, text: str) -> list[Pair]:
        """Each token of a text once."""
        return list(_windows(self.encode(text), self.prefix, self.context))

    def prompt(self, text: str, most_new: int) -> list[int]:
        """To write on from, with room for so many tokens."""
        room = self.context - most_new
        if room <= 0:
            raise DataError(
                f"max_gen_toks is {most_new:,}, which leaves no room for a question in the model's context of "
                f"{self.context:,} tokens; write a smaller one into the task file."
            )
        return (self.encode(text) or [self.prefix])[-room:]


def _windows(ids: list[int], prefix: int, most: int) -> Iterator[Pair]:
    """The first as long as can be; each later one ends where the text goes on, and sees back as far as can be."""
    if not ids:
        return
    done = min(most, len(ids))
    yield [prefix], ids[:done]
    while done < len(ids):
        end = min(done + most, len(ids))
        begin = max(0, end - most - 1)
        yield ids[begin:done], ids[done:end]
        done = end
