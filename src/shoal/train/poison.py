"""Makes the numbers of given batches go wrong, for tests and drills. Does nothing unless SHOAL_POISON is set.

SHOAL_POISON=nan@1:7,9        on rank 1 (on all unless told) the gradient of batches 7 and 9 has a NaN
SHOAL_POISON=noise:70-75      the targets of these batches are random: a real spike
SHOAL_POISON=wrong@1:20-29    in a replay before these batches that rank computes a little wrongly, without a word
SHOAL_POISON=kill@0:80        that rank is killed (SIGKILL) before batch 80
Several are separated by semicolons. Batches are counted from 0, in the order of the data.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.data.windows import NO_TARGET, Batch
from shoal.model.decoder import Decoder

VARIABLE = "SHOAL_POISON"
_ONE = re.compile(r"(nan|noise|wrong|kill)(?:@(\d+))?:(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


@dataclass(frozen=True)
class _Dose:
    kind: str
    rank: int | None
    batches: frozenset[int]


class Poison:
    def __init__(self, text: str, rank: int) -> None:
        doses = [_dose(part) for part in text.split(";") if part]
        self._doses = [dose for dose in doses if dose.rank in (None, rank)]

    @classmethod
    def here(cls, rank: int) -> Poison:
        return cls(os.environ.get(VARIABLE, ""), rank)

    def batches(self, number: int, batches: list[Batch], vocab: int) -> list[Batch]:
        if self._hits("kill", number):
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._hits("noise", number):
            return batches
        chance = np.random.default_rng(number)
        return [
            replace(b, targets=np.where(b.targets == NO_TARGET, NO_TARGET, chance.integers(0, vocab, b.targets.shape)))
            for b in batches
        ]

    def gradients(self, number: int, held: Iterable[Tensor]) -> None:
        if self._hits("nan", number):
            next(iter(held)).mul_(torch.nan)

    @contextmanager
    def computing(self, number: int, decoders: Iterable[Decoder]) -> Iterator[None]:
        block = next(block for decoder in decoders for block in decoder.blocks.values())
        wrong = self._hits("wrong", number)
        hook = block.register_forward_hook(lambda module, args, out: out * 1.001) if wrong else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _hits(self, kind: str, number: int) -> bool:
        return any(dose.kind == kind and number in dose.batches for dose in self._doses)


def _dose(text: str) -> _Dose:
    match = _ONE.fullmatch(text)
    if match is None:
        raise ValueError(f"{VARIABLE}={text} is none of those that shoal.train.poison describes")
    numbers: set[int] = set()
    for span in match[3].split(","):
        first, _, last = span.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return _Dose(match[1], None if match[2] is None else int(match[2]), frozenset(numbers))
