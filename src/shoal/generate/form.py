"""What an answer must be: said here, without what it takes to keep to it (`shoal.generate.grammar`)."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA, JSON, REGEX, GRAMMAR = "schema", "json", "regex", "grammar"
MOST_BYTES = 256 << 10


@dataclass(frozen=True)
class Form:
    kind: str
    """SCHEMA, JSON (any), REGEX or GRAMMAR."""
    text: str = ""

    @property
    def is_json(self) -> bool:
        return self.kind in (SCHEMA, JSON)
