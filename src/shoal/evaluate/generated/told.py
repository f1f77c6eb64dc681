"""Tasks whose items lie in the package, made once out of a text that may be shipped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from shoal.errors import UsageError
from shoal.evaluate.generated.dice import Dice
from shoal.evaluate.generated.kind import Keys


@dataclass(frozen=True)
class Told:
    version: int
    about: str
    file: str
    cluster: str
    """The field by which items hang together."""
    keys: Keys

    def items(self, seed: int, count: int | None) -> tuple[dict[str, Any], ...]:
        """All of them in their order, or so many of them as the seed draws."""
        text = files("shoal.evaluate.generated").joinpath(self.file).read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines()]
        if count is None:
            return tuple(found)
        if count > len(found):
            raise UsageError(f"{count:,} items were asked for, and {self.file} has {len(found):,}.")
        return tuple(Dice(self.file, self.version, seed).some(found, count))
