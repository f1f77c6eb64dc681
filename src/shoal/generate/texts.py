"""Text in, text out: prompts to an engine, and its tokens back to text while they come.

Text is told once it can no longer change: a character of several tokens waits for its last one, and what may be the
beginning of a stop string waits until it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal.data.tokenizer import Tokenizer
from shoal.generate.engine import Engine
from shoal.generate.request import STOP, Mask, Sampling, Token

HALF = "\ufffd"  # what a decoder says of bytes that are no character yet
MOST_HALF = 8  # tokens of one character; what is no character after so many will be none


@dataclass(frozen=True)
class Piece:
    """What has been added to an answer."""

    request: int
    text: str
    tokens: tuple[Token, ...] = ()
    """The engine's, since the last piece."""
    finish: str | None = None
    """As of `shoal.generate.request.Token`; None: it goes on."""
    stopped_by: str | None = None
    """The stop string that ended it, which is not part of the text."""
    error: str = ""


@dataclass
class Decoded:
    """The text of tokens that come one by one, after those of a prompt. Put together, the parts are what
    `shoal.data.decoding.continued` makes of all of them at once."""

    tokenizer: Tokenizer
    before: Sequence[int]
    ids: list[int] = field(default_factory=list)
    _begin: int = 0  # of all ids: where decoding begins, far enough back for what depends on its neighbours
    _told: int = 0  # and up to where text has been told
    _borders: list[int] = field(default_factory=list)  # where text was told before: no character goes across

    def __post_init__(self) -> None:
        self.ids = list(self.before[-_whole_characters(self.tokenizer, self.before) :])
        self._told = len(self.ids)
        self._borders = [0]

    def add(self, token: int) -> str:
        self.ids.append(token)
        return self._new(last=len(self.ids) - self._told >= MOST_HALF)

    def rest(self) -> str:
        """What was held back, when nothing follows."""
        return self._new(last=True)

    def _new(self, last: bool) -> str:
        known = self.tokenizer.decode(self.ids[self._begin : self._told])
        whole = self.tokenizer.decode(self.ids[self._begin :])
        if not last and whole.endswith(HALF):
            return ""
        same = next(
            (i for i, (a, b) in enumerate(zip(whole, known, strict=False)) if a != b), min(len(whole), len(known))
        )
        if whole[same:]:
            self._begin = max(border for border in self._borders if border <= max(self._told - MOST_HALF, 0))
            self._borders = [*(border for border in self._borders if border >= self._begin), self._told]
            self._told = len(self.ids)
        return whole[same:]


def _whole_characters(tokenizer: Tokenizer, before: Sequence[int]) -> int:
    """So many tokens at the end of a prompt decode by themselves. Of a SentencePiece tokenizer bytes that follow each
    other are text as a whole or not at all, so that none must be cut off from its character."""
    counts = range(MOST_HALF, MOST_HALF + 4)
    return next((count for count in counts if HALF not in tokenizer.decode(before[-count:])), MOST_HALF)


@dataclass
class _Answer:
    decoded: Decoded
    stops: tuple[str, ...]
    held: str = ""  # text that may be the beginning of a stop string


class Speaker:
    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._answers: dict[int, _Answer] = {}

    def ask(
        self, prompt: Sequence[int], sampling: Sampling, stops: Sequence[str] = (), mask: Mask | None = None
    ) -> int:
        """The number by which its pieces are told. The prompt is tokens: see `shoal.data.starts.begun`."""
        number = self.engine.submit(prompt, sampling, mask)
        self._answers[number] = _Answer(Decoded(self.tokenizer, prompt), tuple(stop for stop in stops if stop))
        return number

    def cancel(self, request: int) -> None:
        self.engine.cancel(request)

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def run(self) -> Iterator[Piece]:
        while self.busy:
            yield from self.step()

    def step(self) -> list[Piece]:
        return [piece for token in self.engine.step() if (piece := self._piece(token)) is not None]

    def _piece(self, token: Token) -> Piece | None:
        answer = self._answers.get(token.request)
        if answer is None:
            return None
        new = "" if token.token is None else answer.decoded.add(token.token)
        if token.finish is not None:
            new += answer.decoded.rest()
        text = answer.held + new
        found = _first(text, answer.stops)
        if found is not None:
            at, stop = found
            self._end(token)
            return Piece(token.request, text[:at], (token,), STOP, stop)
        keep = 0 if token.finish is not None else _maybe(text, answer.stops)
        answer.held = text[len(text) - keep :]
        if token.finish is not None:
            self._end(token)
        return Piece(token.request, text[: len(text) - keep], (token,), token.finish, error=token.error)

    def _end(self, token: Token) -> None:
        self._answers.pop(token.request)
        if token.finish is None:
            self.engine.drop(token.request)


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of them stands."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1]))) if found else None


def _maybe(text: str, stops: Sequence[str]) -> int:
    """So many characters at the end may be the beginning of one."""
    most = max((len(stop) for stop in stops), default=0) - 1
    return next((n for n in range(min(most, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
