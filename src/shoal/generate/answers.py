"""An answer while it comes: its text and tokens, how it ended, and that in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.generate.request import CANCELLED, CONTEXT, ERROR, LENGTH
from shoal.generate.texts import Piece


@dataclass
class Answer:
    prompt: str
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """All that were picked, those of a stop string too."""
    logprobs: list[float] = field(default_factory=list)
    """Natural, by the model's own logits."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: str | None = None
    stopped_by: str | None = None
    error: str = ""
    valid: bool | None = None
    """Of a form: whether the text is a whole document of it."""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        for token in piece.tokens:
            if token.token is not None:
                self.tokens.append(token.token)
                self.logprobs.append(token.logprob)
                self.top.append(list(token.top))
        self.finish, self.stopped_by, self.error = piece.finish, piece.stopped_by, piece.error

    def why(self, context: int) -> str:
        """Why it ended."""
        said = {
            LENGTH: f"after {len(self.tokens):,} tokens, the most that were asked for (--max-tokens)",
            CONTEXT: f"as the model's context of {context:,} tokens is full",
            CANCELLED: "as it was stopped",
            ERROR: f"with an error: {self.error.rstrip('.')}",
        }
        if self.finish in said:
            return said[self.finish]
        if self.stopped_by is not None:
            return f"at the stop text {self.stopped_by!r}"
        if self.valid:
            return "as its form is complete"
        return "by the end token" if self.tokens else "by the end token at once: the model says nothing here"

    def record(self, logprobs: bool) -> dict[str, Any]:
        """For JSON."""
        made: dict[str, Any] = {
            "prompt": self.prompt,
            "prompt_tokens": self.prompt_tokens,
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
            "stopped_by": self.stopped_by,
        }
        if logprobs:
            made["logprobs"] = self.logprobs
            if any(self.top):
                made["top_logprobs"] = self.top
        if self.valid is not None:
            made["valid"] = self.valid
        return made | ({"error": self.error} if self.error else {})
