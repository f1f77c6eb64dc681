"""The work: open items into the engine, as many as it has places for and some that wait; what ends is kept at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shoal.data.starts import begun
from shoal.data.tokenizer import Tokenizer
from shoal.errors import DataError, ShoalError
from shoal.generate.answers import Answer
from shoal.generate.many.item import Item, item_of
from shoal.generate.many.kept import Kept
from shoal.generate.many.source import Source
from shoal.generate.request import ERROR, Sampling
from shoal.generate.texts import Piece, Speaker
from shoal.model.decoder import Decoder
from shoal.values import BadValue

WAITING = 4  # beside each one that is computed, so that a place that falls free is taken at once
SEEN = 64  # numbers of each weight by which it is known

Render = Callable[[Sequence[Mapping[str, Any]]], tuple[Sequence[int], frozenset[int]]]
"""Messages to tokens, by the model's template, and tokens that end an answer to them."""


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


@dataclass(frozen=True)
class _Held:
    item: Item
    seed: int | None
    answer: Answer


class Work:
    def __init__(
        self, source: Source, kept: Kept, lines: range, ask: Ask, speaker: Speaker, batch: int, render: Render
    ) -> None:
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
                self._submit(item)
        except (BadValue, ShoalError) as e:
            self._refuse(line, item, str(e))
        return True

    def _submit(self, item: Item) -> None:
        sampling, tokenizer = item.sampled(self._ask.sampling, self._ask.seed), self._speaker.tokenizer
        if item.messages is not None:
            tokens, ends = self._render(item.messages)
            sampling = dataclasses.replace(sampling, stop_ids=sampling.stop_ids | ends)
        elif item.tokens is not None:
            tokens = item.tokens
        else:
            assert item.prompt is not None
            tokens = begun(tokenizer.encode(item.prompt), tokenizer.start_id)
        number = self._speaker.ask(tokens, sampling, self._ask.stops if item.stops is None else item.stops)
        self._held[number] = _Held(item, None if sampling.greedy else sampling.seed, Answer("", []))

    def _hear(self, piece: Piece) -> tuple[int, int]:
        """New tokens, and 1 if an answer has ended."""
        held = self._held[piece.request]
        before = len(held.answer.tokens)
        held.answer.add(piece)
        if piece.finish is not None:
            del self._held[piece.request]
            if piece.finish == ERROR:
                self._refuse(held.item.line - 1, held.item, piece.error)
            else:
                self._keep(held)
        return len(held.answer.tokens) - before, int(piece.finish is not None)

    def _keep(self, held: _Held) -> None:
        item, answer = held.item, held.answer
        said: dict[str, Any] = {"line": item.line}
        if item.id is not None:
            said["id"] = item.id
        said |= {"text": answer.text, "finish": answer.finish}
        if answer.stopped_by is not None:
            said["stopped_by"] = answer.stopped_by
        if held.seed is not None:
            said["seed"] = held.seed
        said["tokens"] = answer.tokens
        if self._ask.logprobs:
            said["logprobs"] = answer.logprobs
        self._kept.add(item.line - 1, said)
        told, finish = self.told, str(answer.finish)
        told.answered, told.tokens = told.answered + 1, told.tokens + len(answer.tokens)
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
