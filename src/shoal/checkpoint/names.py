"""What things are called: a checkpoint by its step and term, a rank's file and its part of the manifest."""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"
RANK_FILE = re.compile(r"rank-\d{5,18}\.safetensors")
_NAME = re.compile(r"step-(\d{8,18})-term-(\d{1,18})")


@dataclass(frozen=True, order=True)
class Name:
    """A checkpoint: after how many committed steps, and which start of the workers (term) wrote it."""

    step: int
    term: int

    @classmethod
    def of(cls, text: str) -> Name | None:
        """None where the text is not the name of a checkpoint."""
        match = _NAME.fullmatch(text)
        name = cls(int(match[1]), int(match[2])) if match else None
        return name if str(name) == text else None  # one spelling each: `term-01` would be listed and never opened

    def __str__(self) -> str:
        return f"step-{self.step:08d}-term-{self.term}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """The rank whose file it is; -1 where it is none of those."""
    return int(file.removeprefix("rank-").removesuffix(".safetensors")) if RANK_FILE.fullmatch(file) else -1


def part_file(rank: int) -> str:
    """What a rank wrote, for the manifest; gone once that is put together."""
    return f"rank-{rank:05d}.json"


def failed_file(rank: int) -> str:
    """Why a rank could not write its part: rank 0 need not wait for it."""
    return f"rank-{rank:05d}.failed"
