"""Several requests at a time: who is in, whose prompt is computed next, and one more token for all that have begun.

A request waits, has its prompt computed in chunks, then gets a token with every pass until it ends. Nobody waits for
somebody else's end: a place that falls free is taken in the next pass. Where a device picks the tokens itself, a pass
is asked for before the tokens of the one before it are read, so that the device never waits for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.errors import NumericsError
from shoal.generate.asked import drawn_there
from shoal.generate.pick import Chooser, pick
from shoal.generate.request import (
    CANCELLED,
    CONTEXT,
    ERROR,
    LENGTH,
    STOP,
    Mask,
    Sampling,
    Scored,
    Stuck,
    Token,
    refuse_prompt,
)
from shoal.generate.runner import Draws, Pending, Runner
from shoal.generate.runners import Wanted, runner_for
from shoal.generate.score import score
from shoal.model.decoder import Decoder
from shoal.model.exact import log_softmax

BATCH = 16
CHUNK = 512
NOT_FINITE = "its logits are not finite: the weights are damaged or have diverged"


@dataclass
class _Request:
    number: int
    tokens: list[int]
    chooser: Chooser
    sampling: Sampling
    seat: Any = None
    done: int = 0  # tokens of the prompt that are computed
    prompt_logprobs: list[float] = field(default_factory=list)
    last: int = -1


class Engine:
    def __init__(
        self,
        model: Decoder,
        *,
        vocab_size: int,
        batch: int = BATCH,
        context: int | None = None,
        chunk: int = CHUNK,
        exact: bool = False,
        version: str = "",
        prefix_cache: bool = True,
        eight_bits: bool = False,
        runner: Runner | None = None,
        alone: bool = False,
    ) -> None:
        """`vocab_size` is the tokenizer's, `version` names the weights: nothing of others is used again. `eight_bits`:
        weights are rounded to 8 bits, which halves what a GPU reads for a few requests. `alone`: the model is nobody
        else's, and its weights may be laid out anew."""
        self.model, self.vocab_size, self.exact, self.version = model, vocab_size, exact, version
        self._chunk, self._batch, self._prefix_cache = chunk, batch, prefix_cache
        wanted = Wanted(batch, context, exact, eight_bits, min(vocab_size, model.shape.vocab_size), alone)
        self._runner = runner or runner_for(model, wanted)
        self._draws = self._runner if isinstance(self._runner, Draws) and not exact else None
        self._asked: list[tuple[list[_Request], Pending]] = []  # of the device, and not read yet
        self._waiting: deque[_Request] = deque()
        self._reading: list[_Request] = []
        self._writing: list[_Request] = []
        self._ended: list[Token] = []
        self._count = 0

    @property
    def context(self) -> int:
        return self._runner.context

    def submit(self, tokens: Sequence[int], sampling: Sampling, mask: Mask | None = None) -> int:
        """The number by which its tokens are told."""
        refuse_prompt(tokens, self.model.shape.vocab_size, self.context)
        number, self._count = self._count, self._count + 1
        rows = min(self.vocab_size, self.model.shape.vocab_size)
        prompt = list(tokens)
        self._waiting.append(_Request(number, prompt, Chooser(sampling, rows, mask, prompt), sampling))
        return number

    def cancel(self, request: int) -> None:
        """Its place is free at once. Nothing happens if it has ended."""
        if self.drop(request):
            self._ended.append(Token(request, None, finish=CANCELLED))

    def drop(self, request: int) -> bool:
        """As `cancel`, and nothing more is told of it. Whether it was there."""
        for held in (self._waiting, self._reading, self._writing):
            for one in [one for one in held if one.number == request]:
                held.remove(one)
                self._leave(one)
                return True
        return False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._writing or self._ended)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self._writing)

    def run(self) -> Iterator[Token]:
        while self.busy:
            yield from self.step()

    def step(self) -> list[Token]:
        """One pass: the next stretch of prompts, and a token for each request that writes."""
        events, self._ended = self._ended, []
        self._admit()
        writing = list(self._writing)
        events += self._read()
        if self._draws is not None and all(drawn_there(one.chooser) for one in writing):
            return events + self._ahead(self._draws, writing)
        events += self._drawn()
        writing = [one for one in writing if one.seat is not None]
        if writing:
            logits = self._runner.decode([one.seat for one in writing], [one.last for one in writing])
            events += self._told(writing, logits)
        return events

    def _ahead(self, draws: Draws, writing: Sequence[_Request]) -> list[Token]:
        """Asks for the next tokens, then reads those that were asked for before. Who has ended by these has a token
        too many, which nobody reads."""
        asked = {one.number for requests, _ in self._asked for one in requests}
        again, counts = [], []
        for one in writing:
            count = len(one.chooser.answer) + (one.number in asked)
            if count < one.sampling.max_tokens and len(one.tokens) + count < self.context:
                again.append(one)
                counts.append(count)
        pending = None
        if again:
            tokens = [None if one.number in asked else one.last for one in again]
            pending = draws.draw([one.seat for one in again], tokens, [one.sampling for one in again], counts)
        events = self._drawn()
        if pending is not None:
            self._asked.append((again, pending))
        return events

    def _drawn(self) -> list[Token]:
        """What the device has picked; of who has left, nothing."""
        events = []
        for requests, pending in self._asked:
            for one, (token, logprob) in zip(requests, pending.read(), strict=True):
                if one.seat is not None:
                    whole = self._failed(one, NOT_FINITE) if token < 0 else self._event(one, token, logprob, None)
                    events.append(whole)
        self._asked.clear()
        return events

    def score(self, items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """How likely each second text is after its first. What items have in common is computed once. The last token
        is nothing's context: together they may be one longer than the model's."""
        for context, more in items:
            refuse_prompt([*context, *more], self.model.shape.vocab_size, self.context + 1)
        return score(self.model, items, self.exact)

    def _admit(self) -> None:
        while self._waiting and self.running < self._batch:
            one = self._waiting[0]
            most = min(one.sampling.max_tokens, self.context - len(one.tokens))
            version = self.version if self._prefix_cache and not one.sampling.prompt_logprobs else f"{one.number} alone"
            one.seat = self._runner.admit(one.tokens, most, version)
            if one.seat is None:
                return
            one.done = one.seat.cached
            self._reading.append(self._waiting.popleft())

    def _read(self) -> list[Token]:
        """So many tokens of prompts in the order in which they came."""
        events: list[Token] = []
        left = self._chunk
        while self._reading and left > 0:
            one = self._reading[0]
            part = one.tokens[one.done : one.done + left]
            logits = self._runner.prefill(one.seat, part, one.sampling.prompt_logprobs)
            left, before, one.done = left - len(part), one.done, one.done + len(part)
            if one.sampling.prompt_logprobs:
                one.prompt_logprobs += _of_prompt(logits, one.tokens, before)
            if one.done == len(one.tokens):
                self._reading.pop(0)
                self._writing.append(one)
                if self._draws is not None and drawn_there(one.chooser):
                    self._asked.append(([one], self._draws.first(one.seat, logits[-1:], one.sampling)))
                else:
                    events += self._told([one], logits[-1:])
        return events

    def _told(self, requests: Sequence[_Request], logits: Tensor) -> list[Token]:
        """A token each; who has ended leaves."""
        try:
            tokens = pick(logits, [one.chooser for one in requests])
        except (NumericsError, Stuck) as e:
            if len(requests) == 1:
                return [self._failed(requests[0], str(e) if isinstance(e, Stuck) else NOT_FINITE)]
            return [t for i, one in enumerate(requests) for t in self._told([one], logits[i : i + 1])]
        spread = log_softmax(logits)
        found = spread.gather(-1, torch.tensor(tokens, device=spread.device)[:, None])[:, 0].tolist()
        return [
            self._event(one, token, logprob, row)
            for one, token, logprob, row in zip(requests, tokens, found, spread, strict=True)
        ]

    def _event(self, one: _Request, token: int, logprob: float, row: Tensor | None) -> Token:
        sampling, answer = one.sampling, one.chooser.answer
        said, one.prompt_logprobs = tuple(one.prompt_logprobs), []
        if token in sampling.stop_ids and not sampling.ignore_stop:
            self._leave(one)
            return Token(one.number, None, logprob, finish=STOP, prompt_logprobs=said)
        finish = None
        if one.chooser.mask is not None:
            try:
                one.chooser.mask.accept(token)
            except Stuck as e:
                return self._failed(one, str(e))
            finish = STOP if one.chooser.mask.done else None
        answer.append(token)
        one.last = token
        if finish is None and len(answer) >= sampling.max_tokens:
            finish = LENGTH
        if finish is None and len(one.tokens) + len(answer) >= self.context:
            finish = CONTEXT
        top: tuple[tuple[int, float], ...] = ()
        if sampling.logprobs and row is not None:
            best = row.topk(min(sampling.logprobs, len(row)))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        if finish is not None:
            self._leave(one)
        return Token(one.number, token, logprob, top, finish, prompt_logprobs=said)

    def _failed(self, one: _Request, why: str) -> Token:
        self._leave(one)
        after = len(one.tokens) + len(one.chooser.answer)
        return Token(one.number, None, finish=ERROR, error=f"after {after} tokens {why}.")

    def _leave(self, one: _Request) -> None:
        for held in (self._reading, self._writing):
            if one in held:
                held.remove(one)
        if one.seat is not None:
            self._runner.release(one.seat)
            one.seat = None


def _of_prompt(logits: Tensor, tokens: Sequence[int], begin: int) -> list[float]:
    """Of each token after those at `begin` and on: what the one before it thought of it."""
    following = tokens[begin + 1 : begin + 1 + len(logits)]
    spread = log_softmax(logits[: len(following)])
    return spread.gather(-1, torch.tensor(following, dtype=torch.int64, device=spread.device)[:, None])[:, 0].tolist()
