"""The work: open items into the engine, as many as it has places for and some that wait; what ends is kept at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shoal.data.starts import begun
from shoal.data.tokenizer import Tokenizer
from shoal.errors import DataError, ShoalError
from shoal.generate.many.item import Item, item_of
from shoal.generate.many.kept import Kept
from shoal.generate.many.source import Source
from shoal.generate.request import ERROR, Sampling
from shoal.generate.texts import Piece, Speaker
from shoal.model.decoder import Decoder
from shoal.values import BadValue

WAITING = 4  # beside each one that is computed, so that a place that falls free is taken at once
SEEN = 64  # numbers of each weight by which it is known

Render = Callable[[Sequence[Mapping[str, str]]], Sequence[int]]


@dataclass(frozen=True)
class Ask:
    """The same for all items, but for what one says itself."""

    sampling: Sampling
    stops: tuple[str, ...] = ()
    seed: int = 0
    skip: bool = False
    """An item that cannot be answered is told in its place; else the work ends there."""
    logprobs: bool = False


@dataclass
class Told:
    answered: int = 0
    refused: int = 0
    tokens: int = 0
    ends: dict[str, int] = field(default_factory=dict)


@dataclass
class _Held:
    item: Item
    seed: int | None
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Work:
    def __init__(
        self, source: Source, kept: Kept, lines: range, ask: Ask, speaker: Speaker, batch: int, render: Render
    ) -> None:
        """`render` turns messages to tokens, by the model's template."""
        self._source, self._kept, self._lines, self._ask = source, kept, lines, ask
        self._speaker, self._most, self._render = speaker, batch * (1 + WAITING), render
        self._held: dict[int, _Held] = {}
        self.told = Told()

    def run(self, stopped: Callable[[], bool], heard: Callable[[int, int], None]) -> bool:
        """Whether all is done. `heard` is told of items that ended, and of new tokens."""
        items = self._open()
        more = True
        while not stopped():
            refused = self.told.refused
            while more and len(self._held) < self._most and not stopped():
                more = self._take(items)
            if not self._held and not more:
                return True
            ended, tokens = self.told.refused - refused, 0
            for piece in self._speaker.step():
                new, over = self._hear(piece)
                tokens, ended = tokens + new, ended + over
            heard(ended, tokens)
        return False

    def _open(self) -> Iterator[tuple[int, bytes]]:
        return ((line, raw) for line, raw in self._source.read(self._lines) if line not in self._kept)

    def _take(self, items: Iterator[tuple[int, bytes]]) -> bool:
        """Whether there was one more."""
        line, raw = next(items, (-1, b""))
        if line < 0:
            return False
        item: Item | None = None
        try:
            item = item_of(raw, line + 1, self._source.json_lines)
            if item is not None:
                sampling = item.sampled(self._ask.sampling, self._ask.seed)
                number = self._speaker.ask(
                    self._tokens(item), sampling, self._ask.stops if item.stops is None else item.stops
                )
                self._held[number] = _Held(item, None if sampling.greedy else sampling.seed)
        except (BadValue, ShoalError) as e:
            self._refuse(line, item, str(e))
        return True

    def _tokens(self, item: Item) -> Sequence[int]:
        tokenizer = self._speaker.tokenizer
        if item.tokens is not None:
            return item.tokens
        if item.messages is not None:
            return self._render(item.messages)
        assert item.prompt is not None
        return begun(tokenizer.encode(item.prompt), tokenizer.start_id)

    def _hear(self, piece: Piece) -> tuple[int, int]:
        """New tokens, and 1 if an answer has ended."""
        held = self._held[piece.request]
        new = [token for token in piece.tokens if token.token is not None]
        held.text.append(piece.text)
        held.tokens += [token.token for token in new if token.token is not None]
        held.logprobs += [token.logprob for token in new]
        if piece.finish is None:
            return len(new), 0
        del self._held[piece.request]
        if piece.finish == ERROR:
            self._refuse(held.item.line - 1, held.item, piece.error)
        else:
            self._keep(held, piece)
        return len(new), 1

    def _keep(self, held: _Held, piece: Piece) -> None:
        item, finish = held.item, str(piece.finish)
        answer: dict[str, Any] = {"line": item.line}
        if item.id is not None:
            answer["id"] = item.id
        answer |= {"text": "".join(held.text), "finish": finish}
        if piece.stopped_by is not None:
            answer["stopped_by"] = piece.stopped_by
        if held.seed is not None:
            answer["seed"] = held.seed
        answer["tokens"] = held.tokens
        if self._ask.logprobs:
            answer["logprobs"] = held.logprobs
        self._kept.add(item.line - 1, answer)
        told = self.told
        told.answered, told.tokens = told.answered + 1, told.tokens + len(held.tokens)
        told.ends[finish] = told.ends.get(finish, 0) + 1

    def _refuse(self, line: int, item: Item | None, why: str) -> None:
        why = why.rstrip(".")
        if not self._ask.skip:
            raise refusal(self._source, line, why)
        named = {} if item is None or item.id is None else {"id": item.id}
        self._kept.add(line, {"line": line + 1, **named, "error": why})
        self.told.refused += 1


def refusal(source: Source, line: int, why: str) -> DataError:
    return DataError(
        f"line {line + 1:,} of {source.path} cannot be answered: {why}; mend it and name another --out, or give "
        "--on-error skip to tell it in its place and go on."
    )


def look_through(source: Source, lines: range, ask: Ask) -> None:
    """Before anything is asked: whether each line can be read. Better now than after hours."""
    for line, raw in source.read(lines):
        try:
            item = item_of(raw, line + 1, source.json_lines)
            if item is not None:
                item.sampled(ask.sampling, ask.seed)
        except BadValue as e:
            raise refusal(source, line, str(e)) from None


def known_by(model: Decoder) -> str:
    """What tells weights from others, quickly: some numbers of each."""
    digest = xxhash.xxh3_128()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // SEEN)][:SEEN].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def tokenizer_known_by(tokenizer: Tokenizer) -> str:
    said = f"{tokenizer.vocab_size} {tokenizer.eos_id} {tokenizer.start_id} {tokenizer.special}"
    digest = xxhash.xxh3_128(said.encode())
    for token in range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // 256)):
        digest.update(tokenizer.spelled(token).encode(errors="replace"))
    return digest.hexdigest()
