"""What computes for the engine: a place for each request, and the logits of its next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.generate.request import Sampling


class Seat(Protocol):
    @property
    def cached(self) -> int:
        """Tokens of the prompt that need not be computed, as they were."""
        ...


class Runner(Protocol):
    context: int
    """Tokens that a request can have, with its answer."""

    def admit(self, tokens: Sequence[int], most: int, version: str) -> Seat | None:
        """A place for a prompt and at most so many tokens after it; None while there is none."""
        ...

    def prefill(self, seat: Any, tokens: Sequence[int], every: bool) -> Tensor:
        """The next tokens of a prompt: logits of the last one, [1, vocab], or of `every` one, [tokens, vocab]."""
        ...

    def decode(self, seats: Sequence[Any], tokens: Sequence[int]) -> Tensor:
        """One more token each: [requests, vocab]."""
        ...

    def release(self, seat: Any) -> None: ...


class Pending(Protocol):
    """Tokens that are being picked on a device."""

    def read(self) -> list[tuple[int, float]]:
        """Of each seat the token and its log-probability; -1 where the logits were not finite. Waits for the device."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A runner that also picks, and may be asked for the next tokens before those it is picking are read."""

    def first(self, seat: Any, logits: Tensor, sampling: Sampling) -> Pending:
        """The first token of an answer, by the last logits of its prompt [1, vocab]."""
        ...

    def draw(
        self, seats: Sequence[Any], tokens: Sequence[int | None], samplings: Sequence[Sampling], drawn: Sequence[int]
    ) -> Pending:
        """One more token each. A token None is the one that was picked for the seat last, read or not. `drawn`: so many
        of the answer were picked before."""
        ...
