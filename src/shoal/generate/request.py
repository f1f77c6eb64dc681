"""What is asked of the engine, and what it answers: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.errors import ShoalError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

STOP, LENGTH, CONTEXT, CANCELLED, ERROR = "stop", "length", "context", "cancelled", "error"
MOST_TOP = 100  # alternatives beside a token


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are picked. What comes first is done first: penalties, mask, temperature, top_k,
    top_p, min_p; as transformers has them."""

    max_tokens: int = 100
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """On what stands in the prompt or in the answer, as transformers has it."""
    presence_penalty: float = 0.0
    """On what stands in the answer, once, as OpenAI has it."""
    frequency_penalty: float = 0.0
    """On what stands in the answer, as often as it does."""
    seed: int = 0
    """A draw depends on this and on the token's position alone: not on what else is computed beside it."""
    stop_ids: frozenset[int] = frozenset()
    """Each of them ends the answer, and is not part of it."""
    ignore_stop: bool = False
    logprobs: int = 0
    """So many of the likeliest tokens are told beside each one."""
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name, least, most in BOUNDS:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # NaN is not
                upper = "" if most == math.inf else f" and at most {most:g}"
                raise UsageError(f"{name} is {value}, but it must be at least {least:g}{upper}.")
        if self.repetition_penalty == 0:
            raise UsageError("repetition_penalty is 0, but it divides: 1 is none, and more is stronger.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31),
    ("temperature", 0, 1e6),
    ("top_k", 1, 2**31),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, MOST_TOP),
)


class Stuck(ShoalError):
    """An answer cannot go on in its form; a clause that says why. The others go on."""


class Mask(Protocol):
    """What an answer may go on with, where it has a form to keep to. Both may raise `Stuck`."""

    def allowed(self) -> Tensor:
        """[vocab], on the CPU: True where a token may come next. The tokens that end the text are among them."""
        ...

    def accept(self, token: int) -> None: ...

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""
        ...


@dataclass(frozen=True)
class Token:
    """One token of an answer, or its end."""

    request: int
    token: int | None
    """None: the answer has ended before another one."""
    logprob: float = 0.0
    """Natural, of the model's own logits: before temperature, penalties and masks."""
    top: tuple[tuple[int, float], ...] = ()
    finish: str | None = None
    """STOP, LENGTH, CONTEXT, CANCELLED or ERROR; None: it goes on."""
    error: str = ""
    prompt_logprobs: tuple[float, ...] = ()
    """With the first event of a request that asked: of each token of the prompt but the first."""


@dataclass(frozen=True)
class Scored:
    """What a model thinks of a text after another."""

    logprobs: tuple[float, ...]
    greedy: bool
    """Whether each of its tokens was the likeliest."""


def refuse_prompt(tokens: Sequence[int], rows: int, context: int) -> None:
    """One sentence for what cannot be continued."""
    if not tokens:
        raise UsageError("there is nothing to go on from: give a prompt of at least one token.")
    if worst := [token for token in tokens if not 0 <= token < rows]:
        raise UsageError(f"the prompt has token {worst[0]}, but the model knows {rows}: use its own tokenizer.")
    if len(tokens) > context:
        raise UsageError(f"the prompt has {len(tokens):,} tokens, but the context is {context:,}: shorten it.")
