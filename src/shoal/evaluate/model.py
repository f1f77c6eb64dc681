"""What is asked for an answer: weights on this machine through the engine, or an endpoint (`shoal.evaluate.endpoint`).

An answer is a function of the weights and of the group of questions that are asked together, and of nothing that was
asked before: a group that is asked again, in another process or by another rank, gives the same bits on a CPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from shoal.data.tokenizer import Tokenizer
from shoal.errors import NumericsError
from shoal.evaluate.questions import Question
from shoal.evaluate.task import Until
from shoal.evaluate.tokens import Encoder, Pair
from shoal.generate.request import ERROR, Sampling, Token

if TYPE_CHECKING:
    from shoal.generate.engine import Engine
    from shoal.generate.opened import Opened

Score = tuple[float, bool]
MOST_STOP_TOKENS = 4  # a character of a stop string is spelled by so many tokens at most


class Model(Protocol):
    @property
    def name(self) -> str:
        """What names the weights, for people."""
        ...

    @property
    def digest(self) -> str:
        """Of all that its answers depend on."""
        ...

    def judged(self, questions: Sequence[Question]) -> list[list[Score]]:
        """Of each thing that each question asks: how likely, and whether the likeliest."""
        ...

    def rolled(self, questions: Sequence[Question]) -> list[Score]:
        """Of whole texts."""
        ...

    def written(self, questions: Sequence[Question], until: Until) -> list[str]: ...


@dataclass(frozen=True)
class Local:
    """Weights on this machine."""

    opened: Opened
    batch: int = 16
    exact: bool = False

    @property
    def name(self) -> str:
        return self.opened.version

    @cached_property
    def digest(self) -> str:
        return digest_of(self.opened, self.exact)

    @cached_property
    def encoder(self) -> Encoder:
        tokenizer = self.opened.tokenizer
        return Encoder(tokenizer, self._engine.context, _adds_start(self.opened))

    @cached_property
    def _engine(self) -> Engine:
        return self._made()

    def _made(self) -> Engine:
        return self.opened.engine(batch=self.batch, exact=self.exact)

    def judged(self, questions: Sequence[Question]) -> list[list[Score]]:
        pairs = [[self.encoder.pair(context, more) for context, more in one.asks] for one in questions]
        found = iter(self._scored([pair for each in pairs for pair in each]))
        return [[next(found) for _ in each] for each in pairs]

    def rolled(self, questions: Sequence[Question]) -> list[Score]:
        windows = [self.encoder.windows(one.asks[0][1]) for one in questions]
        found = iter(self._scored([pair for each in windows for pair in each]))
        parts = [[next(found) for _ in each] for each in windows]
        return [(math.fsum(score for score, _ in each), all(likeliest for _, likeliest in each)) for each in parts]

    def _scored(self, pairs: Sequence[Pair]) -> list[Score]:
        scores = [(math.fsum(one.logprobs), one.greedy) for one in self._engine.score(pairs)]
        for score, _ in scores:
            if not math.isfinite(score):
                raise NumericsError(
                    f"{self.name} gives log-probabilities that are not finite: its weights are damaged or have "
                    "diverged; evaluate another step."
                )
        return scores

    def written(self, questions: Sequence[Question], until: Until) -> list[str]:
        on_cpu = next(self.opened.model.parameters()).device.type == "cpu"
        # A new one has no memory of other groups. On a GPU that would record its graphs again.
        engine, tokenizer = self._made() if on_cpu else self._engine, self.opened.tokenizer
        stops = (*until.stops, *((end,) if (end := tokenizer.spelled(tokenizer.eos_id)) else ()))
        asked = [(self.encoder.prompt(one.asks[0][0], until.max_tokens), one) for one in questions]
        answers: dict[int, list[int]] = {}
        longest = max(map(len, stops), default=0) * MOST_STOP_TOKENS + 2
        for n, (prompt, one) in enumerate(asked):
            answers[engine.submit(prompt, _sampling(until, one, tokenizer.eos_id))] = []
            if n == 0:  # what the others begin with as it does is there then, and is not computed again
                self._take(engine, engine.step(), answers, stops, longest)
        while engine.busy:
            self._take(engine, engine.step(), answers, stops, longest)
        return [cut(tokenizer.decode(answers[number]), stops) for number in sorted(answers)]

    def _take(
        self, engine: Engine, events: Sequence[Token], answers: dict[int, list[int]], stops: Sequence[str], longest: int
    ) -> None:
        """Tokens of one pass. An answer that has come to a stop string is left there."""
        for event in events:
            if event.finish == ERROR:
                raise NumericsError(f"{self.name}: {event.error}")
            if event.token is None:
                continue
            answers[event.request].append(event.token)
            tail = self.opened.tokenizer.decode(answers[event.request][-longest:])
            if event.finish is None and any(stop in tail for stop in stops):
                engine.drop(event.request)


def _sampling(until: Until, question: Question, end: int) -> Sampling:
    seed = int(question.digest[:15], 16)  # one of its own, the same every time
    return Sampling(
        until.max_tokens,
        until.temperature,
        until.top_k,
        until.top_p,
        seed=seed,
        stop_ids=frozenset({end}),
    )


def cut(text: str, stops: Sequence[str]) -> str:
    """What stands before the first of them."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _adds_start(opened: Opened) -> bool:
    """A run's model begins documents as its data does, and says so to others when it is exported; a folder's as its
    tokenizer does in transformers."""
    template = getattr(opened.tokenizer, "template", ())
    return bool(template) if opened.folder is not None else opened.tokenizer.start_id is not None


def digest_of(opened: Opened, exact: bool) -> str:
    """Of the weights as they lie in memory, the tokenizer, and the way of computing."""
    import torch
    import xxhash

    found = xxhash.xxh3_128()
    for name, tensor in opened.model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return hashlib.sha256(
        f"{found.hexdigest()} {_named(opened.tokenizer)} {_adds_start(opened)} {exact}".encode()
    ).hexdigest()


def _named(tokenizer: Tokenizer) -> str:
    content = str(getattr(tokenizer, "content", tokenizer.name))
    return f"{hashlib.sha256(content.encode()).hexdigest()} {tokenizer.start_id} {tokenizer.eos_id}"
